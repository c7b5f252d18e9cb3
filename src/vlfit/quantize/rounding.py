"""From weights to fewer bits: values in, codes and scales out. Knows nothing of names or files.

No form needs example data. FP8 takes the largest value of each block to the largest number that there is.
Integers have one code more below zero than above (-8 to 7): a scale has the sign that puts the largest weight
of its group on that side, then its size is the one, of ``SHARES`` tried, with the least squared error, and
then the one that is best for the codes that this gave (least squares), twice over. On normal numbers that
leaves 8.1 % in groups of 32 where rounding to nearest leaves 9.7 %, and searching all signs, sizes and codes
8.0 % (``tests/engine/convert/test_quantize.py``).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vlfit.layers.linear import pack_codes

FP8_MAX = 448.0  # the largest number of float8_e4m3fn
SCALE_DTYPE = torch.bfloat16
# Tried, of the scale at which the largest weight of a group just becomes the last code. A smaller one cuts
# off the largest weights and is finer for all others; a little larger ones may happen to hit more of them.
SHARES = tuple(0.625 + 0.03125 * step for step in range(17))
_REFINED = 2  # times; a third changes nothing in the third digit


def quantize_fp8(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """``weight`` [out, in] float32 as float8_e4m3fn, and a bfloat16 scale for each ``block`` (rows, columns).

    A scale multiplies its block. The last blocks may be partial.
    """
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))  # [down, rows, across, columns]
    scale = _usable(blocks.abs().amax(dim=(1, 3)) / FP8_MAX)
    # A scale that was rounded down would take the largest value past the last number, which is no infinity.
    codes = (blocks / scale.float()[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX)
    return codes.flatten(2, 3).flatten(0, 1)[:rows, :columns].to(torch.float8_e4m3fn), scale


def quantize_integers(weight: Tensor, bits: int, group_size: int | None) -> tuple[Tensor, Tensor]:
    """``weight`` [out, in] float32 as packed codes [out, in * bits / 32] int32, and scales [out, groups].

    The scales are bfloat16. ``bits`` is 4 or 8. ``group_size`` divides the inputs; None: a row shares a
    scale. Symmetric: a weight is its code less the middle one (8 or 128), times its scale.
    """
    groups = _groups(weight, group_size)
    scale = _best_scale(groups, bits)
    codes = _nearest(groups, scale.float().unsqueeze(2), bits).add_(_middle(bits))
    return _packed(codes.flatten(1).to(torch.uint8), bits), scale


def nearest_error(weight: Tensor, bits: int, group_size: int | None) -> float:
    """Squared error of the plain way: the largest weight of a group becomes the last code above zero."""
    groups = _groups(weight, group_size)
    scale = _usable(groups.abs().amax(dim=2) / (_middle(bits) - 1)).float().unsqueeze(2)
    missed = _nearest(groups, scale, bits).mul_(scale).sub_(groups)
    return float(missed.square_().sum(dtype=torch.float64))


def _groups(weight: Tensor, group_size: int | None) -> Tensor:
    groups: Tensor = weight.unflatten(1, (-1, group_size or weight.shape[1]))
    return groups


def _best_scale(groups: Tensor, bits: int) -> Tensor:
    """For each of ``groups`` [out, groups, size] a scale as the module's opening says, as it is stored."""
    largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True)).squeeze(2)
    start = largest / -_middle(bits)
    best, least = _usable(start), torch.full_like(start, torch.inf)
    for share in SHARES:
        best, least = _better(groups, bits, _usable(start * share), best, least)
    for _ in range(_REFINED):
        codes = _nearest(groups, best.float().unsqueeze(2), bits)
        power = codes.square().sum(dim=2)
        fitted = codes.mul_(groups).sum(dim=2) / power
        best, least = _better(groups, bits, _usable(fitted.nan_to_num()), best, least)
    return best


def _better(groups: Tensor, bits: int, tried: Tensor, best: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Of the scales ``tried`` and ``best``, whose squared errors are ``least``, the better for each group."""
    wide = tried.float().unsqueeze(2)
    error = _nearest(groups, wide, bits).mul_(wide).sub_(groups).square_().sum(dim=2)
    better = error < least
    return torch.where(better, tried, best), torch.where(better, error, least)


def _middle(bits: int) -> int:
    """The code that stands for 0; there are as many below it, and one less above."""
    return 1 << (bits - 1)


def _nearest(groups: Tensor, scale: Tensor, bits: int) -> Tensor:
    return (groups / scale).round_().clamp_(-_middle(bits), _middle(bits) - 1)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Codes [out, in] uint8 in words of 32 bits, the first in the lowest."""
    return pack_codes(codes) if bits == 4 else codes.view(torch.int32)


def _usable(scale: Tensor) -> Tensor:
    """``scale`` as it is stored; never zero, so that a block of zeros stays one."""
    least = torch.finfo(SCALE_DTYPE).tiny
    return torch.where(scale.abs() < least, least, scale).to(SCALE_DTYPE)
