"""Shrink the KV cache when other programs take GPU memory, and grow it back when it is free again.

It shrinks to what running requests need, and at least one context. A KV tensor cannot be shrunk in place, so
the blocks in use wait in RAM while a smaller one is allocated, one tensor after the other. It grows only
while nothing runs.
"""

import logging
import time
from collections.abc import Callable

import torch

from vlfit.engine.scheduling.scheduler import Scheduler
from vlfit.errors import OutOfMemory
from vlfit.layers.kv_cache import KVCache
from vlfit.plan.calibration import RESERVE
from vlfit.units import MIB, format_bytes

logger = logging.getLogger(__name__)

CHECK_INTERVAL_SECONDS = 1.0  # a query takes some ten microseconds, a step some ten milliseconds
IDLE_INTERVAL_SECONDS = 5.0  # between two checks while nothing runs
MIN_SHRINK_BYTES = 64 * MIB  # each resize costs a trip of the cache to RAM and back


class KVResizer:
    """Shrinks and grows the KV cache as other programs take and free GPU memory.

    ``planned_blocks``: the size at the start, and the largest. ``min_blocks``: the smallest, enough for one
    context, so that every accepted request can run. ``free``: returns the bytes of the GPU that no process
    holds; None: the size never changes (on a CPU, or without a plan). ``release``: drops what refers to the
    old tensors' addresses, such as CUDA graphs, and returns freed memory to the driver.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cache: KVCache,
        min_blocks: int,
        free: Callable[[], int] | None,
        release: Callable[[], None],
    ) -> None:
        self.planned_blocks = scheduler.block_manager.num_blocks
        self._scheduler = scheduler
        self._cache = cache
        self._min_blocks = min_blocks
        self._free = free
        self._release = release
        self._next_check = 0.0
        self._warned = False

    @property
    def idle_interval(self) -> float | None:
        """Seconds between calls of ``step`` while nothing runs; None if memory is not watched."""
        return None if self._free is None else IDLE_INTERVAL_SECONDS

    def step(self) -> None:
        """Check the free memory, at most once a second, and resize the KV cache if needed.

        Call it before each engine step, and every ``idle_interval`` seconds without steps. Raises
        ``torch.OutOfMemoryError`` if other programs take the memory during a resize: the cache then has no
        blocks, running requests have lost theirs and must be failed (``kv_pool_lost_error``), and the next
        call allocates ``min_blocks``.
        """
        now = time.perf_counter()
        if self._free is None or now < self._next_check:
            return
        self._next_check = now + CHECK_INTERVAL_SECONDS
        free, block_manager = self._free(), self._scheduler.block_manager
        block_bytes = self._cache.block_bytes
        if block_manager.num_blocks < self._min_blocks:
            self._resize(self._min_blocks)
        elif free < RESERVE.bytes:
            self._shrink(free, block_bytes)
        elif block_manager.num_blocks < self.planned_blocks and not self._scheduler.running:
            # With twice the reserve free, so that it does not shrink at the next check.
            num_more = (free - 2 * RESERVE.bytes) // block_bytes
            if (
                num_more * block_bytes >= MIN_SHRINK_BYTES
                or num_more >= self.planned_blocks - block_manager.num_blocks
            ):
                self._resize(min(block_manager.num_blocks + num_more, self.planned_blocks))
                logger.info("memory is free again: the KV cache grows to %s", self._describe())
                self._warned = False

    def _shrink(self, free: int, block_bytes: int) -> None:
        block_manager = self._scheduler.block_manager
        target = block_manager.num_blocks - -(-max(RESERVE.bytes - free, MIN_SHRINK_BYTES) // block_bytes)
        blocks = max(target, self._min_blocks, block_manager.num_blocks - block_manager.num_free)
        reason = f"{format_bytes(free)} of the GPU are free, the reserve is {format_bytes(RESERVE.bytes)}"
        if blocks < block_manager.num_blocks:
            released = (block_manager.num_blocks - blocks) * block_bytes
            self._resize(blocks)
            logger.warning(
                "%s: %s released, the KV cache shrinks to %s",
                reason,
                format_bytes(released),
                self._describe(),
            )
        elif not self._warned:
            self._warned = True
            logger.warning("%s: the KV cache cannot shrink any further, with %s", reason, self._describe())

    def _describe(self) -> str:
        block_manager = self._scheduler.block_manager
        size = block_manager.block_size
        return f"{block_manager.num_blocks * size} of {self.planned_blocks * size} tokens"

    def _resize(self, blocks: int) -> None:
        scheduler = self._scheduler
        new_numbers = scheduler.resize(blocks)
        try:
            self._cache.resize(blocks, new_numbers, self._release)
        except torch.OutOfMemoryError:
            scheduler.resize(0)
            self._next_check = 0.0  # try again at the next step
            raise


def kv_pool_lost_error() -> OutOfMemory:
    """The error of all requests after ``KVResizer.step`` has lost the KV cache."""
    return OutOfMemory(
        "the GPU is out of memory: other programs took the memory of the KV cache",
        "Close programs that use the GPU and try again: each request checks anew.",
    )
