"""Incremental detokenization: whole characters as tokens arrive, and stop strings. No torch."""

import codecs

from tokenizers import Tokenizer

from vlfit.prompt.tokenizer import TokenBytes

_BROKEN = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Turns the token ids of one completion into text: ``add`` each id, then ``flush``.

    The returned pieces joined equal ``tokenizer.decode`` of all ids, except that SentencePiece's characters
    spelled in bytes are returned as soon as they are complete, even if invalid bytes follow.
    ``skip_special``: leave out special tokens (``<|im_end|>``). The work per token does not grow with the
    text. Raises ``CheckpointError`` for a vocabulary that vlfit cannot read.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder() if skip_special else {}
        self._skipped = frozenset(token_id for token_id, token in added.items() if token.special)
        spelling = TokenBytes.of(tokenizer)
        self._text: _ByteLevelText | _SpelledText = (
            _ByteLevelText(spelling) if spelling.byte_level else _SpelledText(spelling)
        )

    def add(self, token_id: int) -> str:
        """Append a token. Returns the characters that it completes.

        "" in the middle of a character, for a skipped special token, and for an id without a token.
        """
        token = None if token_id in self._skipped else self._tokenizer.id_to_token(token_id)
        # Models have more embedding rows than tokens; such an id decodes to nothing, as in transformers.
        return "" if token is None else self._text.add(token)

    def flush(self) -> str:
        """End the completion. Returns U+FFFD for an incomplete character (SentencePiece: per byte) or ""."""
        return self._text.flush()


class _ByteLevelText:
    """Byte-level BPE: every token is bytes, and a character may span tokens."""

    def __init__(self, spelling: TokenBytes) -> None:
        self._spelling = spelling
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: str) -> str:
        return self._decoder.decode(self._spelling.bytes_of(token))

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class _SpelledText:
    """SentencePiece: tokens are text, with single-byte tokens for characters outside the vocabulary."""

    def __init__(self, spelling: TokenBytes) -> None:
        self._spelling = spelling
        self._bytes = b""  # of an incomplete character
        self._first_word = spelling.first_word
        self._leading = spelling.leading

    def add(self, token: str) -> str:
        byte, is_first = self._spelling.byte_of(token), self._first_word
        self._first_word = False
        if byte is None:
            words = token.replace(self._spelling.space, "" if is_first else " ")
            return self._strip_leading(self.flush() + words)
        self._bytes += bytes((byte,))
        try:
            text = self._bytes.decode("utf-8")
        except UnicodeDecodeError as error:
            if error.end == len(self._bytes) and error.reason == "unexpected end of data":
                return ""
            return self._strip_leading(self.flush())
        self._bytes = b""
        return self._strip_leading(text)

    def flush(self) -> str:
        text, self._bytes = _BROKEN * len(self._bytes), b""
        return text

    def _strip_leading(self, text: str) -> str:
        """``text`` without the spaces at the beginning of the completion."""
        while self._leading and text:
            if not text.startswith(" "):
                self._leading = 0
            else:
                text, self._leading = text[1:], self._leading - 1
        return text


class StopMatcher:
    """Finds the first stop string in text that arrives in pieces: ``add`` each, then ``flush``.

    Text that may begin a stop string is held back until more text decides it. The result does not depend on
    how the text is cut: the stop string that is complete first counts, the longest if two end at once.
    ``stop``: non-empty strings. ``found``: the stop string found, None until then.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""
        self.found: str | None = None

    def add(self, text: str) -> tuple[str, bool]:
        """Add a piece. Returns the text that may be emitted now, and whether a stop string was found.

        If so, the text ends before the stop string, and what follows the stop string is dropped.
        """
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if matches:
            self._held = ""
            end, start = min(matches)
            self.found = text[start:end]
            return text[:start], True
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """End the text. Returns what was held back; "" after a stop string."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
