"""What may come next, looked up in what was there before: a prompt and the answer to it. No tensors.

Answers repeat: the names and brackets of JSON, words that are read off a picture, what was said a turn
before. What followed the last few tokens when they last stood together is a guess at what follows now
("prompt lookup decoding", A. Saxena, 2023; vLLM calls it n-gram speculation). It costs a look into a
dictionary, whatever the length of the text; whether it is right is for the model to say (``guessing.py``).
Knows token ids. Does not know what they stand for, nor what a guess costs.
"""

from collections.abc import Iterable

# So many tokens are looked up together, the most first, and how often in a row the same one must have
# followed. Chosen on the answers of mini about the bundled pictures (docs/log.md): a single token that had to
# be seen but once made captions slower, none at all JSON.
EVIDENCE = {4: 1, 3: 1, 2: 1, 1: 3}
MOST_KNOWN = 4096  # tokens of a prompt that are gone through, its last ones: some 20 ms
_LONGEST = max(EVIDENCE)


class Lookup:
    """Which token followed which tokens, as far as is known; grows with each ``add``.

    Where another one followed than the time before, as behind the name of a field, there is no guess until
    one has followed twice: so guesses end where answers differ.
    """

    def __init__(self) -> None:
        self._newest: tuple[int, ...] = ()
        # The token that followed last, and how often it did in a row; where it took the place of another one,
        # the first time does not count.
        self._followed: dict[tuple[int, ...], tuple[int, int]] = {}

    def add(self, token: int) -> None:
        """``token`` comes next."""
        newest, followed = self._newest, self._followed
        for count in EVIDENCE:
            if len(newest) >= count:
                before = newest[-count:]
                last, times = followed.get(before, (token, 0))
                followed[before] = (token, times + 1 if last == token else 0)
        self._newest = _with(newest, token)

    def extend(self, tokens: Iterable[int]) -> None:
        """``tokens`` come next; what comes behind them does not follow on them."""
        for token in tokens:
            self.add(token)
        self._newest = ()

    def guess(self, most: int) -> list[int]:
        """Up to ``most`` tokens that may come next, in order; none where nothing is known."""
        guessed: list[int] = []
        newest = self._newest
        while len(guessed) < most:
            token = self._next(newest)
            if token is None:
                break
            guessed.append(token)
            newest = _with(newest, token)
        return guessed

    def _next(self, newest: tuple[int, ...]) -> int | None:
        """What the most tokens that are known together say, even if that is nothing."""
        for count, needed in EVIDENCE.items():
            found = self._followed.get(newest[-count:]) if len(newest) >= count else None
            if found is not None:
                return found[0] if found[1] >= needed else None
        return None


def _with(newest: tuple[int, ...], token: int) -> tuple[int, ...]:
    return (*newest[1 - _LONGEST :], token)
