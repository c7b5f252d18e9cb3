"""From token ids to text while they come: whole characters at once, and never past a stop string. No torch.

Knows: byte-level vocabularies (each token is some bytes of UTF-8; a character may span tokens) and stop
strings. Does not know: why a completion ends (``engine/completion.py``).
"""

import codecs

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from vlfit.errors import CheckpointError


def _byte_alphabet() -> dict[str, int]:
    """The character by which a byte-level vocabulary writes each byte: GPT-2's table.

    Printable Latin-1 stands for itself; the other bytes take the code points from 256 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def token_bytes(token: str) -> bytes:
    """The bytes for which ``token`` (as the vocabulary writes it) stands."""
    if all(character in _BYTES for character in token):
        return bytes(_BYTES[character] for character in token)
    return token.encode("utf-8")  # an added token with characters outside the table is itself


def check_byte_level(tokenizer: Tokenizer) -> None:
    """Raise ``CheckpointError`` for a vocabulary that is not byte-level; every Qwen's is."""
    if not isinstance(tokenizer.decoder, ByteLevel):
        raise CheckpointError(
            f"tokenizer.json: the decoder is {type(tokenizer.decoder).__name__}, not ByteLevel",
            "vlfit reads the byte-level vocabularies of Qwen; is this tokenizer of another model?",
        )


class Detokenizer:
    """Follows one completion. The pieces, joined, are what ``tokenizer.decode`` gives for all ids at once.

    ``skip_special`` leaves out special tokens (``<|im_end|>``). The work per token does not grow with the
    text. Raises ``CheckpointError`` if the vocabulary is not byte-level.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        check_byte_level(tokenizer)
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder() if skip_special else {}
        self._skipped = frozenset(token_id for token_id, token in added.items() if token.special)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        """The whole characters that ``token_id`` completes; empty in the middle of one."""
        token = None if token_id in self._skipped else self._tokenizer.id_to_token(token_id)
        # Real models have more rows than tokens; such an id stands for nothing, here as in the reference.
        return "" if token is None else self._decoder.decode(token_bytes(token))

    def flush(self) -> str:
        """The end: a character that was broken off becomes U+FFFD."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class StopMatcher:
    """Finds the first stop string in text that comes in pieces.

    Text that may be the beginning of a stop string is held back until that is decided. The result does not
    depend on how the text is cut: the stop string that is complete first counts, the longest if two end at
    once.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Take a piece. Gives (text that is safe to say, whether a stop string came); the stop string is
        not said.
        """
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """The end: what was held back is said after all."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest tail of ``text`` that begins ``stop`` and does not complete it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
