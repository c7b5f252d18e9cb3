"""Captions of ten pictures by two checkpoints side by side, failures included; readers judge.

    python -m training.mini.compare --before FOLDER --after FOLDER [--markdown]
    python -m training.mini.compare --before FOLDER --save before.json        keeps the captions of one
    python -m training.mini.compare --before before.json --after mini         compares with kept captions

The pictures are asked as ``make demo`` asks them: the short caption, greedy, through vlfit's engine.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from vlfit.client import VLM
from vlfit.errors import VlfitError

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "pictures"
OWN = Path(__file__).parent / "ten_pictures"


@dataclass(frozen=True)
class KnownPicture:
    """One picture, and what a person sees in it."""

    path: Path
    truth: str


# Five drawn scenes as mini was taught to read them, then what it was never taught to read.
TEN = (
    KnownPicture(DEMO / "animals.png", "a frog, a dog and a fox, green to yellow background"),
    KnownPicture(DEMO / "motorcycles.png", "three motorcycles, a whale and a snail on orange"),
    KnownPicture(DEMO / "number-25.png", "the number 25, an elephant and a pink triangle on purple"),
    KnownPicture(DEMO / "shop.png", 'a phone, a chair and the word "SHOP" on purple'),
    KnownPicture(
        DEMO / "tractor-and-cat.png", "a tractor, a cat, a brown square and a yellow rectangle on red"
    ),
    KnownPicture(DEMO / "coffee.jpg", "photo: a cup of coffee on a red saucer, on a wooden table"),
    KnownPicture(
        OWN / "astronaut.jpg", "photo: a smiling astronaut in an orange suit, a flag, a model of a shuttle"
    ),
    KnownPicture(OWN / "chelsea.jpg", "photo: the face of a tabby cat, close up"),
    KnownPicture(OWN / "rocket.jpg", "photo: a rocket on its launch pad under a dark blue sky"),
    KnownPicture(OWN / "red.jpg", "nothing but red"),
)


class CannotCompare(Exception):
    """What was given is no checkpoint and no file of kept words. Says what to do."""


def words_of(source: str) -> dict[str, str]:
    """Captions of the ten by file name: from a ``.json`` file that ``--save`` wrote, or from a checkpoint.

    ``source`` is such a file, a checkpoint folder, or ``mini``. Raises CannotCompare or a VlfitError.
    """
    if source.endswith(".json"):
        return kept_words(Path(source))
    with VLM(source) as vlm:
        return {shown.path.name: vlm.caption(shown.path).text for shown in TEN}


def kept_words(path: Path) -> dict[str, str]:
    """Captions that ``--save`` wrote. Raises CannotCompare if the file has not one for each of the ten."""
    try:
        words = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CannotCompare(f"{path} cannot be read as kept words: {error}") from error
    names = {shown.path.name for shown in TEN}
    if not isinstance(words, dict) or not all(isinstance(text, str) for text in words.values()):
        raise CannotCompare(f"{path} holds no captions by file name; write it anew with --save")
    if missing := sorted(names - set(words)):
        raise CannotCompare(f"{path} lacks {', '.join(missing)}; write it anew with --save")
    return words


def table(columns: dict[str, dict[str, str]], markdown: bool) -> str:
    """The ten, one after another, with the captions of each column's checkpoint (before, after)."""
    if markdown:
        lines = [f"| picture | what it shows | {' | '.join(columns)} |", "|---" * (2 + len(columns)) + "|"]
        for shown in TEN:
            cells = [
                f"`{shown.path.name}`",
                shown.truth,
                *(words[shown.path.name] for words in columns.values()),
            ]
            lines.append(f"| {' | '.join(map(in_a_cell, cells))} |")
        return "\n".join(lines)
    blocks = []
    for shown in TEN:
        rows = [("shows", shown.truth), *((name, words[shown.path.name]) for name, words in columns.items())]
        blocks.append("\n".join([shown.path.name, *(f"  {name:<8}{text}" for name, text in rows)]))
    return "\n\n".join(blocks)


def in_a_cell(text: str) -> str:
    """Text as a Markdown table takes it: on one line, with no bar that would end the cell."""
    return " ".join(text.split()).replace("|", "\\|")


def main(given: list[str] | None = None) -> int:
    """Ask, print, keep; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", help="checkpoint folder, mini, or a .json file of kept words")
    parser.add_argument("--after", help="the same for the other checkpoint")
    parser.add_argument("--markdown", action="store_true", help="a table for the model card")
    parser.add_argument("--save", type=Path, help="keep the words of the checkpoint given last, as JSON")
    arguments = parser.parse_args(given)
    sources = {"before": arguments.before, "after": arguments.after}
    asked = {name: source for name, source in sources.items() if source}
    if not asked:
        parser.error("give --before or --after or both")
    try:
        columns = {name: words_of(source) for name, source in asked.items()}
    except (CannotCompare, VlfitError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(columns, arguments.markdown))
    if arguments.save:
        arguments.save.write_text(json.dumps(columns[list(columns)[-1]], indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
