"""Scheduler: continuous batching with chunked prefill, strictly first come first served. No tensors.

A sequence is admitted when there are free blocks for its prompt and some tokens of an answer; a cached prefix
is reused. When blocks run out, the youngest running sequence is preempted: its blocks are freed and it is
requeued first. The oldest is never preempted, so every request finishes. Decode tokens are scheduled first;
prompts share the rest of the token budget, oldest first. With layers that keep a state, chunks of prompts end
where the prefix cache wants snapshots (``prefix_cache.py``).
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Container, Iterator
from contextlib import contextmanager

from vlfit.engine.scheduling import prefix_cache as prefixes
from vlfit.engine.scheduling.block_manager import BlockManager
from vlfit.engine.scheduling.prefix_cache import (
    ROOT_KEY,
    CachedPrefix,
    PrefixCache,
    block_key,
    images_between,
)
from vlfit.engine.scheduling.sequence import ScheduledChunk, Sequence

LOOKAHEAD_TOKENS = 64  # of an answer, for which blocks are allocated at a time while enough are free


class Scheduler:
    """Waiting and running sequences, and the block tables of the running ones.

    ``add`` each sequence once. Then, per step: ``admit``, ``schedule``, run the chunks, ``advance`` each
    chunk; ``remove`` sequences that have ended. At most ``max_num_seqs`` run at once, with at most
    ``max_num_batched_tokens`` tokens per step. ``prefix_cache`` None: no blocks are shared between requests.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        self.block_manager = block_manager
        self.prefix_cache = prefix_cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self._free_state_slots = list(reversed(range(max_num_seqs)))
        self.num_preemptions = 0

    @property
    def busy(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Append ``sequence`` to the waiting queue."""
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Start waiting sequences while there are blocks for them; returns those started.

        First gives running sequences blocks for their next tokens, preempting the youngest if blocks run out.
        A started sequence has a block table, a ``state_slot`` and, from the prefix cache,
        ``num_cached_tokens``; the caller must copy its ``block_copy`` and ``snapshot``, if set, in the order
        of the result. Strictly first come, first served: no request overtakes a large one at the head of the
        queue, so none starves.
        """
        self._append_blocks()
        admitted = []
        while self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            if not self._try_allocate(sequence):
                break
            sequence.state_slot = self._free_state_slots.pop()
            self.running.append(sequence)
            admitted.append(self.waiting.popleft())
        return admitted

    def _try_allocate(self, sequence: Sequence) -> bool:
        """Allocate the initial block table of ``sequence``, with its cached prefix, if enough blocks are
        free.
        """
        keys = sequence.prompt.keys
        prefix_keys: list[bytes] = []
        found = CachedPrefix([], 0)
        if self.prefix_cache is not None and keys is not None:
            # The keys of a preempted sequence also cover its answer.
            prefix_keys = max(sequence.block_keys, list(keys.block_keys), key=len)
            found = self.prefix_cache.find(prefix_keys, keys, self.block_manager.block_size)
        shared = found.blocks
        initial_tokens = min(sequence.num_tokens + LOOKAHEAD_TOKENS, sequence.max_num_tokens)
        num_new = self.block_manager.blocks_for(initial_tokens) - len(shared)
        num_free = self.block_manager.num_free - (len(shared) - self.block_manager.num_referenced(shared))
        if num_new > num_free:
            return False
        self.block_manager.incref(shared)
        # The block that is copied counts as used, too, and is not among the new ones if there are others.
        held = [] if found.source is None or num_new == num_free else [found.source]
        self.block_manager.incref(held)
        new_blocks = self.block_manager.allocate(num_new)
        self.block_manager.free(held, held)
        sequence.block_table = [*shared, *new_blocks]
        sequence.num_cached_tokens = found.tokens
        sequence.block_keys = prefix_keys[: len(shared)]
        if found.source is not None:
            # It may be among the blocks just allocated, as nothing is written before the copy.
            begin = len(shared) * self.block_manager.block_size
            sequence.block_copy = found.source, sequence.block_table[len(shared)], found.tokens - begin
        if self.prefix_cache is not None:
            self._start_from_snapshot(sequence, found, self.prefix_cache)
            self.prefix_cache.evict(new_blocks)
        return True

    def _start_from_snapshot(
        self, sequence: Sequence, found: CachedPrefix, prefix_cache: PrefixCache
    ) -> None:
        """Have the state copied that ``found`` ends at. As blocks, it may be given up before the copy."""
        if prefix_cache.snapshots is None or sequence.prompt.keys is None:
            return
        prefix_cache.snapshots.count_request()
        if found.snapshot is not None:
            sequence.snapshot = prefix_cache.snapshots.use(found.snapshot)
            sequence.snapshot_end, sequence.snapshot_key = found.tokens, found.snapshot

    def _append_blocks(self) -> None:
        """Extend full block tables, oldest sequence first; preempt the youngest while no block is free.

        While enough blocks are free a table is extended when two slots are left, the second for the step in
        flight: that one finds the slot of the step after it, so that this can be launched ahead, too. Tables
        grow in place: a step in flight stays theirs.
        """
        for sequence in list(self.running):
            capacity = len(sequence.block_table) * self.block_manager.block_size
            if sequence not in self.running:
                continue
            if sequence.num_tokens <= capacity:
                is_plenty = self.block_manager.num_free > len(self.running)
                if sequence.num_tokens + 1 < capacity or not (sequence.is_decoding and is_plenty):
                    continue
            while not self.block_manager.num_free and sequence in self.running:
                self._preempt(self.running[-1])
            if sequence in self.running:
                self._extend(sequence)

    def _extend(self, sequence: Sequence) -> None:
        """Allocate free blocks for ``LOOKAHEAD_TOKENS``, but no more than ``sequence`` can have."""
        most = self.block_manager.blocks_for(
            min(sequence.num_tokens + LOOKAHEAD_TOKENS, sequence.max_num_tokens)
        )
        wanted = min(most - len(sequence.block_table), self.block_manager.num_free)
        if wanted <= 0:
            return
        new_blocks = self.block_manager.allocate(wanted)
        if self.prefix_cache is not None:
            self.prefix_cache.evict(new_blocks)
        sequence.block_table += new_blocks
        sequence.slot_mapping = None

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free_state_slots.append(sequence.state_slot)
        self.block_manager.free(sequence.block_table, self._worth_keeping(sequence))
        sequence.reset_for_preemption()
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def schedule(self, max_prompt_tokens: int | None = None) -> list[ScheduledChunk]:
        """Chunks of the next step: one token of each decoding sequence, then chunks of prompts.

        Prompts share what decoding sequences leave of ``max_num_batched_tokens``, oldest first. If any
        sequence decodes, prompts get at most ``max_prompt_tokens`` together (None: no further limit). [] if
        nothing is running. Changes nothing: see ``advance``.
        """
        chunks = [ScheduledChunk(sequence, 1) for sequence in self.running if sequence.is_decoding]
        budget = self.max_num_batched_tokens - len(chunks)
        if chunks and max_prompt_tokens is not None:
            budget = min(max_prompt_tokens, budget)
        for sequence in self.running:
            if not sequence.is_decoding and budget > 0:
                num_tokens = self._chunk_length(sequence, budget)
                chunks.append(ScheduledChunk(sequence, num_tokens))
                budget -= num_tokens
        return chunks

    def _chunk_length(self, sequence: Sequence, budget: int) -> int:
        """Tokens of the next prompt chunk of ``sequence``, at most ``budget``.

        Where snapshots are taken, it ends at the next one that is wanted; else with a block, if it is not the
        last chunk, as a snapshot can be taken there.
        """
        begin, keys = sequence.num_cached_tokens, sequence.prompt.keys
        end = min(begin + budget, sequence.num_tokens)
        if self.prefix_cache is None or self.prefix_cache.snapshots is None or keys is None:
            return end - begin
        index = bisect_right(keys.snapshot_ends, begin)
        if index < len(keys.snapshot_ends) and keys.snapshot_ends[index] <= end:
            return keys.snapshot_ends[index] - begin
        if end < sequence.num_tokens:
            aligned = end // self.block_manager.block_size * self.block_manager.block_size
            end = aligned if aligned > begin else end
        return end - begin

    def _worth_keeping(self, sequence: Sequence) -> Container[int]:
        """Which blocks of ``sequence``, which ends or is preempted, others may share.

        With states those up to the last snapshot: nobody can start behind it.
        """
        if self.prefix_cache is None or self.prefix_cache.snapshots is None:
            return self.prefix_cache or ()
        return set(sequence.block_table[: self.block_manager.blocks_for(sequence.snapshot_end)])

    def take_snapshot(self, sequence: Sequence, *, ended: bool = False) -> int | None:
        """Slot for a snapshot of the state of ``sequence`` now; None if none is wanted.

        Call it after ``advance`` for each chunk, and with ``ended`` before ``remove`` for one whose answer
        has ended. The caller copies the state there before the next step. Draft tokens that are not in the
        state yet are not in the snapshot either: whoever starts from it computes them again.
        """
        cache, keys = self.prefix_cache, sequence.prompt.keys
        if cache is None or cache.snapshots is None or keys is None:
            return None
        size = self.block_manager.block_size
        position = sequence.num_cached_tokens - sequence.pending_tokens
        gained = position - sequence.snapshot_end
        if gained <= 0:
            return None
        index = bisect_left(keys.snapshot_ends, position)
        is_wanted = (
            (index < len(keys.snapshot_ends) and keys.snapshot_ends[index] == position)
            or (position % size == 0 and gained >= prefixes.SNAPSHOT_INTERVAL)
            or (ended and position >= sequence.prompt.num_tokens and gained >= prefixes.MIN_SNAPSHOT_TOKENS)
        )
        full = position // size
        # After a resize the cache does not know the first blocks, so that nobody would find the snapshot.
        if not is_wanted or len(cache.match(sequence.block_keys[:full])) < full:
            return None
        key = self._key_at(sequence, position)
        slot = cache.snapshots.add(key, position, sequence.snapshot_key)
        if key in cache.snapshots:
            cache.insert(key, sequence.block_table[(position - 1) // size])
            sequence.snapshot_end, sequence.snapshot_key = position, key
        return slot

    def limit_snapshots(self, slots: int) -> None:
        """Use only the first ``slots`` slots of snapshots, as there is no memory for the others."""
        if self.prefix_cache is not None and self.prefix_cache.snapshots is not None:
            self.prefix_cache.snapshots.limit(slots)

    def _key_at(self, sequence: Sequence, position: int) -> bytes:
        """Key of the first ``position`` tokens of ``sequence``, in a block or at its end."""
        full, part = divmod(position, self.block_manager.block_size)
        before = sequence.block_keys[full - 1] if full else ROOT_KEY
        if not part:
            return before
        prompt, begin = sequence.prompt, position - part
        inside = images_between(prompt.placeholders, prompt.images, begin, position)
        return block_key(before, sequence.token_ids(begin, position), inside)

    def advance(self, chunk: ScheduledChunk) -> None:
        """Count the tokens of ``chunk``, which has run, as cached, and add full blocks to the prefix cache.

        Draft tokens in ``chunk`` do not count: call ``advance`` again for each accepted one, with a chunk of
        one token, once it is in ``generated``.
        """
        sequence, prompt, size = chunk.sequence, chunk.sequence.prompt, self.block_manager.block_size
        before = sequence.num_cached_tokens
        sequence.num_cached_tokens += chunk.num_tokens - len(chunk.draft_tokens)
        if self.prefix_cache is None or prompt.keys is None:
            return
        for end, key in prompt.keys.image_ends:
            if before < end <= sequence.num_cached_tokens:
                self.prefix_cache.insert(key, sequence.block_table[end // size])
        for number in range(len(sequence.block_keys), sequence.num_cached_tokens // size):
            if number < len(prompt.keys.block_keys):
                key = prompt.keys.block_keys[number]
            else:
                begin, end = number * size, (number + 1) * size
                inside = images_between(prompt.placeholders, prompt.images, begin, end)
                key = block_key(
                    sequence.block_keys[-1] if number else ROOT_KEY, sequence.token_ids(begin, end), inside
                )
            sequence.block_keys.append(key)
            self.prefix_cache.insert(key, sequence.block_table[number])

    def resize(self, num_blocks: int) -> dict[int, int]:
        """Change the number of blocks and renumber the block tables of running sequences.

        Returns the new number of each block in use by its old one, as ``BlockManager.resize``, for
        ``KVCache.resize``. Clears the prefix cache. Must not be called between ``admit`` and the end of the
        step.
        """
        if self.prefix_cache is not None:
            self.prefix_cache.evict(range(self.block_manager.num_blocks))
        new_numbers = self.block_manager.resize(num_blocks)
        for sequence in self.running:
            sequence.block_table = [
                new_numbers[block] for block in sequence.block_table if block in new_numbers
            ]
            sequence.slot_mapping = None
        return new_numbers

    def remove(self, sequence: Sequence, *, failed: bool = False) -> None:
        """Remove a waiting or running ``sequence`` and free its blocks. Does nothing if it is neither.

        ``failed``: also evict its blocks from the prefix cache, as their contents may be wrong.
        """
        if sequence in self.running:
            self.running.remove(sequence)
            self._free_state_slots.append(sequence.state_slot)
            if self.prefix_cache is not None and failed:
                self.prefix_cache.evict(sequence.block_table)
            self.block_manager.free(sequence.block_table, self._worth_keeping(sequence))
            sequence.block_table = []
        elif sequence in self.waiting:
            self.waiting.remove(sequence)


MAX_SLOWDOWN = 1.8  # most time of a step with a prompt chunk, in decode steps
MIN_CHUNK = 8  # prompt tokens: matrix units process no fewer at once
MAX_FIXED_STEPS = 1.5  # decode steps; with a longer fixed part small chunks do not help
INITIAL_CHUNK = 256  # prompt tokens, before anything is measured
_DECAY = 0.9  # of older measurements, per step


class PrefillPacer:
    """Limits prompt tokens per step so that steps take at most ``MAX_SLOWDOWN`` times as long as decoding.

    Call ``record_step`` after each step with decoding sequences, ``prefill_budget`` before the next. The
    time of a step is modelled as a fixed part plus a part per prompt token, fitted to past steps. If the
    fixed part alone is too long, as on a card that computes faster than kernels launch, there is no limit:
    fewer, longer steps hold up decoding less often.

    ``max_num_batched_tokens``: the limit of every step. ``enabled`` False: no other limit, and steps are
    not recorded.
    """

    def __init__(self, max_num_batched_tokens: int, enabled: bool = True) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enabled = enabled
        self._decode_seconds: float | None = None  # seconds of a step without prompts
        # Decayed sums over steps with prompt chunks: count, tokens, seconds, tokens^2, tokens * seconds.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def record_step(self, prompt_tokens: int, seconds: float) -> None:
        """Record the ``seconds`` of a step with decoding sequences and ``prompt_tokens`` tokens of prompts.

        ``prompt_tokens`` 0: a pure decode step.
        """
        if not self.enabled:
            return
        if prompt_tokens:
            new = (1.0, prompt_tokens, seconds, prompt_tokens * prompt_tokens, prompt_tokens * seconds)
            self._sums = tuple(_DECAY * old + each for old, each in zip(self._sums, new, strict=True))  # type: ignore[assignment]
        else:
            self._decode_seconds = (
                seconds
                if self._decode_seconds is None
                else _DECAY * self._decode_seconds + (1 - _DECAY) * seconds
            )

    def prefill_budget(self) -> int:
        """Most prompt tokens for a step with decoding sequences; at least 1.

        ``max_num_batched_tokens`` if there is no limit; at most ``INITIAL_CHUNK`` before steps of both kinds
        are recorded.
        """
        if not self.enabled:
            return self.max_num_batched_tokens
        if self._decode_seconds is None or not self._sums[0]:
            return min(INITIAL_CHUNK, self.max_num_batched_tokens)
        fixed, per_token = self._fit(self._decode_seconds)
        if per_token <= 0:
            return self.max_num_batched_tokens
        if fixed > MAX_FIXED_STEPS * self._decode_seconds:
            return self.max_num_batched_tokens
        return min(
            max(int((MAX_SLOWDOWN * self._decode_seconds - fixed) / per_token), MIN_CHUNK),
            self.max_num_batched_tokens,
        )

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Set ``enabled`` to False within the block: no limit, nothing recorded."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def _fit(self, decode_seconds: float) -> tuple[float, float]:
        """Seconds of a step without prompt tokens, and seconds per prompt token: a least-squares fit.

        If all chunks had the same size, the fixed part is taken to be ``decode_seconds``.
        """
        count, tokens, seconds, squares, products = self._sums
        spread = squares - tokens * tokens / count
        if spread <= 1e-3 * squares:
            return decode_seconds, (seconds / count - decode_seconds) * count / tokens
        per_token = (products - tokens * seconds / count) / spread
        return (seconds - per_token * tokens) / count, per_token
