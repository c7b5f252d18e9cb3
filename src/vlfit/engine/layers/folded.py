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
from vlfit.engine.kernels.few_rows import FEW_ROWS
from vlfit.engine.kernels.norm import Onto, Scaled
from vlfit.engine.layers.linear import DenseLinear, Fp8Linear, Int4Linear, Int8Linear, Linear

# Wider rows than these are computed as ever: on one H100 a layer of 2B took 1 to 2 us less, of 4B in int4 6
# of 53 less, of 8B in int4 20 us more than 70, for reasons not known (docs/log.md).
WIDEST = 2560

Foldable = DenseLinear | Fp8Linear | Int4Linear | Int8Linear


def few(hidden: Tensor) -> bool:
    """Whether rows like ``hidden`` [rows, width] are computed so.

    Not in float16: rows times a norm's weight, before they are divided by their length, may exceed it.
    """
    rows, width = hidden.shape
    fits = rows <= FEW_ROWS and width <= WIDEST and hidden.dtype != torch.float16
    return kernels.used_on(hidden.device) and fits


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
    """None if one of them cannot do more than multiply."""
    if foldable(qkv) and foldable(output) and foldable(gate_up) and foldable(down):
        return Folded(qkv, output, gate_up, down)
    return None


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
