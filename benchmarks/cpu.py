"""Large matrices in float16 on a CPU (`layers/cpu_linear.py`) against float32 and bfloat16.

    python -m benchmarks.cpu random-100m random-2b FOLDER        some minutes each
    python -m benchmarks.cpu --products                          only matrix products: a minute
    python -m benchmarks.cpu mini --tokens 4 --rounds 1 --processes 1        to see it run

Each checkpoint runs as the engine runs it, all in float32, and in bfloat16, each in processes of its own, in
turn: loading, memory, prefill of a prompt with a picture, decoding of one request and of several. With one
thread (the default) CPU time is taken, so that other processes count less. `--products`: a matrix of
4096 x 2048 times 1 to 808 rows in each dtype. Exit code 1 if tokens differ between float16 weights and
float32.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import find_checkpoint, write_picture
from benchmarks.harness import MIB, alternate, argument_parser, commit, cpu_name, print_table, run_worker

KINDS = ("float16 weights", "float32", "bfloat16")
ROWS = (1, 2, 4, 8, 64, 808)
SHAPE = (4096, 2048)
COPIES = 8  # of the matrix, so that it is read from memory; 300 MB in float32


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("checkpoints", nargs="*", metavar="NAME")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=24, help="decoded in each round")
    parser.add_argument("--rounds", type=int, default=3, help="in each process, after one that warms up")
    parser.add_argument("--processes", type=int, default=2, help="of each kind, in turn")
    parser.add_argument("--at-once", type=int, default=4, help="requests")
    parser.add_argument("--products", action="store_true", help="also time matrix products")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(run(**json.loads(options.worker))))
        return
    print(f"commit {commit()}; {cpu_name()}, {options.threads} threads")
    if options.products:
        print_products(measure(options, kind="products"))
    same = [compare(name, options) for name in options.checkpoints]
    sys.exit(0 if all(same) else 1)


def compare(name: str, options: argparse.Namespace) -> bool:
    """Print a table of one checkpoint; whether float16 weights gave the tokens of float32."""
    job = {"folder": str(find_checkpoint(name)), "picture": str(write_picture("640x480"))}
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for _, kind in alternate(options.processes, KINDS):
        print(f"  {name}: {kind}", file=sys.stderr)
        runs[kind].append(measure(options, kind=kind, **job))
    table = [["", *KINDS]]
    for label, unit, spec in (
        ("load, s", 1, ".2f"),
        ("weights, MiB", MIB, ".0f"),
        ("RAM that loading took, MiB", MIB, ".0f"),
        ("prompt, ms", 1e-3, ".1f"),
        ("a token, ms", 1e-3, ".2f"),
        (f"a token of {options.at_once} at once, ms", 1e-3, ".2f"),
    ):
        medians = (statistics.median(run[label] for run in each) / unit for each in runs.values())
        table.append([label, *(format(median, spec) for median in medians)])
    print(f"\n{name}\n")
    print_table(table)
    same = bool(runs[KINDS[0]][0]["tokens"] == runs[KINDS[1]][0]["tokens"])
    print(f"\ntokens of {KINDS[0]} and {KINDS[1]}: {'equal' if same else 'DIFFERENT'}", flush=True)
    return same


def measure(options: argparse.Namespace, **job: str) -> dict[str, Any]:
    """Run a worker in a process of its own."""
    settings = {key: getattr(options, key) for key in ("threads", "tokens", "rounds", "at_once")}
    arguments = json.dumps({**settings, **job})
    return run_worker("benchmarks.cpu", "--worker", arguments, OMP_NUM_THREADS=str(options.threads))


def run(*, kind: str, threads: int, **job: Any) -> dict[str, Any]:
    """The worker: bytes and seconds of ``kind``, by label."""
    from vlfit.backends.in_process import import_engine

    import_engine()
    import torch

    torch.set_num_threads(threads)
    clock = time.thread_time if threads == 1 else time.perf_counter
    if kind == "products":
        return time_products(clock)
    from vlfit.plan.native import ram

    if kind == "float32":
        ram.LEAST_WEIGHTS = sys.maxsize  # no matrix is large enough for float16
    with torch.inference_mode():
        return time_engine("bfloat16" if kind == "bfloat16" else "float32", clock, **job)


def time_engine(
    dtype: str,
    clock: Callable[[], float],
    *,
    folder: str,
    picture: str,
    tokens: int,
    rounds: int,
    at_once: int,
) -> dict[str, Any]:
    from vlfit.api.conversation import ImagePart, single_turn
    from vlfit.api.engine_options import EngineOptions
    from vlfit.api.sampling_params import SamplingParams
    from vlfit.checkpoint.source import open_checkpoint
    from vlfit.engine.engine import NativeEngine
    from vlfit.engine.memory.usage import resident_bytes

    before, start = resident_bytes() or 0, time.perf_counter()
    options = EngineOptions(
        device="cpu", dtype=dtype, max_model_len=2048, image_cache_bytes=0, prefix_cache=False
    )
    engine = NativeEngine(open_checkpoint(folder), options)
    load_s, load_bytes = time.perf_counter() - start, (resident_bytes() or 0) - before
    conversation = single_turn("Describe this picture in detail.", ImagePart(Path(picture).read_bytes()))
    prompt = engine.prepare_prompt(engine.prompts.build(conversation))
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)

    def answer(count: int) -> tuple[float, float, list[int]]:
        """Seconds of the first step and of a token; the token ids of the first request."""
        sequences = [engine.make_sequence(prompt, sampling, lambda arrival: None) for _ in range(count)]
        for sequence in sequences:
            engine.submit(sequence)
        seconds = []
        while engine.busy:
            start = clock()
            engine.step()
            seconds.append(clock() - start)
        decoding = statistics.median(seconds[-(tokens // 2) :]) / count
        return (
            seconds[0],
            decoding,
            sequences[0].token_ids(prompt.num_tokens, sequences[0].num_cached_tokens).tolist(),
        )

    answer(1)
    alone = [answer(1) for _ in range(rounds)]
    together = [answer(at_once)[1] for _ in range(rounds)]
    return {
        "load, s": load_s,
        "weights, MiB": sum(engine.account().memory.weights.values()),
        "RAM that loading took, MiB": load_bytes,
        "prompt, ms": statistics.median(first for first, _, _ in alone),
        "a token, ms": statistics.median(each for _, each, _ in alone),
        f"a token of {at_once} at once, ms": statistics.median(together),
        "tokens": alone[0][2],
    }


def time_products(clock: Callable[[], float]) -> dict[str, Any]:
    """Seconds of one product by rows and dtype: the lower quartile of rounds with all dtypes in turn."""
    import torch
    import torch.nn.functional as F

    from vlfit.layers.cpu_linear import HalfPacker

    packer = HalfPacker()
    plain = [torch.randn(SHAPE).bfloat16() for _ in range(COPIES)]
    wide = [weight.float() for weight in plain]
    halves = [packer.pack(weight.float()) for weight in plain]
    packer.wait()
    packer.close()
    calls = itertools.count()
    quartiles = {}
    for rows in ROWS:
        products: dict[str, tuple[Callable[[Any, int], object], torch.dtype]] = {
            "float16 weights": (lambda x, copy: halves[copy](x), torch.float32),
            "float32": (lambda x, copy: F.linear(x, wide[copy]), torch.float32),
            "bfloat16": (lambda x, copy: F.linear(x, plain[copy]), torch.bfloat16),
        }
        times: dict[str, list[float]] = {kind: [] for kind in products}
        for _, kind in alternate(25 if rows <= 8 else 6, KINDS):
            product, dtype = products[kind]
            x, copy = torch.randn(rows, SHAPE[1]).to(dtype), next(calls) % COPIES
            start = clock()
            product(x, copy)
            times[kind].append(clock() - start)
        quartiles[str(rows)] = {kind: statistics.quantiles(each[1:], n=4)[0] for kind, each in times.items()}
    return quartiles


def print_products(quartiles: dict[str, dict[str, float]]) -> None:
    print(f"\n{SHAPE[0]} x {SHAPE[1]}, ms\n")
    print_table(
        [
            ["rows", *KINDS],
            *([rows, *(f"{each[kind] * 1e3:.2f}" for kind in KINDS)] for rows, each in quartiles.items()),
        ]
    )


if __name__ == "__main__":
    main()
