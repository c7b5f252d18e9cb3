"""Concurrent requests: tokens per second, and what pictures that arrive do to requests that decode.

    python -m benchmarks.streams 2B-bf16 4B-fp8             on a GPU, sparse checkpoints: a minute each
    python -m benchmarks.streams mini --device cpu --at-once 1,2 --prompt 100 --image-tokens 64 --every 0.1
                                                            to see it run

First 1, 2, 4, ... requests of text decode at once, greedily; tokens count from the moment when the last
request has its first one until the first request has its last. Then some decode on while requests with a
picture each, no two alike, arrive at a fixed interval, until all pictures are answered. Printed is the time
between two tokens of a decoding request: median, 99th percentile and the longest. Prompts are made of one
token. Fairness: tokens of the request that got fewest over tokens of the one that got most.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event

from benchmarks.checkpoints import checkpoint_of
from benchmarks.harness import (
    add_json_option,
    argument_parser,
    commit,
    device_name,
    print_table,
    write_json,
)
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.checkpoint.source import Checkpoint, open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.engine.engine_thread import EngineThread
from vlfit.engine.execution.warmup import image_prompt, text_prompt
from vlfit.engine.scheduling.sequence import Sequence
from vlfit.prompt.builder import Prompt

WAIT_SECONDS = 300.0


@dataclass(frozen=True)
class Interference:
    """Seconds between two tokens of ``streams`` that decode while ``pictures`` arrive."""

    streams: int
    pictures: int
    every: float
    tokens: int
    alone: float  # median before the first picture
    median: float
    p99: float
    longest: float
    first_token: float  # median of the pictures' requests
    fairness: float


@dataclass(frozen=True)
class Throughput:
    """Tokens per second of all requests that decode at once, and fairness."""

    speed: float
    fairness: float


@dataclass
class TimedRequest:
    """A request and the times of its tokens (``time.perf_counter``)."""

    submitted: float = field(default_factory=time.perf_counter)
    times: list[float] = field(default_factory=list)
    ended: Event = field(default_factory=Event)
    failure: Exception | None = None
    sequence: Sequence | None = None

    def listen(self, arrival: object) -> None:
        self.times.append(time.perf_counter())
        if isinstance(arrival, Exception):
            self.failure = arrival
        if self.failure or getattr(arrival, "finish_reason", None):
            self.ended.set()


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("models", nargs="+", metavar="SIZE-FORMAT", help="2B-bf16, 4B-fp8, ...; mini")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--at-once", default="1,2,4,8,16", help="how many requests, one figure for each")
    parser.add_argument("--prompt", type=int, default=900, help="tokens of a prompt of text")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer, in the first part")
    parser.add_argument("--streams", type=int, default=4, help="that decode while pictures arrive")
    parser.add_argument("--image-tokens", type=int, default=768, help="of a picture: 768 are 1024x768 pixels")
    parser.add_argument("--pictures", type=int, default=16, help="that arrive")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two of them")
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--whole-chunks", action="store_true", help="even if running requests wait for them")
    add_json_option(parser)
    options = parser.parse_args()
    device = device_name(options.device)
    print(f"commit {commit()}; {device}; prompts of {options.prompt} tokens, passes of {options.chunk}")
    report = {}
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            report[model] = measure(open_checkpoint(checkpoint_of(model, Path(folder))), options)
    write_json(options.json, {"commit": commit(), "where": device, "models": report})


def measure(checkpoint: Checkpoint, options: argparse.Namespace) -> dict[str, object]:
    """Measure one model and print the results; they are returned for JSON."""
    at_once = [int(count) for count in options.at_once.split(",")]
    with running(checkpoint, options, max(*at_once, options.streams + 2)) as loop:
        throughput = {count: decode_together(loop, count, options) for count in at_once}
        gaps = decode_while_pictures_arrive(loop, options)
    print(f"\n{checkpoint.name}\n")
    alone = throughput[at_once[0]].speed
    rows = [["requests at once", "tokens/s", f"times {at_once[0]}", "slowest / fastest"]]
    rows += [
        [str(n), f"{each.speed:.0f}", f"{each.speed / alone:.2f}", f"{each.fairness:.2f}"]
        for n, each in throughput.items()
    ]
    print_table(rows)
    print(
        f"\n{gaps.streams} streams, {gaps.pictures} pictures of {options.image_tokens} tokens, one every "
        f"{gaps.every} s: between two tokens {gaps.alone * 1e3:.2f} ms before them; then median "
        f"{gaps.median * 1e3:.2f} ms, 99 % under {gaps.p99 * 1e3:.2f} ms ({gaps.p99 / gaps.median:.1f} x), "
        f"longest {gaps.longest * 1e3:.1f} ms, of {gaps.tokens}; slowest / fastest stream "
        f"{gaps.fairness:.2f}; first token of a picture after {gaps.first_token * 1e3:.0f} ms",
        flush=True,
    )
    return {
        "tokens_per_second": {count: each.speed for count, each in throughput.items()},
        "fairness": {count: each.fairness for count, each in throughput.items()},
        "while_pictures_arrive": asdict(gaps),
    }


@contextmanager
def running(
    checkpoint: Checkpoint, options: argparse.Namespace, sequences: int
) -> Iterator[EngineThread[NativeEngine]]:
    context = max(options.prompt, options.image_tokens + 16) + 8192
    each = max(options.prompt + options.tokens, options.image_tokens) + 64
    engine_options = EngineOptions(
        device=options.device,
        max_model_len=min(context, checkpoint.config.text.max_position_embeddings),
        max_num_seqs=sequences,
        kv_tokens=sequences * each + options.streams * 8192,
        max_num_batched_tokens=options.chunk,
        even_chunks=not options.whole_chunks,
        image_cache_bytes=0,
        prefix_cache=False,
        speculate=False,
    )
    loop = EngineThread(lambda progress: NativeEngine(checkpoint, engine_options, progress))
    try:
        yield loop
    finally:
        loop.close()


def decode_together(loop: EngineThread[NativeEngine], count: int, options: argparse.Namespace) -> Throughput:
    """Median speed and least fairness of three rounds, after one that warms up."""
    speeds, shares = [], []
    for _ in range(4):
        requests = [
            submit(loop, text_prompt(options.prompt + number), options.tokens) for number in range(count)
        ]
        wait(requests)
        begin, end = max(each.times[0] for each in requests), min(each.times[-1] for each in requests)
        tokens = [sum(begin < at <= end for at in each.times) for each in requests]
        speeds.append(sum(tokens) / (end - begin))
        shares.append(min(tokens) / max(tokens))
    return Throughput(statistics.median(speeds[1:]), min(shares[1:]))


def decode_while_pictures_arrive(
    loop: EngineThread[NativeEngine], options: argparse.Namespace
) -> Interference:
    wait([submit(loop, image_prompt(loop.engine, options.image_tokens, 255), 4)])  # warms up
    most = min(8000, loop.engine.context - options.prompt - options.streams)
    streams = [submit(loop, text_prompt(options.prompt + number), most) for number in range(options.streams)]
    while not all(len(each.times) > 100 for each in streams):
        time.sleep(0.01)
    began = time.perf_counter()
    pictures = []
    for number in range(options.pictures):
        time.sleep(max(began + number * options.every - time.perf_counter(), 0))
        picture = image_prompt(loop.engine, options.image_tokens, number)
        pictures.append(submit(loop, picture, 16))
    wait(pictures)
    ended = time.perf_counter()
    if any(each.ended.is_set() for each in streams):
        sys.exit("the streams ended before the pictures did: ask for fewer pictures, or a shorter --every")
    for each in streams:
        if each.sequence is not None:
            loop.cancel(each.sequence)
    wait(streams)
    gaps = [
        (at, at - before) for each in streams for before, at in zip(each.times, each.times[1:], strict=False)
    ]
    alone = [gap for at, gap in gaps[20:] if at < began]
    during = sorted(gap for at, gap in gaps if began <= at <= ended)
    firsts = [each.times[0] - each.submitted for each in pictures]
    tokens = [sum(began <= at <= ended for at in each.times) for each in streams]
    return Interference(
        *(len(streams), len(pictures), options.every, len(during), statistics.median(alone)),
        *(statistics.median(during), during[int(len(during) * 0.99)], during[-1], statistics.median(firsts)),
        min(tokens) / max(tokens),
    )


def submit(loop: EngineThread[NativeEngine], prompt: Prompt, tokens: int) -> TimedRequest:
    engine, request = loop.engine, TimedRequest()
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    sequence = engine.make_sequence(engine.prepare_prompt(prompt), sampling, request.listen)
    request.sequence = sequence
    loop.submit(sequence)
    return request


def wait(requests: list[TimedRequest]) -> None:
    for each in requests:
        if not each.ended.wait(WAIT_SECONDS):
            sys.exit(f"a request had not ended after {WAIT_SECONDS:.0f} s")
        if each.failure is not None:
            raise each.failure


if __name__ == "__main__":
    main()
