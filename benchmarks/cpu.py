"""What it gives on this CPU that large matrices are kept in float16 (`layers/cpu_linear.py`).

    python -m benchmarks.cpu [random-100m random-2b FOLDER ...] [--threads 1] [--products]

Each checkpoint is run as the engine runs it, with all in float32, and in bfloat16, each in processes of its
own, in turn: loading, memory, the pass of a prompt with a picture, tokens decoded by one request and by
several. With one thread times are those of the processor, so that neighbours count less. `--products`: one
matrix of 4096 x 2048 times 1 to 808 rows, in each of the ways that torch has. The exit code is 1 if words
differ between the first two.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engine import find_checkpoint, write_picture
from benchmarks.facts import commit, cpu_name
from benchmarks.measure import MIB, ROOT, environment
from benchmarks.report import print_rows

KINDS = ("float16 weights", "float32", "bfloat16")
ROWS = (1, 2, 4, 8, 64, 808)
SHAPE = (4096, 2048)
COPIES = 8  # of the matrix, so that it is read from memory; 300 MB in float32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoints", nargs="*", metavar="NAME")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=24, help="decoded in each round")
    parser.add_argument("--rounds", type=int, default=3, help="in each process, after one that warms up")
    parser.add_argument("--processes", type=int, default=2, help="of each kind, in turn")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(run(**json.loads(options.worker))))
        return
    print(f"commit {commit()}; {cpu_name()}, {options.threads} threads")
    if options.products:
        print_products(worker(options, kind="products"))
    same = [compare(name, options) for name in options.checkpoints]
    sys.exit(0 if all(same) else 1)


def compare(name: str, options: argparse.Namespace) -> bool:
    """Print a table of one checkpoint; whether float16 weights gave the words of float32."""
    job = {"folder": str(find_checkpoint(name)), "picture": str(write_picture("640x480"))}
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for _ in range(options.processes):
        for kind, done in runs.items():
            print(f"  {name}: {kind}", file=sys.stderr)
            done.append(worker(options, kind=kind, **job))
    table = [["", *KINDS]]
    for label, unit, form in (
        ("load, s", 1, ".2f"),
        ("weights, MiB", MIB, ".0f"),
        ("RAM that loading took, MiB", MIB, ".0f"),
        ("prompt, ms", 1e-3, ".1f"),
        ("a token, ms", 1e-3, ".2f"),
        (f"a token of {options.at_once} at once, ms", 1e-3, ".2f"),
    ):
        medians = (statistics.median(each[label] for each in done) / unit for done in runs.values())
        table.append([label, *(format(median, form) for median in medians)])
    print(f"\n{name}\n")
    print_rows(table)
    same = bool(runs[KINDS[0]][0]["tokens"] == runs[KINDS[1]][0]["tokens"])
    print(f"\ntokens of {KINDS[0]} and {KINDS[1]}: {'equal' if same else 'DIFFERENT'}", flush=True)
    return same


def worker(options: argparse.Namespace, **job: str) -> dict[str, Any]:
    """What a process of its own measures."""
    settings = {key: getattr(options, key) for key in ("threads", "tokens", "rounds", "at_once")}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cpu", "--worker", json.dumps({**settings, **job})],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(OMP_NUM_THREADS=str(options.threads)),
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(*, kind: str, threads: int, **job: Any) -> dict[str, Any]:
    """In the worker: what ``kind`` takes, by label, in bytes and seconds."""
    from vlfit.backends.native import import_engine

    import_engine()
    import torch

    torch.set_num_threads(threads)
    clock = time.thread_time if threads == 1 else time.perf_counter
    if kind == "products":
        return products(clock)
    from vlfit.plan.native import ram as in_ram

    if kind == "float32":
        in_ram.LEAST_WEIGHTS = sys.maxsize
    with torch.inference_mode():
        return of_engine("bfloat16" if kind == "bfloat16" else "float32", clock, **job)


def of_engine(
    dtype: str,
    clock: Callable[[], float],
    *,
    folder: str,
    picture: str,
    tokens: int,
    rounds: int,
    at_once: int,
) -> dict[str, Any]:
    from vlfit.api.conversation import ImagePart, ask
    from vlfit.api.engine_options import EngineOptions
    from vlfit.api.sampling_params import SamplingParams
    from vlfit.checkpoint.source import open_checkpoint
    from vlfit.engine.engine import NativeEngine
    from vlfit.engine.memory.usage import resident_bytes

    before, began = resident_bytes() or 0, time.perf_counter()
    options = EngineOptions(
        device="cpu", dtype=dtype, max_model_len=2048, image_cache_bytes=0, prefix_cache=False
    )
    engine = NativeEngine(open_checkpoint(folder), options)
    load, held = time.perf_counter() - began, (resident_bytes() or 0) - before
    conversation = ask("Describe this picture in detail.", ImagePart(Path(picture).read_bytes()))
    prompt = engine.prepare_prompt(engine.prompts.build(conversation))
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)

    def answer(count: int) -> tuple[float, float, list[int]]:
        """Seconds of the first pass, of a token of each, and the token ids of the first."""
        asked = [engine.sequence(prompt, sampling, lambda arrival: None) for _ in range(count)]
        for sequence in asked:
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
            asked[0].token_ids(prompt.num_tokens, asked[0].num_cached_tokens).tolist(),
        )

    answer(1)
    alone = [answer(1) for _ in range(rounds)]
    together = [answer(at_once)[1] for _ in range(rounds)]
    return {
        "load, s": load,
        "weights, MiB": sum(engine.account().memory.weights.values()),
        "RAM that loading took, MiB": held,
        "prompt, ms": statistics.median(first for first, _, _ in alone),
        "a token, ms": statistics.median(each for _, each, _ in alone),
        f"a token of {at_once} at once, ms": statistics.median(together),
        "tokens": alone[0][2],
    }


def products(clock: Callable[[], float]) -> dict[str, Any]:
    """Seconds of one product by rows and way: the lower quartile of turns, in which all ways take part."""
    import torch
    import torch.nn.functional as F

    from vlfit.layers.cpu_linear import HalfPacker

    packing = HalfPacker()
    plain = [torch.randn(SHAPE).bfloat16() for _ in range(COPIES)]
    wide = [weight.float() for weight in plain]
    halves = [packing.half(weight.float()) for weight in plain]
    packing.settle()
    packing.close()
    turn = iter(range(sys.maxsize))
    found = {}
    for rows in ROWS:
        ways: dict[str, tuple[Callable[[Any, int], object], torch.dtype]] = {
            "float16 weights": (lambda x, copy: halves[copy](x), torch.float32),
            "float32": (lambda x, copy: F.linear(x, wide[copy]), torch.float32),
            "bfloat16": (lambda x, copy: F.linear(x, plain[copy]), torch.bfloat16),
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(25 if rows <= 8 else 6):
            for way, (product, dtype) in ways.items():
                x, copy = torch.randn(rows, SHAPE[1]).to(dtype), next(turn) % COPIES
                start = clock()
                product(x, copy)
                times[way].append(clock() - start)
        found[str(rows)] = {way: statistics.quantiles(each[1:], n=4)[0] for way, each in times.items()}
    return found


def print_products(found: dict[str, dict[str, float]]) -> None:
    print(f"\n{SHAPE[0]} x {SHAPE[1]}, ms\n")
    print_rows(
        [
            ["rows", *KINDS],
            *([rows, *(f"{each[way] * 1e3:.2f}" for way in KINDS)] for rows, each in found.items()),
        ]
    )


if __name__ == "__main__":
    main()
