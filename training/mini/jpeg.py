"""What saving as JPEG does to pictures, many at once, on any device; no file is written.

Colours at half the resolution (4:2:0), and the rounding of each 8 x 8 block's cosines with libjpeg's tables
and quality scale (ITU-T T.81, Annex K).
"""

from math import cos, pi, sqrt

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 8
# Annex K, tables K.1 and K.2: how coarsely each frequency is kept at quality 50.
LUMINANCE = (
    16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55, 14, 13, 16, 24, 40, 57, 69, 56,
    14, 17, 22, 29, 51, 87, 80, 62, 18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92,
    49, 64, 78, 87, 103, 121, 120, 101, 72, 92, 95, 98, 112, 100, 103, 99,
)  # fmt: skip
CHROMINANCE = (
    17, 18, 24, 47, 99, 99, 99, 99, 18, 21, 26, 66, 99, 99, 99, 99, 24, 26, 56, 99, 99, 99, 99, 99,
    47, 66, 99, 99, 99, 99, 99, 99, *[99] * 32,
)  # fmt: skip


def as_jpeg(pictures: Tensor, quality: Tensor) -> Tensor:
    """``pictures`` [batch, 3, height, width], 0 to 255, as they come back from JPEG files of ``quality``
    [batch], 1 to 100."""
    red, green, blue = pictures.unbind(1)
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    colours = torch.stack(((blue - luma) / 1.772, (red - luma) / 1.402), 1)
    luma = _rounded(luma.unsqueeze(1) - 128, quality, LUMINANCE)[:, 0] + 128
    height, width = luma.shape[1:]
    small = functional.avg_pool2d(colours, 2, ceil_mode=True)
    small = _rounded(small, quality, CHROMINANCE)
    full = functional.interpolate(small, scale_factor=2, mode="bilinear")[..., :height, :width]
    to_blue, to_red = full.unbind(1)
    green = luma - (0.114 * 1.772 * to_blue + 0.299 * 1.402 * to_red) / 0.587
    back = torch.stack((luma + 1.402 * to_red, green, luma + 1.772 * to_blue), 1)
    return back.clamp(0, 255).round()


def _rounded(planes: Tensor, quality: Tensor, table: tuple[int, ...]) -> Tensor:
    """``planes`` [batch, channels, height, width] with the cosines of each block rounded."""
    batch, channels, height, width = planes.shape
    padded = functional.pad(planes, (0, -width % BLOCK, 0, -height % BLOCK), mode="replicate")
    down, across = padded.shape[2] // BLOCK, padded.shape[3] // BLOCK
    blocks = padded.view(batch, channels, down, BLOCK, across, BLOCK).transpose(3, 4)
    cosines = _cosines().to(planes)
    steps = _steps(quality, table).view(batch, 1, 1, 1, BLOCK, BLOCK)
    kept = (cosines @ blocks @ cosines.T / steps).round() * steps
    blocks = cosines.T @ kept @ cosines
    return blocks.transpose(3, 4).reshape(padded.shape)[..., :height, :width]


def _steps(quality: Tensor, table: tuple[int, ...]) -> Tensor:
    """The table at each quality [batch, 64], as libjpeg's ``jpeg_quality_scaling`` has it."""
    scale = torch.where(quality < 50, 5000 / quality, 200 - 2 * quality).view(-1, 1)
    base = torch.tensor(table, dtype=scale.dtype, device=scale.device)
    return ((base * scale + 50) / 100).floor().clamp(1, 255)


def _cosines() -> Tensor:
    """The orthonormal cosine transform of eight values."""
    rows = [
        [sqrt((1 if k == 0 else 2) / BLOCK) * cos((2 * n + 1) * k * pi / (2 * BLOCK)) for n in range(BLOCK)]
        for k in range(BLOCK)
    ]
    return torch.tensor(rows)
