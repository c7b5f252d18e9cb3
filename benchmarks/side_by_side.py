"""``vlfit plan``, hf-vram-calc and accelerate estimate-memory against measured memory: docs/side-by-side.md.

    python -m benchmarks.side_by_side                        writes the page: minutes the first time
    python -m benchmarks.side_by_side build/ledger.json      with measurements of ``benchmarks.ledger --json``

Needs no GPU. The other two tools are installed into an environment of their own, build/side-by-side, with
torch and transformers of this one; their answers are kept there. Neither gets a model hub: hf-vram-calc reads
a folder, and accelerate, which always asks a hub, gets a local one with each model's config.json.
"""

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

from benchmarks.harness import MIB, ROOT, argument_parser, markdown_table
from benchmarks.ledger import all_jobs, planned_lines, with_checkpoint
from benchmarks.ledger_workers import NATIVE, LedgerJob
from tests.hub import HubRepository, running_hub
from vlfit.machine.model import Gpu, record_from_json
from vlfit.plan import calibration
from vlfit.units import GIB, KIB

PAGE = ROOT / "docs" / "side-by-side.md"
MEASURED = ROOT / "benchmarks" / "measured" / "ledger-h100.json"
TOOLS_FOLDER = ROOT / "build" / "side-by-side"
ANSWERS = TOOLS_FOLDER / "answers.json"  # of the other tools, which take seconds each
TOOLS = {"hf-vram-calc": "1.0.9", "accelerate": "1.15.0"}
NOT_MEASURED = "not measured"
# accelerate has no bf16 and no fp8; these take as many bytes for a weight.
_ACCELERATE_TYPES = {"bf16": "float16", "fp8": "int8", "int4": "int4"}
_UNITS = {"bytes": 1, "KB": KIB, "MB": MIB, "GB": GIB, "TB": KIB * GIB}
_PAGE = """# Memory estimates, side by side

Written by `python -m benchmarks.side_by_side`: do not edit.

GPU memory of Qwen3-VL in MiB: planned by `vlfit plan`, estimated by two other tools, and measured; in
brackets the percentage of the measurement. `4B-fp8-c4096-i1024-s2-p256` means: 4B in FP8, a context of 4096
tokens, pictures of 1024 tokens, 2 requests at once, 256 batched tokens, in the native engine (or in
transformers, where the name says so).

{table}

{measurement}

The columns:

- **vlfit plan**: all lines of the ledger without the desktop and the reserve of 128 MiB, planned for {gpu}.
- **hf-vram-calc** {calc}: its "inference total", 1.2 times the weights for any context and any number of
  requests. It counts the text model only: no vision tower, no output head. Called with `--model_path`,
  `--dtype`, `--max_batch_size` (requests), `--max_seq_len` (context) and `--max-num-tokens` (batched tokens).
- **sum of its parts**: the weights, KV cache and activations that hf-vram-calc prints, added up. Its KV cache
  takes hidden size / heads as the head size, 80 for 4B, where the config says 128; and one byte per value if
  the weights are FP8.
- **accelerate** {accelerate} `estimate-memory`: only the weights, without the output head, in float16 for
  bf16, int8 for FP8 and int4, as if every tensor were stored so. Its guide advises adding 20 % for inference.
  It takes no context, pictures or requests.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """Estimates of one configuration in bytes; None if a tool failed, or nothing was measured.

    ``calc_total``: hf-vram-calc's "inference total"; ``calc_sum``: the sum of its parts.
    """

    name: str
    vlfit: int
    calc_total: int | None
    calc_sum: int | None
    accelerate: int | None
    measured: int | None


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "measured",
        nargs="?",
        type=Path,
        default=MEASURED,
        metavar="FILE",
        help="written by benchmarks.ledger --json (default: benchmarks/measured/ledger-h100.json)",
    )
    parser.add_argument("--page", type=Path, default=PAGE, help="to write (default: docs/side-by-side.md)")
    parser.add_argument("--again", action="store_true", help="run the other tools again")
    options = parser.parse_args()
    measured = json.loads(options.measured.read_text("utf-8"))
    gpu = record_from_json(Gpu, measured["gpu"])
    install_tools()
    if options.again:
        ANSWERS.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="vlfit-side-by-side-") as folder:
        jobs = [with_checkpoint(job, Path(folder)) for job in all_jobs(read_files=False)]
        rows = all_rows(jobs, gpu, measured_bytes(measured), tables_in_ram(measured))
    options.page.write_text(page(rows, gpu, measured["facts"]), "utf-8")
    print(f"written to {options.page}")


def measured_bytes(measured: dict[str, Any]) -> dict[str, int]:
    """Bytes of each configuration's process, by its name."""
    return {each["name"]: each["measured"] for each in measured.get("results", []) if "measured" in each}


