"""The atlas: every drawing that a scene can contain, as small square textures in one file.

A texture is ``SIDE`` x ``SIDE`` pixels of red, green, blue and alpha, its content stretched to fill the
square; ``aspect`` (width / height) says how to unstretch it. Shapes and words are white, to be tinted when
drawn.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from io import BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from training.mini.outlines import draw_shape
from training.mini.vocabulary import COLOURS, SHAPES, colour_indices

SIDE = 128
PHOTO_SIDE = 192
SPRITE_QUALITY = 85
PHOTO_QUALITY = 78
# A sprite bears a colour's name if it has more than the first share of the colour, and no more than the
# second of any other.
MAIN_COLOUR, OTHER_COLOUR = 0.55, 0.20
BUILT_IN_WORDS = (
    "STOP",
    "EXIT",
    "OPEN",
    "SALE",
    "HELLO",
    "CAFE",
    "TAXI",
    "BANK",
    "PARK",
    "SHOP",
    "HELP",
    "YES",
)
MATERIALS = Path(__file__).parent / "materials"
BUILT_IN_NUMBERS = 100
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Drawing:
    """One picture for the atlas. ``style``: whose drawing it is ("" for shapes), for text the font's name."""

    kind: str
    name: str
    picture: Image.Image
    style: str = ""


@dataclass(frozen=True)
class Photo:
    """One photo, stretched to [PHOTO_SIDE, PHOTO_SIDE, 3]; ``aspect`` is the width / height it had."""

    pixels: Bytes
    label: str
    aspect: float


