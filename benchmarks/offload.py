"""Layers that wait in RAM: how fast it is, beside what the plan says, for more and more of them.

    python -m benchmarks.offload                       4B in FP8, with 0, 1, 2 and 3 GiB off the card
    python -m benchmarks.offload --size 8B --weights bf16 --offload 0 4 10
    python -m benchmarks.offload --variants            also what was decided against, for the middle one

First the GPU is measured (``vlfit plan --calibrate``), into a folder of its own. Then each configuration runs
in a process of its own, on a checkpoint of the true shapes whose weights are holes in a file. Speed does not
depend on their values. The exit code is 1 where a measured speed is more than 20 % off the plan's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.facts import card, commit
from benchmarks.hollow import write_hollow
from benchmarks.measure import MIB, ROOT
from benchmarks.offload_worker import Measured, OffloadJob
from vlfit.checkpoint.source import open_checkpoint
from vlfit.machine.gpu import read_gpus
from vlfit.machine.model import Gpu
from vlfit.plan.backends import NATIVE
from vlfit.plan.calibration import constants_for, with_bandwidth
from vlfit.plan.ledger import Settings
from vlfit.plan.native.ram import copy_seconds, layers_to_free, offload_of
from vlfit.plan.shapes import model_of
from vlfit.units import GIB

TOLERANCE = 0.2
PATIENCE = 240  # seconds for one process


def main() -> None:
    options = read_options()
    with tempfile.TemporaryDirectory() as scratch:
        environment = os.environ | {"XDG_CACHE_HOME": scratch, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        if options.device == "cuda":
            calibrate(environment)
        os.environ["XDG_CACHE_HOME"] = scratch  # the plan reads there what was measured
        folder = str(
            options.checkpoint or write_hollow(Path(scratch) / "model", options.size, options.weights)
        )
        results: list[dict[str, Any]] = []
        facts = {
            "commit": commit(),
            "card": card() if options.device == "cuda" else "none",
            "results": results,
        }
        print_head(facts)
        for job in jobs(options, folder):
            results.append(compared(job, measured(job, environment), the_gpu(options.device)))
            print(f"| {' | '.join(row_of(results[-1]))} |", flush=True)
            if "failed" in results[-1]:
                print(results[-1]["failed"], file=sys.stderr, flush=True)
            if options.json:  # after each row, should the next one take too long
                options.json.write_text(json.dumps(facts, indent=1), "utf-8")
    sys.exit(0 if all(within(result) for result in results if not result["job"]["variant"]) else 1)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Layers that wait in RAM: measured speed beside the plan's.")
    parser.add_argument("--size", default="4B", choices=("2B", "4B", "8B"))
    parser.add_argument("--weights", default="fp8", choices=("bf16", "fp8", "int4"))
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="a real one instead")
    parser.add_argument("--offload", nargs="+", type=float, metavar="GIB", default=[0.0, 1.0, 2.0, 3.0])
    parser.add_argument("--image-tokens", type=int, default=1024, help="of the picture that is asked about")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3, help="requests, the first of which warms up")
    parser.add_argument(
        "--variants", action="store_true", help="also the last layers, and copies in one piece"
    )
    parser.add_argument("--device", default="cuda", help="other than cuda only to try this program")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def calibrate(environment: dict[str, str]) -> None:
    """In a process of its own, as the GPU must be untouched. It ends with what a plan ends with, 0 or 3."""
    words = [sys.executable, "-m", "vlfit", "plan", "mini", "--calibrate"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=PATIENCE)
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
    found = [OffloadJob(offload=round(gib * GIB), **common) for gib in options.offload]
    if options.variants:
        middle = [job.offload for job in found if job.offload]
        offload = middle[len(middle) // 2]
        variants = ("last layers", "one piece", "pieces of 1 MiB", "without graphs")
        found += [
            OffloadJob(offload=0 if variant == "without graphs" else offload, variant=variant, **common)
            for variant in variants
        ]
    return found


def measured(job: OffloadJob, environment: dict[str, str]) -> Measured | str:
    """What the process found, or the end of what it wrote."""
    words = [sys.executable, "-m", "benchmarks.offload_worker", json.dumps(asdict(job))]
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return f"not done after {PATIENCE} s"
    if done.returncode:
        return done.stderr[-2000:]
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def the_gpu(device: str) -> Gpu | None:
    return None if device == "cpu" else with_bandwidth(read_gpus()[0][0])


def compared(job: OffloadJob, found: Measured | str, gpu: Gpu | None) -> dict[str, Any]:
    """One row: the job, what the plan says of it, what was measured."""
    result: dict[str, Any] = {"job": asdict(job), "title": job.title}
    if isinstance(found, str):
        return result | {"failed": found}
    result["measured"] = asdict(found)
    if gpu is None:
        return result
    checkpoint = open_checkpoint(job.folder)
    model = model_of(checkpoint.name, checkpoint.config, checkpoint.tensors, "read from its headers")
    count = layers_to_free(model, job.offload) if job.offload else 0
    settings = Settings(model.weights, job.context, job.image_tokens, 1, job.chunk, offload=count)
    speed = NATIVE.speed(model, gpu, settings)
    copies = copy_seconds(offload_of(model, count), gpu, constants_for(gpu))
    if speed is not None:
        result["planned"] = asdict(speed) | {"copy_s": None if copies is None else copies[1]}
    return result


def within(result: dict[str, Any]) -> bool:
    """Whether decoding is as fast as the plan expects, within ``TOLERANCE``; without layers in RAM that is
    another benchmark's business, and any speed will do.
    """
    if "failed" in result:
        return False
    if "planned" not in result or not result["job"]["offload"]:
        return True
    planned, found = result["planned"]["decode"]["expected"], result["measured"]["tokens_per_s"]
    return bool(abs(found / planned - 1) <= TOLERANCE)


def print_head(facts: dict[str, Any]) -> None:
    print(f"commit {facts['commit']}; {facts['card']}")
    titles = (
        *("off the card", "layers", "RAM MiB", "card MiB", "load s", "link GB/s"),
        *("tokens/s", "planned", "ratio", "first token ms", "planned"),
    )
    print(f"| {' | '.join(titles)} |\n|{'---:|' * len(titles)}", flush=True)


def row_of(result: dict[str, Any]) -> list[str]:
    if "failed" in result:
        return [result["title"], "failed", *[""] * 9]
    found, planned = result["measured"], result.get("planned")
    cells = [
        result["title"],
        str(found["layers"]),
        f"{found['ram'] / MIB:.0f}",
        f"{sum(found['weights'].values()) / MIB:.0f}",
        f"{found['load_s']:.1f}",
        f"{found['ram'] / found['step_s'] / 1e9:.1f}",
        f"{found['tokens_per_s']:.1f}",
    ]
    if planned is None:
        return [*cells, "?", "?", f"{found['first_token_s'] * 1e3:.0f}", "?"]
    decode, first = planned["decode"], planned["first_token"]
    return [
        *cells,
        f"{decode['expected']:.1f} ({decode['low']:.1f}-{decode['high']:.1f})",
        f"{found['tokens_per_s'] / decode['expected']:.2f}",
        f"{found['first_token_s'] * 1e3:.0f}",
        f"{first['expected'] * 1e3:.0f} ({first['low'] * 1e3:.0f}-{first['high'] * 1e3:.0f})",
    ]


if __name__ == "__main__":
    main()