def tables_in_ram(measured: dict[str, Any]) -> set[str]:
    """Names of the configurations whose token embedding was in RAM when they were measured."""
    return {each["name"] for each in measured.get("results", []) if each.get("held", {}).get("table_in_ram")}


def install_tools() -> None:
    """Install the other tools into an environment of their own, with torch and transformers of this one."""
    python = TOOLS_FOLDER / "bin" / "python"
    borrowed = Path(sysconfig.get_paths()["purelib"])
    requirements = [f"{name}=={version}" for name, version in TOOLS.items()]
    packages = next(iter(TOOLS_FOLDER.glob("lib/*/site-packages")), None)
    if packages is not None:
        installed = {each.name: each.version for each in distributions(path=[str(packages)])}
        if all(installed.get(name) == version for name, version in TOOLS.items()):
            return
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(TOOLS_FOLDER)], check=True)
    packages = next(iter(TOOLS_FOLDER.glob("lib/*/site-packages")))
    (packages / "borrowed.pth").write_text(f"{borrowed}\n", "utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    # Their programs must be installed even if this environment has the same package.
    subprocess.run([*pip, "--ignore-installed", "--no-deps", *requirements], check=True)
    subprocess.run([*pip, *requirements], check=True)


def all_rows(jobs: list[LedgerJob], gpu: Gpu, measured: dict[str, int], tables_in_ram: set[str]) -> list[Row]:
    configs = {job.size: Path(job.folder) / "config.json" for job in jobs if job.weights == "bf16"}
    rows = []
    for job in jobs:
        print(f"  {job.name}", file=sys.stderr)
        config = configs[job.size]
        parts = cached(f"hf-vram-calc {job.name}", partial(hf_vram_calc, job))
        sizes = cached(f"accelerate {job.size}", partial(accelerate, job.size, config))
        lines = planned_lines(job, gpu, table_in_ram=job.name in tables_in_ram)
        rows.append(
            Row(
                job.name,
                sum(line.bytes for line in lines) - calibration.RESERVE.bytes,
                parts.get("total"),
                parts.get("sum"),
                sizes.get(_ACCELERATE_TYPES[job.weights]),
                measured.get(job.name),
            )
        )
    return rows


def cached(question: str, run: Callable[[], dict[str, int]]) -> dict[str, int]:
    """The answer to ``question``, from ``ANSWERS`` or by ``run``. An empty answer (a failure) is not kept."""
    question = f"{question} {' '.join(TOOLS.values())}"
    answers: dict[str, dict[str, int]] = json.loads(ANSWERS.read_text("utf-8")) if ANSWERS.exists() else {}
    if question not in answers:
        answer = run()
        if not answer:
            return {}
        answers[question] = answer
        ANSWERS.write_text(json.dumps(answers, indent=1), "utf-8")
    return answers[question]


def hf_vram_calc(job: LedgerJob) -> dict[str, int]:
    """``total``: its "inference total"; ``sum``: of its weights, KV cache and activations."""
    file = Path(job.folder) / f"{job.name}.json"
    tokens = min(job.chunk, job.context) * (1 if job.backend == NATIVE else job.sequences)
    words = ["--model", Path(job.folder).name, "--model_path", job.folder, "--dtype", job.weights]
    words += ["--max_batch_size", str(job.sequences), "--max_seq_len", str(job.context)]
    words += ["--max-num-tokens", str(tokens), "--output_json", str(file)]
    if run_tool("hf-vram-calc", *words, HF_HUB_OFFLINE="1") is None or not file.is_file():
        return {}
    estimate = json.loads(file.read_text("utf-8"))["memory_requirements"][0]
    parts = ("model_size_gib", "kv_cache_size_gib", "activation_size_gib")
    return {
        "total": round(estimate["inference_total_gib"] * GIB),
        "sum": round(sum(estimate[part] for part in parts) * GIB),
    }


def accelerate(size: str, config: Path) -> dict[str, int]:
    """Total size for each dtype."""
    name = f"Qwen/Qwen3-VL-{size}-Instruct"
    with running_hub() as hub, tempfile.TemporaryDirectory() as home:
        hub.repositories[name] = HubRepository({"config.json": config.read_bytes()})
        words = ["estimate-memory", name, "--dtypes", *_ACCELERATE_TYPES.values()]
        printed = run_tool("accelerate", *words, HF_ENDPOINT=hub.url, HF_HOME=home)
    return accelerate_sizes(printed or "")


def accelerate_sizes(table: str) -> dict[str, int]:
    """``│float16│  741.88 MB  │ 8.27 GB  │`` means 8.27 GiB for float16: it divides by 1024."""
    sizes = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split("│")]
        size = re.fullmatch(r"([\d.]+) (\w+)", cells[3]) if len(cells) > 4 else None
        if size and size[2] in _UNITS:
            sizes[cells[1]] = round(float(size[1]) * _UNITS[size[2]])
    return sizes


