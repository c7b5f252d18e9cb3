"""Guesses at the next tokens of answers, so that one pass gives several: who guesses how many, and was right.

A pass that computes a few more rows of a sequence takes hardly longer, as it is the weights that take time to
read. So where tokens that are known say what comes next, a pass gets them as if they had been
said; the model says of each row what it would have gone on with, and as far as that is what was guessed, it
has come true. The first token that is not is the model's own, so a pass never gives less than one. Only who
takes the likeliest token each time may guess: nothing is drawn.

Knows sequences and their blocks; a guess never takes a block that its sequence does not hold. Does not know
tensors, nor how rows are computed (``runner.py``, ``engine/execution/cuda_graphs.py``).
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many

from vlfit.engine.scheduling.scheduler import Work
from vlfit.engine.scheduling.sequence import PricedPrompt, Sequence

# What may come next, looked up in what was there before: a prompt and the answer to it. No tensors.
#
# Answers repeat: the names and brackets of JSON, words that are read off a picture, what was said a turn
# before. What followed the last few tokens when they last stood together is a guess at what follows now
# ("prompt lookup decoding", A. Saxena, 2023; vLLM calls it n-gram speculation). It costs a look into a
# dictionary, whatever the length of the text; whether it is right is for the model to say
# (``engine/scheduling/speculative.py``). Knows token ids. Does not know what they stand for, nor what a
# guess costs.


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


# With fewer right ones than this on average, guesses are not worth the longer pass. Eight rows took 1.6 times
# as long as one with mini on a CPU, two rows 1.3 (this is between them); on an H100 1.20 (2B FP8), 1.17 (4B
# FP8) and 1.06 (4B int4), waiting for the tokens included (``benchmarks/guess_rows.py``).
WORTH_ON_CPU, WORTH_ON_GPU = 0.5, 0.2
_NEW = 0.3  # weight of the newest pass in the average
REST, LONGEST_REST = 4, 64  # tokens without a guess after too many wrong ones; twice as many each time


class Guesser:
    """What one sequence guesses. Belongs to whoever steps it, once it runs.

    ``worth``: how many right tokens a pass must give on average.
    """

    def __init__(self, prompt: PricedPrompt, worth: float = WORTH_ON_CPU) -> None:
        self._worth = worth
        self._lookup = Lookup()
        *before, last = _texts(prompt)
        for text in before:
            self._lookup.extend(text)
        for token in last:
            self._lookup.add(token)
        self._known = 0  # of the answer
        self._right = 1.0  # tokens for each pass with guesses, on average
        self._rest = 0
        self._next_rest = REST

    def guess(self, generated: Many[int], most: int) -> tuple[int, ...]:
        """Up to ``most`` tokens that may follow ``generated``, which grows from call to call."""
        came = len(generated) - self._known
        for token in generated[self._known :]:
            self._lookup.add(token)
        self._known = len(generated)
        if self._rest > 0:
            self._rest -= came
            return ()
        return tuple(self._lookup.guess(most))

    def learn(self, right: int) -> None:
        """Of the last guesses ``right`` came true."""
        self._right += _NEW * (right - self._right)
        if self._right < self._worth:
            # It begins anew with as much trust as it takes: the next wrong one is one too many again.
            self._rest, self._right = self._next_rest, self._worth
            self._next_rest = min(2 * self._next_rest, LONGEST_REST)
        elif right:
            self._next_rest = REST


def with_guesses(batch: list[Work], rows: int, block_size: int) -> list[Work]:
    """``batch`` with guesses, and in the order that a pass wants: who has none comes first.

    Of at most ``rows`` rows, shared out evenly. ``batch`` itself where there are none, or somebody in it may
    not guess.
    """
    room = rows - len(batch)
    if room <= 0 or not all(_may_guess(work.sequence) for work in batch):
        return batch
    guessed = [_guesses(work.sequence, room, block_size) for work in batch]
    guessing = sum(map(bool, guessed))
    if not guessing:
        return batch
    each = max(room // guessing, 1)
    works = []
    for work, guesses in zip(batch, guessed, strict=True):
        kept = guesses[: min(each, room)]
        room -= len(kept)
        works.append(Work(work.sequence, 1 + len(kept), kept))
    return sorted(works, key=lambda work: bool(work.guesses))


def came_true(guesses: Many[int], best: Many[int], usable: Many[bool]) -> int:
    """How many of ``guesses`` are what the model says itself, from the first on.

    ``best`` and ``usable``: the likeliest token behind the one before all guesses, then behind each of them,
    and whether the numbers there are any.
    """
    count = 0
    while count < len(guesses) and guesses[count] == best[count] and usable[count + 1]:
        count += 1
    return count


def _may_guess(sequence: Sequence) -> bool:
    return sequence.decoding and sequence.guesser is not None


def _guesses(sequence: Sequence, most: int, block_size: int) -> tuple[int, ...]:
    """Where blocks end, and the answer, so do guesses: its last token is never fed back."""
    if sequence.guesser is None:
        return ()
    room = len(sequence.blocks) * block_size - sequence.cached - 1
    left = sequence.max_tokens - len(sequence.generated) - 1
    return sequence.guesser.guess(sequence.generated, max(min(most, room, left), 0))


def _texts(prompt: PricedPrompt) -> Iterator[list[int]]:
    """What stands between the pictures of ``prompt``, and at last what the answer follows on."""
    begin = max(prompt.tokens - MOST_KNOWN, 0)
    for place in prompt.placeholders.tolist():
        if place > begin:
            yield prompt.token_ids[begin:place].tolist()
        begin = max(begin, place + 1)
    yield prompt.token_ids[begin:].tolist()
