"""Drawn scenes whose truth is known, as encoded files: five shapes in exact places, three aspect ratios.

Boxes in an answer are compared with the truth. What a model can do decides how well it finds them, so only of
known checkpoints (``known_answers``) that is a finding; a picture whose EXIF turns it must give any model the
same pixels. Known answers are in ``known/answers.json``, beside the pictures that they are about; those of
further checkpoints can be added by posts (docs/cards.md).
"""

import hashlib
import io
import json
import re
import statistics
from dataclasses import dataclass
from importlib import resources

from vlfit.api.conversation import Conversation, ImagePart, Message, TextPart, VideoPart, single_turn
from vlfit.checkpoint.source import Checkpoint

Box = tuple[float, float, float, float]  # left, top, right, bottom in thousandths of the upright picture
SHAPES = ("circle", "square", "triangle", "diamond", "star")
_COLOURS = {"circle": "red", "square": "blue", "triangle": "green", "diamond": "orange", "star": "purple"}
_SIZES = {"square": (288, 288), "wide": (384, 224), "tall": (224, 384)}
# Centres in thousandths, and the half side of a shape in thousandths of the shorter side.
_CENTRES = ((200, 220), (760, 200), (500, 520), (210, 790), (780, 770))
_HALF = 120
_CLIP_SIZE = (224, 128)
_ROTATED = 6  # EXIF: to be turned by 90 degrees clockwise to be upright
DETECT = (
    'Locate every instance that belongs to the following categories: "{}". '
    "Report bbox coordinates in JSON format."
)
_BOX = re.compile(r'"bbox_2d"\s*:\s*\[([^\]]{1,80})\]')
_MOST_BOXES = 100


@dataclass(frozen=True)
class DrawnScene:
    """One drawn picture: its name, its file, and the true box of each shape."""

    name: str
    data: bytes
    boxes: dict[str, Box]

    def conversation(self, shapes: tuple[str, ...]) -> Conversation:
        """The question for the boxes of ``shapes``, as ``vlfit detect`` asks it."""
        return (Message("user", (ImagePart(self.data), TextPart(DETECT.format(", ".join(shapes))))),)


def draw_scenes() -> dict[str, DrawnScene]:
    """The scenes by name: ``square``, ``wide``, ``tall``, and ``wide_turned``, which EXIF turns upright."""
    scenes = {name: _draw(name, *size) for name, size in _SIZES.items()}
    scenes["wide_turned"] = DrawnScene("wide_turned", _turned(scenes["wide"].data), scenes["wide"].boxes)
    return scenes


def _draw(name: str, width: int, height: int) -> DrawnScene:
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(picture)
    boxes: dict[str, Box] = {}
    half = _HALF * min(width, height) // 1000
    for shape, (across, down) in zip(SHAPES, _CENTRES, strict=True):
        x, y = across * width // 1000, down * height // 1000
        colour = _COLOURS[shape]
        if shape == "circle":
            pen.ellipse((x - half, y - half, x + half, y + half), fill=colour)
        elif shape == "square":
            pen.rectangle((x - half, y - half, x + half, y + half), fill=colour)
        else:
            pen.polygon(shape_corners(shape, x, y, half), fill=colour)
        boxes[shape] = (
            (x - half) * 1000 / width,
            (y - half) * 1000 / height,
            (x + half + 1) * 1000 / width,
            (y + half + 1) * 1000 / height,
        )
    return DrawnScene(name, _png(picture), boxes)


def draw_clip(frames: int) -> VideoPart:
    """A clip of ``frames`` frames, two a second: a circle that crosses the picture."""
    from PIL import Image, ImageDraw

    files = []
    width, height = _CLIP_SIZE
    for number in range(frames):
        picture = Image.new("RGB", (width, height), "white")
        x, y = (number + 1) * width // (frames + 1), height * (1 + number % 2) // 3
        half = height // 6
        ImageDraw.Draw(picture).ellipse((x - half, y - half, x + half, y + half), fill=(200, 30 * number, 40))
        files.append(_png(picture))
    return VideoPart(tuple(files), fps=2.0)


def shape_corners(shape: str, x: int, y: int, half: int) -> list[tuple[float, float]]:
    """Corners of a triangle, diamond or star around a centre, in pixels."""
    if shape == "triangle":
        return [(x, y - half), (x + half, y + half), (x - half, y + half)]
    if shape == "diamond":
        return [(x, y - half), (x + half, y), (x, y + half), (x - half, y)]
    outer = ((0, -1), (1, -0.2), (0.65, 1), (-0.65, 1), (-1, -0.2))
    inner = ((0.25, -0.25), (0.4, 0.3), (0, 0.55), (-0.4, 0.3), (-0.25, -0.25))
    points = [point for pair in zip(outer, inner, strict=True) for point in pair]
    return [(x + across * half, y + down * half) for across, down in points]