def run_tool(tool: str, *arguments: str, **environment: str) -> str | None:
    """Standard output of ``tool``; None if it fails, which is printed."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [str(TOOLS_FOLDER / "bin" / tool), *arguments],
        capture_output=True,
        text=True,
        env=plain | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | environment,
        timeout=600,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        print(f"  {tool} failed with exit code {done.returncode}: {last}", file=sys.stderr)
        return None
    return done.stdout


def page(rows: list[Row], gpu: Gpu, facts: dict[str, Any]) -> str:
    """The whole document."""
    heading = ["configuration", "vlfit plan", "hf-vram-calc", "sum of its parts", "accelerate"]
    heading += ["accelerate + 20 %", "measured"]
    table = markdown_table([heading, *(cells(row) for row in rows)])
    return _PAGE.format(
        table="\n".join(table),
        measurement=about_measurement(facts),
        gpu=gpu.name,
        calc=TOOLS["hf-vram-calc"],
        accelerate=TOOLS["accelerate"],
    )


def about_measurement(facts: dict[str, Any]) -> str:
    return (
        "Measured is the GPU memory of the process (NVML) in the worst case that the settings admit\n"
        f"(`benchmarks/ledger.py`): {facts['card']}, torch {facts['torch']}, transformers\n"
        f"{facts['transformers']}. The numbers are in `benchmarks/measured/`."
    )


def cells(row: Row) -> list[str]:
    more = None if row.accelerate is None else round(row.accelerate * 1.2)
    estimates = (row.vlfit, row.calc_total, row.calc_sum, row.accelerate, more)
    shown = [cell(size, row.measured) for size in estimates]
    return [row.name, *shown, NOT_MEASURED if row.measured is None else f"{row.measured / MIB:,.0f}"]


def cell(size: int | None, measured: int | None) -> str:
    if size is None:
        return "failed"
    return f"{size / MIB:,.0f}" + (f" ({size / measured:.0%})" if measured else "")


if __name__ == "__main__":
    main()
