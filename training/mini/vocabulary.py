"""Colours, shapes, clothes and places that scenes are drawn from, with articles and plurals.

Also the rule that gives a pixel its colour name.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from training.mini.things import THINGS

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

IRREGULAR_PLURALS: Final = {"cross": "crosses"} | {
    name: thing.plural for name, thing in THINGS.items() if thing.plural
}

# Things that are one by nature or have no natural "two": said with a measure, or bare, and never counted.
PAIRS: Final = (
    "scissors", "glasses", "sunglasses", "jeans", "gloves", "socks", "shorts", "skis", "chopsticks",
    "headphones", "maracas", "cherries", "swords", "scales",
)  # fmt: skip
MEASURES: Final[dict[str, str]] = dict.fromkeys(PAIRS, "a pair of") | {
    "cheese": "a piece of",
    "bread": "a loaf of",
    "bacon": "a piece of",
    "chocolate": "a bar of",
    "honey": "a pot of",
    "corn": "an ear of",
    "garlic": "a bulb of",
    "broccoli": "a head of",
    "grapes": "a bunch of",
    "blueberries": "some",
    "pancakes": "a stack of",
    "fries": "some",
    "rice": "a bowl of",
    "spaghetti": "a plate of",
    "sushi": "some",
    "popcorn": "a bucket of",
    "ice cream": "an",
    "milk": "a glass of",
    "champagne": "a bottle of",
    "beer": "a glass of",
    "soda": "a cup of",
    "bubble tea": "a cup of",
    "fire": "a",
    "bowling pins": "some",
    "lightning": "a bolt of",
    "soap": "a bar of",
    "toilet paper": "a roll of",
    "yarn": "a ball of",
}
UNCOUNTED: Final = frozenset(MEASURES)
# Names whose first letter misleads about "a" and "an".
SAID_WITH_A: Final = frozenset({"unicorn"})
SAID_WITH_AN: Final = frozenset({"hourglass"})

# The groups about which one can ask "How many ... are there?" without an argument about what belongs to them.
GROUP_PLURALS: Final[dict[str, str]] = {
    "animal": "animals",
    "plant": "plants",
    "food": "pieces of food",
    "drink": "drinks",
    "vehicle": "vehicles",
    "building": "buildings",
    "clothing": "pieces of clothing",
    "bag": "bags",
    "instrument": "musical instruments",
    "tool": "tools",
    "furniture": "pieces of furniture",
    "body part": "body parts",
}
GROUP_PHRASES: Final[dict[str, str]] = {
    "food": "a piece of food",
    "clothing": "a piece of clothing",
    "furniture": "a piece of furniture",
    "instrument": "a musical instrument",
}

# The classes of the clothes photos, by the name of their folder, as they are said.
CLOTHES: Final[dict[str, str]] = {
    "dress": "a dress",
    "hat": "a hat",
    "longsleeve": "a long-sleeved top",
    "outwear": "a jacket",
    "pants": "a pair of trousers",
    "shirt": "a shirt",
    "shoes": "a pair of shoes",
    "shorts": "a pair of shorts",
    "skirt": "a skirt",
    "t-shirt": "a t-shirt",
}

NUMBER_WORDS: Final = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

# Row and column, in thirds of the picture.
PLACES: Final = (
    ("top left", "top", "top right"),
    ("left", "centre", "right"),
    ("bottom left", "bottom", "bottom right"),
)


def plural(name: str) -> str:
    """More than one of a thing: "star" -> "stars"; of a group too: "clothing" -> "pieces of clothing"."""
    if name in GROUP_PLURALS:
        return GROUP_PLURALS[name]
    return IRREGULAR_PLURALS.get(name, name + "s")


def with_article(name: str) -> str:
    """ "owl" -> "an owl"; "scissors" -> "a pair of scissors"; a group too: "food" -> "a piece of food"."""
    if name in GROUP_PHRASES:
        return GROUP_PHRASES[name]
    if name in MEASURES:
        return f"{MEASURES[name]} {name}"
    vowel = name in SAID_WITH_AN or (name[0] in "aeiou" and name not in SAID_WITH_A)
    return f"{'an' if vowel else 'a'} {name}"


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
