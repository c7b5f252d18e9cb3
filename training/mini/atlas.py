"""The atlas: every drawing a scene can contain, as small square textures in one file.

Knows: how shapes and written words are drawn, and how the atlas lies on disk and in memory.
Does not know: where sprites and photos come from (prepare) or where they are put (scenes, render).

A texture is `SIDE` x `SIDE` pixels of red, green, blue and alpha, its content stretched to fill the square;
`aspect` (width / height) says how to unstretch it. Shapes and words are white, to be tinted when drawn.
"""

from dataclasses import dataclass
from functools import cached_property
from math import cos, pi, sin
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from training.mini.vocabulary import NUMBERS, SHAPES, WORDS

SIDE = 128
PHOTO_SIDE = 160
LEVELS = 4
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Atlas:
    """``kinds``, ``names`` and ``aspects`` run along the first axis of ``textures`` [count, SIDE, SIDE, 4].

    Kinds are "shape", "number", "word" and "sprite". ``photos``: [count, PHOTO_SIDE, PHOTO_SIDE, 3].
    """

    kinds: tuple[str, ...]
    names: tuple[str, ...]
    aspects: tuple[float, ...]
    textures: Bytes
    photos: Bytes

    @cached_property
    def by_name(self) -> dict[tuple[str, str], list[int]]:
        """Indices of all drawings of (kind, name)."""
        found: dict[tuple[str, str], list[int]] = {}
        for index, key in enumerate(zip(self.kinds, self.names, strict=True)):
            found.setdefault(key, []).append(index)
        return found

    def names_of(self, kind: str) -> list[str]:
        """The names of one kind, in order, each once."""
        return self._names.get(kind, [])

    @cached_property
    def _names(self) -> dict[str, list[str]]:
        names: dict[str, list[str]] = {}
        for kind, name in self.by_name:
            names.setdefault(kind, []).append(name)
        return names

    def save(self, path: Path) -> None:
        """Write one compressed file; tinted textures keep their alpha only."""
        tinted = np.array([kind != "sprite" for kind in self.kinds])
        photos = [_to_jpeg(photo) for photo in self.photos]
        np.savez_compressed(
            path,
            kinds=np.array(self.kinds),
            names=np.array(self.names),
            aspects=np.array(self.aspects, np.float32),
            masks=self.textures[tinted][..., 3],
            sprites=self.textures[~tinted],
            photo_bytes=np.frombuffer(b"".join(photos), np.uint8),
            photo_sizes=np.array([len(photo) for photo in photos], np.int64),
        )

    @staticmethod
    def load(path: Path) -> "Atlas":
        """Read what ``save`` wrote."""
        with np.load(path) as stored:
            kinds = tuple(str(kind) for kind in stored["kinds"])
            tinted = np.array([kind != "sprite" for kind in kinds])
            textures = np.full((len(kinds), SIDE, SIDE, 4), 255, np.uint8)
            alpha = np.full((int(tinted.sum()), SIDE, SIDE, 4), 255, np.uint8)
            alpha[..., 3] = stored["masks"]
            textures[tinted] = alpha
            textures[~tinted] = stored["sprites"]
            ends = np.cumsum(stored["photo_sizes"])
            data = stored["photo_bytes"].tobytes()
            starts = [0, *ends[:-1]] if len(ends) else []
            photos = [_from_jpeg(data[start:end]) for start, end in zip(starts, ends, strict=True)]
            names = tuple(str(name) for name in stored["names"])
            aspects = tuple(float(aspect) for aspect in stored["aspects"])
        return Atlas(kinds, names, aspects, textures, stack_photos(photos))


def stack_photos(photos: list[Bytes]) -> Bytes:
    """[count, PHOTO_SIDE, PHOTO_SIDE, 3], also for an empty list."""
    return np.stack(photos) if photos else np.zeros((0, PHOTO_SIDE, PHOTO_SIDE, 3), np.uint8)


def built_in_atlas(fonts: list[Path] | None = None) -> Atlas:
    """Shapes, numbers and words only: what can be drawn with nothing fetched.

    ``fonts``: TrueType files for the words; without any, Pillow's own font.
    """
    drawings: list[tuple[str, str, Image.Image]] = [("shape", name, draw_shape(name)) for name in SHAPES]
    faces = [ImageFont.truetype(str(path), 96) for path in fonts] if fonts else [ImageFont.load_default(96)]
    for kind, texts in (("number", NUMBERS), ("word", WORDS)):
        drawings += [(kind, text, draw_text(text, face)) for text in texts for face in faces]
    return pack(drawings, [])


