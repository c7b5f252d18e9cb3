"""Our JPEG beside Pillow's: the same blurred colours and rounded blocks."""

import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from training.mini.jpeg import as_jpeg


def drawn() -> Image.Image:
    picture = Image.new("RGB", (150, 134), (235, 20, 30))
    draw = ImageDraw.Draw(picture)
    draw.ellipse((20, 30, 70, 90), fill=(20, 200, 40))
    draw.rectangle((90, 50, 139, 120), fill=(30, 40, 220))
    draw.text((10, 105), "HELLO", fill=(255, 255, 0))
    return picture


@pytest.mark.parametrize("quality", [30, 75, 83, 95])
def test_pictures_come_back_as_pillow_saves_them(quality: int) -> None:
    picture = drawn()
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality)
    saved = np.asarray(Image.open(file), np.float32)
    pixels = np.asarray(picture, np.float32)
    ours = as_jpeg(
        torch.from_numpy(pixels).permute(2, 0, 1)[None].repeat(2, 1, 1, 1), torch.tensor([float(quality), 50])
    )
    off = np.abs(ours[0].permute(1, 2, 0).numpy() - saved).mean()
    changed = np.abs(saved - pixels).mean()
    assert changed > 1.0
    assert off < 0.35 * changed, f"{off:.2f} off where JPEG itself changes {changed:.2f}"
    assert not torch.equal(ours[0], ours[1]), "each picture has its own quality"