def _png(picture: "object", **options: object) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, "PNG", **options)  # type: ignore[attr-defined]
    return stream.getvalue()


def _turned(data: bytes) -> bytes:
    """The same picture lying on its side, with the EXIF orientation that makes it upright again."""
    from PIL import Image

    picture = Image.open(io.BytesIO(data)).transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = _ROTATED
    return _png(picture, exif=exif)


def read_boxes(answer: str) -> list[Box]:
    """Boxes of an answer in the form of Qwen3-VL (``bbox_2d``, thousandths); others are left out."""
    boxes: list[Box] = []
    for match in list(_BOX.finditer(answer))[:_MOST_BOXES]:
        try:
            numbers = json.loads(f"[{match[1]}]")
            left, top, right, bottom = map(float, numbers)
        except (ValueError, TypeError):
            continue
        boxes.append((min(left, right), min(top, bottom), max(left, right), max(top, bottom)))
    return boxes


def overlap(first: Box, second: Box) -> float:
    """Intersection over union of two boxes."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    both = max(width, 0.0) * max(height, 0.0)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (first, second)]
    return both / (sum(areas) - both) if both else 0.0


def mean_overlap(answer: str, scene: DrawnScene) -> float:
    """Mean over the true boxes of ``scene`` of the best overlap that a box of ``answer`` has with each."""
    return statistics.fmean(_best_overlaps(answer, scene))


def median_overlap(answer: str, scene: DrawnScene) -> float:
    """The median of what ``mean_overlap`` averages.

    A small model leaves a shape out where rounding decides a tie; boxes in wrong places move all of them.
    """
    return statistics.median(_best_overlaps(answer, scene))


def _best_overlaps(answer: str, scene: DrawnScene) -> list[float]:
    found = read_boxes(answer)
    return [max((overlap(box, true) for box in found), default=0.0) for true in scene.boxes.values()]


# --- answers of known checkpoints ---------------------------------------------------------------------------

_BYTES = 2**16  # of weights, that tell one checkpoint from another


@dataclass(frozen=True)
class KnownWords:
    """What a known checkpoint answers, greedily, to ``question`` about a picture that ships with vlfit.

    ``picture``: its file's name, ``data``: the file.
    """

    picture: str
    data: bytes
    question: str
    answer: str

    def conversation(self) -> Conversation:
        """The question, as ``vlfit ask`` asks it."""
        return single_turn(self.question, ImagePart(self.data))


@dataclass(frozen=True)
class KnownAnswers:
    """What a known checkpoint answers about the drawn scenes and the pictures that ship with vlfit.

    ``overlaps``: by the scene's name the least ``median_overlap`` (intersection over union) of its boxes with
    the true ones. They leave a pixel or two to other dtypes; words were the same in float32 and bfloat16.
    """

    name: str
    overlaps: dict[str, float]
    words: tuple[KnownWords, ...]


def known_answers(checkpoint: Checkpoint) -> KnownAnswers | None:
    """The answers that are known of ``checkpoint``, by its ``identity``; None for all but a few."""
    folder = resources.files("vlfit.parity") / "known"
    entry = json.loads((folder / "answers.json").read_text("utf-8")).get(identity(checkpoint))
    if entry is None:
        return None
    words = [
        KnownWords(each["picture"], (folder / each["picture"]).read_bytes(), each["question"], each["answer"])
        for each in entry["words"]
    ]
    return KnownAnswers(entry["name"], entry["overlaps"], tuple(words))


def identity(checkpoint: Checkpoint) -> str:
    """By which a checkpoint is known, whatever its folder: sixteen hexadecimal digits.

    A hash of the tensors' names, dtypes and shapes and the first weights.
    """
    digest = hashlib.sha256()
    infos = sorted(checkpoint.tensors.values(), key=lambda info: info.name)
    for info in infos:
        digest.update(f"{info.name} {info.dtype} {info.shape}\n".encode())
    with infos[0].file.open("rb") as file:
        file.seek(infos[0].start)
        digest.update(file.read(min(infos[0].bytes, _BYTES)))
    return digest.hexdigest()[:16]
