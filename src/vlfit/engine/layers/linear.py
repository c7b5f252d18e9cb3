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
