"""Who runs in the next forward pass: admission, chunked prefill, continuous batching. No tensors.

A sequence is admitted when the blocks for its whole prompt and its longest possible completion are free, so
nothing that runs is ever evicted. Decoding sequences go first, one token each; what is left of the chunk goes
to prompts, oldest first.
"""

from collections import deque
from dataclasses import dataclass

from vlfit.engine.kv_cache import BlockPool
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
    """``sequences``: most that run at once; ``chunk``: most tokens of one forward pass."""

    def __init__(self, pool: BlockPool, sequences: int, chunk: int) -> None:
        self.pool = pool
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
            needed = self.pool.blocks_for(self.waiting[0].most_tokens)
            if needed > self.pool.free:
                break
            sequence = self.waiting.popleft()
            sequence.blocks = self.pool.take(needed)
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

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

    def remove(self, sequence: Sequence) -> None:
        """Take ``sequence`` out, wherever it is, and free its blocks. Harmless when it is already out."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.pool.give_back(sequence.blocks)
            sequence.blocks = []
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
