"""Linear layers: one class per weights format. Knows nothing of files; ``loader.py`` builds them.

Every class computes ``x @ W.T + bias`` for ``x`` of shape [rows, in] and gives [rows, out]. On a CPU narrow
weights are widened at each call, in plain PyTorch: the reference for the kernels that a GPU uses.
"""

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from vlfit import kernels
from vlfit.kernels.gemm import fp8 as eight_bits
from vlfit.kernels.gemm.dense import FEW_ROWS, multiply
from vlfit.kernels.gemm.fp8 import EightBits
from vlfit.kernels.gemm.quantized import NarrowWeights, linear


class Linear(Protocol):
    """What the model calls, whatever the format of the weights."""

    def __call__(self, x: Tensor) -> Tensor: ...


@runtime_checkable
class Gated(Protocol):
    """A layer whose outputs are gates and as many others, which it can multiply at once, for few rows."""

    def gated(self, x: Tensor) -> Tensor:
        """``silu(gate) * other`` [rows, out / 2] of ``x`` [at most ``FEW_ROWS`` rows, in], by kernels."""
        ...


class DenseLinear:
    """Weights in the dtype of the computation: ``weight`` [out, in], ``bias`` [out] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= FEW_ROWS and kernels.used_on(x.device):
            return multiply(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)

    def gated(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight, self.bias, gated=True)


class Fp8Linear:
    """Weights kept in FP8: ``weight`` [out, in] float8_e4m3fn, a float32 scale for each ``block`` of it.

    ``scale`` is [ceil(out / block[0]), ceil(in / block[1])].
    """

    def __init__(
        self, weight: Tensor, scale: Tensor, block: tuple[int, int], bias: Tensor | None = None
    ) -> None:
        self.weights = NarrowWeights(weight, scale, None, block)
        self.bias = bias
        self._fits = eight_bits.fits(self.weights)  # known once, and asked four times a layer

    def __call__(self, x: Tensor) -> Tensor:
        if self.in_eight_bits(x):
            return self.multiply(eight_bits.quantize(x))
        if kernels.used_on(x.device):
            return linear(x, self.weights, self.bias)
        widened = dequantize_fp8(self.weights.codes, self.weights.scale, self.weights.block, x.dtype)
        return F.linear(x, widened, self.bias)

    def gated(self, x: Tensor) -> Tensor:
        return linear(x, self.weights, self.bias, gated=True)

    def in_eight_bits(self, x: Tensor) -> bool:
        """Whether rows as many as those of ``x``, and of its dtype, are rounded to FP8 before the product."""
        return self._fits and eight_bits.takes_rows(x.shape[0], x.dtype, x.device)

    def multiply(self, x: EightBits) -> Tensor:
        """What is computed of rows that are rounded already."""
        return eight_bits.multiply(x, self.weights, self.bias)


class Stacked:
    """Layers with the same input, stored unlike each other: their outputs beside one another."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = parts

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=1)


class Reordered:
    """``inner`` on inputs in another order: its input i is ``order[i]`` of what comes, [in] int32."""

    def __init__(self, inner: Linear, order: Tensor) -> None:
        self.inner = inner
        self.order = order

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner(x.index_select(1, self.order))


def common_block_rows(block_rows: int, heights: Sequence[int]) -> int:
    """How many rows share a scale once matrices of ``heights`` rows stand on top of one another.

    No block may straddle two matrices. In all official checkpoints none would, and the blocks stay as they
    are; otherwise they are cut into equal lower ones.
    """
    return math.gcd(block_rows, *heights[:-1])


def dequantize_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """``weight`` [out, in] float8 times its block scales, as ``dtype``.

    The product is formed in float32 and rounded once, as the official checkpoints mean it
    (``weight_scale_inv`` multiplies, despite its name).
    """
    rows, columns = weight.shape
    by_row = scale.float().repeat_interleave(block[0], dim=0)[:rows]
    full = by_row.repeat_interleave(block[1], dim=1)[:, :columns]
    return (weight.float() * full).to(dtype)


