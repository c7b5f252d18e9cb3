"""Render scenes to pictures, many at once, on the device of the atlas.

Training pictures, held-out ones and the demo pictures all come from here.
"""

from dataclasses import dataclass
from math import cos, log2, radians, sin

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from training.mini.atlas import Atlas
from training.mini.jpeg import as_jpeg
from training.mini.scenes import MAX_SLOTS, Photo, Scene

LEVELS = 4
MODES = {"plain": 0, "gradient": 1, "landscape": 2, "photo": 3}
SCENE_FIELDS = 24
THING_FIELDS = 12
# The qualities of JPEG that pictures are saved in.
QUALITIES = (40.0, 97.0)
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Numbers:
    """Scenes as plain numbers, those with most things first: what the renderer reads.

    ``things``: [batch, MAX_SLOTS, THING_FIELDS]. ``order``: which scene stands in each row.
    ``rows[slot]``: how many scenes have a thing in that slot, the first so many.
    """

    scenes: Floats
    things: Floats
    order: npt.NDArray[np.int64]
    rows: tuple[int, ...]


def to_numbers(scenes: list[Scene], texture_side: int = 128) -> Numbers:
    """Flatten scenes of one size."""
    fields = np.zeros((len(scenes), SCENE_FIELDS), np.float32)
    things = np.zeros((len(scenes), MAX_SLOTS, THING_FIELDS), np.float32)
    counts = np.array([len(scene.things) + len(scene.marks) for scene in scenes])
    order = np.argsort(-counts, kind="stable")
    for row, scene in enumerate(scenes[index] for index in order):
        fields[row] = _scene_fields(scene)
        for slot, thing in enumerate((*scene.things, *scene.marks)):
            half_width, half_height = thing.width * scene.width / 2, thing.height * scene.height / 2
            turn = radians(thing.angle)
            level = round(min(LEVELS - 1, max(0.0, log2(texture_side / (2 * min(half_width, half_height))))))
            things[row, slot] = (
                thing.texture, level, thing.x * scene.width, thing.y * scene.height, half_width, half_height,
                cos(turn), sin(turn), -1.0 if thing.flipped else 1.0, *thing.tint,
            )  # fmt: skip
    return Numbers(fields, things, order, tuple(int((counts > slot).sum()) for slot in range(MAX_SLOTS)))


def _scene_fields(scene: Scene) -> tuple[float, ...]:
    background, finish = scene.background, scene.finish
    top = background.colours[0] if background.colours else (0, 0, 0)
    bottom = background.colours[-1] if background.colours else (0, 0, 0)
    photo = background.photo or Photo(0)
    turn = radians(photo.turn)
    return (
        MODES[background.kind], *top, *bottom, background.horizon, background.texture,
        photo.index, *photo.crop, photo.blur, cos(turn), sin(turn), -1.0 if photo.flipped else 1.0,
        photo.other, photo.mix, finish.brightness, finish.contrast, finish.grain, scene.width,
    )  # fmt: skip


