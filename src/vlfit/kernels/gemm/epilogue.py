"""What products know of the rows between them, so that no kernel is needed for residual and norm.

A product that ends a half of a layer adds what it finds to the hidden rows itself. It leaves them times the
weight of the norm that comes next, too, and the sums of their squares, one for each tile of outputs. The
product behind reads those rows, and multiplies what it has summed by what the squares say: a norm's factor
for a row is the same for all its inputs. Rounded is once less than if the norm were computed for itself.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlfit.kernels.launch import power_of_two


@dataclass(frozen=True, slots=True)
class Scaled:
    """Rows before their norm: ``rows`` [rows, width], times the norm's weight, and ``squares`` [rows, tiles]
    float32, sums of the squares of what they were before that. ``eps`` is added to their mean.
    """

    rows: Tensor
    squares: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Onto:
    """What a product adds to, ``hidden`` [rows, width], in place; ``weight`` [width] and ``eps`` of the norm
    that comes next.
    """

    hidden: Tensor
    weight: Tensor
    eps: float

    def scaled(self, tile_outputs: int) -> Scaled:
        """Room for what a product with such tiles leaves."""
        rows, width = self.hidden.shape
        sums = (rows, -(-width // tile_outputs))
        squares = torch.empty(sums, dtype=torch.float32, device=self.hidden.device)
        return Scaled(torch.empty_like(self.hidden), squares, self.eps)


def pointers(x: Tensor, norm: Scaled | None, onto: Onto | None, left: Scaled | None) -> tuple[Tensor, ...]:
    """Weight, scaled rows and sums for a kernel that reads ``norm``, or adds ``onto`` and leaves ``left``, or
    neither.
    """
    if onto is not None and left is not None:
        return onto.weight, left.rows, left.squares
    return x, x, x if norm is None else norm.squares


def numbers(norm: Scaled | None) -> tuple[int, float]:
    """How many sums a row has, and what is added to the mean of its squares."""
    return (0, 0.0) if norm is None else (norm.squares.shape[1], norm.eps)


def choices(norm: Scaled | None, onto: Onto | None) -> dict[str, Any]:
    """What such a kernel is compiled for."""
    return {
        "normed": norm is not None,
        "adds": onto is not None,
        "tile_squares": 1 if norm is None else power_of_two(norm.squares.shape[1]),
    }