def pack(drawings: list[tuple[str, str, Image.Image]], photos: list[Bytes]) -> Atlas:
    """Crop each drawing (kind, name, RGBA picture) to what is visible and make it a texture."""
    kinds, names, aspects, textures = [], [], [], []
    for kind, name, picture in drawings:
        texture, aspect = to_texture(picture)
        kinds.append(kind)
        names.append(name)
        aspects.append(aspect)
        textures.append(texture)
    return Atlas(tuple(kinds), tuple(names), tuple(aspects), np.stack(textures), stack_photos(photos))


def to_texture(picture: Image.Image) -> tuple[Bytes, float]:
    """A cropped, stretched texture and the aspect (width / height) it had."""
    box = picture.getchannel("A").point(lambda alpha: 255 if alpha > 40 else 0).getbbox()
    if box is None:
        raise ValueError("a drawing for the atlas is entirely transparent")
    cropped = picture.crop(box)
    # Premultiplied while it is resized: otherwise the colour of invisible pixels bleeds into the rim.
    stretched = cropped.convert("RGBa").resize((SIDE, SIDE), Image.Resampling.BICUBIC).convert("RGBA")
    return np.asarray(stretched), cropped.width / cropped.height


def draw_text(text: str, face: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> Image.Image:
    """The text in white on nothing."""
    left, top, right, bottom = face.getbbox(text)
    picture = Image.new("RGBA", (round(right - left) + 8, round(bottom - top) + 8), (255, 255, 255, 0))
    ImageDraw.Draw(picture).text((4 - left, 4 - top), text, font=face, fill=(255, 255, 255, 255))
    return picture


def draw_shape(name: str) -> Image.Image:
    """One shape in white on nothing, drawn four times too large and then reduced for smooth edges."""
    size = 512
    mask = Image.new("L", (size, size), 0)
    pen = ImageDraw.Draw(mask)
    if name in ("circle", "oval"):
        box = (0, 0, size, size) if name == "circle" else (0, 112, size, 400)
        pen.ellipse(box, fill=255)
    elif name == "ring":
        pen.ellipse((0, 0, size, size), fill=255)
        pen.ellipse((120, 120, size - 120, size - 120), fill=0)
    elif name == "crescent":
        pen.ellipse((0, 0, size, size), fill=255)
        pen.ellipse((170, -40, size + 130, size - 90), fill=0)
    elif name == "heart":
        pen.polygon([_heart_point(step / 100 * 2 * pi) for step in range(100)], fill=255)
    else:
        pen.polygon([(x * size, y * size) for x, y in _corners(name)], fill=255)
    picture = Image.new("RGBA", (size, size), (255, 255, 255, 0))
    picture.putalpha(mask)
    return picture


def _heart_point(angle: float) -> tuple[float, float]:
    x = 16 * sin(angle) ** 3
    y = 13 * cos(angle) - 5 * cos(2 * angle) - 2 * cos(3 * angle) - cos(4 * angle)
    return 256 + x * 15, 230 - y * 15


def _corners(name: str) -> list[tuple[float, float]]:
    """Corners of a straight-edged shape, in the unit square."""
    low, high = 1 / 3, 2 / 3
    match name:
        case "square":
            return [(0, 0), (1, 0), (1, 1), (0, 1)]
        case "rectangle":
            return [(0, 0.22), (1, 0.22), (1, 0.78), (0, 0.78)]
        case "triangle":
            return [(0.5, 0.02), (1, 0.9), (0, 0.9)]
        case "diamond":
            return [(0.5, 0), (0.9, 0.5), (0.5, 1), (0.1, 0.5)]
        case "hexagon":
            return [(0.5 + 0.5 * cos(step * pi / 3), 0.5 + 0.5 * sin(step * pi / 3)) for step in range(6)]
        case "cross":
            return [
                (low, 0), (high, 0), (high, low), (1, low), (1, high), (high, high),
                (high, 1), (low, 1), (low, high), (0, high), (0, low), (low, low),
            ]  # fmt: skip
        case "arrow":
            return [(0, 0.38), (0.55, 0.38), (0.55, 0.15), (1, 0.5), (0.55, 0.85), (0.55, 0.62), (0, 0.62)]
        case "star":
            radii = (0.5, 0.2)
            angles = [step * pi / 5 - pi / 2 for step in range(10)]
            return [
                (0.5 + radii[i % 2] * cos(angle), 0.5 + radii[i % 2] * sin(angle))
                for i, angle in enumerate(angles)
            ]
    raise ValueError(f"no drawing for the shape {name!r}")


def _to_jpeg(photo: Bytes) -> bytes:
    from io import BytesIO

    buffer = BytesIO()
    Image.fromarray(photo).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def _from_jpeg(data: bytes) -> Bytes:
    from io import BytesIO

    return np.asarray(Image.open(BytesIO(data)).convert("RGB"))
