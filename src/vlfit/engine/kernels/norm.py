"""What products know of the rows between them, so that no kernel is needed for residual and norm.

A product that ends a half of a layer adds what it finds to the hidden rows itself, and leaves the sums of
their squares, one for each tile of outputs. The product behind multiplies by the norm's weight what it reads,
and by what the sums say what it has summed: a norm's factor for a row is the same for all its inputs.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vlfit.engine.kernels.launch import power_of_two


@dataclass(frozen=True, slots=True)
class Norm:
    """Of rows whose sums of squares are ``squares`` [rows, tiles] float32, times ``weight`` [width]."""

    weight: Tensor
    squares: Tensor
    eps: float


def pointers(x: Tensor, norm: Norm | None, squares: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weight and sums for a kernel that reads those of ``norm``, or leaves ``squares``, or neither."""
    if norm is not None:
        return norm.weight, norm.squares
    return x, x if squares is None else squares


def numbers(norm: Norm | None) -> tuple[int, float]:
    """How many sums a row has, and what is added to the mean of its squares."""
    return (0, 0.0) if norm is None else (norm.squares.shape[1], norm.eps)


def choices(norm: Norm | None, squares: Tensor | None) -> dict[str, Any]:
    """What such a kernel is compiled for."""
    return {
        "normed": norm is not None,
        "adds": squares is not None,
        "tile_squares": 1 if norm is None else power_of_two(norm.squares.shape[1]),
    }
