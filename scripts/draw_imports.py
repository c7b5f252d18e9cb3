"""Draw the folders of the package and the imports between them as SVG (docs/imports.svg).

    .venv/bin/python -m scripts.draw_imports > docs/imports.svg
    .venv/bin/python -m scripts.draw_imports --commit 05756eb > docs/imports-before.svg

A box is a folder, on the floor of most of its modules (tests/test_floors.py); each square in it is a module,
red if it imports itself in a circle. A line runs from the foot of the importing folder to the imported one,
the wider the more imports; it is red where a module imports from a higher floor.
"""

import argparse
import ast
import subprocess
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from io import BytesIO
from math import sqrt
from pathlib import Path

from tests.test_floors import floor_of

ROOT = Path(__file__).parent.parent
PACKAGE = "src/vlfit"
WIDTH, MARGIN, GAP = 1500, 20, 14
SQUARE, PER_ROW, TITLE = 8, 10, 30
FEWEST = 4  # imports that make a line; with all of them nothing could be seen
FLOOR_NAMES = (
    "0  what all others speak of",
    "1  what fits",
    "2  the model itself",
    "3  who runs the model",
    "4  what a person came for",
    "5  what a person touches",
)


@dataclass(frozen=True)
class Box:
    """A folder as drawn. ``modules``: their dotted names; ``x``, ``y``: the upper left corner."""

    name: str
    modules: tuple[str, ...]
    x: float
    y: float
    width: float
    height: float

    def nearest(self, other: "Box") -> float:
        """The x of a line to or from ``other``: on this box, as near to the middle of the other as can be."""
        return min(max(other.x + other.width / 2, self.x + 6), self.x + self.width - 6)


def sources(commit: str | None) -> dict[str, str]:
    """The text of every module by dotted name, of ``commit`` or of the working tree."""
    if commit is None:
        files = {
            path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
            for path in (ROOT / PACKAGE).rglob("*.py")
        }
    else:
        packed = subprocess.run(
            ["git", "archive", commit, PACKAGE], cwd=ROOT, capture_output=True, check=True
        ).stdout
        with tarfile.open(fileobj=BytesIO(packed)) as archive:
            files = {
                member.name: file.read().decode()
                for member in archive
                if member.name.endswith(".py") and (file := archive.extractfile(member)) is not None
            }
    named = {name.removeprefix("src/").removesuffix(".py").replace("/", "."): t for name, t in files.items()}
    return {name: text for name, text in named.items() if name.rpartition(".")[2] not in _NOT_DRAWN}


_NOT_DRAWN = {"__init__", "__main__", "_version"}
_IMPORTED_BY_ALL = ("vlfit.errors", "vlfit.settings", "vlfit.units")


def imported(text: str, modules: Mapping[str, str]) -> Iterator[str]:
    """The module that each import in ``text`` names, if it is one of ``modules``, as often as it is named."""
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & modules.keys()
            names = sorted(inner) or [node.module]
        yield from (name for name in names if name in modules)


def in_circles(edges: Mapping[str, set[str]]) -> set[str]:
    """The modules from which imports lead back to themselves."""

    def reachable(start: str) -> set[str]:
        found: set[str] = set()
        left = list(edges[start])
        while left:
            name = left.pop()
            if name not in found:
                found.add(name)
                left += edges[name]
        return found

    return {name for name in list(edges) if name in reachable(name)}


def folder_of(module: str) -> str:
    """The folder below the package; of modules beside it, their floor stands for one."""
    parent = module.rpartition(".")[0].removeprefix("vlfit").lstrip(".")
    return f"{parent.replace('.', '/')}/" if parent else f"(beside the folders, floor {floor_of(module)})"


def floor_of_folder(modules: tuple[str, ...]) -> int:
    """The floor of most of its modules: a family's config and cost are below its folder."""
    return Counter(map(floor_of, modules)).most_common(1)[0][0]


