"""Several requests at once: tokens per second, and what those that run feel of pictures that arrive.

    python -m benchmarks.streams 2B-bf16 4B-fp8             on a GPU; hollow checkpoints of the true sizes
    python -m benchmarks.streams mini --device cpu          to try it on a CPU

First 1, 2, 4, ... requests of text decode at once, greedily; tokens are counted from when the last of them
has its first to when the first has its last. Then some of them go on while requests with a picture each, no
two alike, arrive at a fixed rhythm, until all pictures are answered. The time between two tokens of a running
request is what is told: its median, its 99th percentile and the longest. Prompts are made of one token.
Fair is who gave the one that got fewest tokens as many as the one that got most: their ratio is told, too.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event

from benchmarks.facts import card, commit, cpu_name
from benchmarks.hollow import write_hollow
from benchmarks.report import print_rows
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.checkpoint.source import Checkpoint, mini_folder, open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.engine.execution.warmup import image_prompt, text_prompt
from vlfit.engine.loop import EngineThread
from vlfit.engine.scheduling.sequence import Sequence
from vlfit.prompt.builder import Prompt

WAIT_SECONDS = 300.0


@dataclass(frozen=True)
class Feel:
    """Of ``streams`` that run while ``pictures`` arrive; times in seconds."""

    streams: int
    pictures: int
    every: float
    tokens: int
    alone: float  # median between two tokens before the first picture
    median: float
    p99: float
    longest: float
    first_token: float  # median of the pictures' requests
    fairness: float  # tokens of the stream that got fewest, by those of the one that got most


@dataclass(frozen=True)
class Together:
    """Of requests that decode at once: tokens per second of all, and how fair it was (as above)."""

    speed: float
    fairness: float


@dataclass
class Request:
    """One that was handed to the engine, and when each of its tokens came (``time.perf_counter``)."""

    asked: float = field(default_factory=time.perf_counter)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="SIZE-FORMAT", help="2B-bf16, 4B-fp8, ...; mini")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--at-once", default="1,2,4,8,16", help="how many requests, one figure for each")
    parser.add_argument("--prompt", type=int, default=900, help="tokens of a prompt of text")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer, where they are counted")
    parser.add_argument("--streams", type=int, default=4, help="that run while pictures arrive")
    parser.add_argument("--image-tokens", type=int, default=768, help="of a picture: 768 are 1024x768 pixels")
    parser.add_argument("--pictures", type=int, default=16, help="that arrive")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two of them")
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--whole-chunks", action="store_true", help="however long others wait for them")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    where = f"CPU {cpu_name()}" if options.device == "cpu" else card()
    print(f"commit {commit()}; {where}; prompts of {options.prompt} tokens, passes of {options.chunk}")
    report = {}
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            report[model] = measure(_checkpoint(model, Path(folder) / model), options)
    if options.json:
        facts = {"commit": commit(), "where": where}
        options.json.write_text(json.dumps({**facts, "models": report}, indent=1), encoding="utf-8")


def measure(checkpoint: Checkpoint, options: argparse.Namespace) -> dict[str, object]:
    """Print what one model does, and give it."""
    at_once = [int(count) for count in options.at_once.split(",")]
    with running(checkpoint, options, max(*at_once, options.streams + 2)) as loop:
        throughput = {count: decode_together(loop, count, options) for count in at_once}
        feel = while_pictures_arrive(loop, options)
    print(f"\n{checkpoint.name}\n")
    alone = throughput[at_once[0]].speed
    rows = [["requests at once", "tokens/s", f"times {at_once[0]}", "slowest / fastest"]]
    rows += [
        [str(n), f"{each.speed:.0f}", f"{each.speed / alone:.2f}", f"{each.fairness:.2f}"]
        for n, each in throughput.items()
    ]
    print_rows(rows)
    print(
        f"\n{feel.streams} streams, {feel.pictures} pictures of {options.image_tokens} tokens, one every "
        f"{feel.every} s: between two tokens {feel.alone * 1e3:.2f} ms before them; then median "
        f"{feel.median * 1e3:.2f} ms, 99 % under {feel.p99 * 1e3:.2f} ms ({feel.p99 / feel.median:.1f} x), "
        f"longest {feel.longest * 1e3:.1f} ms, of {feel.tokens}; slowest / fastest stream "
        f"{feel.fairness:.2f}; first token of a picture after {feel.first_token * 1e3:.0f} ms",
        flush=True,
    )
    return {
        "tokens_per_second": {count: each.speed for count, each in throughput.items()},
        "fairness": {count: each.fairness for count, each in throughput.items()},
        "while_pictures_arrive": asdict(feel),
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


def decode_together(loop: EngineThread[NativeEngine], count: int, options: argparse.Namespace) -> Together:
    """The median of three rounds, after one that warms up; the least fair of them."""
    speeds, shares = [], []
    for _ in range(4):
        heard = [ask(loop, text_prompt(options.prompt + number), options.tokens) for number in range(count)]
        wait(heard)
        begin, end = max(each.times[0] for each in heard), min(each.times[-1] for each in heard)
        tokens = [sum(begin < at <= end for at in each.times) for each in heard]
        speeds.append(sum(tokens) / (end - begin))
        shares.append(min(tokens) / max(tokens))
    return Together(statistics.median(speeds[1:]), min(shares[1:]))


def while_pictures_arrive(loop: EngineThread[NativeEngine], options: argparse.Namespace) -> Feel:
    wait([ask(loop, image_prompt(loop.engine, options.image_tokens, 255), 4)])  # its kernels are there
    most = min(8000, loop.engine.context - options.prompt - 1)
    streams = [ask(loop, text_prompt(options.prompt + number), most) for number in range(options.streams)]
    while not all(len(each.times) > 100 for each in streams):
        time.sleep(0.01)
    began = time.perf_counter()
    pictures = []
    for number in range(options.pictures):
        time.sleep(max(began + number * options.every - time.perf_counter(), 0))
        picture = image_prompt(loop.engine, options.image_tokens, number)
        pictures.append(ask(loop, picture, 16))
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
    firsts = [each.times[0] - each.asked for each in pictures]
    tokens = [sum(began <= at <= ended for at in each.times) for each in streams]
    return Feel(
        *(len(streams), len(pictures), options.every, len(during), statistics.median(alone)),
        *(statistics.median(during), during[int(len(during) * 0.99)], during[-1], statistics.median(firsts)),
        min(tokens) / max(tokens),
    )


def ask(loop: EngineThread[NativeEngine], prompt: Prompt, tokens: int) -> Request:
    engine, request = loop.engine, Request()
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    sequence = engine.sequence(engine.prepare_prompt(prompt), sampling, request.listen)
    request.sequence = sequence
    loop.submit(sequence)
    return request


def wait(requests: list[Request]) -> None:
    for each in requests:
        if not each.ended.wait(WAIT_SECONDS):
            sys.exit(f"a request had not ended after {WAIT_SECONDS:.0f} s")
        if each.failure is not None:
            raise each.failure


def _checkpoint(model: str, folder: Path) -> Checkpoint:
    if model == "mini":
        return open_checkpoint(mini_folder())
    size, _, weights = model.partition("-")
    return open_checkpoint(write_hollow(folder, size, weights))


if __name__ == "__main__":
    main()
