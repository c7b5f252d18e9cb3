"""The native engine against transformers' ``generate``, phase by phase, on the same checkpoint in one run.

    make bench                          on the CPU: mini, and a random checkpoint of 108.5 M parameters
    ... -m benchmarks.engine --gpu      on a CUDA device, with the native engine on the CPU beside it
    ... -m benchmarks.engine --checkpoint FOLDER

Every engine runs in processes of its own, in turn. Greedy, one request at a time. The exit code
is 1 if the tokens differ in float32.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import CACHE, SHAPES, write_random_checkpoint
from benchmarks.facts import machine_facts
from benchmarks.measure import Job, run_worker
from benchmarks.report import DTYPE_BYTES, Column, print_facts, print_table

NATIVE, TRANSFORMERS = "benchmarks.native_worker", "benchmarks.transformers_worker"


def main() -> None:
    options = read_options()
    facts = machine_facts(options.threads, gpu=options.gpu)
    print_facts(facts)
    results: list[dict[str, Any]] = []
    same = True
    for name in options.checkpoint:
        folder = find_checkpoint(name)
        job = job_for(folder, options)
        columns = measure(job, options)
        print_table(name, job, columns, facts, size=options.size)
        same = same and all(
            run.token_ids == columns[0].runs[0].token_ids for each in columns for run in each.runs
        )
        runs = {each.title: [asdict(run) for run in each.runs] for each in columns}
        results.append({"checkpoint": name, "runs": runs})
    if options.json:
        options.json.write_text(json.dumps({"facts": facts, "results": results}, indent=1), "utf-8")
    # Below float32 two right engines may part ways where two tokens are nearly as likely.
    sys.exit(0 if same or options.dtype != "float32" else 1)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The native engine against transformers, phase by phase.")
    parser.add_argument("--checkpoint", nargs="+", metavar="NAME",
                        help=f"mini, {', '.join(SHAPES)} or folders (default: mini random-100m)")  # fmt: skip
    parser.add_argument("--gpu", action="store_true", help="measure on the first CUDA device")
    parser.add_argument("--dtype", default="float32", choices=DTYPE_BYTES, help="of the computation")
    # On a machine that others use too, --threads 1 is fairer: two threads wait for each other at every step.
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help="of torch on the CPU (default: all cores)")
    parser.add_argument("--tokens", type=int, default=64, help="decoded in each round")
    parser.add_argument("--processes", type=int, default=3, help="of each engine, in turn")
    parser.add_argument("--rounds", type=int, default=3, help="in each process, after one that warms up")
    parser.add_argument("--size", default="640x480", help="of the picture, in pixels")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single measurement there")
    options = parser.parse_args()
    options.checkpoint = options.checkpoint or ["mini", "random-100m"]
    return options


def find_checkpoint(name: str) -> Path:
    from vlfit.checkpoint.source import open_checkpoint

    if name in SHAPES:
        return write_random_checkpoint(name, open_checkpoint("mini").folder)
    return open_checkpoint(name).folder


def job_for(folder: Path, options: argparse.Namespace) -> Job:
    return Job(
        folder=str(folder),
        picture=str(write_picture(options.size)),
        question="Describe this picture in detail.",
        device="cuda" if options.gpu else "cpu",
        dtype=options.dtype,
        threads=options.threads,
        tokens=options.tokens,
        rounds=options.rounds,
    )


def measure(job: Job, options: argparse.Namespace) -> list[Column]:
    """All columns. The engines take turns, so that a slow minute of the machine falls on both."""
    name = Path(job.folder).name
    columns = [Column("native", job.device, []), Column("transformers", job.device, [])]
    for turn in range(options.processes):
        for column, module in zip(columns, (NATIVE, TRANSFORMERS), strict=True):
            print(f"  {name}: {column.title} {turn + 1}/{options.processes}", file=sys.stderr)
            column.runs.append(run_worker(module, job))
    if options.gpu and options.dtype == "float32":
        print(f"  {name}: native on the CPU", file=sys.stderr)
        on_cpu = replace(job, device="cpu", rounds=1)
        columns.append(Column("native on CPU", "cpu", [run_worker(NATIVE, on_cpu)]))
    return columns


def write_picture(size: str) -> Path:
    """A picture of ``size`` (WxH), the same at every call."""
    from vlfit.bench.workload import synthetic_picture

    width, height = (int(side) for side in size.split("x"))
    path = CACHE / f"picture-{width}x{height}.jpg"
    CACHE.mkdir(parents=True, exist_ok=True)
    path.write_bytes(synthetic_picture(width, height))
    return path


if __name__ == "__main__":
    main()
