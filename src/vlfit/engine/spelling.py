"""How a vocabulary spells text: which bytes each token stands for, and what decoding takes away. No torch.

Knows: byte-level vocabularies (Qwen's, Llama 3's), and those of SentencePiece (Llama 2's, Phi-3's), where
U+2581 stands for a space, and bytes that no token has are spelled ``<0xE2>``. Does not know: text that comes
in pieces (``detokenizer.py``).
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Self

from tokenizers import Tokenizer

from vlfit.errors import CheckpointError

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
