"""What the numbers of a benchmark depend on: the commit, the machine, the speed of its memory."""

import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.measure import ROOT
from vlfit.bench.results import cpu_name as cpu_name


def machine_facts(threads: int, *, gpu: bool) -> dict[str, Any]:
    """Where the numbers come from, how fast the memory is, and what starting costs. Seconds and GB/s."""
    help_program = "import sys; sys.argv = ['vlfit', '--help']; from vlfit.cli.main import main; main()"
    facts: dict[str, Any] = {
        "commit": commit(),
        "processor": cpu_name(),
        "threads": threads,
        "cpu_memory_gb_per_s": memory_speed("cpu", threads),
        "python_s": seconds_of("pass"),
        "import_vlfit_s": seconds_of("import vlfit"),
        "vlfit_help_s": seconds_of(help_program),
    }
    if gpu:
        facts["card"] = card()
        facts["gpu_memory_gb_per_s"] = memory_speed("cuda", threads)
    return facts


def memory_speed(device: str, threads: int) -> float:
    return float(output_of(sys.executable, "-m", "benchmarks.bandwidth", device, str(threads)))


def seconds_of(program: str) -> float:
    """Median wall time of a fresh interpreter that runs ``program``; one run before it warms the files up."""
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        output_of(sys.executable, "-c", program)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def commit() -> str:
    """The commit checked out, with ``+changes`` when the tree differs from it; ``unknown`` without git."""
    try:
        changed = output_of("git", "status", "--porcelain")
        return output_of("git", "rev-parse", "--short", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def card() -> str:
    """Name and driver of the first card."""
    try:
        return output_of(
            "nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"
        ).splitlines()[0]
    except (OSError, subprocess.CalledProcessError):
        return "a card that nvidia-smi does not name"


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout.strip()
