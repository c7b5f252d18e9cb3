"""Quantize weights: float32 values to codes and scales.

No format needs calibration data. FP8 maps the largest value of each block to the largest FP8 number. Integers
have one more code below zero than above (-8 to 7), so a group's scale gets the sign that puts its largest
weight on that side. Its magnitude is the one of ``SCALE_FACTORS`` with the least squared error, then refined
twice by least squares for the codes that it gave. On normally distributed weights the error is 8.1 % in
groups of 32, against 9.7 % for rounding to nearest and 8.0 % for a search over all signs, magnitudes and
codes (``tests/quantize/test_quantize.py``).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vlfit.layers.linear import pack_int4

FP8_MAX = 448.0  # largest float8_e4m3fn
SCALE_DTYPE = torch.bfloat16
# Factors of the scale that maps a group's largest weight to the last code. Smaller scales clip the largest
# weights and are finer for all others; slightly larger ones may happen to fit more weights.
SCALE_FACTORS = tuple(0.625 + 0.03125 * step for step in range(17))
_REFINEMENTS = 2  # a third does not change the third digit of the error


def quantize_fp8(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Quantize ``weight`` [out, in] float32 to FP8. ``block``: rows and columns that share a scale.

    Returns codes [out, in] float8_e4m3fn and scales [blocks of rows, blocks of columns] bfloat16: weight =
    code * scale. Blocks at the end of rows and columns may be partial.
    """
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))  # [down, rows, across, columns]
    scale = _storable_scale(blocks.abs().amax(dim=(1, 3)) / FP8_MAX)
    # If the scale was rounded down, the largest value would exceed the last code, and FP8 has no infinity.
    codes = (blocks / scale.float()[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX)
    return codes.flatten(2, 3).flatten(0, 1)[:rows, :columns].to(torch.float8_e4m3fn), scale


def quantize_int(weight: Tensor, bits: int, group_size: int | None) -> tuple[Tensor, Tensor]:
    """Quantize ``weight`` [out, in] float32 to int4 or int8 (``bits``), in groups of ``group_size`` inputs.

    Returns packed codes [out, in * bits / 32] int32 and scales [out, groups] bfloat16, which may be negative:
    weight = (code - zero code) * scale, where the zero code is 8 or 128. ``group_size`` must divide the
    inputs; None: one scale per row.
    """
    groups = _grouped(weight, group_size)
    scale = _best_scale(groups, bits)
    codes = _round_to_codes(groups, scale.float().unsqueeze(2), bits).add_(_zero_code(bits))
    return _pack(codes.flatten(1).to(torch.uint8), bits), scale


def nearest_squared_error(weight: Tensor, bits: int, group_size: int | None) -> float:
    """Sum of squared errors of plain rounding to nearest, for comparison with ``quantize_int``.

    ``bits`` and ``group_size``: as for ``quantize_int``. Each group's scale maps its largest magnitude to
    the last positive code.
    """
    groups = _grouped(weight, group_size)
    scale = _storable_scale(groups.abs().amax(dim=2) / (_zero_code(bits) - 1)).float().unsqueeze(2)
    error = _round_to_codes(groups, scale, bits).mul_(scale).sub_(groups)
    return float(error.square_().sum(dtype=torch.float64))


def _grouped(weight: Tensor, group_size: int | None) -> Tensor:
    groups: Tensor = weight.unflatten(1, (-1, group_size or weight.shape[1]))
    return groups


def _best_scale(groups: Tensor, bits: int) -> Tensor:
    """The scale for each of ``groups`` [out, groups, size], searched as the module docstring says."""
    extreme = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True)).squeeze(2)
    start = extreme / -_zero_code(bits)
    best, best_error = _storable_scale(start), torch.full_like(start, torch.inf)
    for factor in SCALE_FACTORS:
        best, best_error = _keep_better(groups, bits, _storable_scale(start * factor), best, best_error)
    for _ in range(_REFINEMENTS):
        codes = _round_to_codes(groups, best.float().unsqueeze(2), bits)
        codes_squared = codes.square().sum(dim=2)
        least_squares = codes.mul_(groups).sum(dim=2) / codes_squared
        best, best_error = _keep_better(
            groups, bits, _storable_scale(least_squares.nan_to_num()), best, best_error
        )
    return best


def _keep_better(
    groups: Tensor, bits: int, candidate: Tensor, best: Tensor, best_error: Tensor
) -> tuple[Tensor, Tensor]:
    """For each group the better of the scales ``candidate`` and ``best``, whose squared errors are
    ``best_error``.
    """
    scale = candidate.float().unsqueeze(2)
    error = _round_to_codes(groups, scale, bits).mul_(scale).sub_(groups).square_().sum(dim=2)
    is_better = error < best_error
    return torch.where(is_better, candidate, best), torch.where(is_better, error, best_error)


def _zero_code(bits: int) -> int:
    """The code that stands for 0; there are as many below it, and one less above."""
    return 1 << (bits - 1)


def _round_to_codes(groups: Tensor, scale: Tensor, bits: int) -> Tensor:
    return (groups / scale).round_().clamp_(-_zero_code(bits), _zero_code(bits) - 1)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [out, in] uint8 into 32-bit words, the first in the lowest bits."""
    return pack_int4(codes) if bits == 4 else codes.view(torch.int32)


def _storable_scale(scale: Tensor) -> Tensor:
    """``scale`` in the dtype it is stored in; never zero, so that a block of zeros stays zero."""
    smallest = torch.finfo(SCALE_DTYPE).tiny
    return torch.where(scale.abs() < smallest, smallest, scale).to(SCALE_DTYPE)
