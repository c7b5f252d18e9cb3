"""Who runs in the next forward pass: admission, chunked prefill, continuous batching. No tensors.

A sequence is admitted when the blocks for its whole prompt and its longest possible completion are free, so
nothing that runs is ever evicted. What is left of an earlier prompt that began alike it takes over.
Decoding sequences go first, one token each; what is left of the chunk goes to prompts, oldest first.
"""

from collections import deque
from dataclasses import dataclass

from vlfit.engine.kv_cache import BlockPool
from vlfit.engine.prefix_cache import ROOT, PrefixCache, PromptKeys, images_between, key_of
from vlfit.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Work:
    """``length`` tokens of ``sequence``, from its first token that is not in the cache."""

    sequence: Sequence
    length: int

    @property
    def finishes_prompt(self) -> bool:
        return self.sequence.cached + self.length >= self.sequence.tokens


class Scheduler:
    """``sequences``: most that run at once; ``chunk``: most tokens of one forward pass.

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
        self.running: list[Sequence] = []

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Move waiting sequences to the running ones while their blocks are free; gives those moved.

        Strictly first come, first served: a large request at the head is not overtaken, so it never starves.
        """
        admitted = []
        while self.waiting and len(self.running) < self.sequences:
            sequence = self.waiting[0]
            if not self._give_blocks(sequence):
                break
            self.running.append(sequence)
            admitted.append(self.waiting.popleft())
        return admitted

    def _give_blocks(self, sequence: Sequence) -> bool:
        """The blocks for all that ``sequence`` can become, if they are free: first those that are known to
        hold the beginning of its prompt, which then is not computed again.
        """
        keys = sequence.prompt.keys
        shared = self.prefixes.find(keys.blocks) if self.prefixes is not None and keys is not None else []
        needed = self.pool.blocks_for(sequence.most_tokens) - len(shared)
        if needed > self.pool.free - (len(shared) - self.pool.held(shared)):
            return False
        self.pool.share(shared)
        taken = self.pool.take(needed)
        sequence.blocks = [*shared, *taken]
        sequence.shared = sequence.cached = len(shared) * self.pool.block_size
        sequence.copy = None
        if self.prefixes is not None and keys is not None:
            sequence.keys = list(keys.blocks[: len(shared)])
            self._find_copy(sequence, keys, self.prefixes)
        if self.prefixes is not None:
            self.prefixes.forget(taken)
        return True

    def _find_copy(self, sequence: Sequence, keys: PromptKeys, prefixes: PrefixCache) -> None:
        """What a block that nobody can share knows of the next one: to be copied before the next pass.

        The block may be among those just taken, as nothing is written before that.
        """
        begin = sequence.shared
        found = prefixes.find_part(keys.ends, begin, begin + self.pool.block_size)
        if found is not None:
            block, end = found
            sequence.copy = block, sequence.blocks[begin // self.pool.block_size], end - begin
            sequence.shared = sequence.cached = end

    def next_batch(self) -> list[Work]:
        """Decoding sequences first, then prompts, at most ``chunk`` tokens (but every decoding one)."""
        work = [Work(sequence, 1) for sequence in self.running if sequence.decoding]
        room = self.chunk - len(work)
        for sequence in self.running:
            if not sequence.decoding and room > 0:
                length = min(room, sequence.tokens - sequence.cached)
                work.append(Work(sequence, length))
                room -= length
        return work

    def advance(self, work: Work) -> None:
        """``work`` is done: its tokens are in the cache, where others may share them."""
        sequence, prompt, size = work.sequence, work.sequence.prompt, self.pool.block_size
        before = sequence.cached
        sequence.cached += work.length
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
