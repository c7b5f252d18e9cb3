"""Linear layers: one class per weights format, built by ``loading/loader.py``.

Each computes ``x @ W.T + bias`` [rows, out] for ``x`` [rows, in]. On a CPU quantized weights are dequantized
at each call, in plain PyTorch: the reference for the GPU's kernels.
"""

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from vlfit import kernels
from vlfit.kernels.gemm import fp8 as eight_bits
from vlfit.kernels.gemm.dense import DENSE_MAX_ROWS, dense_linear
from vlfit.kernels.gemm.fp8 import Fp8Activations
from vlfit.kernels.gemm.quantized import QuantizedWeight, quantized_linear


class Linear(Protocol):
    """A linear layer in any weights format."""

    def __call__(self, x: Tensor) -> Tensor: ...


@runtime_checkable
class GatedLinear(Protocol):
    """A layer of gates and values that computes SwiGLU in its epilogue, for few rows."""

    def gated(self, x: Tensor) -> Tensor:
        """``silu(gate) * up`` [rows, out / 2] of ``x`` [at most ``DENSE_MAX_ROWS`` rows, in], by kernels."""
        ...


class DenseLinear:
    """Weights in the computation's dtype: ``weight`` [out, in], ``bias`` [out] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= DENSE_MAX_ROWS and kernels.enabled_on(x.device):
            return dense_linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)

    def gated(self, x: Tensor) -> Tensor:
        return dense_linear(x, self.weight, self.bias, swiglu=True)


class Fp8Linear:
    """Weights in FP8: ``weight`` [out, in] float8_e4m3fn, a float32 scale for each ``block`` of it.

    ``scale`` is [ceil(out / block[0]), ceil(in / block[1])].
    """

    def __init__(
        self, weight: Tensor, scale: Tensor, block: tuple[int, int], bias: Tensor | None = None
    ) -> None:
        self.weights = QuantizedWeight(weight, scale, None, block)
        self.bias = bias
        self._fits = eight_bits.supports_fp8_gemm(self.weights)  # read four times a layer

    def __call__(self, x: Tensor) -> Tensor:
        if self.takes_fp8_rows(x):
            return self.multiply(eight_bits.quantize_rows(x))
        if kernels.enabled_on(x.device):
            return quantized_linear(x, self.weights, self.bias)
        dequantized = dequantize_fp8(
            self.weights.codes, self.weights.scale, self.weights.block_shape, x.dtype
        )
        return F.linear(x, dequantized, self.bias)

    def gated(self, x: Tensor) -> Tensor:
        return quantized_linear(x, self.weights, self.bias, swiglu=True)

    def takes_fp8_rows(self, x: Tensor) -> bool:
        """Whether ``x`` is quantized to FP8 before the product, going by its rows and dtype."""
        return self._fits and eight_bits.uses_fp8_for_rows(x.shape[0], x.dtype, x.device)

    def multiply(self, x: Fp8Activations) -> Tensor:
        """The product of rows that are quantized already."""
        return eight_bits.fp8_linear(x, self.weights, self.bias)


class StackedLinear:
    """Layers with the same input in different formats; their outputs are concatenated."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = parts

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=1)


class ReorderedLinear:
    """``inner`` with permuted inputs: its input i is input ``order[i]``, [in] int32."""

    def __init__(self, inner: Linear, order: Tensor) -> None:
        self.inner = inner
        self.order = order

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner(x.index_select(1, self.order))


def stacked_block_rows(block_rows: int, heights: Sequence[int]) -> int:
    """Rows per block of scales for a stack of matrices of ``heights`` rows.

    The largest divisor of ``block_rows`` and of every height but the last, so that no block straddles two
    matrices; the last block may be incomplete. In official checkpoints it is ``block_rows`` itself.
    """
    return math.gcd(block_rows, *heights[:-1])


def dequantize_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """``weight`` [out, in] float8 times its block scales, as ``dtype``.

    Multiplied in float32 and rounded once. ``weight_scale_inv`` multiplies, despite its name.
    """
    rows, columns = weight.shape
    by_row = scale.float().repeat_interleave(block[0], dim=0)[:rows]
    full = by_row.repeat_interleave(block[1], dim=1)[:, :columns]
    return (weight.float() * full).to(dtype)


