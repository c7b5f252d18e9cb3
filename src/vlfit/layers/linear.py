"""Linear layers: one class per weights format, built by ``loading/loader.py``.

Each computes ``x @ W.T + bias`` [rows, out] for ``x`` [rows, in]. On a CPU quantized weights are dequantized
at each call, in plain PyTorch: the reference for the GPU's kernels.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from vlfit import kernels
from vlfit.checkpoint.quantization import CODEBOOKS, LOW_BITS, RUN
from vlfit.kernels.gemm import fp8
from vlfit.kernels.gemm.dense import DENSE_MAX_ROWS, dense_linear
from vlfit.kernels.gemm.fp8 import Fp8Activations
from vlfit.kernels.gemm.quantized import quantized_linear, quantized_linears
from vlfit.kernels.gemm.weights import QuantizedWeight


class Linear(Protocol):
    """A linear layer in any weights format.

    Called with ``x`` [rows, in], it returns [rows, out] in the dtype of ``x``.
    """

    def __call__(self, x: Tensor) -> Tensor: ...


@runtime_checkable
class SwigluLinear(Protocol):
    """A stacked gate and up projection whose kernel computes SwiGLU in its epilogue."""

    def forward_swiglu(self, x: Tensor) -> Tensor:
        """``silu(gate) * up`` [rows, out / 2] for ``x`` [rows, in]; the layer's first outputs are the gates.

        Only on a GPU, and for at most ``DENSE_MAX_ROWS`` rows.
        """
        ...


class DenseLinear:
    """A ``Linear`` with weights in the computation's dtype: ``weight`` [out, in], ``bias`` [out] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= DENSE_MAX_ROWS and kernels.enabled_for("linear", x.device):
            return dense_linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)

    def forward_swiglu(self, x: Tensor) -> Tensor:
        """See ``SwigluLinear``."""
        return dense_linear(x, self.weight, self.bias, swiglu=True)


class Fp8Linear:
    """A ``Linear`` with weights in FP8: ``weight`` [out, in] float8_e4m3fn, a float32 scale per ``block``.

    ``block``: (rows, columns) that share a scale. ``scale`` is [ceil(out / block[0]), ceil(in /
    block[1])]; ``bias`` [out] or None.
    """

    def __init__(
        self, weight: Tensor, scale: Tensor, block: tuple[int, int], bias: Tensor | None = None
    ) -> None:
        self.weights = QuantizedWeight(weight, scale, None, block)
        self.bias = bias
        self._fits = fp8.supports_fp8_gemm(self.weights)  # read four times a layer

    def __call__(self, x: Tensor) -> Tensor:
        if self.takes_fp8_rows(x):
            return self.multiply(fp8.quantize_activations(x))
        if kernels.enabled_for("linear", x.device):
            return quantized_linear(x, self.weights, self.bias)
        dequantized = dequantize_fp8(
            self.weights.codes, self.weights.scale, self.weights.block_shape, x.dtype
        )
        return F.linear(x, dequantized, self.bias)

    def forward_swiglu(self, x: Tensor) -> Tensor:
        """See ``SwigluLinear``."""
        return quantized_linear(x, self.weights, self.bias, swiglu=True)

    def takes_fp8_rows(self, x: Tensor) -> bool:
        """Whether ``x`` [rows, in] is quantized to FP8 as well and multiplied in FP8 (``multiply``).

        Depends on the weights' scales and on the device, dtype and number of rows of ``x``.
        """
        return self._fits and fp8.uses_fp8_for_rows(x.shape[0], x.dtype, x.device)

    def multiply(self, x: Fp8Activations) -> Tensor:
        """The layer applied to activations that are already in FP8: [rows, out] in ``x.dtype``.

        Only where ``takes_fp8_rows`` is true of the unquantized rows.
        """
        return fp8.fp8_linear(x, self.weights, self.bias)


