"""What stands between a decoder layer's GEMMs: residual add, RMSNorm and SwiGLU, fused on a GPU.

In plain PyTorch on a CPU, in a kernel of their own on a GPU, and for one row on a GPU in the epilogue and
prologue of the GEMMs (``kernels/gemm/epilogue.py``), which differs in rounding alone.
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
from vlfit.kernels.gemm.dense import DENSE_MAX_ROWS
from vlfit.kernels.gemm.epilogue import PreNormRows, ResidualEpilogue
from vlfit.kernels.rows import row_ops as fused
from vlfit.layers.linear import DenseLinear, Fp8Linear, GatedLinear, Int4Linear, Int8Linear, Linear
from vlfit.layers.norm import rms_norm


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add ``delta`` to ``hidden`` [rows, width] in place; return ``rms_norm`` of the sum."""
    if kernels.enabled_on(hidden.device):
        return fused.add_rms_norm(hidden, delta, weight, eps)
    if delta is not None:
        hidden.add_(delta)
    return rms_norm(hidden, weight, eps)


def _takes_fp8_rows(layer: Linear, x: Tensor) -> TypeGuard[Fp8Linear]:
    return isinstance(layer, Fp8Linear) and layer.takes_fp8_rows(x)


def norm_linear(layer: Linear, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """``layer`` of ``add_norm``; the norm quantizes its rows if the layer takes them in FP8."""
    if _takes_fp8_rows(layer, hidden):
        return layer.multiply(eight_bits.add_rms_norm_quantize(hidden, delta, weight, eps))
    return layer(add_norm(hidden, delta, weight, eps))


def feed_forward(
    gate_up: Linear, down: Linear, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """Add ``delta`` to ``hidden`` [rows, width] in place; return SwiGLU feed-forward of the sum's norm."""
    if _takes_fp8_rows(gate_up, hidden) and _takes_fp8_rows(down, hidden):
        # In one expression, so that each tensor is freed once it was read.
        return down.multiply(
            eight_bits.silu_and_mul_quantize(
                gate_up.multiply(eight_bits.add_rms_norm_quantize(hidden, delta, weight, eps))
            )
        )
    return down(linear_silu_mul(gate_up, add_norm(hidden, delta, weight, eps)))


def linear_silu_mul(gate_up: Linear, x: Tensor) -> Tensor:
    """``silu(gate) * up`` [rows, inner] of the product of ``gate_up`` and ``x`` [rows, hidden]."""
    if kernels.enabled_on(x.device) and len(x) <= DENSE_MAX_ROWS and isinstance(gate_up, GatedLinear):
        return gate_up.gated(x)
    return silu_mul(gate_up(x))


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` [rows, inner] of ``gate_up`` [rows, 2 * inner], which may be overwritten."""
    if kernels.enabled_on(gate_up.device):
        return fused.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate, inplace=True).mul_(up)


# The fused decode path: residual add and norm in the products' epilogues and prologues.

# Microseconds of a layer on one H100, with separate norms and fused: 54 and 52 (2B, bf16), 42 and 39 (2B,
# FP8), 61 and 58 (4B, FP8), 56 and 50 (4B, int4), 73 and 69 (8B, int4); with eight rows 72 and 74 (2B, bf16),
# 81 and 88 (8B, int4). Hence one row only, and above this width int4 only (docs/log.md).
FUSED_MAX_ROWS = 1
FUSED_MAX_WIDTH = 2560

Fusable = DenseLinear | Fp8Linear | Int4Linear | Int8Linear


def uses_fused_decode(hidden: Tensor) -> bool:
    """Whether ``hidden`` [rows, width] goes through the fused decode path.

    Not in float16: rows times a norm's weight may overflow before they are divided by their norm.
    """
    return (
        kernels.enabled_on(hidden.device) and len(hidden) <= FUSED_MAX_ROWS and hidden.dtype != torch.float16
    )


def is_fusable(layer: Linear) -> TypeGuard[Fusable]:
    """Whether the GEMM of ``layer`` can take a fused prologue and epilogue."""
    return isinstance(layer, Fusable)


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """The products of a decoder layer that can be fused."""

    qkv: Fusable
    output: Fusable
    gate_up: Fusable
    down: Fusable


def fuse_layer(qkv: Linear, output: Linear, gate_up: Linear, down: Linear) -> FusedLayer | None:
    """None if a product cannot be fused, or fusing would be slower."""
    if not (is_fusable(qkv) and is_fusable(output) and is_fusable(gate_up) and is_fusable(down)):
        return None
    width = len(down.weight) if isinstance(down, DenseLinear) else down.weights.out_features
    products = (qkv, output, gate_up, down)
    pays = width <= FUSED_MAX_WIDTH or all(isinstance(part, Int4Linear) for part in products)
    return FusedLayer(qkv, output, gate_up, down) if pays else None


def fused_linear(layer: Fusable, x: Tensor | PreNormRows, gated: bool = False) -> Tensor:
    """``layer`` of ``x`` [rows, in] or of rows whose norm is still to be applied; ``gated``: with SwiGLU."""
    if isinstance(layer, DenseLinear):
        return few_rows.dense_linear(x, layer.weight, layer.bias, swiglu=gated)
    return linear.quantized_linear(x, layer.weights, layer.bias, swiglu=gated)


def linear_add_residual(layer: Fusable, x: Tensor, onto: ResidualEpilogue) -> PreNormRows:
    """Add ``layer`` of ``x`` [rows, in] to the residual rows of ``onto`` in place, and prepare their norm."""
    if isinstance(layer, DenseLinear):
        return few_rows.dense_linear_add(x, layer.weight, layer.bias, onto)
    return linear.quantized_linear_add(x, layer.weights, layer.bias, onto)
