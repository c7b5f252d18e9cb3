"""How much of a prompt is read at a time while others decode: what lets them wait twice as long as usual.

What a pass takes is learnt from those that were: a part that does not depend on its tokens, and a part for
each. Where the first alone leaves no room, as on a card that computes faster than kernels are launched, no
chunk is short enough: then prompts are read in as few passes as can be, and those that decode are held up
seldom instead. Knows times. Does not know who runs (``scheduler.py``).
"""

from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 2.0  # a pass with a chunk of a prompt in it may take so many times what one without takes
LEAST = 8  # tokens of a prompt that are read at a time: matrix units take no fewer at once
MOST_FIXED = 1.5  # steps that a pass may take whatever is in it: with more, chunks are of no use
UNKNOWN = 256  # tokens, while nothing is known: a prompt about a picture is some of them
_KEPT = 0.9  # of what is known stays with each new pass


class Pace:
    """``chunk``: most tokens of one pass. One that is not ``even`` learns nothing, and has room for all."""

    def __init__(self, chunk: int, even: bool = True) -> None:
        self.chunk = chunk
        self.even = even
        self._step: float | None = None  # seconds of a pass in which all decode
        # Sums over passes with chunks of prompts, older ones weighing less: of 1, tokens, seconds, tokens
        # squared, tokens times seconds.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def note(self, tokens: int, seconds: float) -> None:
        """A pass in which somebody decoded took ``seconds``, and had ``tokens`` of prompts in it."""
        if not self.even:
            return
        if tokens:
            new = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
            self._sums = tuple(_KEPT * old + each for old, each in zip(self._sums, new, strict=True))  # type: ignore[assignment]
        else:
            self._step = seconds if self._step is None else _KEPT * self._step + (1 - _KEPT) * seconds

    def room(self) -> int:
        """Tokens of prompts for the next pass in which somebody decodes."""
        if not self.even:
            return self.chunk
        if self._step is None or not self._sums[0]:
            return min(UNKNOWN, self.chunk)
        fixed, each = self._line(self._step)
        if each <= 0:
            return self.chunk
        if fixed > MOST_FIXED * self._step:
            return self.chunk
        return min(max(int((PATIENCE * self._step - fixed) / each), LEAST), self.chunk)

    @contextmanager
    def rest(self) -> Iterator[None]:
        """Within the block it is not even."""
        even, self.even = self.even, False
        try:
            yield
        finally:
            self.even = even

    def _line(self, step: float) -> tuple[float, float]:
        """Seconds of a pass, and for each token of prompts in it: least squares.

        Where all chunks were alike, the first is taken to be as long as a ``step`` in which all decode.
        """
        count, tokens, seconds, squares, products = self._sums
        spread = squares - tokens * tokens / count
        if spread <= 1e-3 * squares:
            return step, (seconds / count - step) * count / tokens
        each = (products - tokens * seconds / count) / spread
        return (seconds - each * tokens) / count, each
