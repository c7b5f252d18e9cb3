"""Guesses at the next tokens: what they save where answers repeat, and what they cost where they do not.

    python -m benchmarks.speculation                            mini on a CPU, the bundled pictures
    python -m benchmarks.speculation FOLDER --device cuda       another checkpoint, another device

The same questions go to two engines of one process, with guesses and without, in turn; greedily, one at a
time. Timed is from the first token to the last, in CPU time where a CPU computes, as others may use it too.
The tokens of both are compared: on a CPU that computes in float32 they must be the same. In half precision
on a GPU two tokens that the model finds all but equally likely may change places (docs/speculation.md).
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.facts import card, commit, cpu_name
from benchmarks.report import print_rows
from vlfit.api.conversation import Conversation, ImagePart, Message, TextPart, ask
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.native import import_engine
from vlfit.checkpoint.source import open_checkpoint
from vlfit.tasks.describe import CAPTION_LONG, CAPTION_SHORT, SCENE

import_engine()

from vlfit.engine.engine import NativeEngine  # noqa: E402

PICTURES = Path(__file__).parents[1] / "examples" / "pictures"
READ = "What text do you see in this picture?"
QUESTIONS = {"scene": SCENE, "reading": READ, "caption": CAPTION_SHORT, "long caption": CAPTION_LONG}
AGAIN = ("scene", "reading")  # asked a second time in the same conversation


@dataclass
class Answered:
    """One answer: its ``tokens``, ``passes`` that it took after the first token, and ``seconds`` of those."""

    tokens: list[int]
    text: str
    passes: int
    guessed: int
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """Of all answers to one kind of question: tokens behind the first, passes, seconds without guesses and
    with them, and of how many answers the tokens are the same.
    """

    kind: str
    answers: int
    same: int
    tokens: int
    passes: tuple[int, int]
    guessed: int
    seconds: tuple[float, float]

    @property
    def right(self) -> int:
        """Guesses that came true: each saves a pass."""
        return self.passes[0] - self.passes[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default="mini")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=512, help="most of an answer")
    parser.add_argument("--repeat", type=int, default=5, help="rounds; the median of each answer's counts")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    where = f"CPU {cpu_name()}" if options.device == "cpu" else card()
    print(f"commit {commit()}; {where}; {options.model}, greedy, medians of {options.repeat}\n")
    clock = time.process_time if options.device == "cpu" else time.perf_counter
    engines = [
        NativeEngine(
            open_checkpoint(options.model),
            EngineOptions(device=options.device, max_num_seqs=1, speculate=wish),
        )
        for wish in (False, True)
    ]
    rows = [compared(kind, engines, asked, options, clock) for kind, asked in questions(engines[0], options)]
    print_rows(table(rows))
    if options.json:
        facts = {"commit": commit(), "where": where, "model": options.model}
        options.json.write_text(
            json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1), encoding="utf-8"
        )
    if any(row.same < row.answers for row in rows):
        sys.exit("some answers are not the same with guesses")


def questions(engine: NativeEngine, options: argparse.Namespace) -> Iterator[tuple[str, list[Conversation]]]:
    """Kinds of questions, each with a conversation about each picture."""
    pictures = [ImagePart(path.read_bytes(), path.name) for path in sorted(PICTURES.iterdir())]
    for kind, words in QUESTIONS.items():
        first = [ask(words, picture) for picture in pictures]
        yield kind, first
        if kind in AGAIN:
            question = Message("user", (TextPart(words),))
            texts = [answer(engine, each, options.tokens, time.process_time).text for each in first]
            yield (
                f"{kind}, asked again",
                [
                    (*each, Message("assistant", (TextPart(said),)), question)
                    for each, said in zip(first, texts, strict=True)
                ],
            )


def compared(
    kind: str,
    engines: list[NativeEngine],
    asked: list[Conversation],
    options: argparse.Namespace,
    clock: Callable[[], float],
) -> Row:
    """Both engines, in turn, about each picture in turn; the first round warms up and does not count."""
    found: list[list[Answered]] = [[], []]
    for turn in range(options.repeat + 1):
        for number, conversation in enumerate(asked):
            for which in (0, 1) if turn % 2 else (1, 0):
                new = answer(engines[which], conversation, options.tokens, clock)
                if turn == 0:
                    found[which].append(new)
                else:
                    found[which][number].seconds += new.seconds
    for answers in found:
        for each in answers:
            del each.seconds[0]
    plain, guessing = found
    return Row(
        kind,
        len(asked),
        sum(one.tokens == other.tokens for one, other in zip(plain, guessing, strict=True)),
        sum(len(each.tokens) - 1 for each in plain),
        (sum(each.passes for each in plain), sum(each.passes for each in guessing)),
        sum(each.guessed for each in guessing),
        (
            sum(statistics.median(each.seconds) for each in plain),
            sum(statistics.median(each.seconds) for each in guessing),
        ),
    )


def answer(
    engine: NativeEngine, conversation: Conversation, tokens: int, clock: Callable[[], float]
) -> Answered:
    """One answer, from its first token on."""
    heard: list[object] = []
    prompt = engine.prepare_prompt(engine.prompts.build(conversation, engine.image_limit, engine.context))
    most = min(tokens, engine.context - prompt.num_tokens)
    sequence = engine.sequence(prompt, SamplingParams(max_tokens=most), heard.append)
    engine.submit(sequence)
    while engine.busy and not sequence.generated:
        engine.step()
    before, began = engine.counters, clock()
    while engine.busy:
        engine.step()
    seconds = clock() - began
    if isinstance(heard[-1], Exception):
        raise heard[-1]
    after = engine.counters
    text = "".join(getattr(chunk, "text", "") for chunk in heard)
    passes, guessed = after.steps - before.steps, after.draft_tokens - before.draft_tokens
    return Answered(sequence.generated, text, passes, guessed, [seconds])


def table(rows: list[Row]) -> list[list[str]]:
    """A line for each kind of question."""
    head = ["question", "tokens", "passes", "with guesses", "saved", "tokens a pass", "guesses right"]
    lines = [[*head, "tokens/s", "with guesses", "ratio", "same tokens"]]
    for row in rows:
        plain, guessing = (row.tokens / seconds for seconds in row.seconds)
        saved = row.right / row.passes[0]
        right = f"{row.right} of {row.guessed}"
        counts = [f"{row.tokens}", f"{row.passes[0]}", f"{row.passes[1]}", f"{saved:.0%}"]
        speeds = [f"{plain:.0f}", f"{guessing:.0f}", f"{guessing / plain:.2f}"]
        each = f"{row.tokens / row.passes[1]:.2f}"
        lines.append([row.kind, *counts, each, right, *speeds, f"{row.same} of {row.answers}"])
    return lines


if __name__ == "__main__":
    main()
