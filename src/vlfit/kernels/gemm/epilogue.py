"""Residual add and RMSNorm fused into the epilogue of one GEMM and the prologue of the next.

The GEMM that ends half a layer (attention output, down projection) adds its result to the residual stream. It
also writes the sum times the next norm's weight, and partial sums of squares, one per tile of outputs. The
next GEMM reads those rows and scales its sums by the norm's factor, which is the same for all inputs of a
row. Results are rounded once less often than with a norm of its own.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlfit.kernels.launch import next_power_of_2


@dataclass(frozen=True, slots=True)
class PreNormRows:
    """Rows before RMSNorm: ``rows`` [num_rows, width], already times the norm's weight, and ``square_sums``
    [num_rows, tiles] float32, partial sums of squares before that multiplication. ``eps`` is the norm's.
    """

    rows: Tensor
    square_sums: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class ResidualEpilogue:
    """Residual add: ``hidden`` [num_rows, width] is updated in place; ``norm_weight`` [width] and ``eps``
    belong to the norm that follows.
    """

    hidden: Tensor
    norm_weight: Tensor
    eps: float

    def allocate_prenorm(self, block_n: int) -> PreNormRows:
        """Allocate what a GEMM with tiles of ``block_n`` outputs leaves for the next."""
        rows, width = self.hidden.shape
        shape = (rows, -(-width // block_n))
        square_sums = torch.empty(shape, dtype=torch.float32, device=self.hidden.device)
        return PreNormRows(torch.empty_like(self.hidden), square_sums, self.eps)


def split_prologue(x: Tensor | PreNormRows) -> tuple[Tensor, PreNormRows | None]:
    """The rows of ``x``, and ``x`` itself if the GEMM's prologue normalizes them."""
    return (x.rows, x) if isinstance(x, PreNormRows) else (x, None)


def tiled_outputs(outputs: int, block_n: int, swiglu: bool) -> tuple[int, int]:
    """Outputs to tile, and how many a tile has: with SwiGLU it holds gates and ups, half each."""
    return (outputs // 2, block_n // 2) if swiglu else (outputs, block_n)


def allocate_partial(out: Tensor, splits: int, rows: int, outputs: int) -> Tensor:
    """Split-K sums [splits, rows, outputs] in float32; ``out`` stands in where K is not split."""
    if splits == 1:
        return out
    return torch.empty((splits, rows, outputs), dtype=torch.float32, device=out.device)


def epilogue_pointers(
    x: Tensor, prologue: PreNormRows | None, residual: ResidualEpilogue | None, prenorm: PreNormRows | None
) -> tuple[Tensor, ...]:
    """Norm weight, pre-norm rows and square sums as the kernel takes them; ``x`` stands in for those not
    used.
    """
    if residual is not None and prenorm is not None:
        return residual.norm_weight, prenorm.rows, prenorm.square_sums
    return x, x, x if prologue is None else prologue.square_sums


def prologue_arguments(prologue: PreNormRows | None) -> tuple[int, float]:
    """Number of partial sums per row, and the norm's eps."""
    return (0, 0.0) if prologue is None else (prologue.square_sums.shape[1], prologue.eps)


def fusion_flags(prologue: PreNormRows | None, residual: ResidualEpilogue | None) -> dict[str, Any]:
    """Compile-time arguments for the fused prologue and epilogue."""
    return {
        "PRENORM": prologue is not None,
        "ADD_RESIDUAL": residual is not None,
        "BLOCK_SUMS": 1 if prologue is None else next_power_of_2(prologue.square_sums.shape[1]),
    }
