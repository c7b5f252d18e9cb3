"""Reads a checkpoint's tokenizer as transformers reads it. No torch.

Knows: ``tokenizer.json``, the special tokens that templates may write, and the one place where transformers 5
goes by another rule than the file's. Does not know: templates or conversations.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer, pre_tokenizers

from vlfit.checkpoint.fields import Fields
from vlfit.checkpoint.processor_files import tokenizer_file
from vlfit.errors import CheckpointError

# How a vocabulary spells text: which bytes each token stands for, and what decoding takes away. No torch.
#
# Knows: byte-level vocabularies (Qwen's, Llama 3's), and those of SentencePiece (Llama 2's, Phi-3's), where
# U+2581 stands for a space, and bytes that no token has are spelled ``<0xE2>``. Does not know: text that
# comes in pieces (``detokenizer.py``).


_SPELLED_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The character by which a byte-level vocabulary writes each byte: GPT-2's table.

    Printable Latin-1 stands for itself; the other bytes take the code points from 256 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTES = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class Spelling:
    """``byte_level``: each character of a token is a byte. Otherwise ``space`` stands for a space, and where
    ``spells_bytes`` a token may be one byte.

    Of a whole text ``leading`` spaces at its beginning are not said, and where ``first_word`` those that its
    first token begins with: the tokenizer had put them before it.
    """

    byte_level: bool = False
    space: str = ""
    spells_bytes: bool = False
    leading: int = 0
    first_word: bool = False

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """By the tokenizer's decoder. Raises ``CheckpointError`` for one that vlfit does not follow."""
        decoder = tokenizer.decoder
        settings: dict[str, Any] = {} if decoder is None else json.loads(decoder.__getstate__())
        steps = settings.get("decoders", [settings])
        if [step.get("type") for step in steps] == ["ByteLevel"]:
            return cls(byte_level=True)
        found: dict[str, Any] = {}
        fused = False
        for step in steps:
            match step:
                case {"type": "Replace", "pattern": {"String": str(space)}, "content": " "}:
                    found["space"] = space
                case {"type": "ByteFallback"}:
                    found["spells_bytes"] = True
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Strip", "content": " ", "start": int(count), "stop": 0} if fused:
                    found["leading"] = count
                case {"type": "Metaspace", "replacement": str(space), "prepend_scheme": scheme}:
                    found |= {"space": space, "first_word": scheme != "never"}
                case _:
                    raise _unknown(step)
        if "space" not in found:
            raise _unknown(settings)
        return cls(**found)

    def bytes_of(self, token: str) -> bytes:
        """The bytes for which ``token`` (as the vocabulary writes it) stands inside of a text."""
        if self.byte_level:
            if all(character in BYTES for character in token):
                return bytes(BYTES[character] for character in token)
            return token.encode("utf-8")  # an added token with characters outside the table is itself
        byte = self.byte_of(token)
        return token.replace(self.space, " ").encode("utf-8") if byte is None else bytes((byte,))

    def byte_of(self, token: str) -> int | None:
        """The one byte that ``token`` spells, if it is such a token."""
        spelled = _SPELLED_BYTE.fullmatch(token) if self.spells_bytes else None
        return int(spelled[1], 16) if spelled else None


def _unknown(step: dict[str, Any]) -> CheckpointError:
    return CheckpointError(
        f"tokenizer.json: the decoder has {step.get('type', 'nothing')}, which vlfit does not follow",
        "vlfit reads byte-level vocabularies (Qwen, Llama 3) and SentencePiece's (Llama 2, Phi-3); is this "
        "tokenizer of another model?",
    )


_LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")


def read_tokenizer(folder: Path) -> Tokenizer:
    """Raises ``CheckpointError`` for one that is missing, broken, or of a kind that vlfit cannot read."""
    path = tokenizer_file(folder)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{path} cannot be read: {error}", "Fetch this file again.") from error
    if Spelling.of(tokenizer).byte_level and tokenizer.pre_tokenizer is None:
        raise CheckpointError(f"{path} has no pre_tokenizer", "Fetch this file again.")
    _as_llama(tokenizer, folder)
    # Settings of whoever saved it; a prompt is neither cut nor padded.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _as_llama(tokenizer: Tokenizer, folder: Path) -> None:
    """transformers 5 splits the text of Llama 2 by its ``LlamaTokenizer``, whatever the file says: with
    ``legacy`` a space goes before every piece between special tokens, without only before the first.
    """
    settings, config = _settings(folder), Fields.read(folder / "config.json")
    named = settings.text("tokenizer_class", "") in _LLAMA_CLASSES
    if config.text("model_type", "") != "llama" or not named or Spelling.of(tokenizer).byte_level:
        return
    scheme = "always" if settings.flag("legacy", False) else "first"
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="\u2581",
        prepend_scheme=scheme if settings.flag("add_prefix_space", True) else "never",
        split=False,
    )


def special_tokens(folder: Path) -> dict[str, str]:
    """``bos_token``, ``eos_token`` and the like, which templates may write."""
    values = _settings(folder).values
    named = {name: values[name] for name in values if name.endswith("_token")}
    contents = {name: v.get("content") if isinstance(v, dict) else v for name, v in named.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _settings(folder: Path) -> Fields:
    path = folder / "tokenizer_config.json"
    return Fields.read(path) if path.is_file() else Fields({}, path.name)
