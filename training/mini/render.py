"""Turn scenes into pictures, many at once, on whatever processor the atlas lies on.

Knows: how a scene's numbers become pixels; this one renderer makes the training pictures, the held-out ones
and the demo pictures. Does not know: words.
"""

from dataclasses import dataclass
from math import cos, log2, radians, sin

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from training.mini.atlas import LEVELS, PHOTO_SIDE, SIDE, Atlas
from training.mini.scenes import MAX_OBJECTS, Scene

MODES = {"plain": 0, "gradient": 1, "landscape": 2, "photo": 3}
SCENE_FIELDS = 21
THING_FIELDS = 12
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Numbers:
    """Scenes as plain numbers: what the renderer reads. ``things``: [batch, MAX_OBJECTS, THING_FIELDS]."""

    scenes: Floats
    things: Floats
    count: int


def to_numbers(scenes: list[Scene]) -> Numbers:
    """Flatten scenes of one size."""
    fields = np.zeros((len(scenes), SCENE_FIELDS), np.float32)
    things = np.zeros((len(scenes), MAX_OBJECTS, THING_FIELDS), np.float32)
    most = 0
    for row, scene in enumerate(scenes):
        background, finish = scene.background, scene.finish
        top = background.colours[0] if background.colours else (0, 0, 0)
        bottom = background.colours[-1] if background.colours else (0, 0, 0)
        fields[row] = (
            MODES[background.kind], *top, *bottom, background.horizon, background.texture, background.photo,
            *background.crop, background.blur, finish.brightness, finish.contrast, finish.grain,
            scene.seed % 9973, scene.width, scene.height,
        )  # fmt: skip
        most = max(most, len(scene.things))
        for slot, thing in enumerate(scene.things):
            half_width, half_height = thing.width * scene.width / 2, thing.height * scene.height / 2
            turn = radians(thing.angle)
            level = round(min(LEVELS - 1, max(0.0, log2(SIDE / (2 * min(half_width, half_height))))))
            things[row, slot] = (
                thing.texture, level, thing.x * scene.width, thing.y * scene.height, half_width, half_height,
                cos(turn), sin(turn), -1.0 if thing.flipped else 1.0, *thing.tint,
            )  # fmt: skip
    return Numbers(fields, things, most)


