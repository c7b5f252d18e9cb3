"""Random scenes: how often each sort, thing, colour and size comes, such that no answer is arguable."""

import numpy as np

from training.mini.arrange import arrange
from training.mini.atlas import Atlas
from training.mini.charts import draw_chart
from training.mini.photos import draw_garment, draw_photo, photo_backdrop
from training.mini.scenes import MAX_SLOTS, Background, Finish, Scene, Thing
from training.mini.screens import draw_screen
from training.mini.things import THINGS
from training.mini.vocabulary import COLOURS, GROUP_PLURALS, UNCOUNTED

NO_ROTATION = frozenset({"circle", "ring", "oval", "square", "diamond", "rectangle", "cross"})
# How often each sort of scene comes, in thousandths. Photos are left out where the atlas holds none.
SORTS = {
    "single": 100, "few": 215, "many": 80, "group": 145, "kindred": 50, "written": 240, "chart": 35,
    "photo": 55, "garment": 45, "screen": 20, "empty": 15,
}  # fmt: skip

# The names of each group that can be counted; a group of fewer is never shown as one.
KINDRED = {g: [name for name, thing in THINGS.items() if thing.group == g] for g in GROUP_PLURALS}
LEAST_KINDRED = 5
# How often 2, 3, ... 9 of a group are wanted: the more, the likelier one of them finds no room.
KINDRED_SHARES = np.cumsum([5, 6, 8, 10, 12, 14, 19, 26])


def draw_scene(seed: int, size: tuple[int, int], atlas: Atlas, ease: float = 0.0, sort: str = "") -> Scene:
    """The scene of a seed, for a picture of ``size`` (width, height) pixels.

    ``ease`` from 0 to 1 is the share of scenes with one large thing: the start of training needs them.
    ``sort``: one of ``SORTS``, or empty to draw it by lot too.
    """
    return SceneDrawer(np.random.default_rng(seed), size, atlas).paint(seed, ease, sort)


