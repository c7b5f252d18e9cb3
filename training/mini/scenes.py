"""A scene: what a picture will show. Pixels (``render``) and words (``phrases``, ``texts``) follow from it.

Lengths are fractions of the picture: x and width of its width, y and height of its height.
"""

from dataclasses import dataclass, field
from math import cos, radians, sin, sqrt

from training.mini.things import THINGS
from training.mini.vocabulary import PLACES

# Things and marks together: what the renderer has slots for.
MAX_SLOTS = 12
# A centre this close to the line between two thirds belongs to neither: no place word is used.
PLACE_MARGIN = 0.045
# Sides (the root of width x height, both as fractions) from which on, and up to which, a thing is called
# large and small; between them it is called neither.
LARGE, SMALL = 0.5, 0.2
# "Bigger" is only asked about areas that differ by this factor.
CLEARLY_BIGGER = 1.6


@dataclass(frozen=True)
class Thing:
    """One object: what it is, which drawing of it, and where.

    ``kind``: "shape", "sprite", "number", "word" or "bar" (of a chart). ``colour``: that of a shape, a bar
    or letters; of a sprite its main colour if it has one, otherwise empty. ``tint``: the colour that the
    drawing is multiplied with. ``width`` and ``height`` are those before the turn of ``angle`` degrees.
    ``value``: of a bar, what it stands for.
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
    value: int = 0

    @property
    def label(self) -> str:
        """What it is called: "red square", "dog", "number 42", "word STOP", "red bar"."""
        if self.kind in ("shape", "bar"):
            return f"{self.colour} {self.name}"
        return f"{self.kind} {self.name}" if self.written else self.name

    @property
    def group(self) -> str:
        """The sort of thing a sprite is ("animal"), or empty."""
        return THINGS[self.name].group if self.kind == "sprite" else ""

    @property
    def written(self) -> bool:
        """Whether it is text."""
        return self.kind in ("number", "word")

    @property
    def side(self) -> float:
        """Of the square of the same area, as a fraction of the picture."""
        return sqrt(self.width * self.height)

    @property
    def size_word(self) -> str:
        """ "large ", "small ", or empty for what is neither."""
        return "large " if self.side >= LARGE else "small " if self.side <= SMALL else ""


@dataclass(frozen=True)
class Photo:
    """A photo of the atlas: ``crop`` is the part shown (left, top, width, height in fractions).

    ``blur`` from 0 (sharp) to 3. ``turn`` in degrees, ``flipped``: mirrored. ``other`` is a second photo
    that shines through with the share ``mix``; none if that is 0.
    """

    index: int
    crop: tuple[float, float, float, float] = (0.0, 0.0, 1.0, 1.0)
    blur: int = 0
    turn: float = 0.0
    flipped: bool = False
    other: int = 0
    mix: float = 0.0


@dataclass(frozen=True)
class Background:
    """``kind``: "plain", "gradient", "landscape" or "photo". ``colours`` are exact, top first.

    ``names`` are the colour names of a plain or gradient background. ``texture``: how uneven it is.
    """

    kind: str
    names: tuple[str, ...] = ()
    colours: tuple[tuple[int, int, int], ...] = ()
    horizon: float = 0.0
    photo: Photo | None = None
    texture: float = 0.0


@dataclass(frozen=True)
class Finish:
    """What is done to the whole picture last: brightness, contrast and grain."""

    brightness: float = 1.0
    contrast: float = 1.0
    grain: float = 0.0


@dataclass(frozen=True)
class Scene:
    """A picture of ``width`` x ``height`` pixels. ``things`` run from left to right; ``marks`` are drawn
    but are no things (the axis of a chart, the numbers on its bars).

    ``sort``: "things", "chart", "photo" or "empty". ``facts`` of a photo: its main colours, the commonest
    first, then "bright" or "dark" if it is; empty where they are not known. ``garment``: the piece of
    clothing a photo shows (a key of ``CLOTHES``), or empty.
    """

    seed: int
    width: int
    height: int
    background: Background
    things: tuple[Thing, ...]
    marks: tuple[Thing, ...] = ()
    sort: str = "things"
    facts: tuple[str, ...] = ()
    garment: str = ""
    finish: Finish = field(default_factory=Finish)

    def box(self, thing: Thing) -> tuple[int, int, int, int]:
        """Left, top, right, bottom of a thing in thousandths of the picture, as Qwen3-VL writes boxes."""
        half_width, half_height = half_extent(thing, self.width, self.height)
        edges = (thing.x - half_width, thing.y - half_height, thing.x + half_width, thing.y + half_height)
        left, top, right, bottom = (min(1000, max(0, round(edge * 1000))) for edge in edges)
        return left, top, right, bottom

    @property
    def texts(self) -> list[str]:
        """Every word and number that can be read, from left to right."""
        return [thing.name for thing in sorted((*self.things, *self.marks), key=_x) if thing.written]


def _x(thing: Thing) -> float:
    return thing.x


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
