"""When other programs take the memory that was to stay free: the KV pool gives blocks back, down to what
running requests need and one context.

A pool is one tensor of keys and one of values, of which no part can be given back. So what running requests
have in it waits in RAM while a smaller pool is made, one of the two tensors after the other. When memory is
free again and nothing runs, the pool grows back. Knows how much must stay free and when to look. Does not
know how memory is asked for (``budget.py``) or blocks are numbered (``kv_cache.py``).
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

EVERY_SECONDS = 1.0  # asking the driver takes some ten microseconds, a step some ten milliseconds
IDLE_SECONDS = 5.0  # between two looks while nothing runs
STEP = 64 * MIB  # what is given back at least: each time costs a trip of the cache to RAM and back


class Pressure:
    """``free`` tells bytes of the device that nobody has; None: they are not watched, as on a CPU.

    ``least``: blocks that the pool has at least, so that whatever was priced can run.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cache: KVCache,
        least: int,
        free: Callable[[], int] | None,
        release: Callable[[], None],
    ) -> None:
        self.planned = scheduler.pool.blocks
        self._scheduler = scheduler
        self._cache = cache
        self._least = least
        self._free = free
        self._release = release
        self._next_look = 0.0
        self._said = False

    @property
    def idle_seconds(self) -> float | None:
        """How long to wait for requests before the next look; None where nobody has to look."""
        return None if self._free is None else IDLE_SECONDS

    def relieve(self) -> None:
        """Called before a step. Raises ``torch.OutOfMemoryError`` if others were faster and took what the
        pool was to have: it has no blocks then, and nothing that runs has anything left.
        """
        now = time.perf_counter()
        if self._free is None or now < self._next_look:
            return
        self._next_look = now + EVERY_SECONDS
        free, pool = self._free(), self._scheduler.pool
        block = self._cache.block_bytes
        if pool.blocks < self._least:
            self._resize(self._least)
        elif free < RESERVE.bytes:
            self._shrink(free, block)
        elif pool.blocks < self.planned and not self._scheduler.running:
            # With as much again to spare, so that it does not shrink at the next look.
            more = (free - 2 * RESERVE.bytes) // block
            if more * block >= STEP or more >= self.planned - pool.blocks:
                self._resize(min(pool.blocks + more, self.planned))
                logger.info("memory is free again: the KV cache has %s", self._words())
                self._said = False

    def _shrink(self, free: int, block: int) -> None:
        pool = self._scheduler.pool
        wanted = pool.blocks - -(-max(RESERVE.bytes - free, STEP) // block)
        blocks = max(wanted, self._least, pool.blocks - pool.free)
        said = f"{format_bytes(free)} of the GPU are free, of {format_bytes(RESERVE.bytes)} to be left free"
        if blocks < pool.blocks:
            given = (pool.blocks - blocks) * block
            self._resize(blocks)
            logger.warning("%s: %s given back, the KV cache has %s", said, format_bytes(given), self._words())
        elif not self._said:
            self._said = True
            logger.warning("%s: the KV cache has nothing left to give back, with %s", said, self._words())

    def _words(self) -> str:
        pool = self._scheduler.pool
        return f"{pool.blocks * pool.block_size} of {self.planned * pool.block_size} tokens"

    def _resize(self, blocks: int) -> None:
        scheduler = self._scheduler
        kept = scheduler.resize(blocks)
        try:
            self._cache.resize(blocks, kept, self._release)
        except torch.OutOfMemoryError:
            scheduler.resize(0)
            self._next_look = 0.0  # whoever comes next tries again
            raise


def no_memory_for_the_pool() -> OutOfMemory:
    """What all requests are told when there is no room for the smallest pool."""
    return OutOfMemory(
        "the GPU is out of memory: other programs took what the KV cache was to have",
        "close programs that use the GPU, and try again: it is looked for anew at each request",
    )
