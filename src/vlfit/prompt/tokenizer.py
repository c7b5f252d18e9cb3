"""A checkpoint's tokenizer, as transformers reads it, and the bytes of each of its tokens."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from vlfit.checkpoint.fields import Fields
from vlfit.checkpoint.processor_files import tokenizer_file
from vlfit.errors import CheckpointError
from vlfit.models.registry import spec_of

_SHORT_TEXT = 4096  # characters: a millisecond
SPELLED_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's table of a character for each byte.

    Printable Latin-1 is itself; the other bytes take the code points from 256 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTES = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """How the tokens of one vocabulary spell bytes.

    ``byte_level`` (GPT-2, Qwen): each character of a token is a byte, by GPT-2's table. Otherwise
    SentencePiece: the character ``space`` (U+2581) is a space, and with ``spells_bytes`` a token like
    ``<0xE2>`` is one byte. At the start of a text a decoder drops ``leading`` spaces (``Strip``), or with
    ``first_word`` the space before the first word (``Metaspace``); ``bytes_of`` does not drop them.
    """

    byte_level: bool = False
    space: str = ""
    spells_bytes: bool = False
    leading: int = 0
    first_word: bool = False

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """Read from the decoder of ``tokenizer``. Raises ``CheckpointError`` for an unsupported decoder."""
        decoder = tokenizer.decoder
        settings: dict[str, Any] = {} if decoder is None else json.loads(decoder.__getstate__())
        steps = settings.get("decoders", [settings])
        if [step.get("type") for step in steps] == ["ByteLevel"]:
            return cls(byte_level=True)
        values: dict[str, Any] = {}
        fused = False
        for step in steps:
            match step:
                case {"type": "Replace", "pattern": {"String": str(space)}, "content": " "}:
                    values["space"] = space
                case {"type": "ByteFallback"}:
                    values["spells_bytes"] = True
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Strip", "content": " ", "start": int(count), "stop": 0} if fused:
                    values["leading"] = count
                case {"type": "Metaspace", "replacement": str(space), "prepend_scheme": scheme}:
                    values |= {"space": space, "first_word": scheme != "never"}
                case _:
                    raise _unknown(step)
        if "space" not in values:
            raise _unknown(settings)
        return cls(**values)

    def bytes_of(self, token: str) -> bytes:
        """The bytes of ``token`` in a text, but not at its start. ``token``: as the vocabulary spells it."""
        if self.byte_level:
            if all(character in BYTES for character in token):
                return bytes(BYTES[character] for character in token)
            return token.encode("utf-8")  # an added token with other characters is itself
        byte = self.byte_of(token)
        return token.replace(self.space, " ").encode("utf-8") if byte is None else bytes((byte,))

    def byte_of(self, token: str) -> int | None:
        """The byte of a token like ``<0xE2>`` in a vocabulary that ``spells_bytes``; None for others."""
        spelled = SPELLED_BYTE.fullmatch(token) if self.spells_bytes else None
        return int(spelled[1], 16) if spelled else None


def _unknown(step: dict[str, Any]) -> CheckpointError:
    return CheckpointError(
        f"tokenizer.json: the decoder has {step.get('type', 'nothing')}, which vlfit does not support",
        "Check that the tokenizer belongs to this model: vlfit reads byte-level vocabularies and those of "
        "SentencePiece.",
    )


# A family's ``adjust_tokenizer``: changes the tokenizer by ``tokenizer_config.json``.
AdjustTokenizer = Callable[[Tokenizer, Fields], None]


def read_tokenizer(folder: Path, model_type: str) -> Tokenizer:
    """Read ``tokenizer.json`` in ``folder``, adjusted by the family of ``model_type`` as transformers does.

    Truncation and padding are off. Raises ``CheckpointError`` if the file is missing, broken or not
    supported.
    """
    path = tokenizer_file(folder)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{path} cannot be read: {error}", "Fetch this file again.") from error
    if TokenBytes.of(tokenizer).byte_level and tokenizer.pre_tokenizer is None:
        raise CheckpointError(f"{path} has no pre_tokenizer", "Fetch this file again.")
    if module := spec_of(model_type).tokenizer:
        adjust: AdjustTokenizer = import_module(module).adjust_tokenizer
        adjust(tokenizer, _settings(folder))
    # Settings saved with the file; a prompt is neither truncated nor padded.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def token_ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """The tokens of ``text``. Other threads run meanwhile, if it is long.

    ``Tokenizer.encode`` holds the interpreter's lock, for a second with 700 KB; encoding a batch does not.
    """
    if len(text) < _SHORT_TEXT:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids
    # A batch of one gains nothing from threads, and tokenizers warns at each fork once it has started some.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    [encoded] = tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
    found: list[int] = encoded.ids
    return found


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Text of each special token in ``tokenizer_config.json`` by name (``bos_token``, ``eos_token``).

    For ``ChatTemplate``. {} without the file.
    """
    values = _settings(folder).values
    named = {name: values[name] for name in values if name.endswith("_token")}
    contents = {name: v.get("content") if isinstance(v, dict) else v for name, v in named.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _settings(folder: Path) -> Fields:
    path = folder / "tokenizer_config.json"
    return Fields.read(path) if path.is_file() else Fields({}, path.name)
