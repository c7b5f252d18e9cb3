"""Steps between products that a GPU does in one kernel each; here is what they mean, in plain PyTorch.

Knows: what is added, normalized and multiplied, and in which dtype it is rounded. Does not know the
model: ``models/decoder.py`` puts the steps in order.
"""

from dataclasses import dataclass
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from vlfit import kernels
from vlfit.kernels.gemm import dense as few_rows
from vlfit.kernels.gemm import fp8 as eight_bits
from vlfit.kernels.gemm import quantized as linear
from vlfit.kernels.gemm.dense import FEW_ROWS
from vlfit.kernels.gemm.epilogue import Onto, Scaled
from vlfit.kernels.rows import row_ops as fused
from vlfit.layers.linear import DenseLinear, Fp8Linear, Gated, Int4Linear, Int8Linear, Linear
from vlfit.layers.norm import rms_norm


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Adds ``delta`` to ``hidden`` [rows, width] in place; gives ``rms_norm`` of the sum."""
    if kernels.used_on(hidden.device):
        return fused.add_norm(hidden, delta, weight, eps)
    if delta is not None:
        hidden.add_(delta)
    return rms_norm(hidden, weight, eps)


def _in_eight_bits(layer: Linear, x: Tensor) -> TypeGuard[Fp8Linear]:
    return isinstance(layer, Fp8Linear) and layer.in_eight_bits(x)


def normed(layer: Linear, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """What ``layer`` makes of ``add_norm``, rounded where it is found if the layer takes its rows in FP8."""
    if _in_eight_bits(layer, hidden):
        return layer.multiply(eight_bits.add_norm(hidden, delta, weight, eps))
    return layer(add_norm(hidden, delta, weight, eps))


def feed_forward(
    gate_up: Linear, down: Linear, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """Adds ``delta`` to ``hidden`` [rows, width] in place; gives ``down`` of what the gates of ``gate_up``
    let through of the norm of the sum.
    """
    if _in_eight_bits(gate_up, hidden) and _in_eight_bits(down, hidden):
        # In one line, so that nothing outlives what reads it.
        return down.multiply(
            eight_bits.silu_and_multiply(gate_up.multiply(eight_bits.add_norm(hidden, delta, weight, eps)))
        )
    return down(gated(gate_up, add_norm(hidden, delta, weight, eps)))


def gated(gate_up: Linear, x: Tensor) -> Tensor:
    """``silu(gate) * up`` [rows, inner] of what ``gate_up`` makes of ``x`` [rows, hidden]."""
    if kernels.used_on(x.device) and len(x) <= FEW_ROWS and isinstance(gate_up, Gated):
        return gate_up.gated(x)
    return silu_and_multiply(gate_up(x))


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` [rows, inner] of ``gate_up`` [rows, 2 * inner], which may be overwritten."""
    if kernels.used_on(gate_up.device):
        return fused.silu_and_multiply(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate, inplace=True).mul_(up)


# Layers whose products do what stands between them, for few rows on a GPU: residual and norm cost no
# kernel.
#
# Knows: which layers can do that, and for which rows. What is computed, ``kernels/gemm/epilogue.py`` says;
# the reference is the same layers without it (``fused.py``), from which this differs in rounding alone.


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
