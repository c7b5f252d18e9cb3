"""Score mini: put the held-out questions to a checkpoint, through vlfit's own engine.

    python -m training.mini.evaluate
    python -m training.mini.evaluate --model build/mini --clothes FOLDER --json scores.json
    python -m training.mini.evaluate --copies                   also its FP8 and int4 copies
    python -m training.mini.evaluate --only written --only name --sample 200

Prints a table by topic. The exit status is 1 if a gate is missed, 2 if what was asked for cannot be done. In
a --sample, a gate that is missed on fewer than 50 questions is too few to tell, and fails nothing.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from training.mini.arguments import file_to_write, whole_number
from training.mini.asking import ask_all
from training.mini.gates import (
    MAX_COPY_LOSS,
    MIN_SAMPLE,
    Row,
    ScoredAnswer,
    copies_pass,
    drop,
    drop_lines,
    gates_pass,
    summarize,
    table_lines,
)
from training.mini.held_out import SHIPPED, HeldOut, only, read, sample, topics_of
from training.mini.teller import Exchange
from training.mini.vocabulary import CLOTHES
from vlfit.errors import VlfitError

CLOTHES_QUESTION = "What piece of clothing is this?"
NOT_ASKED = "clothes: not asked. The photos are no part of the project: --clothes FOLDER asks FOLDER/CLASS/*."
# Two copies of 2,000 cost about as long as the original; fewer, and chance alone could lose half a point.
COPY_SAMPLE = 2000
WRONG = 0.5


def clothes_in(folder: Path) -> list[HeldOut]:
    """A question about each photo of FOLDER/CLASS/*.

    Raises ``ValueError`` if a class is missing or empty, or is none that mini was taught.
    """
    found = {path.name for path in folder.iterdir() if path.is_dir()} if folder.is_dir() else set()
    if found != set(CLOTHES):
        raise ValueError(
            f"{folder} must hold one folder of photos for each of {', '.join(CLOTHES)}; "
            f"it holds {', '.join(sorted(found)) or 'no folders'}"
        )
    items = []
    for name, phrase in CLOTHES.items():
        exchange = Exchange("clothes", CLOTHES_QUESTION, f"It is {phrase}.")
        photos = sorted(path for path in (folder / name).iterdir() if path.is_file())
        if not photos:
            raise ValueError(f"{folder / name} holds no photos")
        items += [
            HeldOut(f"{name}/{path.name}", (path.read_bytes(),), False, "", ((exchange,),)) for path in photos
        ]
    return items


def questions_for(arguments: argparse.Namespace) -> list[HeldOut]:
    """What the command line asks for. Raises ``OSError`` or ``ValueError`` where it cannot be had."""
    items = read(arguments.questions)
    if arguments.clothes:
        items += clothes_in(arguments.clothes)
    if arguments.only:
        known = topics_of(items)
        if unknown := [topic for topic in arguments.only if topic not in known]:
            if "clothes" in unknown:
                raise ValueError("clothes are asked about photos that do not ship: give --clothes FOLDER too")
            raise ValueError(f"no question is about {_quoted(unknown)}; the topics are {_quoted(known)}")
        items = only(items, arguments.only)
    return sample(items, arguments.sample) if arguments.sample else items


def _quoted(topics: list[str]) -> str:
    """Topics hold commas and spaces."""
    return ", ".join(f'"{topic}"' for topic in topics)


def evaluate(model: str, items: list[HeldOut], name: str, processes: int) -> list[ScoredAnswer]:
    """All answers of a checkpoint, judged; says on a terminal how far it is."""
    total = sum(item.questions for item in items)

    def progress(count: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{name}: {count} of {total} answers\033[K", end="", file=sys.stderr, flush=True)

    progress(0)
    try:
        return ask_all(model, items, progress, processes)
    finally:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def ask_copies(model: str, items: list[HeldOut], processes: int) -> dict[str, list[ScoredAnswer]]:
    """Answers of the FP8 and int4 copies that ``vlfit convert`` makes, to a sample of the same questions.

    Raises ``ValueError`` with the converter's own words if it fails.
    """
    chosen = sample(items, COPY_SAMPLE)
    answers = {}
    with tempfile.TemporaryDirectory() as folder:
        for weights in MAX_COPY_LOSS:
            out = Path(folder) / weights
            command = (
                sys.executable,
                "-m",
                "vlfit",
                "convert",
                model,
                "--weights",
                weights,
                "--out",
                str(out),
            )
            made = subprocess.run(command, capture_output=True, text=True)
            if made.returncode:
                raise ValueError(f"vlfit convert --weights {weights} failed: {made.stderr.strip()}")
            answers[weights] = evaluate(str(out), chosen, weights, processes)
    return answers


def as_json(
    model: str,
    judged: list[ScoredAnswer],
    table: dict[str, Row],
    drops: dict[str, dict[str, float]],
    seconds: float,
) -> str:
    """Scores, what copies lose, and every wrong answer, for machines."""
    wrong = [
        {"picture": one.picture, **asdict(one.exchange), "said": one.said}
        for one in judged
        if one.score < WRONG
    ]
    topics = {
        topic.strip(): {**asdict(row), "passes": row.passes, "missed": row.missed}
        for topic, row in table.items()
    }
    value = {
        "model": model,
        "seconds": round(seconds),
        "topics": topics,
        "points_lost": drops,
        "wrong": wrong,
    }
    return json.dumps(value, indent=1) + "\n"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m training.mini.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="mini", help="mini, or a checkpoint folder (default: mini, the one that ships)")
    add("--questions", type=Path, default=SHIPPED, metavar="FILE.zip", help="default: those that ship")
    add("--clothes", type=Path, metavar="FOLDER", help="also ask what each photo of FOLDER/CLASS/* shows")
    add("--only", action="append", metavar="TOPIC", help="only this topic; may be given several times")
    add(
        "--sample",
        type=whole_number(1),
        metavar="N",
        help="about N of the questions, of every topic its share",
    )
    add(
        "--processes",
        type=whole_number(1),
        default=0,
        metavar="N",
        help="default: as many as there are cores",
    )
    add("--copies", action="store_true", help="also score the FP8 and int4 copies that vlfit convert makes")
    add("--json", type=file_to_write, metavar="FILE", help="write scores and wrong answers there")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Ask, print, judge; returns the exit status."""
    options = parser().parse_args(arguments)
    started = time.monotonic()
    try:
        items = questions_for(options)
        judged = evaluate(options.model, items, "original", options.processes)
        table = summarize(judged, sampled=bool(options.sample))
        print("\n".join(table_lines(table)), flush=True)
        copies = ask_copies(options.model, items, options.processes) if options.copies else {}
    except (OSError, ValueError, VlfitError) as error:
        print(f"evaluate: {error}", file=sys.stderr)  # an error of vlfit says what to do on a line of its own
        return 2
    sampled = bool(options.sample)
    drops = {weights: drop(judged, answers) for weights, answers in copies.items()}
    for weights, lost in drops.items():
        print("\n".join(drop_lines(weights, lost, len(copies[weights]), sampled)))
    if not options.clothes:
        print(NOT_ASKED)
    seconds = time.monotonic() - started
    print(f"{len(judged)} questions in {seconds:.0f} s")
    if options.json:
        options.json.write_text(as_json(options.model, judged, table, drops, seconds))
    partial = bool(options.only or options.sample)
    told = {w: lost for w, lost in drops.items() if not sampled or len(copies[w]) >= MIN_SAMPLE}
    return 0 if gates_pass(table, partial) and copies_pass(told) else 1


if __name__ == "__main__":
    raise SystemExit(main())