def lay_out(
    folders: Mapping[str, tuple[str, ...]],
) -> tuple[list[Box], list[tuple[int, float, float]], float]:
    """Boxes; number, top and height of each floor; the height of all. Floor 5 is above."""
    boxes: list[Box] = []
    bands = []
    y = 60.0
    for floor in range(5, -1, -1):
        top = y
        here = [each for each in sorted(folders.items()) if floor_of_folder(each[1]) == floor]
        y += 26
        for row in rows_of(here):
            free = WIDTH - 2 * MARGIN - sum(width_of(name) for name, _ in row)
            gap = free / (len(row) + 1)
            x = MARGIN + gap
            for name, modules in row:
                height = TITLE + SQUARE * -(-len(modules) // PER_ROW) + 6
                boxes.append(Box(name, modules, x, y, width_of(name), height))
                x += width_of(name) + gap
            y += max(box.height for box in boxes[-len(row) :]) + 30
        bands.append((floor, top, y - top - 2))
        y += 6
    return boxes, bands, y


def width_of(name: str) -> float:
    return max(PER_ROW * SQUARE + 12, 6.3 * len(name) + 12)


def rows_of(folders: list[tuple[str, tuple[str, ...]]]) -> list[list[tuple[str, tuple[str, ...]]]]:
    """``folders`` in as few rows as they need, all about as full."""
    widths = [width_of(name) + GAP for name, _ in folders]
    rows = -(-sum(widths) // (WIDTH - 2 * MARGIN - max(widths)))
    found: list[list[tuple[str, tuple[str, ...]]]] = [[] for _ in range(int(rows))]
    done = 0.0
    for each, width in zip(folders, widths, strict=True):
        found[int(done / sum(widths) * rows)].append(each)
        done += width
    return found


def draw_box(box: Box, circular: set[str]) -> str:
    squares = ["", ""]
    for number, module in enumerate(box.modules):
        column, row = number % PER_ROW, number // PER_ROW
        x, y = box.x + 6 + column * SQUARE, box.y + TITLE + row * SQUARE
        squares[module in circular] += f"M{x:.0f} {y:.0f}h6v6h-6z"
    paths = "".join(
        f'<path d="{path}" fill="{colour}"/>'
        for path, colour in zip(squares, ("#4a6fa5", "#c0392b"), strict=True)
        if path
    )
    return (
        f'<rect x="{box.x:.0f}" y="{box.y:.0f}" width="{box.width:.0f}" height="{box.height:.0f}" rx="4" '
        f'fill="#fff" stroke="#8a94a6"/>'
        f'<text x="{box.x + 6:.0f}" y="{box.y + 12:.0f}">{escape(box.name)}</text>'
        f'<text x="{box.x + 6:.0f}" y="{box.y + 24:.0f}" class="n">{len(box.modules)}</text>{paths}'
    )


def draw_line(start: Box, end: Box, count: int, *, up: bool) -> str:
    x1, x2 = start.nearest(end), end.nearest(start)
    y1 = start.y + start.height
    if end.y > y1:
        y2 = end.y
        bend = (y2 - y1) / 2
        path = f"M{x1:.0f} {y1:.0f}C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2:.0f}"
    else:
        y2 = end.y + end.height
        low = max(y1, y2) + 22
        path = f"M{x1:.0f} {y1:.0f}C{x1:.0f} {low:.0f} {x2:.0f} {low:.0f} {x2:.0f} {y2:.0f}"
    colour = ' class="up"' if up else ""
    title = f"{start.name} imports {end.name} {count} times"
    return f'<path d="{path}" stroke-width="{0.6 * sqrt(count):.1f}"{colour}><title>{title}</title></path>'


def draw(modules: Mapping[str, str], heading: str) -> str:
    edges: dict[str, set[str]] = defaultdict(set)
    counts: Counter[tuple[str, str]] = Counter()
    climbing: set[tuple[str, str]] = set()
    for name, text in modules.items():
        for wanted in imported(text, modules):
            edges[name].add(wanted)
            if folder_of(name) != folder_of(wanted) and not wanted.endswith(_IMPORTED_BY_ALL):
                pair = folder_of(name), folder_of(wanted)
                counts[pair] += 1
                if floor_of(name) < floor_of(wanted):
                    climbing.add(pair)
    circular = in_circles(edges)
    members: dict[str, list[str]] = defaultdict(list)
    for name in sorted(modules):
        members[folder_of(name)].append(name)
    folders = {name: tuple(inside) for name, inside in members.items()}
    boxes, bands, height = lay_out(folders)
    by_name = {box.name: box for box in boxes}
    lines = [
        draw_line(by_name[start], by_name[end], count, up=(start, end) in climbing)
        for (start, end), count in sorted(counts.items(), key=lambda item: item[1])
        if count >= FEWEST or (start, end) in climbing
    ]
    facts = (
        f"{heading}: {len(modules)} modules in {len(folders)} folders, {len(circular)} modules in circles of "
        f"imports (red). {len(lines)} of {len(counts)} lines are drawn: "
        f"not those of fewer than {FEWEST} imports, nor those to errors, settings and units."
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        'font-family="sans-serif" font-size="11">',
        "<style>.n{fill:#667}.l path{fill:none;stroke:#555;stroke-opacity:.3}"
        ".l path.up{stroke:#c0392b;stroke-opacity:.8}.l path:hover{stroke:#d35400;stroke-opacity:1}</style>",
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#fff"/>',
        f'<text x="{MARGIN}" y="34" font-size="15">{escape(facts)}</text>',
    ]
    for floor, top, tall in bands:
        parts.append(f'<rect y="{top:.0f}" width="{WIDTH}" height="{tall:.0f}" fill="#eef1f6"/>')
        parts.append(f'<text x="{MARGIN}" y="{top + 17:.0f}" font-weight="bold">{FLOOR_NAMES[floor]}</text>')
    parts += ['<g class="l">', *lines, "</g>", *(draw_box(box, circular) for box in boxes), "</svg>"]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commit", help="the tree of this commit, not the working tree")
    options = parser.parse_args()
    print(draw(sources(options.commit), options.commit or "Now"))


if __name__ == "__main__":
    main()
