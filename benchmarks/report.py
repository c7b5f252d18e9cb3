"""How the measurements are told: one Markdown table for each checkpoint, and what must hold."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import parameters
from benchmarks.measure import MIB, Job, Run
from vlfit.bench.results import markdown as markdown

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Column:
    """One engine on one device: the runs of all its processes."""

    title: str
    device: str
    runs: list[Run]

    def median(self, value: Callable[[Run], float]) -> float:
        return statistics.median(value(run) for run in self.runs)


def print_facts(facts: dict[str, Any]) -> None:
    print(
        f"commit {facts['commit']}; {facts['processor']}, {facts['threads']} threads, "
        f"memory read at {facts['cpu_memory_gb_per_s']:.1f} GB/s"
    )
    if "card" in facts:
        print(f"{facts['card']}, memory read at {facts['gpu_memory_gb_per_s']:.0f} GB/s")
    times = (("python", "python_s"), ("import vlfit", "import_vlfit_s"), ("vlfit --help", "vlfit_help_s"))
    print("; ".join(f"{what} {facts[key] * 1e3:.0f} ms" for what, key in times))


def print_table(name: str, job: Job, columns: list[Column], facts: dict[str, Any], *, size: str) -> None:
    total, read = (count * DTYPE_BYTES[job.dtype] for count in parameters(Path(job.folder)))
    first = columns[0].runs[0]
    versions = ", ".join(f"{package} {number}" for package, number in columns[1].runs[0].versions.items())
    print(f"\n## {name}: {total / DTYPE_BYTES[job.dtype] / 1e6:.1f} M parameters\n")
    print(
        f"{job.dtype}, {mib(total)} MiB of weights; picture {size} ({first.image_tokens} tokens), prompt "
        f"{first.prompt_tokens} tokens, {job.tokens} decoded; medians of {len(columns[0].runs)} processes x "
        f"{job.rounds} rounds; {versions}\n"
    )
    decoded = job.tokens - 1
    speeds = [decoded / column.median(lambda run: run.median_s("decode")) for column in columns]
    achieved = [
        speed * (column.runs[0].read_bytes or read) for speed, column in zip(speeds, columns, strict=True)
    ]
    rows = [
        ["", *(column.title for column in columns), "transformers / native"],
        *phase_rows(columns, decoded),
        ["tokens/s", *(f"{speed:.1f}" for speed in speeds), ""],
        ["achieved GB/s", *(f"{speed / 1e9:.1f}" for speed in achieved), ""],
        ["RSS after load, MiB", *(mib(column.median(lambda run: run.rss_loaded)) for column in columns), ""],
        ["peak RSS, MiB", *(mib(column.median(lambda run: run.rss_peak)) for column in columns), ""],
    ]
    if job.device != "cpu":
        peaks = (mib(column.median(lambda run: run.gpu_bytes)) for column in columns)
        rows.append(["peak of torch on the GPU, MiB", *peaks, ""])
    print_rows(rows)
    print_verdicts(job, columns, facts, weights=total, gb_per_s=achieved[0] / 1e9)


def phase_rows(columns: list[Column], decoded: int) -> list[list[str]]:
    """A row for each phase, with how many times longer transformers takes."""
    ms = 1e3
    phases: dict[str, tuple[Callable[[Run], float], str]] = {
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
    for label, (value, form) in phases.items():
        medians = [column.median(value) for column in columns]
        rows.append([label, *(format(each, form) for each in medians), f"{medians[1] / medians[0]:.2f} x"])
    return rows


def print_verdicts(
    job: Job, columns: list[Column], facts: dict[str, Any], *, weights: int, gb_per_s: float
) -> None:
    """What must hold, and whether it does."""
    print()
    if job.device == "cpu":
        peak, limit = columns[0].median(lambda run: run.rss_peak), weights * 1.3 + 600 * MIB
        verdict = "kept" if peak <= limit else "BROKEN"
        print(
            f"- memory: native peaks at {mib(peak)} MiB; weights x 1.3 + 600 MiB is {mib(limit)}: {verdict}"
        )
    memory = facts["cpu_memory_gb_per_s" if job.device == "cpu" else "gpu_memory_gb_per_s"]
    print(f"- decoding: native reads weights at {gb_per_s / memory:.0%} of the speed of memory")
    for column in columns[1:]:
        print(f"- tokens of {columns[0].title} and {column.title}: {agreement(columns[0], column)}")


def agreement(one: Column, other: Column) -> str:
    """In words: whether the two engines said the same tokens, and if not, from where on they differ."""
    expected, found = one.runs[0].token_ids, other.runs[0].token_ids
    pairs = zip(expected, found, strict=False)
    same = next((index for index, (left, right) in enumerate(pairs) if left != right), len(expected))
    return f"all {same} equal" if expected == found else f"DIFFER after {same} of {len(expected)}"


def mib(size: float) -> str:
    return f"{size / MIB:.0f}"


def print_rows(rows: list[list[str]]) -> None:
    """A Markdown table with aligned columns."""
    print("\n".join(markdown(rows)))
