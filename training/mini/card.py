"""The model card beside trained weights: what they are, how and from what they were made, how good they are.

Sources are those that ``prepare`` recorded. What is not recorded is said to be so.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from training.mini.emoji import HELD_OUT
from training.mini.shape import MINI35, QWEN3_5, QWEN3_VL, Shape

MADE = "## How it was made"
NAMES = {QWEN3_VL: "Qwen3-VL", QWEN3_5: "Qwen3.5"}
ONLY_SCORED = frozenset(f"npm:@iconify-json/{name}" for name in HELD_OUT)
BUILT_IN = (
    "No materials were fetched: its pictures show the shapes, the numbers and the few words that "
    "`training/mini` can draw by itself."
)


@dataclass(frozen=True)
class TrainingRecord:
    """How weights came about.

    ``how``: sentences. ``materials``: the folder that `prepare` wrote, or None where the drawings built in
    were used. ``scores``: by topic, 0 to 1, as training measured them, on ``each`` questions of most topics.
    ``before``: from ``previous_record``, for weights that were trained further.
    """

    how: str
    materials: Path | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    each: int = 0
    before: str = ""


def card(making: TrainingRecord | None, shape: Shape, parameters: int, folder: Path) -> str:
    """The page. ``parameters``: how many numbers the weights are; ``folder``: where they lie."""
    parts = [
        "# A model made by vlfit's training/mini",
        f"A {NAMES[shape.family]} checkpoint of {parameters / 1e6:.1f} million parameters. This page was "
        "written by the program that wrote the weights. It is not the mini that ships with vlfit: the scores "
        "on that one's card are not those of this model. Which licence these weights have, those must say "
        "who made them.",
        MADE,
        *(["Nothing is recorded of it."] if making is None else made(making)),
        "## How good it is",
        scored(making),
        f"The held-out questions, which the scores of the mini that ships are of, have to be asked: "
        f"`python -m training.mini.evaluate --model {folder}`.",
        "## What it cannot do",
        limits(making, shape),
    ]
    return "\n\n".join(parts) + "\n"


def made(making: TrainingRecord) -> list[str]:
    """The paragraphs of the section ``MADE``."""
    learnt_from = BUILT_IN if making.materials is None else sources(making.materials / "sources.json")
    return [making.how, learnt_from, *([making.before] if making.before else [])]


def sources(path: Path) -> str:
    """What the materials were made from, as a table; or that this is not known."""
    try:
        rows = [
            [str(source[key]) for key in ("package", "version", "holds", "licence", "attribution")]
            for source in json.loads(path.read_text())
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return (
            "Its materials had no `sources.json` that can be read: what they were made from is not recorded."
        )
    packages: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for package, version, holds, licence, attribution in rows:
        if package not in ONLY_SCORED:
            packages[holds, licence, attribution].append(f"{package} {version}")
    lines = ["| materials | what they hold | licence | by |", "|---|---|---|---|"]
    for (holds, licence, attribution), each in packages.items():
        cells = (", ".join(each), holds, licence, attribution)
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines)


def scored(making: TrainingRecord | None) -> str:
    """Training's own measure, as a table; or that nothing was measured."""
    if making is None or not making.scores:
        return "It was not measured as it was made."
    said = (
        f"Training's own measure of the weights written here: up to {making.each} questions of a topic "
        "(fewer of those with long answers), about scenes of seeds that training never draws, made of the "
        "same drawings and photos as those it learnt from."
    )
    rows = (f"| {topic} | {100 * value:.0f} % |" for topic, value in making.scores.items())
    return said + "\n\n" + "\n".join(["| topic | right |", "|---|---|", *rows])


def limits(making: TrainingRecord | None, shape: Shape) -> str:
    """What is known of its limits: of a model like mini those of mini, else next to nothing."""
    if shape not in (Shape(), MINI35):
        return "It is of another shape than mini's, smaller or larger: no list of its limits exists."
    if making is None or making.materials is None:
        return "It was not taught what mini was taught, as far as is recorded: no list of its limits exists."
    return (
        "As far as `training/mini` was left as it came, it was taught what the mini that ships was taught, "
        'and what that one was not taught it cannot do either: see "What it cannot do" in '
        "`src/vlfit/mini/README.md`. Where else it fails is not known."
    )


def previous_record(folder: Path) -> str:
    """How the weights in ``folder`` were made, from their own card, for the card of what comes of them."""
    try:
        text = (folder / "README.md").read_text()
    except (OSError, ValueError):
        text = ""
    section = text.partition(f"\n{MADE}\n")[2].partition("\n## ")[0].strip()
    if not section:
        return f"It began with the weights in `{folder}`. How those were made is not recorded beside them."
    quoted = "\n".join(f"> {line}".rstrip() for line in section.splitlines())
    return f"It began with the weights in `{folder}`. Of them their card says:\n\n{quoted}"
