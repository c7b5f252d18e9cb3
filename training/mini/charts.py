"""Layout of small bar charts: two to five bars of different colours, each with its number on top."""

import numpy as np

from training.mini.atlas import Atlas
from training.mini.scenes import Thing
from training.mini.vocabulary import COLOURS

MOST_BARS = 5
HIGHEST = 20
# Where the line stands and how high the highest bar may reach, as fractions of the picture from the top.
GROUND, CEILING = 0.9, 0.2


def draw_chart(
    random: np.random.Generator, size: tuple[int, int], atlas: Atlas, ground_colour: str
) -> tuple[tuple[Thing, ...], tuple[Thing, ...]]:
    """The bars from left to right, and the marks: a number over each bar and the line they stand on."""
    count = int(random.integers(2, MOST_BARS + 1))
    # Bars of one value would make "which is the tallest" arguable.
    values = [int(value) for value in 1 + random.permutation(HIGHEST)[:count]]
    free = [name for name in COLOURS if name != ground_colour]
    names = [free[int(index)] for index in random.permutation(len(free))[:count]]
    dark = ground_colour not in ("black", "blue", "purple", "brown", "red", "green")
    ink = (20, 20, 20) if dark else (245, 245, 245)
    square = atlas.by_name["shape", "square"][0]
    pitch = 0.86 / count
    bars, marks = [], []
    for number, (value, name) in enumerate(zip(values, names, strict=True)):
        red, green, blue = (int(random.integers(low, high + 1)) for low, high in COLOURS[name])
        tint = (red, red, red) if name == "grey" else (red, green, blue)
        height = (GROUND - CEILING) * value / max(values)
        x = 0.07 + pitch * (number + 0.5)
        bar = Thing(
            "bar", "bar", name, tint, square, x, GROUND - height / 2, pitch * 0.7, height, value=value
        )
        bars.append(bar)
        marks.append(_number_over(bar, str(value), random, size, atlas, ink))
    marks.append(Thing("line", "line", "", ink, square, 0.5, GROUND + 0.006, 0.9, 0.012))
    return tuple(bars), tuple(marks)


def _number_over(
    bar: Thing, text: str, random: np.random.Generator, size: tuple[int, int], atlas: Atlas,
    ink: tuple[int, int, int],
) -> Thing:  # fmt: skip
    drawings = atlas.by_name["number", text]
    texture = drawings[int(random.integers(len(drawings)))]
    down = max(0.09 * size[1], 17.0)
    across = min(down * atlas.aspects[texture], 0.9 * bar.width * size[0] / 0.7)
    top = bar.y - bar.height / 2
    y = max(top - 0.015 - down / size[1] / 2, down / size[1] / 2)
    return Thing("number", text, "", ink, texture, bar.x, y, across / size[0], down / size[1])
