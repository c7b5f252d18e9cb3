"""The native engine against transformers' ``generate``, phase by phase, on the same checkpoint in one run.

    make bench                               on the CPU: mini, and a random checkpoint of 108.5 M parameters
    python -m benchmarks.engine --gpu        on a CUDA device, with the native engine on the CPU beside it
    python -m benchmarks.engine --checkpoint FOLDER
    python -m benchmarks.engine --checkpoint mini --threads 1 --processes 1 --rounds 1       half a minute

Import, load, preprocessing, prefill, decoding and memory of one greedy request at a time. Each engine runs in
processes of its own, in turn; the default takes some five minutes on two cores. On a machine that others use,
``--threads 1`` is fairer: two threads wait for each other at every step. Exit code 1 if the tokens differ in
float32.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import SHAPES, count_parameters, find_checkpoint, write_picture
from benchmarks.engine_workers import NATIVE, TRANSFORMERS, EngineJob, EngineRun, run_engine
from benchmarks.harness import (
    MIB,
    add_json_option,
    alternate,
    argument_parser,
    card,
    commit,
    cpu_name,
    in_mib,
    output_of,
    print_table,
    write_json,
)

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PEAK_FACTOR, PEAK_EXTRA = 1.3, 600 * MIB  # most resident memory of the native engine, from the weights


@dataclass(frozen=True, slots=True)
class Column:
    """One engine on one device: the runs of all its processes."""

    title: str
    device: str
    runs: list[EngineRun]

    def median(self, value: Callable[[EngineRun], float]) -> float:
        return statistics.median(value(run) for run in self.runs)


def main() -> None:
    options = read_options()
    facts = machine_facts(options.threads, gpu=options.gpu)
    print_facts(facts)
    results: list[dict[str, Any]] = []
    same = True
    for name in options.checkpoint:
        job = job_for(find_checkpoint(name), options)
        columns = measure(job, options)
        print_result(name, job, columns, facts, size=options.size)
        same = same and all(
            run.token_ids == columns[0].runs[0].token_ids for each in columns for run in each.runs
        )
        runs = {each.title: [asdict(run) for run in each.runs] for each in columns}
        results.append({"checkpoint": name, "runs": runs})
        write_json(options.json, {"facts": facts, "results": results})
    # Below float32 two right engines may differ where two tokens are nearly as likely.
    sys.exit(0 if same or options.dtype != "float32" else 1)


def read_options() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--checkpoint",
        nargs="+",
        metavar="NAME",
        default=["mini", "random-100m"],
        help=f"mini, {', '.join(SHAPES)} or folders (default: mini random-100m)",
    )
    parser.add_argument("--gpu", action="store_true", help="measure on the first CUDA device")
    parser.add_argument("--dtype", default="float32", choices=DTYPE_BYTES, help="of the computation")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help="of torch on the CPU (default: all cores)")
    parser.add_argument("--tokens", type=int, default=64, help="decoded in each round")
    parser.add_argument("--processes", type=int, default=3, help="of each engine, in turn")
    parser.add_argument("--rounds", type=int, default=3, help="in each process, after one that warms up")
    parser.add_argument("--size", default="640x480", help="of the picture, in pixels")
    add_json_option(parser)
    return parser.parse_args()


def job_for(folder: Path, options: argparse.Namespace) -> EngineJob:
    return EngineJob(
        folder=str(folder),
        picture=str(write_picture(options.size)),
        question="Describe this picture in detail.",
        device="cuda" if options.gpu else "cpu",
        dtype=options.dtype,
        threads=options.threads,
        tokens=options.tokens,
        rounds=options.rounds,
    )


def measure(job: EngineJob, options: argparse.Namespace) -> list[Column]:
    name = Path(job.folder).name
    columns = [Column(engine, job.device, []) for engine in (NATIVE, TRANSFORMERS)]
    for number, column in alternate(options.processes, columns):
        print(f"  {name}: {column.title} {number + 1}/{options.processes}", file=sys.stderr)
        column.runs.append(run_engine(column.title, job))
    if options.gpu and options.dtype == "float32":
        print(f"  {name}: native on the CPU", file=sys.stderr)
        on_cpu = replace(job, device="cpu", rounds=1)
        columns.append(Column("native on CPU", "cpu", [run_engine(NATIVE, on_cpu)]))
    return columns


# --- the machine -------------------------------------------------------------------------------------------


def machine_facts(threads: int, *, gpu: bool) -> dict[str, Any]:
    """Commit, processor, memory bandwidth (GB/s), and seconds to start Python and ``vlfit --help``."""
    help_program = "import sys; sys.argv = ['vlfit', '--help']; from vlfit.cli.main import main; main()"
    facts: dict[str, Any] = {
        "commit": commit(),
        "processor": cpu_name(),
        "threads": threads,
        "cpu_memory_gb_per_s": memory_bandwidth("cpu", threads),
        "python_s": start_seconds("pass"),
        "import_vlfit_s": start_seconds("import vlfit"),
        "vlfit_help_s": start_seconds(help_program),
    }
    if gpu:
        facts["card"] = card()
        facts["gpu_memory_gb_per_s"] = memory_bandwidth("cuda", threads)
    return facts


def memory_bandwidth(device: str, threads: int) -> float:
    """GB/s (1e9 bytes) as ``vlfit bench`` measures it, in a process of its own."""
    program = (
        "import torch; from vlfit.tuning.bandwidth import measure_memory_bandwidth; "
        f"torch.set_num_threads({threads}); print(measure_memory_bandwidth(torch.device('{device}')) / 1e9)"
    )
    return float(output_of(sys.executable, "-c", program))


def start_seconds(program: str) -> float:
    """Median wall time of a new interpreter that runs ``program``, after one run that warms the files up."""
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        output_of(sys.executable, "-c", program)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


# --- the report --------------------------------------------------------------------------------------------


def print_facts(facts: dict[str, Any]) -> None:
    print(
        f"commit {facts['commit']}; {facts['processor']}, {facts['threads']} threads, "
        f"memory read at {facts['cpu_memory_gb_per_s']:.1f} GB/s"
    )
    if "card" in facts:
        print(f"{facts['card']}, memory read at {facts['gpu_memory_gb_per_s']:.0f} GB/s")
    times = (("python", "python_s"), ("import vlfit", "import_vlfit_s"), ("vlfit --help", "vlfit_help_s"))
    print("; ".join(f"{what} {facts[key] * 1e3:.0f} ms" for what, key in times))


def print_result(
    name: str, job: EngineJob, columns: list[Column], facts: dict[str, Any], *, size: str
) -> None:
    total, read = (count * DTYPE_BYTES[job.dtype] for count in count_parameters(Path(job.folder)))
    first = columns[0].runs[0]
    versions = ", ".join(f"{package} {number}" for package, number in columns[1].runs[0].versions.items())
    print(f"\n## {name}: {total / DTYPE_BYTES[job.dtype] / 1e6:.1f} M parameters\n")
    print(
        f"{job.dtype}, {in_mib(total)} MiB of weights; picture {size} ({first.image_tokens} tokens), prompt "
        f"{first.prompt_tokens} tokens, {job.tokens} decoded; medians of {len(columns[0].runs)} processes x "
        f"{job.rounds} rounds; {versions}\n"
    )
    decoded = job.tokens - 1
    speeds = [decoded / column.median(lambda run: run.median_s("decode")) for column in columns]
    achieved = [
        speed * (column.runs[0].read_bytes or read) for speed, column in zip(speeds, columns, strict=True)
    ]
    loaded = [in_mib(column.median(lambda run: run.rss_loaded)) for column in columns]
    peak = [in_mib(column.median(lambda run: run.rss_peak)) for column in columns]
    rows = [
        ["", *(column.title for column in columns), "transformers / native"],
        *phase_rows(columns, decoded),
        ["tokens/s", *(f"{speed:.1f}" for speed in speeds), ""],
        ["achieved GB/s", *(f"{speed / 1e9:.1f}" for speed in achieved), ""],
        ["RSS after load, MiB", *loaded, ""],
        ["peak RSS, MiB", *peak, ""],
    ]
    if job.device != "cpu":
        peaks = (in_mib(column.median(lambda run: run.gpu_bytes)) for column in columns)
        rows.append(["peak of torch on the GPU, MiB", *peaks, ""])
    print_table(rows)
    print_verdicts(job, columns, facts, weights=total, gb_per_s=achieved[0] / 1e9)


def phase_rows(columns: list[Column], decoded: int) -> list[list[str]]:
    """A row for each phase, with how many times longer transformers takes."""
    ms = 1e3
    phases: dict[str, tuple[Callable[[EngineRun], float], str]] = {
        "import, s": (lambda run: run.import_s, ".2f"),
        "load, s": (lambda run: run.load_s, ".3f"),
        "preprocess, ms": (lambda run: run.median_s("preprocess") * ms, ".1f"),
        "prefill, ms": (lambda run: run.median_s("prefill") * ms, ".1f"),
        "decode, ms per token": (lambda run: run.median_s("decode") / decoded * ms, ".2f"),
        "one request, ms": (
            lambda run: sum(map(run.median_s, ("preprocess", "prefill", "decode"))) * ms,
            ".0f",
        ),
    }
    rows = []
    for label, (value, spec) in phases.items():
        medians = [column.median(value) for column in columns]
        rows.append([label, *(format(each, spec) for each in medians), f"{medians[1] / medians[0]:.2f} x"])
    return rows


def print_verdicts(
    job: EngineJob, columns: list[Column], facts: dict[str, Any], *, weights: int, gb_per_s: float
) -> None:
    """What must hold, and whether it does."""
    print()
    if job.device == "cpu":
        peak, limit = columns[0].median(lambda run: run.rss_peak), weights * PEAK_FACTOR + PEAK_EXTRA
        verdict = "kept" if peak <= limit else "BROKEN"
        print(
            f"- memory: native peaks at {in_mib(peak)} MiB; "
            f"weights x {PEAK_FACTOR} + {in_mib(PEAK_EXTRA)} MiB is {in_mib(limit)}: {verdict}"
        )
    bandwidth = facts["cpu_memory_gb_per_s" if job.device == "cpu" else "gpu_memory_gb_per_s"]
    print(f"- decoding: native reads weights at {gb_per_s / bandwidth:.0%} of the memory bandwidth")
    for column in columns[1:]:
        print(f"- tokens of {columns[0].title} and {column.title}: {token_agreement(columns[0], column)}")


def token_agreement(one: Column, other: Column) -> str:
    """Whether both engines gave the same tokens, and if not, how many did agree."""
    expected, actual = one.runs[0].token_ids, other.runs[0].token_ids
    pairs = zip(expected, actual, strict=False)
    same = next((index for index, (left, right) in enumerate(pairs) if left != right), len(expected))
    return f"all {same} equal" if expected == actual else f"DIFFER after {same} of {len(expected)}"


if __name__ == "__main__":
    main()
