"""Layout of pictures that look like a screenshot or a page: panels, bars, buttons, lines of unreadable text.

They have no things, since of such a picture mini can only say what sort it is.
"""

import numpy as np

from training.mini.atlas import Atlas
from training.mini.scenes import MAX_SLOTS, Background, Finish, Scene, Thing

# Lines of letters are this high, in pixels: too low to be read.
LINE_HEIGHT = (5.0, 11.0)
LIGHT = ((250, 250, 250), (240, 242, 245), (255, 255, 255), (228, 230, 235))
DARK = ((24, 26, 30), (34, 36, 44), (18, 18, 20), (45, 48, 56))
ACCENTS = ((30, 110, 230), (20, 150, 90), (220, 60, 50), (110, 70, 190), (240, 150, 20))


def draw_screen(
    seed: int, size: tuple[int, int], random: np.random.Generator, atlas: Atlas, finish: Finish
) -> Scene:
    """A page: a bar at the top, sometimes one at the side, a button or two, and lines of lettering."""
    dark = bool(random.random() < 0.35)
    ground = _one(DARK if dark else LIGHT, random)
    ink = (235, 235, 235) if dark else (30, 30, 34)
    panel = _one(DARK if dark else LIGHT, random)
    square = atlas.by_name["shape", "square"][0]
    left, top = 0.06, 0.06
    marks: list[Thing] = []
    if random.random() < 0.75:
        height = float(random.uniform(0.07, 0.14))
        tint = _one(ACCENTS, random) if random.random() < 0.6 else panel
        marks.append(_block(square, 0.0, 0.0, 1.0, height, tint))
        top += height
    if random.random() < 0.45:
        width = float(random.uniform(0.16, 0.3))
        marks.append(_block(square, 0.0, top - 0.06, width, 1.06 - top, panel))
        left += width
    for _ in range(int(random.integers(0, 3))):
        width, height = float(random.uniform(0.14, 0.26)), float(random.uniform(0.06, 0.1))
        x, y = float(random.uniform(left, 0.96 - width)), float(random.uniform(0.78, 0.94 - height))
        marks.append(_block(square, x, y, width, height, _one(ACCENTS, random)))
    marks += _lines(random, size, atlas, (left, top), ink, MAX_SLOTS - len(marks))
    background = Background("plain", ("black" if dark else "white",), (ground,))
    return Scene(seed, *size, background, (), tuple(marks), "screen", finish=finish)


def _lines(
    random: np.random.Generator, size: tuple[int, int], atlas: Atlas, start: tuple[float, float],
    ink: tuple[int, int, int], count: int,
) -> list[Thing]:  # fmt: skip
    """Rows of small words, until there are ``count`` words or no room is left; at least one."""
    textures = [index for (kind, _), found in atlas.by_name.items() if kind == "word" for index in found]
    textures = textures or [
        index for (kind, _), found in atlas.by_name.items() if kind == "number" for index in found
    ]
    height = float(random.uniform(*LINE_HEIGHT)) / size[1]
    x, y = start[0], start[1] + height
    lines: list[Thing] = []
    while len(lines) < count and y + height < 0.98:
        texture = textures[int(random.random() * len(textures))]
        width = min(atlas.aspects[texture] * height * size[1] / size[0], 0.96 - x)
        if width > 0.02:
            # "lettering", not "word": it is not to be read.
            lines.append(
                Thing("lettering", "", "", ink, texture, x + width / 2, y + height / 2, width, height)
            )
        x += width + 0.02
        if x > 0.8 or random.random() < 0.35:
            x, y = start[0], y + height * float(random.uniform(1.5, 3.0))
    return lines


def _block(
    square: int, left: float, top: float, width: float, height: float, tint: tuple[int, int, int]
) -> Thing:
    return Thing("panel", "", "", tint, square, left + width / 2, top + height / 2, width, height)


def _one(choices: tuple[tuple[int, int, int], ...], random: np.random.Generator) -> tuple[int, int, int]:
    return choices[int(random.random() * len(choices))]
