"""From weights to fewer bits: values in, codes and scales out. Knows nothing of names or files.

Neither form needs example data: FP8 takes the largest value of each block to the largest number that there
is; int4 tries a few scales for each group and keeps the one with the least squared error.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vlfit.engine.layers.linear import SYMMETRIC_ZERO, pack_codes

FP8_MAX = 448.0  # the largest number of float8_e4m3fn
SCALE_DTYPE = torch.bfloat16
# Tried around the scale at which the largest weight of a group just becomes the code 7.5. A smaller scale
# cuts off the largest weights and is finer for all others; up to 7.5/7 nothing is cut off at all.
SCALE_FACTORS = tuple(0.6 + 0.03125 * step for step in range(16))


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


def quantize_int4(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """``weight`` [out, in] float32 as packed codes [out, in / 8] int32, and bfloat16 scales [out, groups].

    ``group_size`` divides the inputs. Symmetric: a weight is its code less 8, times its scale.
    """
    groups = weight.unflatten(1, (-1, group_size))
    scale = _best_scale(groups)
    codes = _nearest(groups, scale.float().unsqueeze(2)).add_(SYMMETRIC_ZERO)
    return pack_codes(codes.flatten(1).to(torch.uint8)), scale


def _best_scale(groups: Tensor) -> Tensor:
    """For each of ``groups`` [out, groups, size] the scale, of those tried, with the least squared error."""
    start = groups.abs().amax(dim=2) / 7.5
    best = _usable(start)
    least = torch.full_like(start, float("inf"))
    for factor in SCALE_FACTORS:
        tried = _usable(start * factor)
        wide = tried.float().unsqueeze(2)
        error = _nearest(groups, wide).mul_(wide).sub_(groups).square_().sum(dim=2)
        better = error < least
        best = torch.where(better, tried, best)
        least = torch.where(better, error, least)
    return best


def _nearest(groups: Tensor, scale: Tensor) -> Tensor:
    return (groups / scale).round_().clamp_(-SYMMETRIC_ZERO, SYMMETRIC_ZERO - 1)


def _usable(scale: Tensor) -> Tensor:
    """``scale`` as it is stored; never zero, so that a block of zeros stays one."""
    return scale.clamp_min(torch.finfo(SCALE_DTYPE).tiny).to(SCALE_DTYPE)