class StackedLinear:
    """A ``Linear`` whose output is the concatenated outputs of ``parts``.

    These take the same input and have different weights formats, so that they cannot be one matrix.
    """

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = parts

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) == 1 and kernels.enabled_for("linear", x.device):
            quantized = quantized_parts(self)
            if quantized is not None:
                return quantized_linears(x, quantized)
        return torch.cat([part(x) for part in self.parts], dim=1)


def quantized_parts(layer: StackedLinear) -> list[tuple[QuantizedWeight, Tensor | None]] | None:
    """Weights and bias of each part of ``layer``; None if one is not quantized."""
    parts = [part for part in layer.parts if isinstance(part, Fp8Linear | Int8Linear | PackedLinear)]
    return [(part.weights, part.bias) for part in parts] if len(parts) == len(layer.parts) else None


def first_outputs(linear: Linear, count: int) -> Linear | None:
    """The first ``count`` outputs of ``linear``, by its own weights in memory; None if its kind has no such.

    ``count``: a multiple of 8, at most the number of outputs.
    """
    if isinstance(linear, DenseLinear):
        return DenseLinear(linear.weight[:count], None if linear.bias is None else linear.bias[:count])
    if not isinstance(linear, Int8Linear | PackedLinear):
        return None
    whole = linear.weights
    codes, scale = whole.codes[:count], whole.scale[:count]
    bias = None if linear.bias is None else linear.bias[:count]
    if isinstance(linear, Int8Linear):
        return Int8Linear(codes, scale, bias)
    supers = None if whole.super_scale is None else whole.super_scale[:count]
    zeros = None if whole.zero_point is None else whole.zero_point[: count // 8]
    return PackedLinear(replace(whole, codes=codes, scale=scale, zero_point=zeros, super_scale=supers), bias)


class ReorderedLinear:
    """A ``Linear`` that permutes its inputs for ``inner`` (GPTQ's act-order).

    Input i of ``inner`` is ``x[:, order[i]]``. ``order`` [in] int32.
    """

    def __init__(self, inner: Linear, order: Tensor) -> None:
        self.inner = inner
        self.order = order

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner(x.index_select(1, self.order))


def stacked_block_rows(block_rows: int, heights: Sequence[int]) -> int:
    """How many rows share a scale once matrices of ``heights`` rows are stacked; ``block_rows`` do before.

    The greatest common divisor of ``block_rows`` and every height but the last: no block straddles two
    matrices, and only the last block may be incomplete. In official checkpoints it is ``block_rows`` itself.
    """
    return math.gcd(block_rows, *heights[:-1])


def dequantize_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The weights [out, in] of an ``Fp8Linear`` as ``dtype``: multiplied in float32 and rounded once.

    ``scale``, with one number per ``block`` (rows, columns), is the checkpoint's ``weight_scale_inv``, which
    multiplies despite its name.
    """
    rows, columns = weight.shape
    by_row = scale.float().repeat_interleave(block[0], dim=0)[:rows]
    full = by_row.repeat_interleave(block[1], dim=1)[:, :columns]
    return (weight.float() * full).to(dtype)


class PackedLinear:
    """A ``Linear`` with weights in 4, 5 or 6 bits, and a scale for each group of inputs.

    ``weights``: codes in words of 32 bits (``pack_codes``); ``bias`` [out] or None.
    """

    def __init__(self, weights: QuantizedWeight, bias: Tensor | None = None) -> None:
        self.weights = weights
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if kernels.enabled_for("linear", x.device):
            return quantized_linear(x, self.weights, self.bias)
        return F.linear(x, dequantize_packed(self.weights, x.dtype), self.bias)

    def forward_swiglu(self, x: Tensor) -> Tensor:
        """See ``SwigluLinear``."""
        return quantized_linear(x, self.weights, self.bias, swiglu=True)


def dequantize_packed(weights: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The weights [out, in] of a ``PackedLinear`` as ``dtype``: computed in float32 and rounded once.

    (code - zero point) * scale. Without stored zero points the middle code (8 of 16) stands for 0; with
    minima, code 0 does. With a codebook: its number for the code, times scale. Two levels of scales: see
    ``expand_scales``.
    """
    stored, scale, supers = weights.codes, weights.scale, weights.super_scale
    codes = unpack_codes(stored, weights.bits, weights.in_features)
    if weights.codebook is not None:
        values = torch.tensor(CODEBOOKS[weights.codebook], dtype=torch.float32, device=stored.device)
        wide = values[codes.int()]
    else:
        wide = codes.float()
    wide = wide.unflatten(1, (scale.shape[1], -1))  # [out, groups, in / groups]
    if weights.zero_point is not None:
        wide -= unpack_int4(weights.zero_point.T)[:, : len(scale)].T.unsqueeze(2)
    elif weights.codebook is None and not weights.is_affine:
        wide -= 1 << weights.bits - 1
    if supers is not None:
        return _scale_codes(wide, *expand_scales(scale, supers), dtype)
    dequantized: Tensor = (wide * scale.float().unsqueeze(2)).flatten(1).to(dtype)
    return dequantized


def dequantize_int4(packed: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``dequantize_packed`` of int4 codes [out, in / 8] with a scale for each group: [out, groups]."""
    group = packed.shape[1] * 8 // scale.shape[1]
    return dequantize_packed(QuantizedWeight(packed, scale, zero_point, (1, group)), dtype)


class Int8Linear:
    """A ``Linear`` with weights in 8 bits: ``codes`` [out, in] int8, ``scale`` [out, groups].

    Each scale is for in / groups consecutive inputs. ``bias``: [out] or None.
    """

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        self.weights = QuantizedWeight(codes, scale, None, (1, codes.shape[1] // scale.shape[1]))
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if kernels.enabled_for("linear", x.device):
            return quantized_linear(x, self.weights, self.bias)
        return F.linear(x, dequantize_int8(self.weights.codes, self.weights.scale, x.dtype), self.bias)

    def forward_swiglu(self, x: Tensor) -> Tensor:
        """See ``SwigluLinear``."""
        return quantized_linear(x, self.weights, self.bias, swiglu=True)


def dequantize_int8(
    codes: Tensor, scale: Tensor, dtype: torch.dtype, super_scale: Tensor | None = None
) -> Tensor:
    """The weights [out, in] as ``dtype``: code * scale, computed in float32 and rounded once.

    ``codes`` [out, in] int8; ``scale`` [out, groups], each for in / groups neighbours in a row.
    ``super_scale``: see ``expand_scales``.
    """
    wide: Tensor = codes.float().unflatten(1, (scale.shape[1], -1))
    if super_scale is not None:
        return _scale_codes(wide, *expand_scales(scale, super_scale), dtype)
    return wide.mul_(scale.float().unsqueeze(2)).flatten(1).to(dtype)


def expand_scales(scale: Tensor, super_scale: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scales and minima [out, groups] in float32 of two-level ``scale`` and ``super_scale``; None: no minima.

    A weight is code * scale - minimum. For the forms of both tensors see ``QuantizedWeight``.
    """
    repeats = scale.shape[1] // super_scale.shape[1]
    if scale.dtype == torch.int8:
        return scale.float() * super_scale.float().repeat_interleave(repeats, dim=1), None
    sub = scale.contiguous().view(torch.uint8).unflatten(1, (-1, 2)).float()
    halves = super_scale.contiguous().view(torch.float16).unflatten(1, (-1, 2)).float()
    both = sub * halves.repeat_interleave(repeats, dim=1)
    return both[..., 0], both[..., 1]


def _scale_codes(codes: Tensor, scales: Tensor, minima: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[out, in] in ``dtype`` of float32 ``codes`` [out, groups, in / groups], which are overwritten."""
    codes *= scales.unsqueeze(2)
    if minima is not None:
        codes -= minima.unsqueeze(2)
    return codes.flatten(1).to(dtype)


_HIGH_BITS = 0x80808080 - 2**32  # the highest bit of each byte of a word


def unpack_int8(packed: Tensor) -> Tensor:
    """Convert packed 8-bit codes [out, in / 4] int32 to int8 [out, in], in place: a view of the same memory.

    A packed code is the number plus 128, so that only its highest bit is flipped.
    """
    return packed.bitwise_xor_(_HIGH_BITS).view(torch.int8)


def stack_zero_points(parts: Sequence[Tensor], heights: Sequence[int]) -> Tensor:
    """Stack the packed int4 zero points of matrices of ``heights`` rows.

    ``parts``: [ceil(height / 8), groups] int32 each; returns [ceil(sum of heights / 8), groups]. Repacked, as
    eight rows share a word and a matrix may begin in the middle of one.
    """
    if parts[0].is_meta:  # torch would import its compiler to infer the shape
        return parts[0].new_empty(-(-sum(heights) // 8), parts[0].shape[1])
    codes = [
        unpack_int4(part.T)[:, :height] for part, height in zip(parts, heights, strict=True)
    ]  # each [groups, rows]
    return pack_int4(torch.cat(codes, dim=1)).T.contiguous()


def unpack_int4(packed: Tensor) -> Tensor:
    """Unpack 4-bit codes, eight to a word, lowest bits first.

    [rows, words] int32 to [rows, 8 * words] uint8.
    """
    pairs = packed.flatten().view(torch.uint8).view(len(packed), 4 * packed.shape[1])  # of neighbours
    return torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)


def pack_int4(codes: Tensor) -> Tensor:
    """Pack 4-bit codes, eight to a word: [rows, columns] uint8 to [rows, ceil(columns / 8)] int32.

    Inverse of ``unpack_int4``; the last word is padded with zeros.
    """
    padded = _padded(codes, 8)
    return (padded[:, ::2] | padded[:, 1::2] << 4).contiguous().view(torch.int32)


def _padded(codes: Tensor, count: int) -> Tensor:
    """``codes`` with columns a multiple of ``count``; themselves if they are, where ``F.pad`` would copy."""
    missing = -codes.shape[1] % count
    return F.pad(codes, (0, missing)) if missing else codes


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of 4, 5 or 6 bits as GEMM kernels read them: [rows, columns] uint8 to int32 words.

    Of 5 and 6 bits a row first has the upper four of each code, as from ``pack_int4``, and then the lowest n:
    4 words for each 16 or 8 words of upper bits, of which word i has the lowest bits of words i, i + 4, ...
    Those of code c of the j-th of these words are at bit 4 * c + j * n. Columns are a multiple of 32; the end
    is padded with zeros.
    """
    low = LOW_BITS.get(bits)
    if low is None:
        return pack_int4(codes)
    runs = 4 // low  # words of upper bits that share one of lowest
    lowest = _padded(codes & (1 << low) - 1, RUN * runs)
    parts = lowest.view(len(codes), -1, runs, RUN)
    fields = parts[:, :, 0].clone()
    for run in range(1, runs):
        fields |= parts[:, :, run] << run * low
    return torch.cat((pack_int4(codes >> low), pack_int4(fields.flatten(1))), dim=1)


def unpack_codes(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Inverse of ``pack_codes``: [rows, ``columns``] uint8."""
    low = LOW_BITS.get(bits)
    if low is None:
        return unpack_int4(packed)[:, :columns]
    upper = unpack_int4(packed[:, : columns // 8].contiguous())
    fields = unpack_int4(packed[:, columns // 8 :].contiguous()).unflatten(1, (-1, RUN))
    parts = torch.stack([fields >> run * low & (1 << low) - 1 for run in range(4 // low)], dim=2)
    lower = parts.flatten(1)[:, :columns]
    return upper << low | lower
