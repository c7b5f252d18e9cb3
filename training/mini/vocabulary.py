"""What mini can name: colours, shapes, sprites, written words, places.

Knows: the closed lists that scenes are drawn from, and the rule that gives a pixel its colour name.
Does not know: how anything is drawn (atlas, render) or asked about (texts).
"""

from typing import Final

import numpy as np
import numpy.typing as npt

# Each colour name with the range its red, green and blue are drawn from. The ranges leave gaps between
# names, so that no colour in a scene could fairly be called by two of them.
COLOURS: Final[dict[str, tuple[tuple[int, int], tuple[int, int], tuple[int, int]]]] = {
    "red": ((195, 250), (10, 50), (10, 50)),
    "orange": ((240, 255), (120, 150), (0, 30)),
    "yellow": ((240, 255), (215, 245), (10, 80)),
    "green": ((10, 80), (130, 190), (20, 80)),
    "blue": ((10, 70), (50, 115), (185, 250)),
    "purple": ((105, 145), (20, 65), (150, 205)),
    "pink": ((245, 255), (125, 175), (175, 215)),
    "brown": ((105, 140), (55, 80), (15, 40)),
    "black": ((0, 28), (0, 28), (0, 28)),
    "white": ((240, 255), (240, 255), (240, 255)),
    "grey": ((115, 150), (115, 150), (115, 150)),
}

SHAPES: Final = (
    "circle",
    "square",
    "rectangle",
    "triangle",
    "star",
    "heart",
    "cross",
    "ring",
    "diamond",
    "oval",
    "hexagon",
    "crescent",
    "arrow",
)

# Code points (as the emoji packages name their files, without FE0F) that show the thing, most plainly first.
SPRITES: Final[dict[str, tuple[str, ...]]] = {
    "dog": ("1f415", "1f436", "1f429"),
    "cat": ("1f408", "1f431"),
    "horse": ("1f40e", "1f434"),
    "cow": ("1f404", "1f42e"),
    "pig": ("1f416", "1f437"),
    "sheep": ("1f411",),
    "elephant": ("1f418",),
    "lion": ("1f981",),
    "bear": ("1f43b",),
    "fox": ("1f98a",),
    "monkey": ("1f412", "1f435"),
    "rabbit": ("1f407", "1f430"),
    "mouse": ("1f401", "1f42d"),
    "duck": ("1f986",),
    "owl": ("1f989",),
    "penguin": ("1f427",),
    "fish": ("1f41f", "1f420"),
    "whale": ("1f40b", "1f433"),
    "turtle": ("1f422",),
    "snake": ("1f40d",),
    "frog": ("1f438",),
    "butterfly": ("1f98b",),
    "bee": ("1f41d",),
    "crab": ("1f980",),
    "octopus": ("1f419",),
    "snail": ("1f40c",),
    "apple": ("1f34e", "1f34f"),
    "banana": ("1f34c",),
    "orange": ("1f34a",),
    "lemon": ("1f34b",),
    "pear": ("1f350",),
    "strawberry": ("1f353",),
    "pineapple": ("1f34d",),
    "watermelon": ("1f349",),
    "carrot": ("1f955",),
    "mushroom": ("1f344",),
    "cheese": ("1f9c0",),
    "pizza": ("1f355",),
    "hamburger": ("1f354",),
    "cake": ("1f382", "1f370"),
    "car": ("1f697", "1f698", "1f699"),
    "bus": ("1f68c", "1f68d"),
    "truck": ("1f69a", "1f69b"),
    "bicycle": ("1f6b2",),
    "motorcycle": ("1f3cd",),
    "tractor": ("1f69c",),
    "airplane": ("2708",),
    "helicopter": ("1f681",),
    "rocket": ("1f680",),
    "sailboat": ("26f5",),
    "house": ("1f3e0", "1f3e1"),
    "tree": ("1f333", "1f332"),
    "flower": ("1f33b", "1f337", "1f33c"),
    "cactus": ("1f335",),
    "umbrella": ("2614", "2602"),
    "clock": ("23f0",),
    "key": ("1f511",),
    "guitar": ("1f3b8",),
    "camera": ("1f4f7",),
    "phone": ("1f4f1",),
    "football": ("26bd",),
    "balloon": ("1f388",),
    "chair": ("1fa91",),
    "scissors": ("2702",),
    "snowman": ("26c4",),
    "robot": ("1f916",),
    "shoe": ("1f45f",),
    "cup": ("2615",),
}

