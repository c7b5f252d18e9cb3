"""The plan's total against what a process really holds on a GPU, configuration by configuration.

    python -m benchmarks.ledger --json build/ledger.json    all of them: a few minutes
    python -m benchmarks.ledger --only 4B fp8/int4          those whose name has 4B, and fp8 or int4
    python -m benchmarks.ledger --list
    python -m benchmarks.ledger --against benchmarks/measured/ledger-h100.json
                                                            earlier measurements against today's plan: no GPU

Each configuration runs in a process of its own (``ledger_workers.py``), which loads a checkpoint of true
sizes and runs the worst case that the plan admits. The plan's total without the desktop and without the
reserve is compared with the GPU memory that the process took (NVML). Needs an idle GPU, of 20 GB for all.
Exit code 1 if any plan is below the measurement.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import write_sparse_checkpoint
from benchmarks.harness import (
    MIB,
    ROOT,
    add_json_option,
    argument_parser,
    card,
    commit,
    cpu_name,
    environment,
    print_table,
    versions_of,
    write_json,
)
from benchmarks.ledger_workers import NATIVE, ROUNDED, TRANSFORMERS, HeldMemory, LedgerJob
from vlfit.checkpoint import catalog
from vlfit.checkpoint.source import read_checkpoint
from vlfit.errors import DeviceError
from vlfit.machine.model import Gpu, record_from_json, record_to_json
from vlfit.machine.survey import survey
from vlfit.plan import calibration
from vlfit.plan.backends import cost_model
from vlfit.plan.gpus import emptiest_gpu
from vlfit.plan.ledger import Line, PlanSettings
from vlfit.plan.shapes import model_of

WORKER = "benchmarks.ledger_workers"
ROUNDED_TOO, TIGHT = "rounded", "tight"
# Size, weights, context, image tokens, sequences, batched tokens; then rounded (int4 in groups of 128, int8
# for all but the text layers), tight (the smaller KV pool), or neither.
NATIVE_CASES: tuple[tuple[str, str, int, int, int, int, str], ...] = (
    ("2B", "bf16", 8192, 2560, 4, 1024, ""),
    ("2B", "bf16", 8192, 6400, 1, 1024, ""),  # the tower needs more than the text model
    ("2B", "fp8", 4096, 1024, 2, 512, ""),
    ("2B", "fp8", 8192, 2560, 4, 1024, ""),
    ("2B", "int4", 8192, 2560, 4, 1024, ""),
    ("4B", "bf16", 4096, 1024, 1, 256, ""),
    ("4B", "bf16", 8192, 2560, 4, 1024, ""),
    ("4B", "fp8", 4096, 1024, 2, 256, ""),  # the worked example of docs/plan.md
    ("4B", "fp8", 8192, 2560, 4, 1024, ""),
    ("4B", "fp8", 8192, 1280, 8, 1024, ROUNDED_TOO),
    ("4B", "fp8", 6144, 1280, 8, 512, TIGHT),
    ("4B", "int4", 8192, 2560, 4, 512, ""),
    ("8B", "bf16", 4096, 1024, 2, 512, ""),
    ("8B", "fp8", 2048, 256, 1, 128, ""),
    ("8B", "fp8", 8192, 2560, 4, 1024, ""),
    ("8B", "int4", 4096, 1280, 2, 256, ""),
    # What `vlfit serve` is to hold on a card with 7,200 MiB free (``memory.py``).
    ("2B", "fp8", 16384, 2560, 8, 1024, ""),
    ("4B", "fp8", 6144, 1280, 4, 1024, ""),
    ("4B", "int4", 16384, 2560, 8, 1024, ""),
    ("8B", "int4", 4096, 1280, 2, 1024, ROUNDED_TOO),
)
# The same of models with recurrent states.
CASES_WITH_STATES: tuple[tuple[str, str, int, int, int, int, str], ...] = (
    ("Qwen3.5-0.8B", "bf16", 16384, 2560, 4, 1024, ""),
    ("Qwen3.5-2B", "bf16", 8192, 2560, 4, 1024, ""),
    ("Qwen3.5-2B", "fp8", 16384, 2560, 8, 1024, ""),
    ("Qwen3.5-4B", "bf16", 4096, 1024, 2, 512, ""),
    ("Qwen3.5-4B", "fp8", 8192, 2560, 4, 1024, ""),
    ("Qwen3.5-4B", "int4", 32768, 2560, 8, 1024, ""),
    ("Qwen3.5-9B", "fp8", 4096, 1024, 1, 512, ""),
    ("Qwen3.5-9B", "int4", 16384, 1280, 2, 1024, ROUNDED_TOO),
)
TRANSFORMERS_CASES = (("2B", 936, 768, 1), ("4B", 2048, 1024, 2), ("8B", 2048, 1024, 1))
NO_LINE = "-"
TIMEOUT = 180  # seconds for one configuration; they take some five


def main() -> None:
    options = read_options()
    known, facts, gpu = read_measured(options.against) if options.against else ({}, new_facts(), None)
    jobs = list(known)
    if not options.against:
        jobs = [*all_jobs(options.read_files), *jobs_with_states(options.read_files)]
    jobs = [job for job in jobs if all(matches(job, word) for word in options.only)]
    if options.list:
        print("\n".join(job.name for job in jobs))
        return
    if not jobs:
        sys.exit(f"no configuration has all of {options.only} in its name: see --list")
    gpu = gpu or this_gpu()
    facts["constants"] = calibration.constants_for(gpu).context.source
    print("; ".join(f"{name} {value}" for name, value in facts.items()))
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="vlfit-ledger-") as folder:
        placed = [with_checkpoint(job, Path(folder)) for job in jobs]
        measured = iter([known[job] for job in jobs]) if options.against else measure(placed)
        results = []
        for job, held in zip(placed, measured, strict=True):
            results.append(compare(job, held, gpu))
            write(options.json, facts, gpu, results)
    print_results(results)
    if not options.against:
        facts["seconds"] = round(time.perf_counter() - started, 1)
        print(f"\n{len(results)} configurations in {facts['seconds']:.0f} s")
    write(options.json, facts, gpu, results)
    sys.exit(1 if any(result["verdict"] != "ok" for result in results) else 0)


def matches(job: LedgerJob, word: str) -> bool:
    """Whether the job's name contains ``word``, or one of several between slashes."""
    return any(part in job.name for part in word.split("/"))


