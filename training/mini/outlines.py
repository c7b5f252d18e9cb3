"""Outlines of the shapes that mini can name."""

from math import cos, pi, sin

from PIL import Image, ImageDraw


def draw_shape(name: str) -> Image.Image:
    """One shape in white on nothing, drawn four times too large and then reduced for smooth edges."""
    size = 512
    mask = Image.new("L", (size, size), 0)
    pen = ImageDraw.Draw(mask)
    if name in ("circle", "oval"):
        box = (0, 0, size, size) if name == "circle" else (0, 112, size, 400)
        pen.ellipse(box, fill=255)
    elif name == "ring":
        pen.ellipse((0, 0, size, size), fill=255)
        pen.ellipse((120, 120, size - 120, size - 120), fill=0)
    elif name == "crescent":
        pen.ellipse((0, 0, size, size), fill=255)
        pen.ellipse((170, -40, size + 130, size - 90), fill=0)
    elif name == "heart":
        pen.polygon([_heart_point(step / 100 * 2 * pi) for step in range(100)], fill=255)
    else:
        pen.polygon([(x * size, y * size) for x, y in _corners(name)], fill=255)
    picture = Image.new("RGBA", (size, size), (255, 255, 255, 0))
    picture.putalpha(mask)
    return picture


def _heart_point(angle: float) -> tuple[float, float]:
    x = 16 * sin(angle) ** 3
    y = 13 * cos(angle) - 5 * cos(2 * angle) - 2 * cos(3 * angle) - cos(4 * angle)
    return 256 + x * 15, 230 - y * 15


def _corners(name: str) -> list[tuple[float, float]]:
    """Corners of a straight-edged shape, in the unit square."""
    low, high = 1 / 3, 2 / 3
    match name:
        case "square":
            return [(0, 0), (1, 0), (1, 1), (0, 1)]
        case "rectangle":
            return [(0, 0.22), (1, 0.22), (1, 0.78), (0, 0.78)]
        case "triangle":
            return [(0.5, 0.02), (1, 0.9), (0, 0.9)]
        case "diamond":
            return [(0.5, 0), (0.9, 0.5), (0.5, 1), (0.1, 0.5)]
        case "hexagon":
            return [(0.5 + 0.5 * cos(step * pi / 3), 0.5 + 0.5 * sin(step * pi / 3)) for step in range(6)]
        case "cross":
            return [
                (low, 0), (high, 0), (high, low), (1, low), (1, high), (high, high),
                (high, 1), (low, 1), (low, high), (0, high), (0, low), (low, low),
            ]  # fmt: skip
        case "arrow":
            return [(0, 0.38), (0.55, 0.38), (0.55, 0.15), (1, 0.5), (0.55, 0.85), (0.55, 0.62), (0, 0.62)]
        case "star":
            radii = (0.5, 0.2)
            angles = [step * pi / 5 - pi / 2 for step in range(10)]
            return [
                (0.5 + radii[i % 2] * cos(angle), 0.5 + radii[i % 2] * sin(angle))
                for i, angle in enumerate(angles)
            ]
    raise ValueError(f"no drawing for the shape {name!r}")
