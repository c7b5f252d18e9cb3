"""Residual add, RMSNorm and SwiGLU between a decoder layer's GEMMs.

On a CPU plain PyTorch or, between layers whose weights stay as stored, compiled code
(``kernels/cpu/row_functions.py``); on a GPU kernels of their own or, for a single row, the epilogues and
prologues of the GEMMs (``kernels/gemm/epilogue.py``), where only rounding differs.
"""

from dataclasses import dataclass
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from vlfit import kernels
from vlfit.kernels.cpu import row_functions as cpu_rows
from vlfit.kernels.gemm import dense, fp8, quantized
from vlfit.kernels.gemm.dense import DENSE_MAX_ROWS
from vlfit.kernels.gemm.epilogue import PreNormRows, ResidualEpilogue, unwrap_rows
from vlfit.kernels.rows import row_ops
from vlfit.layers.cpu_stored import StoredLinear
from vlfit.layers.linear import (
    DenseLinear,
    Fp8Linear,
    Int8Linear,
    Linear,
    PackedLinear,
    StackedLinear,
    SwigluLinear,
    quantized_parts,
)
from vlfit.layers.norm import rms_norm


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add ``delta`` to ``hidden`` [rows, width] in place; return ``rms_norm`` of the sum, a new tensor.

    ``delta`` None: nothing is added.
    """
    if kernels.enabled_for("rows", hidden.device):
        return row_ops.add_rms_norm(hidden, delta, weight, eps)
    if delta is not None:
        hidden.add_(delta)
    return rms_norm(hidden, weight, eps)


def _fuses_rows(x: Tensor) -> bool:
    """Whether ``x`` may enter or leave a product by the norm or SwiGLU that is part of its kernel."""
    return kernels.plain_on(x.device).isdisjoint(("linear", "rows"))


def _takes_fp8_rows(layer: Linear, x: Tensor) -> TypeGuard[Fp8Linear]:
    return isinstance(layer, Fp8Linear) and layer.takes_fp8_rows(x) and _fuses_rows(x)


def add_norm_linear(
    layer: Linear, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> Tensor:
    """Add ``delta`` to ``hidden`` [rows, width] in place; return ``layer`` applied to the sum's RMSNorm.

    ``delta`` None: nothing is added. If the layer takes its input in FP8, the norm's kernel quantizes it.
    """
    if _takes_fp8_rows(layer, hidden):
        return layer.multiply(fp8.add_rms_norm_quantize(hidden, delta, weight, eps))
    if isinstance(layer, StoredLinear) and _fuses_rows(hidden):
        return layer(cpu_rows.add_rms_norm(hidden, delta, weight, eps))
    return layer(add_norm(hidden, delta, weight, eps))


def feed_forward(
    gate_up: Linear, down: Linear, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """Add ``delta`` to ``hidden`` [rows, width] in place; return the SwiGLU feed-forward's output.

    Its input is the RMSNorm (``weight``, ``eps``) of the sum. The result [rows, width] is not added to
    ``hidden``.
    """
    if _takes_fp8_rows(gate_up, hidden) and _takes_fp8_rows(down, hidden):
        # One expression, so that each tensor is freed as soon as it is read.
        return down.multiply(
            fp8.silu_and_mul_quantize(gate_up.multiply(fp8.add_rms_norm_quantize(hidden, delta, weight, eps)))
        )
    if isinstance(gate_up, StoredLinear) and _fuses_rows(hidden):
        return down(cpu_rows.silu_mul(gate_up(cpu_rows.add_rms_norm(hidden, delta, weight, eps))))
    return down(linear_silu_mul(gate_up, add_norm(hidden, delta, weight, eps)))


def linear_silu_mul(gate_up: Linear, x: Tensor) -> Tensor:
    """``silu(gate) * up`` [rows, inner] for ``x`` [rows, width].

    ``gate_up(x)`` is [rows, 2 * inner], gates first.
    """
    in_kernel = kernels.enabled_on(x.device) and len(x) <= DENSE_MAX_ROWS and _fuses_rows(x)
    if in_kernel and isinstance(gate_up, SwigluLinear):
        return gate_up.forward_swiglu(x)
    return silu_mul(gate_up(x))


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``gate_up`` [rows, 2 * inner], gates first, computed in place.

    Overwrites the gates and returns them: a strided view [rows, inner].
    """
    if kernels.enabled_for("rows", gate_up.device):
        return row_ops.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate, inplace=True).mul_(up)


# The fused decode path: residual add and norm in the GEMMs' epilogues and prologues.

# Microseconds for a layer on one H100, with separate norms and fused: 54 and 52 (2B, bf16), 42 and 39 (2B,
# FP8), 61 and 58 (4B, FP8), 56 and 50 (4B, int4), 73 and 69 (8B, int4); with eight rows 72 and 74 (2B, bf16),
# 81 and 88 (8B, int4). Hence one row only, and above this width int4 only (docs/log.md).
FUSED_MAX_ROWS = 1
FUSED_MAX_WIDTH = 2560