def this_gpu() -> Gpu:
    try:
        return emptiest_gpu(survey())
    except DeviceError as error:
        sys.exit(error.message)


def write(file: Path | None, facts: dict[str, Any], gpu: Gpu, results: list[dict[str, Any]]) -> None:
    write_json(file, {"facts": facts, "gpu": record_to_json(gpu), "results": results})


def new_facts() -> dict[str, Any]:
    return {
        "card": card(),
        "commit": commit(),
        "processor": cpu_name(),
        **versions_of("torch", "transformers"),
    }


def read_measured(files: list[Path]) -> tuple[dict[LedgerJob, HeldMemory | str], dict[str, Any], Gpu]:
    """Earlier measurements by configuration (or why they failed), facts and GPU. Later ``files`` override."""
    known: dict[LedgerJob, HeldMemory | str] = {}
    for file in files:
        content = json.loads(file.read_text("utf-8"))
        for result in content["results"]:
            job = LedgerJob(folder="", **result["job"])
            known[job] = HeldMemory(**result["held"]) if "held" in result else result["why"]
    return known, content["facts"], record_from_json(Gpu, content["gpu"])


def read_options() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="parts of names, e.g. 4B fp8/int4"
    )
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument(
        "--read-files", action="store_true", help="read weights from files instead of making them on the GPU"
    )
    parser.add_argument(
        "--against",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="measure nothing; take what --json wrote (the last of several files counts)",
    )
    add_json_option(parser)
    return parser.parse_args()


def native_jobs(
    cases: Sequence[tuple[str, str, int, int, int, int, str]], read_files: bool
) -> list[LedgerJob]:
    return [
        LedgerJob("", *case[:6], NATIVE, read_files, rounded=case[6] == ROUNDED_TOO, tight=case[6] == TIGHT)
        for case in cases
    ]


def all_jobs(read_files: bool) -> list[LedgerJob]:
    return native_jobs(NATIVE_CASES, read_files) + [
        LedgerJob("", size, "bf16", context, image_tokens, sequences, context, TRANSFORMERS)
        for size, context, image_tokens, sequences in TRANSFORMERS_CASES
    ]


def jobs_with_states(read_files: bool) -> list[LedgerJob]:
    return native_jobs(CASES_WITH_STATES, read_files)


def with_checkpoint(job: LedgerJob, folder: Path) -> LedgerJob:
    """``job`` with a checkpoint of its size and weights in ``folder``, written unless it is there."""
    checkpoint = folder / f"{job.size}-{job.weights}{ROUNDED if job.rounded else ''}"
    if not checkpoint.exists() and job.rounded:
        tied = catalog.family_entries(job.size)[0].config.tie_word_embeddings
        parts = ("embedding", "vision") if tied else ("head", "embedding", "vision")
        write_sparse_checkpoint(checkpoint, job.size, job.weights, parts, 128)
    elif not checkpoint.exists():
        write_sparse_checkpoint(checkpoint, job.size, job.weights)
    return replace(job, folder=str(checkpoint))


def measure(jobs: list[LedgerJob]) -> Iterator[HeldMemory | str]:
    """Run each job in a process of its own: what it held, or why it failed.

    One process at a time uses the GPU; the next one imports its libraries meanwhile.
    """
    waiting = start(jobs[0])
    for number, job in enumerate(jobs):
        process = waiting
        if number + 1 < len(jobs):
            waiting = start(jobs[number + 1])
        held = outcome(process)
        print(f"  {job.name}: {held if isinstance(held, str) else phases(held)}", file=sys.stderr, flush=True)
        yield held


