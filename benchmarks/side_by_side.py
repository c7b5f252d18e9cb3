"""``vlfit plan``, hf-vram-calc, accelerate estimate-memory and the truth on the same configurations.

    ... -m benchmarks.side_by_side                        writes docs/side-by-side.md
    ... -m benchmarks.side_by_side build/ledger.json      with the truth that benchmarks.ledger wrote there

The two other tools are installed into a throw-away environment, build/side-by-side, which borrows torch and
transformers from this one. Neither gets a model hub: hf-vram-calc reads a folder, and accelerate, which asks
a hub in any case, is given a local one that has each model's config.json.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from benchmarks.ledger import all_jobs, place, predicted_lines
from benchmarks.ledger_job import NATIVE, LedgerJob
from benchmarks.measure import MIB, ROOT
from benchmarks.report import markdown
from tests.hub import HubRepository, running_hub
from vlfit.machine.model import Gpu, decode
from vlfit.plan import calibration
from vlfit.units import GIB, KIB

PAGE = ROOT / "docs" / "side-by-side.md"
TRUTH = ROOT / "benchmarks" / "measured" / "ledger-h100.json"
HOME = ROOT / "build" / "side-by-side"
ANSWERS = HOME / "answers.json"  # of the other tools, which take seconds each and never change their minds
TOOLS = {"hf-vram-calc": "1.0.9", "accelerate": "1.15.0"}
NOT_MEASURED = "not measured"
# accelerate has no bf16 and no fp8; these take as many bytes for a weight.
_ACCELERATE_TYPES = {"bf16": "float16", "fp8": "int8", "int4": "int4"}
_UNITS = {"bytes": 1, "KB": KIB, "MB": MIB, "GB": GIB, "TB": KIB * GIB}
_PAGE = """# Side by side

Written by `python -m benchmarks.side_by_side`: do not edit.

How much GPU memory Qwen3-VL takes, by `vlfit plan`, by two other tools and in truth, in MiB; in brackets
what part of the truth that is. A name like `4B-fp8-c4096-i1024-s2-p256` means: 4B in FP8, a context of 4096
tokens, pictures of 1024 tokens, 2 requests at once, 256 tokens a pass, in the native engine (or, where the
name says so, in transformers).

{table}

{truth}

What the columns are:

- **vlfit plan**: all lines of the ledger but the desktop and the 128 MiB of air, planned for {gpu}.
- **hf-vram-calc** {calc}: its "inference total", which is 1.2 times the weights, whatever context and
  requests are. It counts the text model only: no vision tower, no output head. Asked with `--model_path`,
  `--dtype`, `--max_batch_size` (requests), `--max_seq_len` (context) and `--max-num-tokens` (tokens of a
  pass). *Its parts added up*: its weights, KV cache and activations, each of which it prints. Its KV cache
  takes hidden / heads for the size of a head, 80 in 4B, where the config says 128; and one byte for a value
  if the weights are in FP8.
- **accelerate** {accelerate} `estimate-memory`: the weights alone, without the output head, in float16 for
  bf16, in int8 for FP8 and in int4, as if every tensor were stored so. Its guide advises to add 20 % for
  inference. It knows no context, pictures or requests, and asks a model hub: here a local one that has the
  config.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration: what each tool says that it takes, in bytes; None where there is no answer.

    ``calc_sum`` adds up hf-vram-calc's own parts; ``calc_total`` is what it calls the total of inference.
    """

    name: str
    vlfit: int
    calc_total: int | None
    calc_sum: int | None
    accelerate: int | None
    truth: int | None


def main() -> None:
    parser = argparse.ArgumentParser(description="vlfit plan, two other tools and the truth.")
    parser.add_argument(
        "truth",
        nargs="?",
        type=Path,
        default=TRUTH,
        metavar="FILE",
        help="what benchmarks.ledger --json wrote (default: what is kept in benchmarks/measured)",
    )
    parser.add_argument(
        "--page", type=Path, default=PAGE, help="where to write (default: docs/side-by-side.md)"
    )
    parser.add_argument("--again", action="store_true", help="ask the other tools again")
    options = parser.parse_args()
    measured = json.loads(options.truth.read_text("utf-8"))
    gpu = decode(Gpu, measured["gpu"])
    install()
    if options.again:
        ANSWERS.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="vlfit-side-by-side-") as folder:
        jobs = [place(job, Path(folder)) for job in all_jobs(read_files=False)]
        rows = all_rows(jobs, gpu, truths(measured))
    options.page.write_text(page(rows, gpu, measured["facts"]), "utf-8")
    print(f"written to {options.page}")


def truths(measured: dict[str, Any]) -> dict[str, int]:
    """Bytes that each configuration's process took, by its name."""
    return {each["name"]: each["measured"] for each in measured.get("results", []) if "measured" in each}


