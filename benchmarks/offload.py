"""Layers streamed from RAM: measured speed against the plan's, for more and more of them.

    python -m benchmarks.offload                       4B in FP8, with 0, 1, 2 and 3 GiB in RAM: minutes
    python -m benchmarks.offload --size 8B --weights bf16 --offload 0 4 10
    python -m benchmarks.offload --variants            also rejected designs, for the middle one
    python -m benchmarks.offload --device cpu --checkpoint FOLDER --offload 0 --tokens 8 --rounds 2
                                                       to see it run

First the GPU is measured (`vlfit plan --calibrate`), into a cache of its own. Then each configuration runs in
a process of its own, on a sparse checkpoint of the true shapes (``checkpoints.py``). Exit code 1 where a
measured speed is more than 20 % off the plan's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.checkpoints import write_sparse_checkpoint
from benchmarks.harness import (
    add_json_option,
    argument_parser,
    card,
    commit,
    in_mib,
    print_row,
    run_module,
    run_worker,
    write_json,
)
from vlfit.checkpoint.source import open_checkpoint
from vlfit.machine.gpu import read_gpus
from vlfit.machine.model import Gpu
from vlfit.plan.backends import NATIVE
from vlfit.plan.calibration import constants_for, with_bandwidth
from vlfit.plan.ledger import PlanSettings
from vlfit.plan.native.ram import copy_seconds, num_layers_to_free, offload_of
from vlfit.plan.shapes import model_of
from vlfit.units import GIB

if TYPE_CHECKING:
    from vlfit.engine.engine import NativeEngine

TOLERANCE = 0.2
TIMEOUT = 240  # seconds for one process
VARIANTS = ("last layers", "one piece", "pieces of 1 MiB", "without graphs")


@dataclass(frozen=True, slots=True)
class OffloadJob:
    """A checkpoint with ``offload`` bytes in RAM, and ``rounds`` requests about a picture.

    ``variant``: one of ``VARIANTS``, which the engine does not use, or "".
    """

    folder: str
    offload: int
    image_tokens: int
    tokens: int
    rounds: int
    device: str = "cuda"
    variant: str = ""
    context: int = 4096
    chunk: int = 2048

    @property
    def title(self) -> str:
        size = f"{self.offload / 2**30:g} GiB"
        return f"{size}, {self.variant}" if self.variant else size


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians of all rounds but the first, and bytes.

    Tokens per second after the first token, seconds of a decode step and to the first token. ``weights``: on
    the device, by ledger line; ``ram``: pinned; ``peak``: on the device while loading, beyond the end.
    """

    layers: int
    ram: int
    weights: dict[str, int]
    load_s: float
    peak: int
    tokens_per_s: float
    step_s: float
    first_token_s: float


def main() -> None:
    options = read_options()
    if options.worker:
        print(json.dumps(asdict(measure(OffloadJob(**json.loads(options.worker))))))
        return
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = scratch  # of the workers, too
        if options.device == "cuda":
            calibrate()
        folder = str(
            options.checkpoint
            or write_sparse_checkpoint(Path(scratch) / "model", options.size, options.weights)
        )
        results: list[dict[str, Any]] = []
        facts = {
            "commit": commit(),
            "card": card() if options.device == "cuda" else "none",
            "results": results,
        }
        print_head(facts)
        for job in jobs(options, folder):
            results.append(compare(job, run_job(job), read_gpu(options.device)))
            print_row(row_of(results[-1]))
            if "failed" in results[-1]:
                print(results[-1]["failed"], file=sys.stderr, flush=True)
            write_json(options.json, facts)
    sys.exit(0 if all(is_as_planned(result) for result in results if not result["job"]["variant"]) else 1)