class Int4Linear:
    """Weights kept in 4 bits with a scale for each group of inputs.

    ``packed`` [out, in / 8] int32, ``scale`` [out, in / group], ``zero_point`` [ceil(out / 8), in / group]
    int32 or None, as ``dequantize_int4`` takes them.
    """

    def __init__(
        self, packed: Tensor, scale: Tensor, zero_point: Tensor | None, bias: Tensor | None = None
    ) -> None:
        group = packed.shape[1] * 8 // scale.shape[1]
        self.weights = NarrowWeights(packed, scale, zero_point, (1, group))
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if kernels.used_on(x.device):
            return linear(x, self.weights, self.bias)
        stored = self.weights
        widened = dequantize_int4(stored.codes, stored.scale, stored.zero_point, x.dtype)
        return F.linear(x, widened, self.bias)

    def gated(self, x: Tensor) -> Tensor:
        return linear(x, self.weights, self.bias, gated=True)


SYMMETRIC_ZERO = 8  # the code that stands for 0 where no zero points are stored


def dequantize_int4(packed: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weights [out, in] as ``dtype``: (code - zero point) * scale, in float32 and rounded once."""
    groups = scale.shape[1]
    codes = unpack_codes(packed).unflatten(1, (groups, -1)).float()  # [out, groups, in / groups]
    if zero_point is None:
        codes -= SYMMETRIC_ZERO
    else:
        codes -= unpack_codes(zero_point.T)[:, : len(scale)].T.unsqueeze(2)
    widened: Tensor = (codes * scale.float().unsqueeze(2)).flatten(1).to(dtype)
    return widened


class Int8Linear:
    """Weights kept in 8 bits: ``codes`` [out, in] int8, ``scale`` [out, groups]; one group: a scale a row."""

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        self.weights = NarrowWeights(codes, scale, None, (1, codes.shape[1] // scale.shape[1]))
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if kernels.used_on(x.device):
            return linear(x, self.weights, self.bias)
        return F.linear(x, dequantize_int8(self.weights.codes, self.weights.scale, x.dtype), self.bias)

    def gated(self, x: Tensor) -> Tensor:
        return linear(x, self.weights, self.bias, gated=True)


def dequantize_int8(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights [out, in] as ``dtype``: code * scale, in float32 and rounded once.

    ``scale`` [out, groups]: neighbours in a row share one.
    """
    wide: Tensor = codes.float().unflatten(1, (scale.shape[1], -1))
    return wide.mul_(scale.float().unsqueeze(2)).flatten(1).to(dtype)


_MIDDLES = 0x80808080 - 2**32  # the middle code, 128, in each byte of a word


def signed_codes(packed: Tensor) -> Tensor:
    """Packed 8-bit codes [out, in / 4] int32, four to a word, as int8 [out, in]: in place, the same bytes.

    A packed code is its number plus 128, which differs from the number in the highest bit alone.
    """
    return packed.bitwise_xor_(_MIDDLES).view(torch.int8)


def join_zero_points(parts: Sequence[Tensor], heights: Sequence[int]) -> Tensor:
    """Zero points of matrices of ``heights`` rows as those of one matrix with all rows.

    Eight rows share a word, so those of the second matrix may begin in the middle of one.
    """
    if parts[0].is_meta:  # where torch would import its compiler to tell the shape
        return parts[0].new_empty(-(-sum(heights) // 8), parts[0].shape[1])
    codes = [
        unpack_codes(part.T)[:, :height] for part, height in zip(parts, heights, strict=True)
    ]  # each [groups, rows]
    return pack_codes(torch.cat(codes, dim=1)).T.contiguous()


def unpack_codes(packed: Tensor) -> Tensor:
    """Eight codes of each word, lowest bits first: [rows, words] int32 to [rows, 8 * words] uint8."""
    pairs = packed.flatten().view(torch.uint8).view(len(packed), -1)  # a byte holds two neighbours
    return torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)


def pack_codes(codes: Tensor) -> Tensor:
    """What ``unpack_codes`` reads: [rows, columns] uint8 below 16 to [rows, ceil(columns / 8)] int32."""
    padded = F.pad(codes, (0, -codes.shape[1] % 8))
    return (padded[:, ::2] | padded[:, 1::2] << 4).contiguous().view(torch.int32)
