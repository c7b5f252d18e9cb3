"""The plan's total against what a process really holds on a GPU, configuration by configuration.

    ... -m benchmarks.ledger --json build/ledger.json    all of them: a few minutes
    ... -m benchmarks.ledger --only 4B fp8/int4          those whose name holds 4B, and fp8 or int4
    ... -m benchmarks.ledger --list
    ... -m benchmarks.ledger --against benchmarks/measured/ledger-h100.json
                                                         what was measured before, and what is predicted now

Each configuration has a process of its own, which loads a checkpoint of true sizes (``hollow.py``) and runs
the worst case that the plan admits (``warmup.py``). The ledger less the desktop and less the air,
which is a choice, is compared with the memory of the card that the process took, by NVML. The exit code is 1
if any prediction is below the truth.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.facts import card, commit, cpu_name
from benchmarks.hollow import write_hollow
from benchmarks.ledger_job import NATIVE, ROUNDED, TRANSFORMERS, Held, LedgerJob
from benchmarks.measure import MIB, ROOT, environment, versions_of
from benchmarks.report import print_rows
from vlfit.checkpoint import catalog
from vlfit.checkpoint.source import read_checkpoint
from vlfit.errors import DeviceError
from vlfit.machine.model import Gpu, decode, encode
from vlfit.machine.survey import survey
from vlfit.plan import calibration
from vlfit.plan.backends import cost_model
from vlfit.plan.gpus import emptiest
from vlfit.plan.ledger import Line, Settings
from vlfit.plan.shapes import model_of

WORKERS = {NATIVE: "benchmarks.ledger_native", TRANSFORMERS: "benchmarks.ledger_transformers"}
ROUNDED_TOO, TIGHT = "rounded", "tight"
# Size, weights, context, image tokens, sequences, tokens of a pass; then rounded (groups of 128, and all in
# 8 bits that is no text layer), tight (the smaller KV pool), or neither.
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
TRANSFORMERS_CASES = (("2B", 936, 768, 1), ("4B", 2048, 1024, 2), ("8B", 2048, 1024, 1))
NO_LINE = "-"
PATIENCE = 180  # seconds for one configuration; they take some five


def main() -> None:
    options = read_options()
    known, facts, gpu = earlier(options.against) if options.against else ({}, new_facts(), None)
    jobs = list(known) if options.against else all_jobs(options.read_files)
    wanted = [job for job in jobs if all(names(job, word) for word in options.only)]
    if options.list:
        print("\n".join(job.name for job in wanted))
        return
    if not wanted:
        sys.exit(f"no configuration has all of {options.only} in its name: see --list")
    gpu = gpu or this_gpu()
    facts["constants"] = calibration.constants_for(gpu).context.source
    print("; ".join(f"{name} {value}" for name, value in facts.items()))
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="vlfit-ledger-") as folder:
        placed = [place(job, Path(folder)) for job in wanted]
        found = iter([known[job] for job in wanted]) if options.against else measured(placed)
        results = []
        for job, held in zip(placed, found, strict=True):
            results.append(compared(job, held, gpu))
            write(options.json, facts, gpu, results)  # a run that is cut short leaves what it has
    print_results(results)
    if not options.against:
        facts["seconds"] = round(time.perf_counter() - started, 1)
        print(f"\n{len(results)} configurations in {facts['seconds']:.0f} s")
    write(options.json, facts, gpu, results)
    sys.exit(1 if any(result["verdict"] != "ok" for result in results) else 0)


def names(job: LedgerJob, word: str) -> bool:
    """Whether the job's name holds ``word``, or one of several between slashes."""
    return any(part in job.name for part in word.split("/"))


def this_gpu() -> Gpu:
    try:
        return emptiest(survey())
    except DeviceError as error:
        sys.exit(error.message)


def write(file: Path | None, facts: dict[str, Any], gpu: Gpu, results: list[dict[str, Any]]) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        content = {"facts": facts, "gpu": encode(gpu), "results": results}
        file.write_text(json.dumps(content, indent=1), "utf-8")


def new_facts() -> dict[str, Any]:
    return {
        "card": card(),
        "commit": commit(),
        "processor": cpu_name(),
        **versions_of("torch", "transformers"),
    }


def earlier(files: list[Path]) -> tuple[dict[LedgerJob, Held | str], dict[str, Any], Gpu]:
    """What was measured before: by configuration, where, and on which GPU. Later ``files`` count first."""
    known: dict[LedgerJob, Held | str] = {}
    for file in files:
        content = json.loads(file.read_text("utf-8"))
        for result in content["results"]:
            job = LedgerJob(folder="", **result["job"])
            known[job] = Held(**result["held"]) if "held" in result else result["why"]
    return known, content["facts"], decode(Gpu, content["gpu"])


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The plan's total against measured processes.")
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
        help="measure nothing; take what --json wrote, of several files the last that has it",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    return parser.parse_args()


