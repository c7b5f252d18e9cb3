"""Who runs in the next forward pass: admission, chunked prefill, continuous batching. No tensors.

A sequence is admitted when blocks for its prompt and some tokens of an answer are free: how long the answer
may become says little about how long it will. What is left of an earlier prompt that began alike it takes
over. Who needs a block when none is free gets it from the youngest, which is paused: it waits before all
others, and what it has said is computed again, or found where it was left, before it goes on. The oldest is
never paused, so all come to their end. Decoding sequences go first, one token each; what is left of the chunk
goes to prompts, oldest first.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vlfit.engine.scheduling.block_manager import BlockPool
from vlfit.engine.scheduling.prefix_cache import ROOT, PrefixCache, PromptKeys, images_between, key_of
from vlfit.engine.scheduling.sequence import Sequence

MARGIN = 64  # tokens of an answer that a request gets blocks for at a time, while there are enough


@dataclass(frozen=True, slots=True)
class Work:
    """``length`` tokens of ``sequence``, from its first token that is not in the cache.

    The last of them are ``guesses``, which may come after all its tokens and were never said.
    """

    sequence: Sequence
    length: int
    guesses: tuple[int, ...] = ()

    @property
    def finishes_prompt(self) -> bool:
        return self.sequence.cached + self.length >= self.sequence.tokens

    @property
    def decodes(self) -> bool:
        """Whether it is a row of its own, the newest token of its sequence."""
        return self.sequence.decoding and self.length == 1


class Scheduler:
    """``sequences``: most that run at once; ``chunk``: most tokens of one pass. ``pauses`` are counted.

    ``prefixes`` remembers what full blocks hold; None: nothing is remembered or shared.
    """

    def __init__(
        self, pool: BlockPool, sequences: int, chunk: int, prefixes: PrefixCache | None = None
    ) -> None:
        self.pool = pool
        self.prefixes = prefixes
        self.sequences = sequences
        self.chunk = chunk
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # the oldest first
        self.pauses = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Blocks for the next token of all that run; then move waiting sequences to the running ones while
        their blocks are free. Gives those moved.

        Strictly first come, first served: a large request at the head is not overtaken, so it never starves.
        """
        self._grow()
        admitted = []
        while self.waiting and len(self.running) < self.sequences:
            sequence = self.waiting[0]
            if not self._give_blocks(sequence):
                break
            self.running.append(sequence)
            admitted.append(self.waiting.popleft())
        return admitted

    def _give_blocks(self, sequence: Sequence) -> bool:
        """The blocks that ``sequence`` begins with, if they are free: first those that are known to hold the
        beginning of its tokens, which then is not computed again.
        """
        keys = sequence.prompt.keys
        known: list[bytes] = []
        shared: list[int] = []
        if self.prefixes is not None and keys is not None:
            known = max(sequence.keys, list(keys.blocks), key=len)  # a paused one's hold its answer too
            shared = self.prefixes.find(known)
        begin = min(sequence.tokens + MARGIN, sequence.most_tokens)
        needed = self.pool.blocks_for(begin) - len(shared)
        if needed > self.pool.free - (len(shared) - self.pool.held(shared)):
            return False
        self.pool.share(shared)
        taken = self.pool.take(needed)
        sequence.blocks = [*shared, *taken]
        sequence.cached = len(shared) * self.pool.block_size
        sequence.keys = known[: len(shared)]
        if self.prefixes is not None and keys is not None:
            self._find_copy(sequence, keys, self.prefixes)
        if self.prefixes is not None:
            self.prefixes.forget(taken)
        return True

    def _find_copy(self, sequence: Sequence, keys: PromptKeys, prefixes: PrefixCache) -> None:
        """What a block that nobody can share knows of the next one: to be copied before the next pass.

        The block may be among those just taken, as nothing is written before that.
        """
        begin = sequence.cached
        found = prefixes.find_part(keys.ends, begin, begin + self.pool.block_size)
        if found is not None:
            block, end = found
            sequence.copy = block, sequence.blocks[begin // self.pool.block_size], end - begin
            sequence.cached = end

    def _grow(self) -> None:
        """A block for the next token of whoever has filled its own, the oldest first; some more if they are
        free. The youngest is paused where there is none.
        """
        for sequence in list(self.running):
            blocks = len(sequence.blocks)
            if sequence not in self.running or sequence.tokens <= blocks * self.pool.block_size:
                continue
            while not self.pool.free and sequence in self.running:
                self._pause(self.running[-1])
            if sequence in self.running:
                wanted = self.pool.blocks_for(min(sequence.tokens + MARGIN, sequence.most_tokens)) - blocks
                taken = self.pool.take(min(wanted, self.pool.free))
                if self.prefixes is not None:
                    self.prefixes.forget(taken)
                # A new list: whoever has the old one has it as it was.
                sequence.blocks = [*sequence.blocks, *taken]
                sequence.slots = None

    def _pause(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.give_back(sequence.blocks, self.prefixes or ())
        sequence.pause()
        self.waiting.appendleft(sequence)
        self.pauses += 1

    def next_batch(self, room: int | None = None) -> list[Work]:
        """Decoding sequences first, then prompts, at most ``chunk`` tokens (but every decoding one).

        ``room``: most tokens of prompts, if any decode.
        """
        work = [Work(sequence, 1) for sequence in self.running if sequence.decoding]
        most = self.chunk - len(work)
        room = min(room, most) if work and room is not None else most
        for sequence in self.running:
            if not sequence.decoding and room > 0:
                length = min(room, sequence.tokens - sequence.cached)
                work.append(Work(sequence, length))
                room -= length
        return work

    def advance(self, work: Work) -> None:
        """``work`` is done: its tokens are in the cache, where others may share them. Of guesses that have
        come true it is told one by one, when they have been said.
        """
        sequence, prompt, size = work.sequence, work.sequence.prompt, self.pool.block_size
        before = sequence.cached
        sequence.cached += work.length - len(work.guesses)
        if self.prefixes is None or prompt.keys is None:
            return
        for end, key in prompt.keys.ends:
            if before < end <= sequence.cached:
                self.prefixes.keep(key, sequence.blocks[end // size])
        for number in range(len(sequence.keys), sequence.cached // size):
            if number < len(prompt.keys.blocks):
                key = prompt.keys.blocks[number]
            else:
                begin, end = number * size, (number + 1) * size
                inside = images_between(prompt.placeholders, prompt.images, begin, end)
                key = key_of(sequence.keys[-1] if number else ROOT, sequence.token_ids(begin, end), inside)
            sequence.keys.append(key)
            self.prefixes.keep(key, sequence.blocks[number])

    def resize(self, blocks: int) -> dict[int, int]:
        """The pool has ``blocks`` from now on. Gives the new numbers of those that are held, by the old ones.

        What blocks hold that nobody holds is forgotten. Not to be called between ``admit`` and a pass.
        """
        if self.prefixes is not None:
            self.prefixes.forget(range(self.pool.blocks))
        numbers = self.pool.resize(blocks)
        for sequence in self.running:
            sequence.blocks = [numbers[block] for block in sequence.blocks if block in numbers]
            sequence.slots = None
        return numbers

    def remove(self, sequence: Sequence, *, failed: bool = False) -> None:
        """Take ``sequence`` out, wherever it is, and free its blocks. Harmless when it is already out.

        What a ``failed`` one has computed is not trusted: nobody who comes later shares it.
        """
        if sequence in self.running:
            self.running.remove(sequence)
            if self.prefixes is not None and failed:
                self.prefixes.forget(sequence.blocks)
            self.pool.give_back(sequence.blocks, self.prefixes or ())
            sequence.blocks = []
        elif sequence in self.waiting:
            self.waiting.remove(sequence)


# How much of a prompt is read at a time while others decode: what lets them wait twice as long as usual.
#
# What a pass takes is learnt from those that were: a part that does not depend on its tokens, and a part
# for each. Where the first alone leaves no room, as on a card that computes faster than kernels are
# launched, no chunk is short enough: then prompts are read in as few passes as can be, and those that
# decode are held up seldom instead. Knows times. Does not know who runs (``scheduler.py``).


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
