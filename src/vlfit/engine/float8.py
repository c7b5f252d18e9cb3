"""Rows of numbers in FP8 (e4m3: four bits of exponent, three of fraction), each row with a scale of its own.

The scale is a power of two, kept as its exponent in one byte (E8M0 of the OCP's Microscaling formats): FP8 is
as exact at one scale as at any other, so a finer one would gain nothing, and what comes back is the code
times a power of two, exactly, in any of the dtypes that an engine computes in. Here in plain PyTorch; the
kernels do the same bit for bit (``kernels/stored.py``). Does not know what the rows are.
"""

import torch
from torch import Tensor

LARGEST = 448.0  # the largest code; one more exponent would be NaN
BIAS = 127  # a scale of 1, as in the exponents of float32
# Rows below 2^-24 of all are as good as 0. Above, a scale has an inverse that is a normal float32, on cards
# too whose codes are read as a 256th of what they are (``kernels/unpack.py``).
LEAST, MOST = BIAS - 32, BIAS + 118
NOT_FINITE = 255  # the scale of a row that has an infinity or NaN: all of it reads as NaN


def narrowed(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [..., width] and scales [...] of ``rows`` [..., width], both uint8.

    The scale is the smallest at which the row's largest number is a code. Numbers are rounded to the nearest
    code, halves to even ones.
    """
    wide = rows.float()
    largest = wide.abs().amax(-1)
    # As many units of 2^21 as make 1.75 the largest fraction of its exponent: 448 is 1.75 * 2^8.
    scale = ((largest.view(torch.int32) + 0x1FFFFF) >> 23) - 8
    scale = scale.clamp(LEAST, MOST)
    shrink = ((2 * BIAS - scale) << 23).view(torch.float32)
    codes = (wide * shrink[..., None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, torch.where(largest.isfinite(), scale, NOT_FINITE).to(torch.uint8)


def widened(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What ``codes`` [..., width] stand for at ``scales`` [...]."""
    numbers = codes.view(torch.float8_e4m3fn).float()
    factor = (scales.to(torch.int32) << 23).view(torch.float32)
    factor.masked_fill_(scales == NOT_FINITE, torch.nan)
    return numbers.mul_(factor[..., None]).to(dtype)