class Int4Linear:
    """Weights in 4 bits with a scale for each group of inputs.

    ``packed`` [out, in / 8] int32, ``scale`` [out, in / group], ``zero_point`` [ceil(out / 8), in / group]
    int32 or None, as ``dequantize_int4`` takes them.
    """

    def __init__(
        self, packed: Tensor, scale: Tensor, zero_point: Tensor | None, bias: Tensor | None = None
    ) -> None:
        group = packed.shape[1] * 8 // scale.shape[1]
        self.weights = QuantizedWeight(packed, scale, zero_point, (1, group))
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if kernels.enabled_on(x.device):
            return quantized_linear(x, self.weights, self.bias)
        stored = self.weights
        dequantized = dequantize_int4(stored.codes, stored.scale, stored.zero_point, x.dtype)
        return F.linear(x, dequantized, self.bias)

    def gated(self, x: Tensor) -> Tensor:
        return quantized_linear(x, self.weights, self.bias, swiglu=True)


SYMMETRIC_ZERO = 8  # the code of 0 without stored zero points


def dequantize_int4(packed: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weights [out, in] as ``dtype``: (code - zero point) * scale, in float32 and rounded once."""
    groups = scale.shape[1]
    codes = unpack_codes(packed).unflatten(1, (groups, -1)).float()  # [out, groups, in / groups]
    if zero_point is None:
        codes -= SYMMETRIC_ZERO
    else:
        codes -= unpack_codes(zero_point.T)[:, : len(scale)].T.unsqueeze(2)
    dequantized: Tensor = (codes * scale.float().unsqueeze(2)).flatten(1).to(dtype)
    return dequantized


class Int8Linear:
    """Weights in 8 bits: ``codes`` [out, in] int8, ``scale`` [out, groups]; one group: a scale a row."""

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        self.weights = QuantizedWeight(codes, scale, None, (1, codes.shape[1] // scale.shape[1]))
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if kernels.enabled_on(x.device):
            return quantized_linear(x, self.weights, self.bias)
        return F.linear(x, dequantize_int8(self.weights.codes, self.weights.scale, x.dtype), self.bias)

    def gated(self, x: Tensor) -> Tensor:
        return quantized_linear(x, self.weights, self.bias, swiglu=True)


def dequantize_int8(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights [out, in] as ``dtype``: code * scale, in float32 and rounded once.

    ``scale`` [out, groups]: neighbours in a row share one.
    """
    wide: Tensor = codes.float().unflatten(1, (scale.shape[1], -1))
    return wide.mul_(scale.float().unsqueeze(2)).flatten(1).to(dtype)


_HIGH_BITS = 0x80808080 - 2**32  # the highest bit of each byte of a word


def signed_codes(packed: Tensor) -> Tensor:
    """Packed 8-bit codes [out, in / 4] int32 as int8 [out, in], in place.

    A packed code is the number plus 128: only the highest bit differs.
    """
    return packed.bitwise_xor_(_HIGH_BITS).view(torch.int8)


def join_zero_points(parts: Sequence[Tensor], heights: Sequence[int]) -> Tensor:
    """Zero points of stacked matrices of ``heights`` rows.

    Eight rows share a word, so the second matrix may begin in the middle of one.
    """
    if parts[0].is_meta:  # torch would import its compiler to infer the shape
        return parts[0].new_empty(-(-sum(heights) // 8), parts[0].shape[1])
    codes = [
        unpack_codes(part.T)[:, :height] for part, height in zip(parts, heights, strict=True)
    ]  # each [groups, rows]
    return pack_codes(torch.cat(codes, dim=1)).T.contiguous()


def unpack_codes(packed: Tensor) -> Tensor:
    """Eight codes per word, lowest bits first: [rows, words] int32 to [rows, 8 * words] uint8."""
    pairs = packed.flatten().view(torch.uint8).view(len(packed), -1)  # a byte holds two neighbours
    return torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)


def pack_codes(codes: Tensor) -> Tensor:
    """Inverse of ``unpack_codes``: [rows, columns] uint8 below 16 to [rows, ceil(columns / 8)] int32."""
    padded = F.pad(codes, (0, -codes.shape[1] % 8))
    return (padded[:, ::2] | padded[:, 1::2] << 4).contiguous().view(torch.int32)
