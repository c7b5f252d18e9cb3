"""The vision tower's blocks as one CUDA graph, for pictures of a size that comes again and again.

The blocks are some three hundred kernels, and a host takes longer to launch them one by one than a large card
to compute them. What they do depends on a picture's grid alone, so it is recorded when pictures of one grid
have come in a row, and replayed for the next ones. One recording is kept at a time, of pictures whose
feed-forward goes whole: what it holds is known (``tower_bytes`` in ``cost.py``). It only saves time:
a grid that cannot be recorded is looked at without. Does not know what blocks do (``vision.py``), nor which
cards have room for this (``plan/native/tiles.py``).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vlfit.loading.pinned import bytes_of, record

logger = logging.getLogger(__name__)

IN_A_ROW = 2  # pictures of one grid, before it is recorded

# Where what the blocks find on a level goes: [patches / merge^2, the text model's width].
Place = Callable[[int], Tensor]
# What the blocks do to the embedded patches of a frame [patches, hidden], in place.
Look = Callable[[Tensor, Place], None]


@dataclass(frozen=True, slots=True)
class Recording:
    """``look`` as it went once, with ``hidden`` before it and ``outputs`` after it; it reads what ``look``
    holds.
    """

    grid: tuple[int, int]
    hidden: Tensor
    outputs: list[Tensor]
    look: Look
    replay: Callable[[], None]


class Recorded:
    """Looks at frames by replaying, where that is recorded."""

    def __init__(self, device: torch.device, most_patches: int) -> None:
        self.nbytes = 0  # what torch took for the recording
        self._device = device
        self._most_patches = most_patches
        self._latest: tuple[int, int] | None = None
        self._count = 0
        self._recording: Recording | None = None
        self._not_again: set[tuple[int, int]] = set()  # grids that could not be recorded

    def release(self) -> None:
        """Forget the recording, because tensors move or its memory is wanted."""
        self._recording = None
        self._latest = None
        self.nbytes = 0

    def look(self, grid: tuple[int, int], hidden: Tensor, place: Place, levels: int, look: Look) -> None:
        """``look`` at ``hidden`` [patches, hidden] of a frame of ``grid``; what is found on each of so many
        ``levels`` goes to ``place``.
        """
        self._count = self._count + 1 if grid == self._latest else 1
        self._latest = grid
        recording = self._recording
        if recording is None or recording.grid != grid:
            recording = None
            if self._count > IN_A_ROW and len(hidden) <= self._most_patches and grid not in self._not_again:
                recording = self._record(grid, hidden, [place(level) for level in range(levels)], look)
        if recording is None:
            look(hidden, place)
            return
        recording.hidden.copy_(hidden)
        recording.replay()
        for level, found in enumerate(recording.outputs):
            place(level).copy_(found)

    def _record(
        self, grid: tuple[int, int], hidden: Tensor, outputs: list[Tensor], look: Look
    ) -> Recording | None:
        """None if it cannot be done, as where other programs have taken the memory: once for each grid."""
        if self._recording is not None:
            self._recording, self.nbytes = None, 0
            torch.cuda.empty_cache()  # what was recorded is given back before another takes as much

        def run() -> tuple[Tensor, list[Tensor]]:
            before = torch.empty_like(hidden)
            found = [torch.empty_like(output) for output in outputs]
            look(before, found.__getitem__)
            return before, found

        try:
            pool = torch.cuda.graph_pool_handle()
            replay, (before, found) = record(self._device, run, pool)
        except Exception as error:  # whatever it is, it comes again if it is no matter of recording
            self._not_again.add(grid)
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            size = "x".join(map(str, grid))
            logger.warning("pictures of %s patches are looked at without a recording: %s", size, reason)
        else:
            self._recording = Recording(grid, before, found, look, replay)
            self.nbytes = bytes_of(pool)
            return self._recording
        torch.cuda.empty_cache()  # what the recording had until it failed
        return None