def start(job: LedgerJob) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", WORKER, json.dumps(asdict(job))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(TOKENIZERS_PARALLELISM="false"),
    )


def outcome(process: "subprocess.Popen[str]") -> HeldMemory | str:
    """Let ``process`` start and wait for its end."""
    try:
        out, err = process.communicate("go\n", timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"did not end in {TIMEOUT} s"
    if process.returncode:
        last = err.strip().splitlines()[-1] if err.strip() else "no output"
        return f"failed with exit code {process.returncode}: {last}"
    return HeldMemory(**json.loads(out.splitlines()[-1]))


def phases(held: HeldMemory) -> str:
    return ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in held.seconds.items())


def compare(job: LedgerJob, held: HeldMemory | str, gpu: Gpu) -> dict[str, Any]:
    """Plan and measurement of one configuration, in bytes. The verdict: ok, BELOW or failed."""
    lines = planned_lines(job, gpu, table_in_ram=not isinstance(held, str) and held.table_in_ram)
    predicted = sum(line.bytes for line in lines) - calibration.RESERVE.bytes
    result: dict[str, Any] = {
        "name": job.name,
        "job": {name: value for name, value in asdict(job).items() if name != "folder"},
        "predicted": predicted,
        "ledger": {line.line: line.bytes for line in lines},
    }
    if isinstance(held, str):
        return result | {"verdict": "failed", "why": held}
    return result | {
        "verdict": "ok" if predicted >= held.process else "BELOW",
        "measured": held.process,
        "ratio": predicted / held.process,
        "lines": by_line(lines, held),
        "held": asdict(held),
    }


def planned_lines(job: LedgerJob, gpu: Gpu, *, table_in_ram: bool = True) -> list[Line]:
    """The ledger without the desktop. ``table_in_ram``: as in ``PlanSettings``."""
    checkpoint = read_checkpoint(job.name, Path(job.folder))
    model = model_of(checkpoint.name, checkpoint.config, checkpoint.tensors, "read from its headers")
    sizes = (job.context, job.image_tokens, job.sequences, job.chunk)
    settings = PlanSettings(job.weights, *sizes, tight_kv_cache=job.tight, table_in_ram=table_in_ram)
    return [line for line in cost_model(job.backend).lines(model, gpu, settings) if line.line != "desktop"]


def by_line(lines: list[Line], held: HeldMemory) -> dict[str, dict[str, int]]:
    """Plan and measurement of lines that torch can tell apart; tower and text model share one pool."""
    sizes = {line.line: line.bytes for line in lines}
    both = {
        "context": (sizes["context"], held.process - held.reserved),
        **{name: (sizes[name], count) for name, count in held.lines.items()},
    }
    # The rest of torch's pool: workspaces, and what the allocator takes beside tensors.
    pool = held.reserved - sum(held.lines.values())
    if "kv_cache" in held.lines:
        both["workspaces"] = (sizes["vision_workspace"] + sizes["text_workspace"], pool)
    else:
        names = ("kv_cache", "vision_workspace", "text_workspace")
        both["kv and workspaces"] = (sum(sizes[name] for name in names), pool)
    return {name: {"predicted": before, "measured": after} for name, (before, after) in both.items()}


def print_results(results: list[dict[str, Any]]) -> None:
    columns = ("context", "workspaces", "graphs", "kv_cache", "weights.text", "weights.vision")
    rows = [["MiB, predicted / measured", "total", "ratio", *columns, "slack"]]
    for result in results:
        if result["verdict"] == "failed":
            rows.append([result["name"], result["why"][:60], *[NO_LINE] * (len(columns) + 2)])
            continue
        lines = {**result["lines"]}
        lines.setdefault("workspaces", lines.get("kv and workspaces"))
        rows.append(
            [
                result["name"],
                pair(result),
                f"{result['ratio']:.3f}{' BELOW' if result['verdict'] == 'BELOW' else ''}",
                *(pair(lines[name]) if name in lines else NO_LINE for name in columns),
                slack(result["held"]),
            ]
        )
    print()
    print_table(rows)
    below = [result["name"] for result in results if result["verdict"] == "BELOW"]
    if below:
        print(f"\nBELOW THE MEASUREMENT: {len(below)} of {len(results)}: {', '.join(below)}")


def pair(sizes: dict[str, Any]) -> str:
    return f"{sizes['predicted'] / MIB:,.0f} / {sizes['measured'] / MIB:,.0f}"


def slack(held: dict[str, Any]) -> str:
    """Growth of torch's pool over growth of the live tensors in it."""
    live = held["peak"] - held["loaded"]
    return f"{(held['reserved'] - held['reserved_loaded']) / live:.2f}" if live > 0 else NO_LINE


if __name__ == "__main__":
    main()