class Renderer:
    """Holds the atlas as flat, premultiplied texels at four sizes each: small things come from small ones."""

    def __init__(self, atlas: Atlas, processor: torch.device) -> None:
        self.processor = processor
        self.side = atlas.textures.shape[1]
        self.texels, self.texture_bases = self._levels(atlas.textures, premultiply=True)
        self.photo_side = atlas.photos.shape[1]
        self.photo_texels, self.photo_bases = self._levels(atlas.photos, premultiply=False)

    def _levels(self, pictures: npt.NDArray[np.uint8], premultiply: bool) -> tuple[Tensor, Tensor]:
        """All levels of all pictures end to end [texels, channels], and where each level starts."""
        if not len(pictures):
            return torch.zeros((1, 3), dtype=torch.uint8, device=self.processor), torch.zeros(LEVELS)
        count, side, _, channels = pictures.shape
        sides = [side >> level for level in range(LEVELS)]
        flat = [torch.empty((count, s, s, channels), dtype=torch.uint8, device=self.processor) for s in sides]
        for start in range(0, count, 64):
            part = torch.from_numpy(pictures[start : start + 64]).to(self.processor).permute(0, 3, 1, 2)
            values = part.float()
            if premultiply:
                values = torch.cat([values[:, :3] * values[:, 3:] / 255, values[:, 3:]], 1)
            for level, small in enumerate(sides):
                shrunk = functional.interpolate(values, (small, small), mode="area")
                flat[level][start : start + 64] = shrunk.permute(0, 2, 3, 1).round().byte()
        starts = np.cumsum([0, *(count * s * s for s in sides[:-1])])
        texels = torch.cat([level.view(-1, channels) for level in flat])
        return texels, torch.from_numpy(starts).to(self.processor)

    @torch.no_grad()
    def render(
        self, numbers: Numbers, size: tuple[int, int], scale: float = 1.0, saved: float = 0.0
    ) -> Tensor:
        """Pictures as float 0-255, [batch, 3, height, width]; ``size`` is (width, height).

        ``scale`` other than 1 draws at another size and resamples, as pictures from outside are. ``saved``:
        the share of pictures that come out of a JPEG file.
        """
        width, height = size
        across, down = round(width * scale), round(height * scale)
        fields = torch.from_numpy(numbers.scenes).to(self.processor)
        things = torch.from_numpy(numbers.things).to(self.processor)
        # Pixel centres, in units of the full-size picture.
        x = (torch.arange(across, device=self.processor) + 0.5) * (width / across)
        y = (torch.arange(down, device=self.processor) + 0.5) * (height / down)
        canvas = self.paint_background(fields, x / width, y / height)
        shown = np.flatnonzero(numbers.scenes[:, 0] == MODES["photo"])
        if len(shown) and len(self.photo_texels) > 1:
            rows = torch.from_numpy(shown).to(self.processor)
            canvas[rows] = self.photo(fields[rows], x / width, y / height)
        if self.processor.type == "cpu":
            self.draw_in_boxes(canvas, numbers, x, y)
        else:
            self.draw_at_once(canvas, things, numbers, x, y)
        canvas = self._finish(canvas, fields)
        if saved:
            canvas = self._save(canvas, saved)
        if scale != 1.0:
            canvas = functional.interpolate(canvas, (height, width), mode="bicubic", antialias=True)
        back = torch.from_numpy(np.argsort(numbers.order)).to(self.processor)
        return canvas.clamp(0, 255).round()[back]

    def paint_background(self, fields: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """``x``, ``y``: pixel centres as fractions. Returns [batch, 3, height, width]."""
        mode = fields[:, 0].view(-1, 1, 1, 1)
        top, bottom = fields[:, 1:4].view(-1, 3, 1, 1), fields[:, 4:7].view(-1, 3, 1, 1)
        down = y.view(1, 1, -1, 1)
        ground = (down > fields[:, 7].view(-1, 1, 1, 1)).float()
        mix = torch.where(
            mode == MODES["gradient"], down, torch.where(mode == MODES["landscape"], ground, 0.0)
        )
        canvas = (top + (bottom - top) * mix).expand(-1, -1, -1, x.numel())
        # A soft, coarse unevenness, like paper or plaster.
        coarse = torch.randn((len(fields), 1, 12, 12), device=self.processor)
        uneven = functional.interpolate(coarse, canvas.shape[2:], mode="bilinear")
        return canvas + uneven * fields[:, 8].view(-1, 1, 1, 1)

    def photo(self, fields: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The photos behind some scenes, with a second one shining through: [batch, 3, height, width]."""
        column = [fields[:, field].view(-1, 1, 1) for field in range(SCENE_FIELDS)]
        left, top, wide, high, _, cosine, sine, flip = column[10:18]
        across = (x.view(1, 1, -1) - 0.5) * flip
        below = y.view(1, -1, 1) - 0.5
        u = left + wide * (0.5 + cosine * across + sine * below)
        v = top + high * (0.5 + cosine * below - sine * across)
        level = fields[:, 14].long()
        first, second = (
            _sample(self.photo_texels, self.photo_bases, self.photo_side, fields[:, field], level, u, v)
            for field in (9, 18)
        )
        mix = fields[:, 19].view(-1, 1, 1, 1)
        return (first + (second - first) * mix).permute(0, 3, 1, 2)

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
            self.texels, self.texture_bases, self.side, thing[:, 0], thing[:, 1].long(), (u + 1) / 2,
            (v + 1) / 2,
        )  # fmt: skip
        cover = (edge * present).unsqueeze(1)
        colour = texels[..., :3].permute(0, 3, 1, 2) * (thing[:, 9:12] / 255).view(-1, 3, 1, 1)
        alpha = texels[..., 3].unsqueeze(1) / 255
        return canvas * (1 - alpha * cover) + colour * cover

    def draw_at_once(self, canvas: Tensor, things: Tensor, numbers: Numbers, x: Tensor, y: Tensor) -> None:
        """Lay all things over the canvases, in place, a slot of all of them at a time: few steps."""
        for slot, count in enumerate(numbers.rows):
            # Scenes with many things stand first: only they are drawn on, in steps of eight so that few
            # sizes occur.
            if count:
                first = min(-(-count // 8) * 8, len(canvas))
                canvas[:first] = self.draw(canvas[:first], things[:first, slot], x, y)

    def draw_in_boxes(self, canvas: Tensor, numbers: Numbers, x: Tensor, y: Tensor) -> None:
        """The same thing by thing, each inside its own box: many steps, few pixels."""
        things = torch.from_numpy(numbers.things)
        across, down = x.numel() / float(x[0] + x[-1]), y.numel() / float(y[0] + y[-1])
        for slot, count in enumerate(numbers.rows):
            for row in range(count):
                centre_x, centre_y, half_width, half_height, cosine, sine = things[row, slot, 2:8].tolist()
                # What a turned rectangle reaches, and a pixel for its soft edge.
                reach_x = abs(cosine) * half_width + abs(sine) * half_height + 1
                reach_y = abs(sine) * half_width + abs(cosine) * half_height + 1
                left, right = (int((centre_x + side * reach_x) * across) + side for side in (-1, 1))
                top, bottom = (int((centre_y + side * reach_y) * down) + side for side in (-1, 1))
                columns, rows = slice(max(left, 0), max(right, 0)), slice(max(top, 0), max(bottom, 0))
                part = canvas[row : row + 1, :, rows, columns]
                if part.numel():
                    part.copy_(self.draw(part, things[row : row + 1, slot], x[columns], y[rows]))

    def _finish(self, canvas: Tensor, fields: Tensor) -> Tensor:
        brightness, contrast, grain = (fields[:, 20 + i].view(-1, 1, 1, 1) for i in range(3))
        canvas = (canvas - 128) * contrast + 128
        canvas = canvas * brightness + torch.randn_like(canvas) * grain
        return canvas.clamp(0, 255).round()

    def _save(self, canvas: Tensor, share: float) -> Tensor:
        least, most = QUALITIES
        chance, lot = torch.rand((2, len(canvas)), device=self.processor)
        quality = (least + (most - least) * lot).round()
        if self.processor.type == "cpu":
            rows = (chance < share).nonzero()[:, 0]
            return canvas.index_copy(0, rows, as_jpeg(canvas[rows], quality[rows])) if len(rows) else canvas
        return torch.where((chance < share).view(-1, 1, 1, 1), as_jpeg(canvas, quality), canvas)


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
