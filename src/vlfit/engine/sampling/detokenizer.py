"""From token ids to text while they come: whole characters at once, and never past a stop string. No torch.

Knows: characters that span tokens, spaces that only the tokenizer put at the beginning, and stop strings.
Does not know: how a vocabulary spells (``tokenizer.py``), or why a completion ends (``output_processor.py``).
"""

import codecs

from tokenizers import Tokenizer

from vlfit.prompt.tokenizer import Spelling

_BROKEN = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Follows one completion. The pieces, joined, are what ``tokenizer.decode`` gives for all ids at once.

    ``skip_special`` leaves out special tokens (``<|im_end|>``). The work per token does not grow with the
    text. Raises ``CheckpointError`` for a vocabulary that vlfit cannot read. There is one difference from
    ``tokenizer.decode``: characters that SentencePiece spells in bytes are said as soon as they are whole,
    also where bytes that are no character follow.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder() if skip_special else {}
        self._skipped = frozenset(token_id for token_id, token in added.items() if token.special)
        spelling = Spelling.of(tokenizer)
        self._text: _ByteLevelText | _SpelledText = (
            _ByteLevelText(spelling) if spelling.byte_level else _SpelledText(spelling)
        )

    def add(self, token_id: int) -> str:
        """The whole characters that ``token_id`` completes; empty in the middle of one."""
        token = None if token_id in self._skipped else self._tokenizer.id_to_token(token_id)
        # Real models have more rows than tokens; such an id stands for nothing, here as in the reference.
        return "" if token is None else self._text.add(token)

    def flush(self) -> str:
        """The end: a character that was broken off becomes U+FFFD."""
        return self._text.flush()


class _ByteLevelText:
    """Every token is bytes, and a character may span tokens."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: str) -> str:
        return self._decoder.decode(self._spelling.bytes_of(token))

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class _SpelledText:
    """Tokens are text, and some are single bytes of a character that no token has."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._bytes = b""  # of a character that is not whole yet
        self._first_word = spelling.first_word
        self._leading = spelling.leading

    def add(self, token: str) -> str:
        byte, is_first = self._spelling.byte_of(token), self._first_word
        self._first_word = False
        if byte is None:
            words = token.replace(self._spelling.space, "" if is_first else " ")
            return self._said(self.flush() + words)
        self._bytes += bytes((byte,))
        try:
            text = self._bytes.decode("utf-8")
        except UnicodeDecodeError as error:
            if error.end == len(self._bytes) and error.reason == "unexpected end of data":
                return ""
            return self._said(self.flush())
        self._bytes = b""
        return self._said(text)

    def flush(self) -> str:
        text, self._bytes = _BROKEN * len(self._bytes), b""
        return text

    def _said(self, text: str) -> str:
        """``text`` less the spaces at the beginning of everything."""
        while self._leading and text:
            if not text.startswith(" "):
                self._leading = 0
            else:
                text, self._leading = text[1:], self._leading - 1
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