def install() -> None:
    """The other tools in an environment of their own; torch and transformers are this one's."""
    python = HOME / "bin" / "python"
    borrowed = Path(sysconfig.get_paths()["purelib"])
    wanted = [f"{name}=={version}" for name, version in TOOLS.items()]
    packages = next(iter(HOME.glob("lib/*/site-packages")), None)
    if packages is not None:
        found = {each.name: each.version for each in distributions(path=[str(packages)])}
        if all(found.get(name) == version for name, version in TOOLS.items()):
            return
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(HOME)], check=True)
    packages = next(iter(HOME.glob("lib/*/site-packages")))
    (packages / "borrowed.pth").write_text(f"{borrowed}\n", "utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, *wanted], check=True)


def all_rows(jobs: list[LedgerJob], gpu: Gpu, known: dict[str, int]) -> list[Row]:
    configs = {job.size: Path(job.folder) / "config.json" for job in jobs if job.weights == "bf16"}
    rows = []
    for job in jobs:
        print(f"  {job.name}", file=sys.stderr)
        config = configs[job.size]
        parts = remembered(f"hf-vram-calc {job.name}", partial(hf_vram_calc, job))
        sizes = remembered(f"accelerate {job.size}", partial(accelerate, job.size, config))
        lines = predicted_lines(job, gpu)
        rows.append(
            Row(
                job.name,
                sum(line.bytes for line in lines) - calibration.RESERVE.bytes,
                parts.get("total"),
                parts.get("sum"),
                sizes.get(_ACCELERATE_TYPES[job.weights]),
                known.get(job.name),
            )
        )
    return rows


def remembered(question: str, ask: Callable[[], dict[str, int]]) -> dict[str, int]:
    """The answer to ``question``, asked once; a tool that fails is asked again the next time."""
    question = f"{question} {' '.join(TOOLS.values())}"
    answers: dict[str, dict[str, int]] = json.loads(ANSWERS.read_text("utf-8")) if ANSWERS.exists() else {}
    if question not in answers:
        answer = ask()
        if not answer:
            return {}
        answers[question] = answer
        ANSWERS.write_text(json.dumps(answers, indent=1), "utf-8")
    return answers[question]


def hf_vram_calc(job: LedgerJob) -> dict[str, int]:
    """``total``: what it calls the total of inference; ``sum``: of its weights, KV cache and activations."""
    file = Path(job.folder) / f"{job.name}.json"
    tokens = min(job.chunk, job.context) * (1 if job.backend == NATIVE else job.sequences)
    words = ["--model", Path(job.folder).name, "--model_path", job.folder, "--dtype", job.weights]
    words += ["--max_batch_size", str(job.sequences), "--max_seq_len", str(job.context)]
    words += ["--max-num-tokens", str(tokens), "--output_json", str(file)]
    if run("hf-vram-calc", *words, HF_HUB_OFFLINE="1") is None or not file.is_file():
        return {}
    found = json.loads(file.read_text("utf-8"))["memory_requirements"][0]
    parts = ("model_size_gib", "kv_cache_size_gib", "activation_size_gib")
    return {
        "total": round(found["inference_total_gib"] * GIB),
        "sum": round(sum(found[part] for part in parts) * GIB),
    }


def accelerate(size: str, config: Path) -> dict[str, int]:
    """Total size for each type that it knows."""
    name = f"Qwen/Qwen3-VL-{size}-Instruct"
    with running_hub() as hub, tempfile.TemporaryDirectory() as home:
        hub.repositories[name] = HubRepository({"config.json": config.read_bytes()})
        words = ["estimate-memory", name, "--dtypes", *_ACCELERATE_TYPES.values()]
        said = run("accelerate", *words, HF_ENDPOINT=hub.url, HF_HOME=home)
    return accelerate_sizes(said or "")


def accelerate_sizes(table: str) -> dict[str, int]:
    """``│float16│  741.88 MB  │ 8.27 GB  │`` means 8.27 GiB for float16: it divides by 1024."""
    found = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split("│")]
        size = re.fullmatch(r"([\d.]+) (\w+)", cells[3]) if len(cells) > 4 else None
        if size and size[2] in _UNITS:
            found[cells[1]] = round(float(size[1]) * _UNITS[size[2]])
    return found


def run(tool: str, *words: str, **environment: str) -> str | None:
    """What ``tool`` prints; None if it fails, which is said."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [str(HOME / "bin" / tool), *words],
        capture_output=True,
        text=True,
        env=plain | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | environment,
        timeout=600,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no words"])[-1]
        print(f"  {tool} failed with exit code {done.returncode}: {last}", file=sys.stderr)
        return None
    return done.stdout


def page(rows: list[Row], gpu: Gpu, facts: dict[str, Any]) -> str:
    """The whole document."""
    title = ["configuration", "vlfit plan", "hf-vram-calc", "its parts added up", "accelerate"]
    title += ["accelerate + 20 %", "truth"]
    table = markdown([title, *(cells(row) for row in rows)])
    return _PAGE.format(
        table="\n".join(table),
        truth=about_the_truth(facts),
        gpu=gpu.name,
        calc=TOOLS["hf-vram-calc"],
        accelerate=TOOLS["accelerate"],
    )


def about_the_truth(facts: dict[str, Any]) -> str:
    return (
        "The truth is what the process took of the GPU's memory by NVML, in the worst case that the\n"
        f"settings admit (`benchmarks/ledger.py`): {facts['card']}, torch {facts['torch']}, transformers\n"
        f"{facts['transformers']}. The numbers are kept in `benchmarks/measured/`."
    )


def cells(row: Row) -> list[str]:
    more = None if row.accelerate is None else round(row.accelerate * 1.2)
    answers = (row.vlfit, row.calc_total, row.calc_sum, row.accelerate, more)
    shown = [cell(size, row.truth) for size in answers]
    return [row.name, *shown, NOT_MEASURED if row.truth is None else f"{row.truth / MIB:,.0f}"]


def cell(size: int | None, truth: int | None) -> str:
    if size is None:
        return "failed"
    return f"{size / MIB:,.0f}" + (f" ({size / truth:.0%})" if truth else "")


if __name__ == "__main__":
    main()
