"""CUDA graph of the vision tower's blocks, for images of a grid that repeats.

The blocks are some three hundred kernels, which a large card runs faster than a host launches them. They
depend on the grid alone, so a graph is captured once images of the same grid come in a row, and replayed for
the next ones. One graph is kept at a time, and only for images whose feed-forward runs in one piece (not
in row slices): its memory is planned (``encoder_graph_bytes`` in ``plan/native/cost.py``). It is an
optimization only: if capture fails, that grid runs without a graph.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vlfit.loading.pinned import GraphPool
from vlfit.models.interface import EncoderBlocks, LevelOutput

logger = logging.getLogger(__name__)
REPEATS_BEFORE_CAPTURE = 2  # images of one grid


@dataclass(frozen=True, slots=True)
class CapturedEncoder:
    """A captured graph for images of ``grid`` (rows, columns of patches).

    ``replay`` computes ``outputs``, one per level, from ``hidden``; all are tensors at fixed addresses.
    ``run_blocks`` is kept because the graph reads tensors that ``run_blocks`` owns.
    """

    grid: tuple[int, int]
    hidden: Tensor
    outputs: list[Tensor]
    run_blocks: EncoderBlocks
    replay: Callable[[], None]


class EncoderGraph:
    """Runs the vision tower's blocks, by CUDA graph replay if images of the same grid come in a row.

    Keeps one graph at a time. Images of more than ``max_patches`` patches never use one. ``nbytes``: GPU
    memory of the graph; 0 if none is captured.
    """

    def __init__(self, device: torch.device, max_patches: int) -> None:
        self.nbytes = 0
        self._device = device
        self._max_patches = max_patches
        self._last_grid: tuple[int, int] | None = None
        self._repeats = 0
        self._captured: CapturedEncoder | None = None
        self._failed_grids: set[tuple[int, int]] = set()  # grids whose capture failed

    def release(self) -> None:
        """Drop the graph, so that ``Budget.release`` frees its memory. It is captured again when needed."""
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
        """Compute ``run_blocks(hidden, output)`` for an image of ``grid``, by graph replay if possible.

        ``grid``: rows and columns of patches. ``hidden``: embedded patches [patches, hidden]; its contents
        are undefined afterwards. Results are written to ``output(level)`` for each level below ``levels``.
        Without a graph for ``grid``, the first ``REPEATS_BEFORE_CAPTURE`` images in a row run directly; the
        next one captures a graph, which replaces that of another grid.
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
            pool = GraphPool(self._device)
            replay, (static_hidden, static_outputs) = pool.capture(run)
        except Exception as error:  # an error of the blocks themselves comes again without the graph
            self._failed_grids.add(grid)
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            size = "x".join(map(str, grid))
            logger.warning("images of %s patches run without a CUDA graph: %s", size, reason)
        else:
            self._captured = CapturedEncoder(grid, static_hidden, static_outputs, run_blocks, replay)
            self.nbytes = pool.nbytes
            return self._captured
        torch.cuda.empty_cache()  # memory of the failed capture
        return None