def all_jobs(read_files: bool) -> list[LedgerJob]:
    native = [
        LedgerJob("", *case[:6], NATIVE, read_files, rounded=case[6] == ROUNDED_TOO, tight=case[6] == TIGHT)
        for case in NATIVE_CASES
    ]
    return native + [
        LedgerJob("", size, "bf16", context, image_tokens, sequences, context, TRANSFORMERS)
        for size, context, image_tokens, sequences in TRANSFORMERS_CASES
    ]


def place(job: LedgerJob, folder: Path) -> LedgerJob:
    """``job`` with a checkpoint of its own size and weights in ``folder``, written unless it is there."""
    checkpoint = folder / f"{job.size}-{job.weights}{ROUNDED if job.rounded else ''}"
    if not checkpoint.exists() and job.rounded:
        tied = catalog.family(job.size)[0].config.tie_word_embeddings
        parts = ("embedding", "vision") if tied else ("head", "embedding", "vision")
        write_hollow(checkpoint, job.size, job.weights, parts, 128)
    elif not checkpoint.exists():
        write_hollow(checkpoint, job.size, job.weights)
    return replace(job, folder=str(checkpoint))


def measured(jobs: list[LedgerJob]) -> Iterator[Held | str]:
    """What the process of each job held, or what it failed of.

    One process at a time uses the GPU; the next one imports its libraries meanwhile.
    """
    waiting = start(jobs[0])
    for number, job in enumerate(jobs):
        process = waiting
        if number + 1 < len(jobs):
            waiting = start(jobs[number + 1])
        held = outcome(process)
        print(
            f"  {job.name}: {held if isinstance(held, str) else seconds(held)}", file=sys.stderr, flush=True
        )
        yield held


def start(job: LedgerJob) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", WORKERS[job.backend], json.dumps(asdict(job))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(TOKENIZERS_PARALLELISM="false"),
    )


def outcome(process: "subprocess.Popen[str]") -> Held | str:
    """Tell ``process`` to go and wait for its end, but not for ever."""
    try:
        out, err = process.communicate("go\n", timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"did not end in {PATIENCE} s"
    if process.returncode:
        last = err.strip().splitlines()[-1] if err.strip() else "no words"
        return f"failed with exit code {process.returncode}: {last}"
    return Held(**json.loads(out.splitlines()[-1]))


def seconds(held: Held) -> str:
    return ", ".join(f"{what} {count:.1f} s" for what, count in held.seconds.items())


def compared(job: LedgerJob, held: Held | str, gpu: Gpu) -> dict[str, Any]:
    """Prediction and measurement of one configuration, in bytes. The verdict: ok, BELOW or failed."""
    lines = predicted_lines(job, gpu)
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


def predicted_lines(job: LedgerJob, gpu: Gpu) -> list[Line]:
    """The ledger but for the desktop."""
    checkpoint = read_checkpoint(job.name, Path(job.folder))
    model = model_of(checkpoint.name, checkpoint.config, checkpoint.tensors, "read from its headers")
    sizes = (job.context, job.image_tokens, job.sequences, job.chunk)
    settings = Settings(job.weights, *sizes, tight=job.tight)
    return [line for line in cost_model(job.backend).lines(model, gpu, settings) if line.line != "desktop"]


def by_line(lines: list[Line], held: Held) -> dict[str, dict[str, int]]:
    """Prediction and measurement where torch can tell them apart; tower and text model share one pool."""
    sizes = {line.line: line.bytes for line in lines}
    found = {
        "context": (sizes["context"], held.process - held.reserved),
        **{name: (sizes[name], count) for name, count in held.lines.items()},
    }
    # All of torch's pool that is none of these: workspaces, and what lies beside tensors.
    pool = held.reserved - sum(held.lines.values())
    if "kv_cache" in held.lines:
        found["workspaces"] = (sizes["vision_workspace"] + sizes["text_workspace"], pool)
    else:
        names = ("kv_cache", "vision_workspace", "text_workspace")
        found["kv and workspaces"] = (sum(sizes[name] for name in names), pool)
    return {name: {"predicted": before, "measured": after} for name, (before, after) in found.items()}


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
    print_rows(rows)
    below = [result["name"] for result in results if result["verdict"] == "BELOW"]
    if below:
        print(f"\nBELOW THE TRUTH: {len(below)} of {len(results)}: {', '.join(below)}")


def pair(sizes: dict[str, Any]) -> str:
    return f"{sizes['predicted'] / MIB:,.0f} / {sizes['measured'] / MIB:,.0f}"


def slack(held: dict[str, Any]) -> str:
    """How much more torch's pool grew than what lived in it."""
    lived = held["peak"] - held["loaded"]
    return f"{(held['reserved'] - held['reserved_loaded']) / lived:.2f}" if lived > 0 else NO_LINE


if __name__ == "__main__":
    main()
