"""A scene: what a picture will show. The scene is the truth; pixels (render) and words (texts) are both
derived from it.

Knows: things, backgrounds, boxes and places. Does not know: how scenes are chosen (lots), drawn or told.

Lengths are fractions of the picture: x and width of its width, y and height of its height.
"""

from dataclasses import dataclass, field
from math import cos, radians, sin

from training.mini.vocabulary import NUMBER_WORDS, PLACES

MAX_OBJECTS = 8
# A centre this close to the line between two thirds belongs to neither: no place word is used.
PLACE_MARGIN = 0.045


@dataclass(frozen=True)
class Thing:
    """One object: what it is, which drawing of it, and where.

    ``colour`` is empty for sprites, which have their own colours. ``tint`` is the exact colour used.
    ``width`` and ``height`` are those before the turn of ``angle`` degrees.
    """

    kind: str
    name: str
    colour: str
    tint: tuple[int, int, int]
    texture: int
    x: float
    y: float
    width: float
    height: float
    angle: float = 0.0
    flipped: bool = False

    @property
    def label(self) -> str:
        """What it is called: "red square", "dog", "number 42", 'word "STOP"'."""
        match self.kind:
            case "shape":
                return f"{self.colour} {self.name}"
            case "number":
                return f"number {self.name}"
            case "word":
                return f"word {self.name}"
        return self.name

    @property
    def written(self) -> bool:
        """Whether it is text."""
        return self.kind in ("number", "word")


@dataclass(frozen=True)
class Background:
    """``kind``: "plain", "gradient", "landscape" or "photo". ``colours`` are exact, top first.

    ``names`` are the colour names of a plain or gradient background. ``crop``: the part of the photo
    shown (left, top, width, height in fractions); ``blur`` from 0 (sharp) to 3.
    """

    kind: str
    names: tuple[str, ...] = ()
    colours: tuple[tuple[int, int, int], ...] = ()
    horizon: float = 0.0
    photo: int = 0
    crop: tuple[float, float, float, float] = (0.0, 0.0, 1.0, 1.0)
    blur: int = 0
    texture: float = 0.0


@dataclass(frozen=True)
class Scene:
    """A picture of ``width`` x ``height`` pixels. ``things`` run from left to right.

    ``facts`` of a photo: its main colours, the commonest first, then "bright" or "dark" if it is.
    """

    seed: int
    width: int
    height: int
    background: Background
    things: tuple[Thing, ...]
    facts: tuple[str, ...] = ()
    finish: "Finish" = field(default_factory=lambda: Finish())

    def box(self, thing: Thing) -> tuple[int, int, int, int]:
        """Left, top, right, bottom of a thing in thousandths of the picture, as Qwen3-VL writes boxes."""
        half_width, half_height = half_extent(thing, self.width, self.height)
        edges = (thing.x - half_width, thing.y - half_height, thing.x + half_width, thing.y + half_height)
        left, top, right, bottom = (min(1000, max(0, round(edge * 1000))) for edge in edges)
        return left, top, right, bottom


@dataclass(frozen=True)
class Finish:
    """What is done to the whole picture last: brightness, contrast, grain, and drawing it at another size."""

    brightness: float = 1.0
    contrast: float = 1.0
    grain: float = 0.0


def half_extent(thing: Thing, width: int, height: int) -> tuple[float, float]:
    """Half the width and height, in fractions, of the upright box around a turned thing."""
    turn = radians(thing.angle)
    across, down = thing.width * width / 2, thing.height * height / 2
    return (
        (abs(across * cos(turn)) + abs(down * sin(turn))) / width,
        (abs(across * sin(turn)) + abs(down * cos(turn))) / height,
    )


def place_of(thing: Thing) -> str | None:
    """The place word of a thing's centre, or None where two words would do."""
    indices = []
    for position in (thing.x, thing.y):
        if min(abs(position - 1 / 3), abs(position - 2 / 3)) < PLACE_MARGIN:
            return None
        indices.append(int(position * 3))
    return PLACES[indices[1]][indices[0]]


def count_of(scene: Scene, name: str, colour: str = "") -> int:
    """How many things of that name (and colour) the scene holds."""
    return sum(thing.name == name and (not colour or thing.colour == colour) for thing in scene.things)


def number_word(count: int) -> str:
    """ "two" for 2, as captions say it."""
    return NUMBER_WORDS[count]
