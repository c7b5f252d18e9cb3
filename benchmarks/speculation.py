"""Speculative decoding by prompt lookup: what it saves where answers repeat, and costs where they do not.

    python -m benchmarks.speculation                            mini on a CPU, the bundled pictures: minutes
    python -m benchmarks.speculation FOLDER --device cuda       another checkpoint, another device
    python -m benchmarks.speculation --temperature 0.7          sampled answers, with a seed for each picture
    python -m benchmarks.speculation --tokens 16 --repeat 1     to see it run
    python -m benchmarks.speculation 9B-int4 --device cuda --accept 0.8
                                     as fast as if 0.8 of the draft model's tokens were right: a minute
    python -m benchmarks.speculation --verify 2B-fp8 4B-fp8 4B-int4
                                     a verification step against a plain decode step, on a GPU: a minute each

The same questions go to two engines of one process, with and without draft tokens, in turn; greedily or with
``--temperature``, one at a time. Timed is from the first token to the last, in CPU time on a CPU, which may
be busy otherwise. Exit code 1 if tokens differ: on a CPU in float32 they must be the same, sampled ones too,
as a seed gives the same tokens with draft tokens. In half precision on a GPU two tokens that are all but
equally likely may change places, so there the exit code is 1 only for greedy answers (docs/speculation.md).

``--accept`` forces acceptance, to see what a draft model (multi-token prediction) is worth whatever its
weights. Its drafts are computed as ever, then replaced: by the tokens of the same answer without drafts, each
with that probability, else by another. So answers stay the same, and are compared. Rounding on a GPU may
still change a token, and what follows it is then accepted less: see *accepted*.

``--verify`` replays captured CUDA graphs of sparse checkpoints. *On the GPU*: replays one after another.
*With the wait*: a step is launched and its tokens are read, as verification needs; a plain step is launched
before the last token is read, so its time on the GPU is all that it takes. The ratio less one is how many
draft tokens must be accepted for a step to pay.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.checkpoints import checkpoint_of
from benchmarks.harness import (
    PICTURES,
    add_json_option,
    argument_parser,
    card,
    commit,
    device_name,
    print_table,
    require_gpu,
    write_json,
)
from vlfit.api.conversation import Conversation, ImagePart, Message, TextPart, single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.in_process import import_engine
from vlfit.checkpoint.source import open_checkpoint
from vlfit.tasks.describe import CAPTION_LONG, CAPTION_SHORT, SCENE

import_engine()

from vlfit.engine.engine import NativeEngine  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

    from vlfit.engine.execution.cuda_graphs import CapturedStep
    from vlfit.engine.scheduling.sequence import ScheduledChunk, Sequence
    from vlfit.kernels.attention.paged import BlockAttentionMetadata

READ = "What text do you see in this picture?"
QUESTIONS = {"scene": SCENE, "reading": READ, "caption": CAPTION_SHORT, "long caption": CAPTION_LONG}
AGAIN = ("scene", "reading")  # asked a second time in the same conversation
ROUNDS, WARM_UP = 60, 5  # of captured steps


@dataclass
class TimedAnswer:
    """One answer: ``passes`` after the first token, ``draft_tokens``, ``seconds`` of each round."""

    tokens: list[int]
    text: str
    passes: int
    draft_tokens: int
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """Of all answers to one kind of question: tokens after the first; passes and seconds without and with
    draft tokens; how many answers have the same tokens.
    """

    kind: str
    answers: int
    same: int
    tokens: int
    passes: tuple[int, int]
    draft_tokens: int
    seconds: tuple[float, float]

    @property
    def accepted(self) -> int:
        """Accepted draft tokens: each saves a pass."""
        return self.passes[0] - self.passes[1]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("model", nargs="?", default="mini")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=512, help="most of an answer")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--top-k", type=int, default=0, help="0: off")
    parser.add_argument("--presence-penalty", type=float, default=0.0)
    parser.add_argument(
        "--repeat", type=int, default=5, help="rounds, after one that warms up; medians count"
    )
    add_json_option(parser)
    parser.add_argument("--accept", type=float, metavar="RATE", help="force so many drafts to be right")
    parser.add_argument("--drafts", type=int, help="with --accept: of a step; default: as many as pay")
    parser.add_argument("--verify", nargs="+", metavar="SIZE-FORMAT", help="measure verification steps")
    parser.add_argument("--rows", default="2,4,8", help="with --verify: of a step, one line for each")
    parser.add_argument("--prompt", type=int, default=1000, help="with --verify: tokens before the answer")
    options = parser.parse_args()
    if options.verify:
        verify_steps(options)
        return
    if options.accept is not None:
        force_acceptance(options)
        return
    device = device_name(options.device)
    kind = "greedy" if options.temperature == 0 else f"temperature {options.temperature:g}"
    kind += f", top-k {options.top_k}" if options.top_k else ""
    kind += f", presence penalty {options.presence_penalty:g}" if options.presence_penalty else ""
    print(f"commit {commit()}; {device}; {options.model}, {kind}, medians of {options.repeat}\n")
    clock = time.process_time if options.device == "cpu" else time.perf_counter
    engines = [
        NativeEngine(
            open_checkpoint(options.model),
            EngineOptions(device=options.device, max_num_seqs=1, speculate=speculate),
        )
        for speculate in (False, True)
    ]
    rows = [
        compare(kind, engines, conversations, options, clock)
        for kind, conversations in questions(engines[0], options)
    ]
    print_table(table(rows))
    facts = {"commit": commit(), "where": device, "model": options.model, "sampling": kind}
    write_json(options.json, {**facts, "rows": [asdict(row) for row in rows]})
    exact = options.device == "cpu" or options.temperature == 0
    if exact and any(row.same < row.answers for row in rows):
        sys.exit("some answers differ with draft tokens")


def questions(engine: NativeEngine, options: argparse.Namespace) -> Iterator[tuple[str, list[Conversation]]]:
    """Each kind of question with its conversations, one for each picture."""
    pictures = [ImagePart(path.read_bytes(), path.name) for path in sorted(PICTURES.iterdir())]
    for kind, words in QUESTIONS.items():
        first = [single_turn(words, picture) for picture in pictures]
        yield kind, first
        if kind in AGAIN:
            question = Message("user", (TextPart(words),))
            texts = [
                time_answer(engine, each, sampling_of(options, seed), time.process_time).text
                for seed, each in enumerate(first)
            ]
            yield (
                f"{kind}, asked again",
                [
                    (*each, Message("assistant", (TextPart(text),)), question)
                    for each, text in zip(first, texts, strict=True)
                ],
            )


def compare(
    kind: str,
    engines: list[NativeEngine],
    conversations: list[Conversation],
    options: argparse.Namespace,
    clock: Callable[[], float],
) -> Row:
    """Both engines answer each question in turn; the first round warms up."""
    answers: list[list[TimedAnswer]] = [[], []]
    for turn in range(options.repeat + 1):
        for number, conversation in enumerate(conversations):
            for which in (0, 1) if turn % 2 else (1, 0):
                answer = time_answer(engines[which], conversation, sampling_of(options, number), clock)
                if turn == 0:
                    answer.seconds.clear()
                    answers[which].append(answer)
                else:
                    answers[which][number].seconds += answer.seconds
    plain, drafted = answers
    return Row(
        kind,
        len(conversations),
        sum(one.tokens == other.tokens for one, other in zip(plain, drafted, strict=True)),
        sum(len(each.tokens) - 1 for each in plain),
        (sum(each.passes for each in plain), sum(each.passes for each in drafted)),
        sum(each.draft_tokens for each in drafted),
        (
            sum(statistics.median(each.seconds) for each in plain),
            sum(statistics.median(each.seconds) for each in drafted),
        ),
    )


def sampling_of(options: argparse.Namespace, seed: int) -> SamplingParams:
    """As the command line asks, with a seed."""
    return SamplingParams(
        max_tokens=options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        presence_penalty=options.presence_penalty,
        seed=seed,
    )


def time_answer(
    engine: NativeEngine, conversation: Conversation, sampling: SamplingParams, clock: Callable[[], float]
) -> TimedAnswer:
    """One answer, timed from its first token on."""
    arrivals: list[object] = []
    prompt = engine.prepare_prompt(engine.prompts.build(conversation, engine.image_limit, engine.context))
    assert sampling.max_tokens is not None
    most = min(sampling.max_tokens, engine.context - prompt.num_tokens)
    sequence = engine.make_sequence(prompt, replace(sampling, max_tokens=most), arrivals.append)
    engine.submit(sequence)
    while engine.busy and not sequence.generated:
        engine.step()
    before, began = engine.counters, clock()
    while engine.busy:
        engine.step()
    seconds = clock() - began
    if isinstance(arrivals[-1], Exception):
        raise arrivals[-1]
    after = engine.counters
    text = "".join(getattr(chunk, "text", "") for chunk in arrivals)
    passes, drafted = after.steps - before.steps, after.draft_tokens - before.draft_tokens
    return TimedAnswer(sequence.generated, text, passes, drafted, [seconds])


def table(rows: list[Row]) -> list[list[str]]:
    """A line for each kind of question."""
    head = ["question", "tokens", "passes", "with drafts", "saved", "tokens a pass", "accepted"]
    lines = [[*head, "tokens/s", "with drafts", "ratio", "same tokens"]]
    for row in rows:
        plain, drafted = (row.tokens / seconds for seconds in row.seconds)
        saved = row.accepted / row.passes[0]
        accepted = f"{row.accepted} of {row.draft_tokens}"
        counts = [f"{row.tokens}", f"{row.passes[0]}", f"{row.passes[1]}", f"{saved:.0%}"]
        speeds = [f"{plain:.0f}", f"{drafted:.0f}", f"{drafted / plain:.2f}"]
        each = f"{row.tokens / row.passes[1]:.2f}"
        lines.append([row.kind, *counts, each, accepted, *speeds, f"{row.same} of {row.answers}"])
    return lines


# --- forced acceptance of a draft model -------------------------------------------------------------------


class ForcedDrafts:
    """Replaces the tokens that ``engine``'s draft model drafts for ``sequence``.

    By those of ``answer``, each with the probability ``rate``, else by another token.
    """

    def __init__(self, engine: NativeEngine, rate: float) -> None:
        if engine.runner.drafter is None:
            sys.exit("the checkpoint has no draft model (multi-token prediction)")
        self._draft = engine.runner.draft
        self._chance, self._rate = random.Random(1), rate
        self.answer: list[int] = []
        engine.runner.draft = self.draft  # type: ignore[method-assign]

    def draft(self, batch: "list[ScheduledChunk]") -> "list[ScheduledChunk]":
        return [
            replace(chunk, draft_tokens=self._forced(chunk)) if chunk.by_draft_model else chunk
            for chunk in self._draft(batch)
        ]

    def _forced(self, chunk: "ScheduledChunk") -> tuple[int, ...]:
        begin, count = len(chunk.sequence.generated), len(chunk.draft_tokens)
        right = self.answer[begin : begin + count]
        right += [0] * (count - len(right))
        return tuple(token + (self._chance.random() >= self._rate) for token in right)


def force_acceptance(options: argparse.Namespace) -> None:
    """Greedy answers of ``--tokens`` tokens with and without drafts of a forced acceptance."""
    from vlfit.engine import engine as engines
    from vlfit.engine.execution.warmup import text_prompt
    from vlfit.engine.scheduling.sequence import Draft
    from vlfit.engine.scheduling.speculative import ModelProposer

    class Fixed(ModelProposer):
        def propose(self, generated: list[int], max_tokens: int) -> Draft:
            draft = super().propose(generated, max_tokens)
            return Draft(wanted=min(options.drafts, max_tokens)) if options.drafts else draft

    setattr(engines, "ModelProposer", Fixed)  # noqa: B010
    setattr(engines, "BestProposer", lambda proposers: proposers[-1])  # noqa: B010
    print(f"commit {commit()}; {device_name(options.device)}; {options.model}, forced {options.accept:g}\n")
    sampling = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    measured: list[tuple[list[int], float, int, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(checkpoint_of(options.model, Path(folder)))
        for speculate in (False, True):
            context = options.prompt + options.tokens + 16
            engine = NativeEngine(
                checkpoint,
                EngineOptions(
                    device=options.device, max_num_seqs=1, max_model_len=context, speculate=speculate
                ),
            )
            forced = ForcedDrafts(engine, options.accept) if speculate else None
            seconds = []
            for _ in range(options.repeat + 1):
                if forced is not None:
                    forced.answer = measured[0][0]
                prepared = replace(engine.prepare_prompt(text_prompt(options.prompt)), keys=None)
                sequence = engine.make_sequence(prepared, sampling, lambda _: None)
                engine.submit(sequence)
                while not sequence.generated:
                    engine.step()
                before, began = engine.counters, time.perf_counter()
                while engine.busy:
                    engine.step()
                seconds.append(time.perf_counter() - began)
            after = engine.counters
            steps = after.steps - before.steps
            drafted = after.draft_tokens - before.draft_tokens
            measured.append((sequence.generated, statistics.median(seconds[1:]), steps, drafted))
            del engine
    (plain, plain_seconds, *_), (tokens, drafted_seconds, steps, drafted) = measured
    accepted = len(plain) - 1 - steps
    print_table(
        [
            ["tokens", "steps", "drafts", "accepted", "ms a token", "with drafts", "ratio", "same tokens"],
            [
                *(str(each) for each in (len(plain) - 1, steps, drafted, accepted)),
                f"{plain_seconds / (len(plain) - 1) * 1e3:.2f}",
                f"{drafted_seconds / (len(plain) - 1) * 1e3:.2f}",
                f"{plain_seconds / drafted_seconds:.2f}",
                "yes" if plain == tokens else "no",
            ],
        ]
    )
    same = next((at for at, (one, other) in enumerate(zip(plain, tokens, strict=True)) if one != other), None)
    if same is not None and options.device == "cpu":
        sys.exit(f"the answers differ from token {same} on")


# --- verification steps on a GPU ---------------------------------------------------------------------------


def verify_steps(options: argparse.Namespace) -> None:
    import torch

    require_gpu("speculation --verify")
    print(f"commit {commit()}; {card()}; after a prompt of {options.prompt} tokens\n")
    rows = [["model", "rows", "plain step, ms", "on the GPU, ms", "ratio", "with the wait, ms", "ratio"]]
    for name in options.verify:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = open_checkpoint(checkpoint_of(name, Path(folder)))
            engine_options = EngineOptions(device="cuda", max_model_len=2048, max_num_seqs=1, speculate=False)
            engine = NativeEngine(checkpoint, engine_options)
        sequence = decoding_sequence(engine, options.prompt)
        for count in map(int, options.rows.split(",")):
            with torch.inference_mode():
                rows.append([name, str(count), *measure_verification(engine, sequence, count)])
    print_table(rows)


def decoding_sequence(engine: NativeEngine, prompt: int) -> "Sequence":
    """A request that has begun to decode; steps are run by hand from here on."""
    from vlfit.engine.execution.warmup import text_prompt

    sampling = SamplingParams(max_tokens=200, ignore_eos=True)
    sequence = engine.make_sequence(engine.prepare_prompt(text_prompt(prompt)), sampling, lambda _: None)
    engine.submit(sequence)
    while len(sequence.generated) < 3:
        engine.step()
    return sequence


def measure_verification(engine: NativeEngine, sequence: "Sequence", count: int) -> list[str]:
    """Cells of a row: a plain step against the verification of ``count`` rows."""
    from vlfit.engine.execution.cuda_graphs import DecodeGraphs
    from vlfit.engine.scheduling.sequence import ScheduledChunk
    from vlfit.loading.pinned import GraphPool

    runner = engine.runner

    def step(token_ids: "Tensor", positions: "Tensor", metadata: "BlockAttentionMetadata") -> "Tensor":
        return runner.text(token_ids, positions, None, runner.cache, metadata, None)

    pool = GraphPool(engine.device)
    graphs = DecodeGraphs(step, runner.cache, pool, runner.text.vocabulary, engine.context, 1, count)
    graphs.capture()
    chunks = [ScheduledChunk(sequence, count, tuple(range(100, 99 + count)))]
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        graphs.run_verify(chunks).read()
        seconds.append(time.perf_counter() - began)
    waited = statistics.median(seconds[WARM_UP:]) * 1e3
    graphs.run([sequence]).read()
    plain, several = (
        replay_milliseconds(graph)
        for _, graph in sorted(graphs._captured.items(), key=lambda each: each[0].size)
    )
    ratios = (f"{several / plain:.2f}", f"{waited / plain:.2f}")
    return [f"{plain:.3f}", f"{several:.3f}", ratios[0], f"{waited:.3f}", ratios[1]]


def replay_milliseconds(graph: "CapturedStep") -> float:
    """Milliseconds on the GPU of one replay among many."""
    import torch

    def replay() -> None:
        graph.forward()
        graph.sample()

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(WARM_UP):
        replay()
    begin.record()
    for _ in range(ROUNDS):
        replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / ROUNDS


if __name__ == "__main__":
    main()
