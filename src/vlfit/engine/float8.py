"""Rows of numbers in FP8 (e4m3: four bits of exponent, three of fraction), each row with a scale of its own.

The scale makes the largest number of a row the largest code, 448: keys have few large numbers, which decide
what is looked at, and so those are rounded least. (Powers of two for scales would take one byte instead of
two: mini then says five times as many bits of something else, docs/log.md.) It is a bfloat16, as that has the
range of all dtypes that are computed in. Here in plain PyTorch; the kernels do the same bit for bit
(``kernels/stored.py``). Does not know what the rows are.
"""

import torch
from torch import Tensor

LARGEST = 448.0  # the largest code; one more exponent would be NaN
LEAST = 2.0**-40  # of a scale: rows below 2^-31 of all are as good as 0, and one over it is a number
SCALE_DTYPE = torch.bfloat16


def narrowed(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [..., width] uint8 and scales [...] int16, bits of bfloat16, of ``rows`` [..., width].

    Numbers are rounded to the nearest code, halves to even ones. A row that has an infinity or NaN reads as
    NaN, all of it.
    """
    wide = rows.float()
    largest = wide.abs().amax(-1)
    scale = (largest / LARGEST).clamp_min(LEAST).to(SCALE_DTYPE)
    codes = (wide * (1.0 / scale.float())[..., None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    scale.masked_fill_(~largest.isfinite(), torch.nan)
    return codes.view(torch.uint8), scale.view(torch.int16)


def widened(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What ``codes`` [..., width] stand for at ``scales`` [...]."""
    numbers = codes.view(torch.float8_e4m3fn).float()
    return numbers.mul_(scales.view(SCALE_DTYPE).float()[..., None]).to(dtype)