class SceneDrawer:
    """Draws one random scene."""

    def __init__(self, random: np.random.Generator, size: tuple[int, int], atlas: Atlas) -> None:
        self.random = random
        self.size = size
        self.atlas = atlas
        self.writing = [kind for kind in ("number", "word") if atlas.names_of(kind)]

    def paint(self, seed: int, ease: float, sort: str) -> Scene:
        """Choose what sort of scene it is, then its background, then its things."""
        if not sort:
            sort = "single" if self.random.random() < ease else self.sort()
        if sort == "photo":
            return draw_photo(seed, self.size, self.random, self.atlas, self.finish())
        if sort == "garment":
            return draw_garment(seed, self.size, self.random, self.atlas)
        if sort == "screen":
            return draw_screen(seed, self.size, self.random, self.atlas, self.finish())
        background = self.background()
        finish = self.finish()
        if sort == "empty":
            while background.kind == "photo":
                background = self.background()
            return Scene(seed, *self.size, background, (), sort="empty", finish=finish)
        if sort == "chart":
            background = self.quiet_background()
            bars, marks = draw_chart(self.random, self.size, self.atlas, background.names[0])
            return Scene(seed, *self.size, background, bars, marks, "chart", finish=finish)
        things = arrange(self.draw_things(sort, background), self.random, self.size, single=sort == "single")
        return Scene(seed, *self.size, background, tuple(things), finish=finish)

    def sort(self) -> str:
        """One of ``SORTS``, as often as it says."""
        sorts = [s for s in SORTS if len(self.atlas.photos) or s not in ("photo", "garment")]
        shares = np.cumsum([SORTS[s] for s in sorts])
        return sorts[int(np.searchsorted(shares, self.random.random() * shares[-1], side="right"))]

    def background(self) -> Background:
        draw = self.random.random()
        texture = (0.0, 0.0, 0.0, 4.0, 10.0)[int(self.random.integers(5))]
        if draw < 0.5:
            name, exact = self.colour(set())
            return Background("plain", (name,), (exact,), texture=texture)
        if draw < 0.64:
            first, top = self.colour(set())
            second, bottom = self.colour({first})
            return Background("gradient", (first, second), (top, bottom), texture=texture)
        if draw < 0.78 or not len(self.atlas.photos):
            sky = _rgb(self.random.integers((120, 180, 225), (165, 220, 256)))
            ground = _rgb(self.random.integers((70, 150, 50), (130, 200, 90)))
            horizon = float(self.random.uniform(0.45, 0.8))
            return Background("landscape", ("blue", "green"), (sky, ground), horizon, texture=texture)
        return photo_backdrop(self.size, self.random, self.atlas)

    def quiet_background(self) -> Background:
        """What a chart stands on: mostly white, else any plain colour."""
        taken = set() if self.random.random() < 0.3 else set(COLOURS) - {"white"}
        name, exact = self.colour(taken)
        return Background("plain", (name,), (exact,))

    def draw_things(self, sort: str, background: Background) -> list[Thing]:
        """Things without a place yet."""
        taken = set(background.names) | ({"blue", "green", "grey"} if background.kind == "photo" else set())
        if sort == "single":
            kind = self.common_kind() if self.random.random() < 0.82 else self.written_kind()
            return [self.thing(kind, taken)]
        if sort == "few":
            return [self.thing(self.common_kind(), taken) for _ in range(int(self.random.integers(2, 5)))]
        if sort == "many":
            return [self.thing(self.common_kind(), taken) for _ in range(int(self.random.integers(5, 10)))]
        if sort == "written":
            others = [self.thing(self.common_kind(), taken) for _ in range(int(self.random.integers(0, 3)))]
            return [self.thing(self.written_kind(), taken), *others]
        return self.draw_group(taken) if sort == "kindred" else self.group(taken)

    def group(self, taken: set[str]) -> list[Thing]:
        """Several of one kind (the same drawing), sometimes with one or two others that are not of it."""
        model = self.thing(self.common_kind(), taken)
        while model.name in UNCOUNTED:
            model = self.thing("shape", taken)
        things = [model] * int(self.random.integers(2, 10))
        for _ in range(min(MAX_SLOTS - len(things), int(self.random.integers(0, 3)))):
            other = self.thing(self.common_kind(), taken)
            # The same shape in another colour is the hard case of "how many red stars".
            if model.kind == "shape" and self.random.random() < 0.4:
                other = self.thing("shape", taken | {model.colour}, model.name)
            # Two drawings of one thing in a group would be counted as one kind, but look like two.
            if other.label != model.label and (other.kind == "shape" or other.name != model.name):
                things.append(other)
        return things

    def draw_group(self, taken: set[str]) -> list[Thing]:
        """Different things of one group, or shapes, up to nine; sometimes with one that is not of it."""
        random = self.random
        known = set(self.atlas.names_of("sprite"))
        groups = {group: [name for name in names if name in known] for group, names in KINDRED.items()}
        groups = {group: names for group, names in groups.items() if len(names) >= LEAST_KINDRED}
        wanted = 2 + int(np.searchsorted(KINDRED_SHARES, random.random() * KINDRED_SHARES[-1], side="right"))
        if not groups or random.random() < 0.2:
            names, kind = self.atlas.names_of("shape"), "shape"
        else:
            # Animals are what people count; the other groups share the rest.
            group = "animal" if "animal" in groups and random.random() < 0.4 else ""
            names = groups[group or list(groups)[int(random.random() * len(groups))]]
            kind = "sprite"
        order = random.permutation(len(names))
        things = [self.thing(kind, taken, names[int(order[n % len(names)])]) for n in range(wanted)]
        if wanted < MAX_SLOTS and random.random() < 0.3:
            other = self.thing("shape" if kind == "sprite" else self.common_kind(), taken)
            things.append(other)
        return things

    def common_kind(self) -> str:
        return "sprite" if self.atlas.names_of("sprite") and self.random.random() < 0.64 else "shape"

    def written_kind(self) -> str:
        """A word mostly, for words cost the most to learn."""
        return self.writing[-1] if self.random.random() < 0.72 else self.writing[0]

    def thing(self, kind: str, taken: set[str], name: str | None = None) -> Thing:
        """A thing of a kind with a drawing, a colour not in ``taken``, a turn, and its aspect as width:1."""
        random, atlas = self.random, self.atlas
        names = atlas.names_of(kind)
        name = name or names[int(random.integers(len(names)))]
        drawings = atlas.by_name[kind, name]
        texture = drawings[int(random.integers(len(drawings)))]
        stretch = float(random.uniform(0.95, 1.05))
        if kind == "sprite":
            # Another artist's drawing is a little wider, paler or more yellow: so are some of these.
            stretch = float(random.uniform(0.85, 1.18))
            pale = random.random() < 0.3
            tint = _rgb(random.integers(195, 256, 3)) if pale else (255, 255, 255)
            colour = atlas.colours[texture]
        else:
            colour, tint = self.colour(taken)
        turns = not (kind == "shape" and name in NO_ROTATION)
        most = 16 if kind == "sprite" else 11
        angle = float(random.uniform(-most, most)) if turns and random.random() < 0.6 else 0.0
        flipped = kind == "sprite" and bool(random.random() < 0.5)
        aspect = atlas.aspects[texture] * stretch
        return Thing(kind, name, colour, tint, texture, 0.5, 0.5, aspect, 1.0, angle, flipped)

    def colour(self, taken: set[str]) -> tuple[str, tuple[int, int, int]]:
        """A colour name not in ``taken`` and an exact colour that bears it."""
        free = [name for name in COLOURS if name not in taken]
        name = free[int(self.random.integers(len(free)))]
        exact = [int(self.random.integers(low, high + 1)) for low, high in COLOURS[name]]
        return name, _rgb([exact[0]] * 3 if name == "grey" else exact)

    def finish(self) -> Finish:
        if self.random.random() < 0.35:
            return Finish()
        return Finish(
            float(self.random.uniform(0.93, 1.05)),
            float(self.random.uniform(0.92, 1.06)),
            (0.0, 0.0, 2.0, 5.0)[int(self.random.integers(4))],
        )


def _rgb(values: "np.ndarray[tuple[int], np.dtype[np.int64]] | list[int]") -> tuple[int, int, int]:
    red, green, blue = (int(value) for value in values)
    return red, green, blue
