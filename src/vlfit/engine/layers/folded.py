"""Layers whose products do what stands between them, for few rows on a GPU: residual and norm cost no kernel.

Knows: which layers can do that, and for which rows. What is computed, ``kernels/norm.py`` says; the reference
is the same layers without it (``fused.py``), from which this differs in rounding alone.
"""

from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from vlfit.engine import kernels
from vlfit.engine.kernels import few_rows, linear
from vlfit.engine.kernels.norm import Onto, Scaled
from vlfit.engine.layers.linear import DenseLinear, Fp8Linear, Int4Linear, Int8Linear, Linear

# On one H100 a layer took, with norms of its own and without: 54 and 52 us (2B, bf16), 42 and 39 (2B, FP8),
# 61 and 58 (4B, FP8), 56 and 50 (4B, int4), 73 and 69 (8B, int4); with eight rows 72 and 74 (2B, bf16), 81
# and 88 (8B, int4). So it is done for one row, and of wider ones than these for int4 alone (docs/log.md).
ROWS = 1
WIDEST = 2560

Foldable = DenseLinear | Fp8Linear | Int4Linear | Int8Linear


def few(hidden: Tensor) -> bool:
    """Whether rows like ``hidden`` [rows, width] are computed so.

    Not in float16: rows times a norm's weight, before they are divided by their length, may exceed it.
    """
    return kernels.used_on(hidden.device) and len(hidden) <= ROWS and hidden.dtype != torch.float16


def foldable(layer: Linear) -> TypeGuard[Foldable]:
    return isinstance(layer, Foldable)


@dataclass(frozen=True, slots=True)
class Folded:
    """The products of a decoder layer."""

    qkv: Foldable
    output: Foldable
    gate_up: Foldable
    down: Foldable


def folded(qkv: Linear, output: Linear, gate_up: Linear, down: Linear) -> Folded | None:
    """None if one of them cannot do more than multiply, or it does not pay."""
    if not (foldable(qkv) and foldable(output) and foldable(gate_up) and foldable(down)):
        return None
    width = len(down.weight) if isinstance(down, DenseLinear) else down.weights.outputs
    pays = width <= WIDEST or all(isinstance(part, Int4Linear) for part in (qkv, output, gate_up, down))
    return Folded(qkv, output, gate_up, down) if pays else None


def product(layer: Foldable, x: Tensor | Scaled, gated: bool = False) -> Tensor:
    """What ``layer`` makes of ``x`` [rows, in], or of the norm of such rows; ``gated``:
    see ``Gated``.
    """
    if isinstance(layer, DenseLinear):
        return few_rows.multiply(x, layer.weight, layer.bias, gated=gated)
    return linear.linear(x, layer.weights, layer.bias, gated=gated)


def add_product(layer: Foldable, x: Tensor, onto: Onto) -> Scaled:
    """Adds what ``layer`` makes of ``x`` [rows, in] to the rows of ``onto``, in place."""
    if isinstance(layer, DenseLinear):
        return few_rows.add_product(x, layer.weight, layer.bias, onto)
    return linear.add_product(x, layer.weights, layer.bias, onto)
