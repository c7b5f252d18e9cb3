"""Residual add and RMSNorm fused into the epilogue of one GEMM and the prologue of the next.

The GEMM that ends half a layer (attention output, down projection) adds its result to the residual stream. It
also writes the sum times the next norm's weight (``PreNormRows``), and partial sums of squares, one or more
per tile of outputs. The next GEMM reads those rows and scales its sums by the norm's factor, which is the
same for all inputs of a row. This rounds once less than a separate norm.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlfit.kernels.launch import next_power_of_2


@dataclass(frozen=True, slots=True)
class PreNormRows:
    """Rows times an RMSNorm's weight, but not yet divided by their root mean square.

    ``rows`` [num_rows, width]. ``square_sums`` [num_rows, n] float32: partial sums of squares of the rows
    before they were multiplied by the weight. ``eps``: the norm's.
    """

    rows: Tensor
    square_sums: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class ResidualEpilogue:
    """A residual add in a GEMM's epilogue: the output is added to ``hidden`` [num_rows, width] in place.

    ``norm_weight`` [width] and ``eps`` are those of the RMSNorm that follows.
    """

    hidden: Tensor
    norm_weight: Tensor
    eps: float

    def allocate_prenorm(self, block_n: int, tile_sums: int = 1) -> PreNormRows:
        """Uninitialized ``PreNormRows``, for a GEMM with tiles of ``block_n`` outputs to fill.

        ``tile_sums``: partial sums of squares of each tile.
        """
        rows, width = self.hidden.shape
        shape = (rows, -(-width // block_n) * tile_sums)
        square_sums = torch.empty(shape, dtype=torch.float32, device=self.hidden.device)
        return PreNormRows(torch.empty_like(self.hidden), square_sums, self.eps)


def unwrap_rows(x: Tensor | PreNormRows) -> tuple[Tensor, PreNormRows | None]:
    """The GEMM's input tensor, and ``x`` itself if it is ``PreNormRows`` (the GEMM's prologue), else None."""
    return (x.rows, x) if isinstance(x, PreNormRows) else (x, None)


def tiled_outputs(outputs: int, block_n: int, swiglu: bool) -> tuple[int, int]:
    """Number of result columns and of those per tile: with SwiGLU half of ``outputs`` and of ``block_n``.

    A gate and its up projection, both outputs of the GEMM, give one result.
    """
    return (outputs // 2, block_n // 2) if swiglu else (outputs, block_n)


def allocate_partial(out: Tensor, splits: int, rows: int, outputs: int) -> Tensor:
    """Allocate the split-K sums [splits, rows, outputs] float32 on the device of ``out``, uninitialized.

    With ``splits`` 1 returns ``out`` as a placeholder: the kernel takes a pointer that it does not use.
    """
    if splits == 1:
        return out
    return torch.empty((splits, rows, outputs), dtype=torch.float32, device=out.device)


def epilogue_pointers(
    x: Tensor, prologue: PreNormRows | None, residual: ResidualEpilogue | None, prenorm: PreNormRows | None
) -> tuple[Tensor, ...]:
    """The kernel's pointers ``norm_weight``, ``prenorm_out`` and ``square_sums``.

    With ``residual`` and ``prenorm`` all three belong to the epilogue, which writes the last two. Without
    them only ``square_sums`` is used, which the ``prologue`` reads (None: no prologue). ``x`` stands in
    for unused pointers.
    """
    if residual is not None and prenorm is not None:
        return residual.norm_weight, prenorm.rows, prenorm.square_sums
    return x, x, x if prologue is None else prologue.square_sums


def prologue_arguments(prologue: PreNormRows | None) -> tuple[int, float]:
    """The kernel's arguments ``num_sums`` (partial sums of squares per row) and ``eps``; None: both 0."""
    return (0, 0.0) if prologue is None else (prologue.square_sums.shape[1], prologue.eps)


def fusion_flags(prologue: PreNormRows | None, residual: ResidualEpilogue | None) -> dict[str, Any]:
    """The kernel's compile-time arguments that turn on its fused prologue and epilogue.

    ``prologue``, ``residual``: None: not fused.
    """
    return {
        "PRENORM": prologue is not None,
        "ADD_RESIDUAL": residual is not None,
        "BLOCK_SUMS": 1 if prologue is None else next_power_of_2(prologue.square_sums.shape[1]),
    }
