"""The vision encoder in the engine: a CUDA graph of its blocks, and a cache of features.

The blocks are some three hundred kernels, which a large card runs faster than a host launches them. They
depend on the grid alone, so a graph is captured once images of the same grid come in a row, and replayed for
the next ones. One graph is kept at a time, and only for images whose feed-forward runs unsplit: its memory is
planned (``encoder_graph_bytes`` in ``plan/native/cost.py``). It is an optimization only: if capture fails,
that grid runs without a graph.

Features are cached in RAM because every byte of a GPU is planned; not in pinned RAM, as torch keeps that by
powers of two and a server grew by half a gigabyte (docs/log.md).
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vlfit.loading.pinned import capture_graph, graph_pool_bytes
from vlfit.models.base import EncoderBlocks, LevelOutput, VisionFeatures

logger = logging.getLogger(__name__)

REPEATS_BEFORE_CAPTURE = 2  # images of one grid


@dataclass(frozen=True, slots=True)
class CapturedEncoder:
    """A captured graph with its static input ``hidden`` and ``outputs``. Keeps ``run_blocks`` alive, whose
    tensors it reads.
    """

    grid: tuple[int, int]
    hidden: Tensor
    outputs: list[Tensor]
    run_blocks: EncoderBlocks
    replay: Callable[[], None]


class EncoderGraph:
    """Runs the encoder blocks, by graph replay where the grid is captured."""

    def __init__(self, device: torch.device, max_patches: int) -> None:
        self.nbytes = 0  # of the graph's memory pool
        self._device = device
        self._max_patches = max_patches
        self._last_grid: tuple[int, int] | None = None
        self._repeats = 0
        self._captured: CapturedEncoder | None = None
        self._failed_grids: set[tuple[int, int]] = set()  # grids whose capture failed

    def release(self) -> None:
        """Drop the graph, because tensors move or its memory is needed."""
        self._captured = None
        self._last_grid = None
        self.nbytes = 0

    def forward(
        self,
        grid: tuple[int, int],
        hidden: Tensor,
        output: LevelOutput,
        levels: int,
        run_blocks: EncoderBlocks,
    ) -> None:
        """Run ``run_blocks`` on ``hidden`` [patches, hidden] of an image of ``grid``.

        The output of each of ``levels`` is written to ``output(level)``.
        """
        self._repeats = self._repeats + 1 if grid == self._last_grid else 1
        self._last_grid = grid
        captured = self._captured
        if captured is None or captured.grid != grid:
            captured = None
            if (
                self._repeats > REPEATS_BEFORE_CAPTURE
                and len(hidden) <= self._max_patches
                and grid not in self._failed_grids
            ):
                captured = self._capture(grid, hidden, [output(level) for level in range(levels)], run_blocks)
        if captured is None:
            run_blocks(hidden, output)
            return
        captured.hidden.copy_(hidden)
        captured.replay()
        for level, level_output in enumerate(captured.outputs):
            output(level).copy_(level_output)

    def _capture(
        self, grid: tuple[int, int], hidden: Tensor, outputs: list[Tensor], run_blocks: EncoderBlocks
    ) -> CapturedEncoder | None:
        """Capture the graph; None if that fails, for example because memory is short. Tried once per grid."""
        if self._captured is not None:
            self._captured, self.nbytes = None, 0
            torch.cuda.empty_cache()  # free the old graph before the next one allocates

        def run() -> tuple[Tensor, list[Tensor]]:
            static_hidden = torch.empty_like(hidden)
            static_outputs = [torch.empty_like(output) for output in outputs]
            run_blocks(static_hidden, static_outputs.__getitem__)
            return static_hidden, static_outputs

        try:
            pool = torch.cuda.graph_pool_handle()
            replay, (static_hidden, static_outputs) = capture_graph(self._device, run, pool)
        except Exception as error:  # an error of the blocks themselves comes again without the graph
            self._failed_grids.add(grid)
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            size = "x".join(map(str, grid))
            logger.warning("images of %s patches run without a CUDA graph: %s", size, reason)
        else:
            self._captured = CapturedEncoder(grid, static_hidden, static_outputs, run_blocks, replay)
            self.nbytes = graph_pool_bytes(pool)
            return self._captured
        torch.cuda.empty_cache()  # memory of the failed capture
        return None


class EncoderCache:
    """LRU cache of vision features. Features larger than the whole cache are not kept."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._entries: OrderedDict[bytes, VisionFeatures] = OrderedDict()

    def get(self, key: bytes, device: torch.device) -> VisionFeatures | None:
        """Features of the image ``key`` on ``device``, or None."""
        features = self._entries.get(key)
        if features is None:
            return None
        self._entries.move_to_end(key)
        deepstack = tuple(level.to(device) for level in features.deepstack)
        return VisionFeatures(features.rows.to(device), deepstack)

    def put(self, key: bytes, features: VisionFeatures) -> None:
        if key in self._entries or features.nbytes > self.limit_bytes:
            return
        deepstack = tuple(level.cpu() for level in features.deepstack)
        self._entries[key] = VisionFeatures(features.rows.cpu(), deepstack)
        self.used_bytes += features.nbytes
        while self.used_bytes > self.limit_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.used_bytes -= oldest.nbytes

    def clear(self) -> None:
        """Drop all features."""
        self._entries.clear()
        self.used_bytes = 0