IRREGULAR_PLURALS: Final = {
    "cross": "crosses",
    "sheep": "sheep",
    "mouse": "mice",
    "fish": "fish",
    "octopus": "octopuses",
    "butterfly": "butterflies",
    "cherry": "cherries",
    "strawberry": "strawberries",
    "bus": "buses",
    "fox": "foxes",
    "scissors": "scissors",
    "snowman": "snowmen",
    "cactus": "cacti",
}

# "scissors" is a plural that stands for one thing: it takes "a pair of" when counted, so it is never counted.
UNCOUNTED: Final = frozenset({"scissors", "cheese"})

WORDS: Final = (
    "STOP", "EXIT", "OPEN", "CLOSED", "SALE", "HELLO", "CAFE", "TAXI", "BANK", "HOTEL", "PARK", "SHOP",
    "FREE", "HELP", "PUSH", "PULL", "YES", "NO", "GO", "BUS", "ZOO", "BAR", "FOOD", "MILK", "TEA",
    "BOOK", "NEWS", "WELCOME", "DANGER", "SLOW",
)  # fmt: skip
NUMBERS: Final = tuple(str(number) for number in range(100))

NUMBER_WORDS: Final = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")

# Row and column, in thirds of the picture.
PLACES: Final = (
    ("top left", "top", "top right"),
    ("left", "centre", "right"),
    ("bottom left", "bottom", "bottom right"),
)


def plural(name: str) -> str:
    """More than one of a thing: "star" -> "stars"."""
    return IRREGULAR_PLURALS.get(name, name + "s")


def with_article(name: str) -> str:
    """ "owl" -> "an owl"; "scissors" -> "a pair of scissors"."""
    if name == "scissors":
        return "a pair of scissors"
    if name == "cheese":
        return "a piece of cheese"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def colour_indices(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The colour name of every pixel of a photo, as indices into ``COLOURS``.

    ``pixels``: [..., 3], 0-255. Unlike the ranges above this rule leaves no gaps: it splits hue, lightness
    and saturation where English speakers change words.
    """
    names = list(COLOURS)
    values = pixels.astype(np.float32) / 255
    high, low = values.max(-1), values.min(-1)
    span = high - low
    saturation = np.where(high > 0, span / np.maximum(high, 1e-6), 0)
    red, green, blue = values[..., 0], values[..., 1], values[..., 2]
    safe = np.maximum(span, 1e-6)
    hue = np.select(
        [high == red, high == green],
        [((green - blue) / safe) % 6, (blue - red) / safe + 2],
        (red - green) / safe + 4,
    )
    hue = hue * 60
    warm_dark = high < 0.62
    chosen = np.full(high.shape, names.index("red"), np.uint8)
    for limit, name in ((345, "pink"), (320, "pink"), (255, "purple"), (165, "blue"), (70, "green")):
        chosen = np.where((hue < 345) & (hue >= limit), names.index(name), chosen).astype(np.uint8)
    bands = (("yellow", 45, 70), ("orange", 16, 45))
    for name, start, end in bands:
        inside = (hue >= start) & (hue < end)
        shade = "brown" if name == "orange" else "green"
        chosen = np.where(inside, np.where(warm_dark, names.index(shade), names.index(name)), chosen)
    for name, start, end in (("blue", 165, 255), ("purple", 255, 320), ("pink", 320, 345)):
        chosen = np.where((hue >= start) & (hue < end), names.index(name), chosen)
    reddish = (hue >= 345) | (hue < 16)
    chosen = np.where(reddish & (high < 0.45), names.index("brown"), chosen)
    chosen = np.where(reddish & (saturation < 0.45) & (high > 0.75), names.index("pink"), chosen)
    # Skin, wood and cardboard: an orange that is not vivid is called brown.
    chosen = np.where((hue >= 16) & (hue < 45) & (saturation < 0.55), names.index("brown"), chosen)
    plain = saturation < 0.16
    chosen = np.where(plain, names.index("grey"), chosen)
    chosen = np.where((saturation < 0.12) & (high > 0.82), names.index("white"), chosen)
    result: npt.NDArray[np.uint8] = np.where(high < 0.16, names.index("black"), chosen).astype(np.uint8)
    return result
