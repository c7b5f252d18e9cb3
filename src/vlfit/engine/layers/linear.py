"""Linear layers: one class per weights format. Knows nothing of files; ``loader.py`` builds them.

Every class computes ``x @ W.T + bias`` for ``x`` of shape [rows, in] and gives [rows, out].
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear(Protocol):
    """What the model calls, whatever the format of the weights."""

    def __call__(self, x: Tensor) -> Tensor: ...


class DenseLinear:
    """Weights in the dtype of the computation: ``weight`` [out, in], ``bias`` [out] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Fp8Linear:
    """Weights kept in FP8 with one float32 scale for each block of 128 x 128, widened at each call.

    ``parts`` are (weight [out_i, in] float8_e4m3fn, scale [ceil(out_i / rows), ceil(in / columns)]); their
    outputs are joined in order. Parts stay apart because a block must not straddle two matrices.
    """

    def __init__(
        self, parts: Sequence[tuple[Tensor, Tensor]], block: tuple[int, int], bias: Tensor | None = None
    ) -> None:
        self.parts = tuple(parts)
        self.block = block
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        outputs = [
            F.linear(x, dequantize_fp8(weight, scale, self.block, x.dtype)) for weight, scale in self.parts
        ]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return joined if self.bias is None else joined + self.bias


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
    """Weights kept in 4 bits with a scale for each group of inputs, widened at each call.

    ``parts`` are (packed [out_i, in / 8] int32, scale [out_i, in / group], zero point [ceil(out_i / 8),
    in / group] int32 or None), as ``dequantize_int4`` takes them; their outputs are joined in order.
    """

    def __init__(
        self, parts: Sequence[tuple[Tensor, Tensor, Tensor | None]], bias: Tensor | None = None
    ) -> None:
        self.parts = tuple(parts)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        outputs = [F.linear(x, dequantize_int4(*part, x.dtype)) for part in self.parts]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return joined if self.bias is None else joined + self.bias


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


def unpack_codes(packed: Tensor) -> Tensor:
    """Eight codes of each word, lowest bits first: [rows, words] int32 to [rows, 8 * words] uint8."""
    pairs = packed.flatten().view(torch.uint8).view(len(packed), -1)  # a byte holds two neighbours
    return torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)


def pack_codes(codes: Tensor) -> Tensor:
    """What ``unpack_codes`` reads: [rows, columns] uint8 below 16 to [rows, ceil(columns / 8)] int32."""
    padded = F.pad(codes, (0, -codes.shape[1] % 8))
    return (padded[:, ::2] | padded[:, 1::2] << 4).contiguous().view(torch.int32)
