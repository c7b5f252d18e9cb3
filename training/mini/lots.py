"""Scenes drawn by lot: which there may be, so that their words are never arguable.

Knows: how often each sort of scene, thing, colour and size comes, and how things find room.
Does not know: what is asked about a scene, or how it is drawn.
"""

from dataclasses import replace
from math import cos, radians, sin, sqrt

import numpy as np

from training.mini.atlas import PHOTO_SIDE, Atlas
from training.mini.scenes import MAX_OBJECTS, Background, Finish, Scene, Thing
from training.mini.vocabulary import COLOURS, UNCOUNTED, colour_indices

NO_ROTATION = frozenset({"circle", "ring", "oval", "square", "diamond", "rectangle", "cross"})


def draw_scene(seed: int, size: tuple[int, int], atlas: Atlas, ease: float = 0.0) -> Scene:
    """The scene of a seed, for a picture of ``size`` (width, height) pixels.

    ``ease`` from 0 to 1 is the share of scenes with one large thing: the start of training needs them.
    """
    return _Painter(np.random.default_rng(seed), size, atlas).paint(seed, ease)


class _Painter:
    """Draws the lots of one scene."""

    def __init__(self, random: np.random.Generator, size: tuple[int, int], atlas: Atlas) -> None:
        self.random = random
        self.width, self.height = size
        self.atlas = atlas
        self.kinds = [kind for kind in ("shape", "sprite", "number", "word") if atlas.names_of(kind)]

    def paint(self, seed: int, ease: float) -> Scene:
        """Choose what sort of scene it is, then its background, then its things."""
        has_photos = len(self.atlas.photos) > 0
        draw = self.random.random()
        if self.random.random() < ease or draw < 0.12:
            sort = "single"
        elif draw < 0.56:
            sort = "few"
        elif draw < 0.80:
            sort = "group"
        elif draw < 0.93 or not has_photos:
            sort = "written"
        else:
            sort = "photo"
        if sort == "photo":
            background = self.photo(blur=0)
            return Scene(
                seed, self.width, self.height, background, (), self.photo_facts(background), self.finish()
            )
        background = self.background()
        wanted = self.wanted(sort, background)
        things = self.arrange(wanted, single=sort == "single")
        ordered = tuple(sorted(things, key=lambda thing: thing.x))
        return Scene(seed, self.width, self.height, background, ordered, (), self.finish())

    def background(self) -> Background:
        draw = self.random.random()
        texture = float(self.random.choice([0.0, 0.0, 0.0, 4.0, 10.0]))
        if draw < 0.55:
            name, exact = self.colour(set())
            return Background("plain", (name,), (exact,), texture=texture)
        if draw < 0.68:
            first, top = self.colour(set())
            second, bottom = self.colour({first})
            return Background("gradient", (first, second), (top, bottom), texture=texture)
        if draw < 0.84 or not len(self.atlas.photos):
            sky = tuple(int(v) for v in self.random.integers((120, 180, 225), (165, 220, 256)))
            ground = tuple(int(v) for v in self.random.integers((70, 150, 50), (130, 200, 90)))
            horizon = float(self.random.uniform(0.45, 0.8))
            return Background(
                "landscape", ("blue", "green"), (_rgb(sky), _rgb(ground)), horizon, texture=texture
            )
        return self.photo(blur=int(self.random.integers(2, 4)))

    def photo(self, blur: int) -> Background:
        share = self.random.uniform(0.55, 1.0, 2)
        left, top = (self.random.uniform(0, 1 - share[0]), self.random.uniform(0, 1 - share[1]))
        crop = (float(left), float(top), float(share[0]), float(share[1]))
        return Background(
            "photo", photo=int(self.random.integers(len(self.atlas.photos))), crop=crop, blur=blur
        )

    def photo_facts(self, background: Background) -> tuple[str, ...]:
        """Names of colours that cover at least a sixth of the crop, at most three, then how light it is."""
        left, top, width, height = (round(value * PHOTO_SIDE) for value in background.crop)
        pixels = self.atlas.photos[background.photo][top : top + height : 3, left : left + width : 3]
        shares = np.bincount(colour_indices(pixels).ravel(), minlength=len(COLOURS)) / pixels[..., 0].size
        order = np.argsort(-shares)[:3]
        names = list(COLOURS)
        facts = [names[index] for rank, index in enumerate(order) if rank == 0 or shares[index] > 0.17]
        light = float(pixels.mean())
        return (*facts, "bright") if light > 165 else (*facts, "dark") if light < 85 else tuple(facts)

    def wanted(self, sort: str, background: Background) -> list[Thing]:
        """Things without a place yet."""
        taken = set(background.names) | ({"blue", "green", "grey"} if background.kind == "photo" else set())
        if sort == "single":
            kind = (
                str(self.random.choice(self.kinds[-2:]))
                if self.random.random() < 0.15
                else self.common_kind()
            )
            return [self.thing(kind, taken)]
        if sort == "few":
            return [self.thing(self.common_kind(), taken) for _ in range(int(self.random.integers(2, 5)))]
        if sort == "written":
            kind = str(self.random.choice(self.kinds[-2:], p=[0.7, 0.3]))
            others = [self.thing(self.common_kind(), taken) for _ in range(int(self.random.integers(0, 3)))]
            return [self.thing(kind, taken), *others]
        return self.group(taken)

    def group(self, taken: set[str]) -> list[Thing]:
        """Several of one kind (the same drawing), sometimes with one or two others that are not of it."""
        model = self.thing(self.common_kind(), taken)
        while model.name in UNCOUNTED:
            model = self.thing("shape", taken)
        things = [model] * int(self.random.integers(2, 7))
        for _ in range(min(MAX_OBJECTS - len(things), int(self.random.integers(0, 3)))):
            other = self.thing(self.common_kind(), taken)
            # The same shape in another colour is the hard case of "how many red stars".
            if model.kind == "shape" and self.random.random() < 0.4:
                other = self.thing("shape", taken | {model.colour}, model.name)
            if other.label != model.label:
                things.append(other)
        return things

    def common_kind(self) -> str:
        has_sprites = "sprite" in self.kinds
        return "sprite" if has_sprites and self.random.random() < 0.6 else "shape"

    def thing(self, kind: str, taken: set[str], name: str | None = None) -> Thing:
        """A thing of a kind with a drawing, a colour not in ``taken``, a turn, and its aspect as width:1."""
        names = self.atlas.names_of(kind)
        name = name or names[int(self.random.integers(len(names)))]
        drawings = self.atlas.by_name[kind, name]
        texture = drawings[int(self.random.integers(len(drawings)))]
        colour, tint = ("", (255, 255, 255)) if kind == "sprite" else self.colour(taken)
        turns = not (kind == "shape" and name in NO_ROTATION)
        angle = float(self.random.uniform(-11, 11)) if turns and self.random.random() < 0.6 else 0.0
        flipped = kind == "sprite" and bool(self.random.random() < 0.5)
        aspect = self.atlas.aspects[texture] * float(self.random.uniform(0.95, 1.05))
        return Thing(kind, name, colour, tint, texture, 0.5, 0.5, aspect, 1.0, angle, flipped)

    def colour(self, taken: set[str]) -> tuple[str, tuple[int, int, int]]:
        free = [name for name in COLOURS if name not in taken]
        name = free[int(self.random.integers(len(free)))]
        exact = [int(self.random.integers(low, high + 1)) for low, high in COLOURS[name]]
        if name == "grey":
            exact = [exact[0]] * 3
        return name, _rgb(tuple(exact))

    def arrange(self, wanted: list[Thing], single: bool) -> list[Thing]:
        """Give each thing a size and a free place; the last ones are left out if there is no room."""
        placed: list[Thing] = []
        boxes: list[tuple[float, float, float, float]] = []
        count = len(wanted)
        # Members of a group share a size, so that "how many" does not hinge on specks.
        shared = (
            None
            if single or self.random.random() < 0.4
            else float(self.random.uniform(0.17, 0.9 / sqrt(count)))
        )
        largest = 0.85 if single else min(0.5, 1.0 / sqrt(count))
        for thing in wanted:
            gap = -0.02 if self.random.random() < 0.03 else 0.012
            for attempt, lots in enumerate(self.random.random((40, 3)).tolist()):
                size = shared if shared is not None else 0.15 + (largest - 0.15) * lots[0]
                size = min(0.45, size) if not single else 0.3 + 0.55 * lots[0]
                found = self.place(thing, max(size * (1 - attempt / 80), 0.13), lots[1], lots[2])
                if found is not None and not any(_touch(found, other, gap) for other in boxes):
                    boxes.append(found)
                    placed.append(self.put(thing, max(size * (1 - attempt / 80), 0.13), found))
                    break
        return placed

    def sides(self, thing: Thing, size: float) -> tuple[float, float]:
        """Width and height in pixels for an area of ``size`` x ``size`` (in short sides of the picture)."""
        aspect = thing.width
        height = max(size * min(self.width, self.height) / sqrt(aspect), 21.0 if thing.written else 18.0)
        return height * aspect, height

    def place(
        self, thing: Thing, size: float, x: float, y: float
    ) -> tuple[float, float, float, float] | None:
        """Centre and half extents (fractions) at the lots ``x`` and ``y``; None if it is too large."""
        across, down = self.sides(thing, size)
        turn = radians(abs(thing.angle))
        half_width = (across * cos(turn) + down * sin(turn)) / 2 / self.width
        half_height = (across * sin(turn) + down * cos(turn)) / 2 / self.height
        if half_width > 0.49 or half_height > 0.49:
            return None
        return (
            half_width + x * (1 - 2 * half_width),
            half_height + y * (1 - 2 * half_height),
            half_width,
            half_height,
        )

    def put(self, thing: Thing, size: float, box: tuple[float, float, float, float]) -> Thing:
        """The thing at the place that was found."""
        across, down = self.sides(thing, size)
        return replace(thing, x=box[0], y=box[1], width=across / self.width, height=down / self.height)

    def finish(self) -> Finish:
        if self.random.random() < 0.35:
            return Finish()
        return Finish(
            float(self.random.uniform(0.93, 1.05)),
            float(self.random.uniform(0.92, 1.06)),
            float(self.random.choice([0.0, 0.0, 2.0, 5.0])),
        )


def _touch(
    one: tuple[float, float, float, float], other: tuple[float, float, float, float], gap: float
) -> bool:
    """Whether two boxes (centre, half extents) come closer than ``gap``."""
    return (
        abs(one[0] - other[0]) < one[2] + other[2] + gap and abs(one[1] - other[1]) < one[3] + other[3] + gap
    )


def _rgb(values: tuple[int, ...]) -> tuple[int, int, int]:
    red, green, blue = values
    return red, green, blue