@dataclass(frozen=True)
class Atlas:
    """Drawings and photos, each described by tuples that run along the first axis of their pixels.

    ``kinds`` ("shape", "number", "word", "sprite"), ``names``, ``aspects``, ``styles`` and ``colours`` (the
    main colour of a sprite as a name of COLOURS, "" if it has none) go with ``textures`` [count, SIDE, SIDE,
    4];
    ``photo_labels`` (a key of CLOTHES, or "") and ``photo_aspects`` with ``photos`` [count, PHOTO_SIDE,
    PHOTO_SIDE, 3].
    """

    kinds: tuple[str, ...]
    names: tuple[str, ...]
    aspects: tuple[float, ...]
    styles: tuple[str, ...]
    colours: tuple[str, ...]
    textures: Bytes
    photos: Bytes
    photo_labels: tuple[str, ...]
    photo_aspects: tuple[float, ...]

    def __post_init__(self) -> None:
        lengths = [len(each) for each in (self.names, self.aspects, self.styles, self.colours, self.textures)]
        if set(lengths) != {len(self.kinds)}:
            raise ValueError(f"an atlas of {len(self.kinds)} kinds got lists of other lengths: {lengths}")
        if not len(self.photos) == len(self.photo_labels) == len(self.photo_aspects):
            raise ValueError("an atlas needs one label and one aspect for each of its photos")

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

    @cached_property
    def photos_of(self) -> dict[str, list[int]]:
        """Indices of the photos of each label."""
        found: dict[str, list[int]] = {}
        for index, label in enumerate(self.photo_labels):
            found.setdefault(label, []).append(index)
        return found

    def only(self, styles: Collection[str]) -> "Atlas":
        """Without the sprites of other styles; shapes, texts and photos stay."""
        return self._chosen(
            index for index, kind in enumerate(self.kinds) if kind != "sprite" or self.styles[index] in styles
        )

    def without_words(self) -> "Atlas":
        """Everything but written words."""
        return self._chosen(index for index, kind in enumerate(self.kinds) if kind != "word")

    def without_photos(self) -> "Atlas":
        """The drawings alone."""
        return replace(self, photos=stack_photos([]), photo_labels=(), photo_aspects=())

    def plus(self, other: "Atlas") -> "Atlas":
        """The drawings and photos of both, this one's first."""
        return Atlas(
            self.kinds + other.kinds,
            self.names + other.names,
            self.aspects + other.aspects,
            self.styles + other.styles,
            self.colours + other.colours,
            np.concatenate([self.textures, other.textures]),
            np.concatenate([self.photos, other.photos]),
            self.photo_labels + other.photo_labels,
            self.photo_aspects + other.photo_aspects,
        )

    def _chosen(self, indices: Iterable[int]) -> "Atlas":
        kept = list(indices)

        def pick(values: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(values[index] for index in kept)

        return replace(
            self,
            kinds=pick(self.kinds),
            names=pick(self.names),
            aspects=tuple(self.aspects[index] for index in kept),
            styles=pick(self.styles),
            colours=pick(self.colours),
            textures=self.textures[kept],
        )

    def save(self, path: Path) -> None:
        """Write one file: sprites and photos as WebP, of tinted textures the alpha only."""
        tinted = np.array([kind != "sprite" for kind in self.kinds], bool)
        sprites = [_to_webp(texture, SPRITE_QUALITY) for texture in self.textures[~tinted]]
        photos = [_to_webp(photo, PHOTO_QUALITY) for photo in self.photos]
        np.savez_compressed(
            path,
            kinds=np.array(self.kinds, np.str_),
            names=np.array(self.names, np.str_),
            aspects=np.array(self.aspects, np.float32),
            styles=np.array(self.styles, np.str_),
            colours=np.array(self.colours, np.str_),
            masks=self.textures[tinted][..., 3],
            sprite_bytes=np.frombuffer(b"".join(sprites), np.uint8),
            sprite_sizes=np.array([len(sprite) for sprite in sprites], np.int64),
            photo_bytes=np.frombuffer(b"".join(photos), np.uint8),
            photo_sizes=np.array([len(photo) for photo in photos], np.int64),
            photo_labels=np.array(self.photo_labels, np.str_),
            photo_aspects=np.array(self.photo_aspects, np.float32),
        )

    @staticmethod
    def load(path: Path) -> "Atlas":
        """Read what ``save`` wrote. A missing or older file is an error that says how to make a new one."""
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; `python -m training.mini.prepare` makes it")
        with np.load(path) as stored:
            if "sprite_bytes" not in stored:
                raise ValueError(
                    f"{path} has an older form; `python -m training.mini.prepare` makes a new one"
                )
            kinds = _strings(stored["kinds"])
            tinted = np.array([kind != "sprite" for kind in kinds], bool)
            textures = np.full((len(kinds), SIDE, SIDE, 4), 255, np.uint8)
            textures[tinted, ..., 3] = stored["masks"]
            sprites = _unpack(stored["sprite_bytes"], stored["sprite_sizes"], "RGBA")
            for index, sprite in zip(np.flatnonzero(~tinted), sprites, strict=True):
                textures[index] = sprite
            return Atlas(
                kinds,
                _strings(stored["names"]),
                tuple(stored["aspects"].tolist()),
                _strings(stored["styles"]),
                _strings(stored["colours"]),
                textures,
                stack_photos(_unpack(stored["photo_bytes"], stored["photo_sizes"], "RGB")),
                _strings(stored["photo_labels"]),
                tuple(stored["photo_aspects"].tolist()),
            )


def stack_photos(photos: Sequence[Bytes]) -> Bytes:
    """[count, PHOTO_SIDE, PHOTO_SIDE, 3], also for an empty list."""
    return np.stack(photos) if photos else np.zeros((0, PHOTO_SIDE, PHOTO_SIDE, 3), np.uint8)


def built_in_atlas(fonts: list[Path] | None = None) -> Atlas:
    """Shapes, numbers to 99 and a few words: what can be drawn with nothing fetched.

    ``fonts``: TrueType files for the words; without any, Pillow's own font.
    """
    drawings = shape_drawings()
    faces: list[tuple[str, ImageFont.FreeTypeFont | ImageFont.ImageFont]] = [
        (path.stem, ImageFont.truetype(str(path), 96)) for path in fonts or []
    ]
    numbers = tuple(str(number) for number in range(BUILT_IN_NUMBERS))
    for style, face in faces or [("built-in", ImageFont.load_default(96))]:
        for kind, texts in (("number", numbers), ("word", BUILT_IN_WORDS)):
            drawings += [Drawing(kind, text, draw_text(text, face), style) for text in texts]
    return pack(drawings, [])


def shape_drawings() -> list[Drawing]:
    """Every shape once."""
    return [Drawing("shape", name, draw_shape(name)) for name in SHAPES]


def pack(drawings: Sequence[Drawing], photos: Sequence[Photo]) -> Atlas:
    """Crop each drawing to what is visible and make it a texture; name the main colour of each sprite."""
    textures, aspects, colours = [], [], []
    for drawing in drawings:
        texture, aspect = to_texture(drawing.picture)
        textures.append(texture)
        aspects.append(aspect)
        colours.append(main_colour(texture) if drawing.kind == "sprite" else "")
    return Atlas(
        tuple(drawing.kind for drawing in drawings),
        tuple(drawing.name for drawing in drawings),
        tuple(aspects),
        tuple(drawing.style for drawing in drawings),
        tuple(colours),
        np.stack(textures) if textures else np.zeros((0, SIDE, SIDE, 4), np.uint8),
        stack_photos([photo.pixels for photo in photos]),
        tuple(photo.label for photo in photos),
        tuple(photo.aspect for photo in photos),
    )


def to_texture(picture: Image.Image) -> tuple[Bytes, float]:
    """A cropped, stretched texture and the aspect (width / height) it had."""
    box = picture.getchannel("A").point(lambda alpha: 255 if alpha > 40 else 0).getbbox()
    if box is None:
        raise ValueError("a drawing for the atlas is entirely transparent")
    cropped = picture.crop(box)
    # Premultiplied while it is resized: otherwise the colour of invisible pixels bleeds into the rim.
    stretched = cropped.convert("RGBa").resize((SIDE, SIDE), Image.Resampling.BICUBIC).convert("RGBA")
    return np.asarray(stretched), cropped.width / cropped.height


def to_photo(picture: Image.Image, label: str = "") -> Photo:
    """The whole picture, stretched to the square of a photo."""
    square = picture.convert("RGB").resize((PHOTO_SIDE, PHOTO_SIDE), Image.Resampling.LANCZOS)
    return Photo(np.asarray(square), label, picture.width / picture.height)


def main_colour(texture: Bytes) -> str:
    """The one colour a person would call a drawing, "" where none prevails. ``texture``: [SIDE, SIDE, 4]."""
    visible = texture[texture[..., 3] > 200]
    if not len(visible):
        return ""
    shares = np.bincount(colour_indices(visible[:, :3]), minlength=len(COLOURS)) / len(visible)
    first, second = np.argsort(shares)[::-1][:2]
    prevails = shares[first] > MAIN_COLOUR and shares[second] <= OTHER_COLOUR
    return list(COLOURS)[first] if prevails else ""


def draw_text(text: str, face: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> Image.Image:
    """The text in white on nothing."""
    left, top, right, bottom = face.getbbox(text)
    picture = Image.new("RGBA", (round(right - left) + 8, round(bottom - top) + 8), (255, 255, 255, 0))
    ImageDraw.Draw(picture).text((4 - left, 4 - top), text, font=face, fill=(255, 255, 255, 255))
    return picture


def _to_webp(pixels: Bytes, quality: int) -> bytes:
    buffer = BytesIO()
    Image.fromarray(pixels).save(buffer, "WEBP", quality=quality, method=4)
    return buffer.getvalue()


def _unpack(data: Bytes, sizes: npt.NDArray[np.int64], mode: str) -> list[Bytes]:
    """The pictures that lie one after another in ``data``."""
    whole, pictures, start = data.tobytes(), [], 0
    for size in sizes.tolist():
        pictures.append(np.asarray(Image.open(BytesIO(whole[start : start + size])).convert(mode)))
        start += size
    return pictures


def _strings(values: npt.NDArray[np.str_]) -> tuple[str, ...]:
    return tuple(str(value) for value in values)
