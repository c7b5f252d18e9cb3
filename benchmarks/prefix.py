"""Prefix reuse: time to the first token of questions about a picture that was seen before.

    python -m benchmarks.prefix                              mini on a CPU: a minute
    python -m benchmarks.prefix FOLDER --device cuda         another checkpoint, another device
    python -m benchmarks.prefix 9B-int4 --random --device cuda --size 1024x768
                                                             random weights of that size: times are the same
    python -m benchmarks.prefix --limit 0.15                 exit code 1 if a second question takes more

For each of ``--pictures`` different pictures of ``--size``: a first question (*first*), another one about the
same picture (*second question*), the first one again (*same again*), its next turn with the first answer in
it (*next turn*), that turn in other words (*edited*); and, after all pictures, one more question (*later*).
Times are the median over the pictures, from submission to the first token, relative to *first*; the encoder
cache is off, so that a picture that is not reused is encoded again. *Reused*: prompt tokens, and of how many.

Every answer is compared with that of the same prompt computed from nothing. On a CPU in float32 they must be
the same; on a GPU in half precision rounding may change a token, so there they are only counted.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks.checkpoints import checkpoint_of, ram_folder
from benchmarks.harness import (
    add_json_option,
    argument_parser,
    card,
    commit,
    device_name,
    print_table,
    write_json,
)
from vlfit.api.conversation import Conversation, ImagePart, Message, TextPart, single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.in_process import import_engine
from vlfit.bench.workload import synthetic_picture
from vlfit.checkpoint.source import open_checkpoint

import_engine()

from vlfit.engine.engine import NativeEngine  # noqa: E402

QUESTION, OTHER, FOLLOW_UP, EDITED = (
    "What is in this picture?",
    "Which colours are there, and where?",
    "Say more about the largest thing in it.",
    "And what is the smallest thing?",
)
CASES = ("first", "second question", "same again", "next turn", "edited", "later")


@dataclass
class Asked:
    """A request: its answer, ``seconds`` to the first token, and prompt tokens, reused and in all."""

    tokens: list[int]
    words: str
    seconds: float
    reused: int
    prompt_tokens: int


@dataclass
class Case:
    """All requests of one kind. ``different``: answers that were not those without a prefix cache."""

    seconds: list[float] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    different: int = 0

    def add(self, asked: Asked, expected: Asked) -> None:
        self.seconds.append(asked.seconds)
        self.reused.append(asked.reused)
        self.prompt_tokens.append(asked.prompt_tokens)
        self.different += asked.tokens != expected.tokens


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("model", nargs="?", default="mini")
    parser.add_argument("--random", action="store_true", help="random weights, for SIZE-FORMAT")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--size", default="512x384", help="of the pictures, WxH")
    parser.add_argument("--pictures", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=24, help="of each answer")
    parser.add_argument("--snapshots", type=int, metavar="MIB", help="RAM for snapshots of states")
    parser.add_argument("--limit", type=float, help="most of a second question's share of the first")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="vlfit-prefix-", dir=ram_folder()) as folder:
        return measure(options, checkpoint_of(options.model, Path(folder), random=options.random))


def measure(options: argparse.Namespace, checkpoint: Path) -> int:
    """Run all cases and print them. The exit code, as in the module's docstring."""
    engine = open_engine(options, checkpoint)
    width, height = (int(side) for side in options.size.split("x"))
    for question in (QUESTION, OTHER):  # kernels compile; this picture is not one of those measured
        ask(engine, single_turn(question, picture(width, height, 0)), options.tokens)
    cases = {name: Case() for name in CASES}

    def run(name: str, conversation: Conversation) -> Asked:
        asked = ask(engine, conversation, options.tokens)
        cases[name].add(asked, ask(engine, conversation, options.tokens, cached=False))
        return asked

    pictures = [picture(width, height, 1 + seed) for seed in range(options.pictures)]
    for image in pictures:
        first = single_turn(QUESTION, image)
        answer = run("first", first).words
        run("second question", single_turn(OTHER, image))
        run("same again", first)
        answered = (*first, Message("assistant", (TextPart(answer or "It is a picture."),)))
        run("next turn", (*answered, Message("user", (TextPart(FOLLOW_UP),))))
        run("edited", (*answered, Message("user", (TextPart(EDITED),))))
    for image in pictures:
        run("later", single_turn(FOLLOW_UP, image))
    return report(options, cases, engine)


def open_engine(options: argparse.Namespace, checkpoint: Path) -> NativeEngine:
    given = {} if options.snapshots is None else {"state_snapshot_bytes": options.snapshots * 2**20}
    return NativeEngine(
        open_checkpoint(checkpoint),
        EngineOptions(
            device=options.device,
            dtype=options.dtype,
            max_model_len=options.context,
            max_num_seqs=1,
            image_cache_bytes=0,
            **given,
        ),
    )


def picture(width: int, height: int, seed: int) -> ImagePart:
    """Like ``bench``'s, with some pixels of its own, so that its content differs."""
    from io import BytesIO

    from PIL import Image

    with Image.open(BytesIO(synthetic_picture(width, height))) as opened:
        pixels = np.array(opened.convert("RGB"))
    pixels[:16, :16] = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    buffer = BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return ImagePart(buffer.getvalue())


def ask(engine: NativeEngine, conversation: Conversation, tokens: int, *, cached: bool = True) -> Asked:
    """Run one request alone; without ``cached`` from nothing, and leaving nothing behind."""
    received: list[object] = []
    prompt = engine.prepare_prompt(engine.prompts.build(conversation, engine.image_limit, engine.context))
    if not cached:
        prompt = replace(prompt, keys=None)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    sequence = engine.make_sequence(prompt, params, received.append)
    began = time.perf_counter()
    engine.submit(sequence)
    while engine.busy:
        engine.step()
    for item in received:
        if isinstance(item, Exception):
            raise item
    assert sequence.first_token_at is not None
    words = engine.prompts.tokenizer.decode(sequence.generated, skip_special_tokens=True)
    seconds = sequence.first_token_at - began
    return Asked(sequence.generated, words, seconds, sequence.num_shared_tokens, prompt.num_tokens)


def report(options: argparse.Namespace, cases: dict[str, Case], engine: NativeEngine) -> int:
    """Print the table; the exit code."""
    first = statistics.median(cases["first"].seconds)
    rows = [["case", "first token, ms", "of first", "reused", "of tokens", "other answers"]]
    for name, case in cases.items():
        seconds = statistics.median(case.seconds)
        rows.append(
            [
                name,
                f"{seconds * 1000:.1f}",
                f"{seconds / first:.0%}",
                f"{statistics.median(case.reused):.0f}",
                f"{statistics.median(case.prompt_tokens):.0f}",
                f"{case.different} of {len(case.seconds)}",
            ]
        )
    memory = engine.account().memory
    where = card() if options.device != "cpu" else device_name(options.device)
    print(f"{options.model}, {options.size}, {where}, commit {commit()}")
    print_table(rows)
    if memory.state_snapshots_limit:
        each = engine.runner.cache.snapshots.bytes_each
        print(f"snapshots: {memory.state_snapshots // each} of {each:,} bytes each")
    share = statistics.median(cases["second question"].seconds) / first
    content = {
        "model": options.model,
        "size": options.size,
        "share": share,
        "cases": {name: asdict(case) for name, case in cases.items()},
    }
    write_json(options.json, content)
    if options.device == "cpu" and any(case.different for case in cases.values()):
        print("answers differ from those without a prefix cache", file=sys.stderr)
        return 1
    if options.limit is not None and share > options.limit:
        print(f"a second question takes {share:.1%} of the first", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