Fusable = DenseLinear | Fp8Linear | Int8Linear | PackedLinear


def uses_fused_decode(hidden: Tensor) -> bool:
    """Whether a batch with residual rows ``hidden`` [rows, width] takes the fused decode path.

    Up to ``FUSED_MAX_ROWS`` rows do, on a GPU. Not in float16, where rows times the norm's weight may
    overflow before they are normalized.
    """
    return (
        kernels.enabled_on(hidden.device)
        and len(hidden) <= FUSED_MAX_ROWS
        and hidden.dtype != torch.float16
        and _fuses_rows(hidden)
    )


def is_fusable(layer: Linear) -> TypeGuard[Fusable]:
    """Whether the GEMM of ``layer`` has a fused prologue and epilogue."""
    return isinstance(layer, Fusable)


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """The linear layers of a decoder layer from its token mixer's output on, all fusable."""

    output: Fusable
    gate_up: Fusable
    down: Fusable


def fuse_layer(qkv: Linear, output: Linear, gate_up: Linear, down: Linear) -> FusedLayer | None:
    """The linear layers of one decoder layer, for the fused decode path. ``qkv``: the token mixer's first.

    None if one of them is not fusable, or fusing would be slower (wide layers, unless all are int4).
    """
    if not (is_fusable(output) and is_fusable(gate_up) and is_fusable(down)):
        return None
    if not (is_fusable(qkv) or (isinstance(qkv, StackedLinear) and all(map(is_fusable, qkv.parts)))):
        return None
    parts = (qkv, output, gate_up, down)
    is_faster = _width(down) <= FUSED_MAX_WIDTH or all(map(_is_int4, parts))
    return FusedLayer(output, gate_up, down) if is_faster else None


def _is_int4(layer: Linear) -> bool:
    """Whether ``layer`` has 4-bit codes without a codebook, the only ones measured in wide layers."""
    return isinstance(layer, PackedLinear) and layer.weights.bits == 4 and layer.weights.codebook is None


def _width(layer: Fusable) -> int:
    """Outputs of ``layer``."""
    return len(layer.weight) if isinstance(layer, DenseLinear) else layer.weights.out_features


def fused_linear(layer: Fusable | StackedLinear, x: Tensor | PreNormRows, swiglu: bool = False) -> Tensor:
    """``layer`` applied to ``x`` [rows, in]; the norm of ``PreNormRows`` is applied in the GEMM's prologue.

    ``swiglu``: the first half of the layer's outputs are gates, and the result is ``silu(gate) * up`` [rows,
    out / 2]. Only on a GPU, for at most ``DENSE_MAX_ROWS`` rows; for a ``StackedLinear`` at most
    ``FUSED_MAX_ROWS``, as its parts write side by side, and without ``swiglu``.
    """
    if not isinstance(layer, StackedLinear):
        return _multiply(layer, x, swiglu=swiglu)
    quantized_layers = quantized_parts(layer)
    if quantized_layers is not None:
        return quantized.quantized_linears(x, quantized_layers)
    rows, _ = unwrap_rows(x)
    parts = [part for part in layer.parts if is_fusable(part)]
    widths = [_width(part) for part in parts]
    out = torch.empty((len(rows), sum(widths)), dtype=rows.dtype, device=rows.device)
    for part, columns in zip(parts, out.split(widths, dim=1), strict=True):
        _multiply(part, x, out=columns)
    return out


def project(layer: Linear, x: Tensor | PreNormRows) -> Tensor:
    """``layer`` applied to normalized rows: ``fused_linear`` for ``PreNormRows``.

    Raises ``TypeError`` for those if the layer's GEMM is not fusable.
    """
    if not isinstance(x, PreNormRows):
        return layer(x)
    if not isinstance(layer, Fusable | StackedLinear):
        raise TypeError(f"{type(layer).__name__} has no fused prologue")
    return fused_linear(layer, x)


def _multiply(
    layer: Fusable, x: Tensor | PreNormRows, *, swiglu: bool = False, out: Tensor | None = None
) -> Tensor:
    if isinstance(layer, DenseLinear):
        return dense.dense_linear(x, layer.weight, layer.bias, swiglu=swiglu, out=out)
    return quantized.quantized_linear(x, layer.weights, layer.bias, swiglu=swiglu, out=out)


def linear_add_residual(layer: Fusable, x: Tensor, residual: ResidualEpilogue) -> PreNormRows:
    """Compute ``residual.hidden += layer(x)`` in place, for ``x`` [rows, in].

    Returns the input of the next ``fused_linear``, which applies the norm of ``residual`` to the sum. Only on
    a GPU, for at most ``DENSE_MAX_ROWS`` rows.
    """
    if isinstance(layer, DenseLinear):
        return dense.dense_linear_add(x, layer.weight, layer.bias, residual)
    return quantized.quantized_linear_add(x, layer.weights, layer.bias, residual)