def read_options() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--size", default="4B", choices=("2B", "4B", "8B"))
    parser.add_argument("--weights", default="fp8", choices=("bf16", "fp8", "int4"))
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="a real one instead")
    parser.add_argument("--offload", nargs="+", type=float, metavar="GIB", default=[0.0, 1.0, 2.0, 3.0])
    parser.add_argument("--image-tokens", type=int, default=1024, help="of the picture")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3, help="requests, the first of which warms up")
    parser.add_argument("--variants", action="store_true", help=f"also {', '.join(VARIANTS)}")
    parser.add_argument("--device", default="cuda", help="other than cuda only to try this program")
    add_json_option(parser)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def calibrate() -> None:
    """Measure the GPU, in a process of its own, which ends as a plan does: with 0, or 3 if nothing fits."""
    done = run_module("vlfit", "plan", "mini", "--calibrate", timeout=TIMEOUT)
    print(done.stderr, file=sys.stderr, flush=True)
    if done.returncode not in (0, 3):
        sys.exit(f"calibrating failed: {done.stderr[-2000:]}")


def jobs(options: argparse.Namespace, folder: str) -> list[OffloadJob]:
    common = {
        "folder": folder,
        "image_tokens": options.image_tokens,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "device": options.device,
    }
    plain = [OffloadJob(offload=round(gib * GIB), **common) for gib in options.offload]
    if not options.variants:
        return plain
    sizes = [job.offload for job in plain if job.offload]
    middle = sizes[len(sizes) // 2]
    return plain + [
        OffloadJob(offload=0 if variant == "without graphs" else middle, variant=variant, **common)
        for variant in VARIANTS
    ]


def run_job(job: OffloadJob) -> Measured | str:
    """What a worker measured, or the end of its stderr."""
    try:
        return Measured(
            **run_worker("benchmarks.offload", "--worker", json.dumps(asdict(job)), timeout=TIMEOUT)
        )
    except subprocess.TimeoutExpired:
        return f"not done after {TIMEOUT} s"
    except RuntimeError as error:
        return str(error)[-2000:]


def read_gpu(device: str) -> Gpu | None:
    return None if device == "cpu" else with_bandwidth(read_gpus()[0][0])


def compare(job: OffloadJob, measured: Measured | str, gpu: Gpu | None) -> dict[str, Any]:
    """One row: the job, what was planned, what was measured."""
    result: dict[str, Any] = {"job": asdict(job), "title": job.title}
    if isinstance(measured, str):
        return result | {"failed": measured}
    result["measured"] = asdict(measured)
    if gpu is None:
        return result
    checkpoint = open_checkpoint(job.folder)
    model = model_of(checkpoint.name, checkpoint.config, checkpoint.tensors, "read from its headers")
    count = num_layers_to_free(model, job.offload) if job.offload else 0
    settings = PlanSettings(
        model.weights, job.context, job.image_tokens, 1, job.chunk, offloaded_layers=count
    )
    speed = NATIVE.speed(model, gpu, settings)
    copies = copy_seconds(offload_of(model, count), gpu, constants_for(gpu))
    if speed is not None:
        result["planned"] = asdict(speed) | {"copy_s": None if copies is None else copies[1]}
    return result


def is_as_planned(result: dict[str, Any]) -> bool:
    """Whether decoding is as fast as planned, within ``TOLERANCE``. Without layers in RAM any speed will do:
    other benchmarks check that.
    """
    if "failed" in result:
        return False
    if "planned" not in result or not result["job"]["offload"]:
        return True
    planned, measured = result["planned"]["decode"]["expected"], result["measured"]["tokens_per_s"]
    return bool(abs(measured / planned - 1) <= TOLERANCE)


def print_head(facts: dict[str, Any]) -> None:
    print(f"commit {facts['commit']}; {facts['card']}")
    heading = (
        *("off the card", "layers", "RAM MiB", "card MiB", "load s", "link GB/s"),
        *("tokens/s", "planned", "ratio", "first token ms", "planned"),
    )
    print_row(heading)
    print_row(["---:"] * len(heading))


def row_of(result: dict[str, Any]) -> list[str]:
    if "failed" in result:
        return [result["title"], "failed", *[""] * 9]
    measured, planned = result["measured"], result.get("planned")
    cells = [
        result["title"],
        str(measured["layers"]),
        in_mib(measured["ram"]),
        in_mib(sum(measured["weights"].values())),
        f"{measured['load_s']:.1f}",
        f"{measured['ram'] / measured['step_s'] / 1e9:.1f}",
        f"{measured['tokens_per_s']:.1f}",
    ]
    if planned is None:
        return [*cells, "?", "?", f"{measured['first_token_s'] * 1e3:.0f}", "?"]
    decode, first = planned["decode"], planned["first_token"]
    return [
        *cells,
        f"{decode['expected']:.1f} ({decode['low']:.1f}-{decode['high']:.1f})",
        f"{measured['tokens_per_s'] / decode['expected']:.2f}",
        f"{measured['first_token_s'] * 1e3:.0f}",
        f"{first['expected'] * 1e3:.0f} ({first['low'] * 1e3:.0f}-{first['high'] * 1e3:.0f})",
    ]


# --- the worker --------------------------------------------------------------------------------------------


def measure(job: OffloadJob) -> Measured:
    import torch

    from vlfit.api.engine_options import EngineOptions
    from vlfit.checkpoint.source import open_checkpoint
    from vlfit.engine.engine import NativeEngine
    from vlfit.loading.offload import StreamedLayers

    apply_variant(job.variant)
    options = EngineOptions(
        device=job.device,
        max_model_len=job.context,
        max_num_seqs=1,
        max_num_batched_tokens=job.chunk,
        image_tokens=job.image_tokens,
        image_cache_bytes=0,
        prefix_cache=False,
        speculate=False,
        offload=job.offload or None,
        cuda_graphs=job.variant != "without graphs",
    )
    began = time.perf_counter()
    engine = NativeEngine(open_checkpoint(job.folder), options)
    on_gpu = engine.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    load_s = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated() if on_gpu else 0
    rounds = [time_request(engine, job, number) for number in range(job.rounds)][1:]
    first, step = (statistics.median(times[which] for times in rounds) for which in (0, 1))
    layers = engine.runner.text.layers
    ram = layers.offloaded_bytes if isinstance(layers, StreamedLayers) else 0
    account = engine.account()
    return Measured(
        account.settings.offload, ram, account.memory.weights, load_s, peak, 1 / step, step, first
    )


def apply_variant(variant: str) -> None:
    """Change the engine to a design that was rejected, so that the difference can be measured."""
    from vlfit.loading import offload
    from vlfit.plan.native import ram

    if variant == "last layers":
        ram.spread_layers = lambda layers, count: tuple(range(layers - count, layers))
    elif variant == "one piece":
        offload.PIECE = 2**40
    elif variant == "pieces of 1 MiB":
        offload.PIECE = 2**20


def time_request(engine: "NativeEngine", job: OffloadJob, number: int) -> tuple[float, float]:
    """Seconds to the first token and of each later step, for a question of 40 tokens about a picture."""
    from vlfit.api.sampling_params import SamplingParams
    from vlfit.engine.execution.warmup import image_prompt
    from vlfit.plan.speed import TEXT_TOKENS

    prompt = image_prompt(engine, job.image_tokens, number, job.image_tokens + TEXT_TOKENS)
    times: list[float] = []
    failures: list[Exception] = []

    def listen(arrival: object) -> None:
        times.append(time.perf_counter())
        if isinstance(arrival, Exception):
            failures.append(arrival)

    sampling = SamplingParams(max_tokens=job.tokens, ignore_eos=True)
    began = time.perf_counter()
    engine.submit(engine.make_sequence(replace(engine.prepare_prompt(prompt), keys=None), sampling, listen))
    while engine.busy:
        engine.step()
    if failures:
        raise failures[0]
    # Chunks without text may be held back: only the last arrival is certain.
    return times[0] - began, (times[-1] - times[0]) / (job.tokens - 1)


if __name__ == "__main__":
    main()