class Renderer:
    """Holds the atlas as flat, premultiplied texels at four sizes each: small things come from small ones."""

    def __init__(self, atlas: Atlas, processor: torch.device) -> None:
        textures = torch.from_numpy(atlas.textures).to(processor)
        texels, self.texture_bases = self._levels(self._premultiply(textures), SIDE)
        self.texels = texels
        photos = torch.from_numpy(atlas.photos).to(processor)
        self.photo_texels, self.photo_bases = self._levels(photos, PHOTO_SIDE)
        self.processor = processor

    @staticmethod
    def _premultiply(textures: Tensor) -> Tensor:
        parts = []
        for part in textures.split(64):
            colours, alpha = part[..., :3].float(), part[..., 3:].float()
            parts.append(torch.cat([colours * alpha / 255, alpha], -1).round().byte())
        return torch.cat(parts)

    @staticmethod
    def _levels(pictures: Tensor, side: int) -> tuple[Tensor, Tensor]:
        """All levels of all pictures end to end [texels, channels], and where each level starts."""
        flat, bases, start = [], [], 0
        for level in range(LEVELS):
            small = side >> level
            parts = [
                functional.interpolate(part.permute(0, 3, 1, 2).float(), (small, small), mode="area")
                for part in pictures.split(64)
            ]
            if not parts:
                return torch.zeros((1, 3), dtype=torch.uint8, device=pictures.device), torch.zeros(LEVELS)
            level_texels = torch.cat([part.permute(0, 2, 3, 1).round().byte() for part in parts])
            flat.append(level_texels.reshape(-1, pictures.shape[-1]))
            bases.append(start)
            start += flat[-1].shape[0]
        return torch.cat(flat), torch.tensor(bases, device=pictures.device)

    @torch.no_grad()
    def render(self, numbers: Numbers, size: tuple[int, int], scale: float = 1.0) -> Tensor:
        """Pictures as float 0-255, [batch, 3, height, width]; ``size`` is (width, height).

        ``scale`` other than 1 draws at another size and resamples, as pictures from outside are.
        """
        width, height = size
        across, down = round(width * scale), round(height * scale)
        fields = torch.from_numpy(numbers.scenes).to(self.processor)
        things = torch.from_numpy(numbers.things).to(self.processor)
        # Pixel centres, in units of the full-size picture.
        x = (torch.arange(across, device=self.processor) + 0.5) * (width / across)
        y = (torch.arange(down, device=self.processor) + 0.5) * (height / down)
        canvas = self._background(fields, x / width, y / height)
        for slot in range(numbers.count):
            canvas = self.draw(canvas, things[:, slot], x, y)
        if scale != 1.0:
            canvas = functional.interpolate(canvas, (height, width), mode="bicubic", antialias=True)
        return self._finish(canvas, fields)

    def _background(self, fields: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """``x``, ``y``: pixel centres as fractions. Returns [batch, 3, height, width]."""
        mode = fields[:, 0].view(-1, 1, 1, 1)
        top, bottom = fields[:, 1:4].view(-1, 3, 1, 1), fields[:, 4:7].view(-1, 3, 1, 1)
        down = y.view(1, 1, -1, 1)
        ground = (down > fields[:, 7].view(-1, 1, 1, 1)).float()
        mix = torch.where(
            mode == MODES["gradient"], down, torch.where(mode == MODES["landscape"], ground, 0.0)
        )
        canvas = (top + (bottom - top) * mix).expand(-1, -1, -1, x.numel())
        if len(self.photo_texels) > 1:
            canvas = torch.where(mode == MODES["photo"], self._photo(fields, x, y), canvas)
        # A soft, coarse unevenness, like paper or plaster.
        coarse = torch.randn((len(fields), 1, 12, 12), device=self.processor)
        uneven = functional.interpolate(coarse, canvas.shape[2:], mode="bilinear")
        return canvas + uneven * fields[:, 8].view(-1, 1, 1, 1)

    def _photo(self, fields: Tensor, x: Tensor, y: Tensor) -> Tensor:
        index, level = fields[:, 9], fields[:, 14].long()
        left, top, wide, high = (fields[:, 10 + i].view(-1, 1, 1) for i in range(4))
        u = (left + wide * x.view(1, 1, -1)).expand(-1, y.numel(), -1)
        v = (top + high * y.view(1, -1, 1)).expand(-1, -1, x.numel())
        texels = _sample(self.photo_texels, self.photo_bases, PHOTO_SIDE, index, level, u, v)
        return texels.permute(0, 3, 1, 2)

    def draw(self, canvas: Tensor, thing: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Lay one thing of each scene over the canvases. ``thing``: [batch, THING_FIELDS]."""
        column = [thing[:, field].view(-1, 1, 1) for field in range(THING_FIELDS)]
        _, _, centre_x, centre_y, half_width, half_height, cosine, sine, flip = column[:9]
        present = half_width > 0
        along = x.view(1, 1, -1) - centre_x
        below = y.view(1, -1, 1) - centre_y
        u = (cosine * along + sine * below) / half_width.clamp_min(1) * flip
        v = (cosine * below - sine * along) / half_height.clamp_min(1)
        edge = ((1 - u.abs()) * half_width + 0.5).clamp(0, 1) * ((1 - v.abs()) * half_height + 0.5).clamp(
            0, 1
        )
        texels = _sample(
            self.texels, self.texture_bases, SIDE, thing[:, 0], thing[:, 1].long(), (u + 1) / 2, (v + 1) / 2
        )
        cover = (edge * present).unsqueeze(1)
        colour = texels[..., :3].permute(0, 3, 1, 2) * (thing[:, 9:12] / 255).view(-1, 3, 1, 1)
        alpha = texels[..., 3].unsqueeze(1) / 255
        return canvas * (1 - alpha * cover) + colour * cover

    def _finish(self, canvas: Tensor, fields: Tensor) -> Tensor:
        brightness, contrast, grain = (fields[:, 15 + i].view(-1, 1, 1, 1) for i in range(3))
        canvas = (canvas - 128) * contrast + 128
        canvas = canvas * brightness + torch.randn_like(canvas) * grain
        return canvas.clamp(0, 255).round()


def _sample(
    texels: Tensor, bases: Tensor, side: int, index: Tensor, level: Tensor, u: Tensor, v: Tensor
) -> Tensor:
    """Bilinear lookup at (u, v) in 0..1 of each scene's texture: [batch, height, width, channels]."""
    sides = (side >> level).view(-1, 1, 1)
    start = (bases.to(level.device)[level].long() + index.long() * (side >> level) ** 2).view(-1, 1, 1)
    limit = (sides - 1).float()
    across = (u * sides - 0.5).clamp_min(0).minimum(limit)
    down = (v * sides - 0.5).clamp_min(0).minimum(limit)
    left, top = across.long(), down.long()
    right, bottom = (left + 1).minimum(sides - 1), (top + 1).minimum(sides - 1)
    mix_x, mix_y = (across - left).unsqueeze(-1), (down - top).unsqueeze(-1)
    upper, lower = start + top * sides, start + bottom * sides
    high = texels[upper + left].float() * (1 - mix_x) + texels[upper + right].float() * mix_x
    low = texels[lower + left].float() * (1 - mix_x) + texels[lower + right].float() * mix_x
    return high * (1 - mix_y) + low * mix_y
