"""Layout of a scene: random sizes and places for its things, without overlap."""

from dataclasses import replace
from math import cos, radians, sin, sqrt

import numpy as np

from training.mini.scenes import Thing

# Sides in short sides of the picture; pixels where letters would otherwise be too small to read.
SMALLEST = 0.14
LEAST_HEIGHT = {"number": 22.0, "word": 24.0}
ATTEMPTS = 40
Box = tuple[float, float, float, float]


def arrange(
    wanted: list[Thing], random: np.random.Generator, size: tuple[int, int], single: bool
) -> list[Thing]:
    """The things from left to right, each with a size and a free place.

    ``wanted`` bear their aspect as width to 1. Those for which there is no room are left out, but never
    all. Raises ``ValueError`` if not even one finds room.
    """
    placed: list[Thing] = []
    boxes: list[Box] = []
    count = len(wanted)
    # Members of a group share a size, so that "how many" does not hinge on specks.
    alike = not single and random.random() > 0.4
    shared = float(random.uniform(0.17, max(0.2, 0.9 / sqrt(count)))) if alike else None
    largest = min(0.5, 1.0 / sqrt(count))
    for thing in wanted:
        gap = -0.02 if random.random() < 0.03 else 0.012
        for attempt, lots in enumerate(random.random((ATTEMPTS, 3)).tolist()):
            side = shared if shared is not None else 0.15 + (largest - 0.15) * lots[0]
            side = 0.25 + 0.62 * lots[0] if single else min(0.45, side)
            side = max(side * (1 - attempt / (2 * ATTEMPTS)), SMALLEST)
            box = _box(thing, side, lots[1], lots[2], size)
            if box is not None and not any(_touch(box, other, gap) for other in boxes):
                boxes.append(box)
                across, down = _pixels(thing, side, size)
                placed.append(
                    replace(thing, x=box[0], y=box[1], width=across / size[0], height=down / size[1])
                )
                break
    if not placed:
        raise ValueError(f"no room for a {wanted[0].name} in {size[0]} x {size[1]} pixels")
    return sorted(placed, key=lambda thing: thing.x)


def _pixels(thing: Thing, side: float, size: tuple[int, int]) -> tuple[float, float]:
    """Width and height for an area of ``side`` x ``side`` (in short sides of the picture)."""
    aspect = thing.width
    height = max(side * min(size) / sqrt(aspect), LEAST_HEIGHT.get(thing.kind, 18.0))
    # A long word takes the height that fits, down to what can be read.
    height = min(height, 0.94 * size[0] / aspect)
    return height * aspect, height


def _box(thing: Thing, side: float, x: float, y: float, size: tuple[int, int]) -> Box | None:
    """Centre and half extents (fractions) at the lots ``x`` and ``y``; None if it is too large."""
    across, down = _pixels(thing, side, size)
    turn = radians(abs(thing.angle))
    half_width = (across * cos(turn) + down * sin(turn)) / 2 / size[0]
    half_height = (across * sin(turn) + down * cos(turn)) / 2 / size[1]
    if half_width > 0.49 or half_height > 0.49:
        return None
    return (
        half_width + x * (1 - 2 * half_width),
        half_height + y * (1 - 2 * half_height),
        half_width,
        half_height,
    )


def _touch(one: Box, other: Box, gap: float) -> bool:
    """Whether two boxes (centre, half extents) come closer than ``gap``."""
    return (
        abs(one[0] - other[0]) < one[2] + other[2] + gap and abs(one[1] - other[1]) < one[3] + other[3] + gap
    )
