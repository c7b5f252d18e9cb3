"""How good mini is: put the held-out questions to the shipped checkpoint, through vlfit's own engine.

    python -m training.mini.evaluate [--model mini] [--questions FILE.zip] [--json scores.json]

Prints a table by topic. Exit status 1 if a gate is missed. A few minutes on two CPU cores.
Knows: the gates. Does not know: how an answer is judged (measure) or where questions come from (held_out).
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from training.mini.held_out import SHIPPED, HeldOut, read
from training.mini.measure import score
from training.mini.texts import Exchange
from vlfit import VLM

# The share of right answers below which mini is not shipped.
GATES = {"colour": 0.95, "place": 0.95, "count": 0.95, "shape": 0.9, "name": 0.9}
HOW_JUDGED = {
    "photo": "called a photo, main colours named",
    "grounding": "mean overlap of boxes (IoU)",
    "analysis": "labels and text right, boxes overlap by half",
}
AT_ONCE = 4


@dataclass(frozen=True)
class Judged:
    """One question, what mini said, and what that is worth (0 to 1)."""

    picture: str
    exchange: Exchange
    said: str
    score: float


def ask_all(vlm: VLM, questions: list[HeldOut]) -> Iterator[Judged]:
    """Ask everything, a few at a time so that the engine can batch them."""

    def judge(pair: tuple[HeldOut, Exchange]) -> Judged:
        held_out, exchange = pair
        said = vlm.ask(exchange.question, held_out.picture, max_tokens=400).text
        return Judged(held_out.name, exchange, said, score(exchange.topic, exchange.answer, said))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(judge, [(item, exchange) for item in questions for exchange in item.exchanges])


def summarize(judged: list[Judged]) -> dict[str, dict[str, float]]:
    """By topic: how many were asked, the mean score, and the gate where there is one."""
    scores: dict[str, list[float]] = defaultdict(list)
    for one in judged:
        scores[one.exchange.topic].append(one.score)
    table = {}
    for topic, values in scores.items():
        table[topic] = {"asked": len(values), "score": sum(values) / len(values)}
        if topic in GATES:
            table[topic]["gate"] = GATES[topic]
    return table


def print_table(table: dict[str, dict[str, float]]) -> None:
    """The table, as people read it."""
    print(f"{'topic':<12}{'asked':>6}{'right':>8}{'gate':>7}")
    for topic, row in table.items():
        gate = f"{row['gate']:.0%}" if "gate" in row else ""
        verdict = "" if passes(row) else "  MISSED"
        note = HOW_JUDGED.get(topic, "")
        print(f"{topic:<12}{row['asked']:>6.0f}{row['score']:>8.1%}{gate:>7}{verdict}  {note}")


def passes(row: dict[str, float]) -> bool:
    """Whether a topic's score reaches its gate."""
    return row["score"] >= row.get("gate", 0.0)


def main() -> int:
    """Ask, print, judge; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="mini", help="mini, or a checkpoint folder")
    parser.add_argument("--questions", type=Path, default=SHIPPED)
    parser.add_argument("--json", type=Path, help="write scores and wrong answers here")
    arguments = parser.parse_args()
    started = time.monotonic()
    judged = []
    with VLM(arguments.model) as vlm:
        for one in ask_all(vlm, read(arguments.questions)):
            judged.append(one)
            if sys.stderr.isatty():
                print(f"\r{len(judged)} answers", end="", file=sys.stderr, flush=True)
    table = summarize(judged)
    print_table(table)
    print(f"{len(judged)} questions in {time.monotonic() - started:.0f} s")
    if arguments.json:
        wrong = [
            {"picture": one.picture, "topic": one.exchange.topic, "question": one.exchange.question,
             "truth": one.exchange.answer, "said": one.said}
            for one in judged if one.score < 0.5
        ]  # fmt: skip
        arguments.json.write_text(json.dumps({"topics": table, "wrong": wrong}, indent=1) + "\n")
    return 0 if all(passes(row) for row in table.values()) and set(GATES) <= set(table) else 1


if __name__ == "__main__":
    raise SystemExit(main())
