"""Qwen3-VL at its true sizes on this GPU, in each format: `vlfit bench`, once for each, beside transformers.

    python -m benchmarks.sizes [2B-bf16 2B-fp8 4B-fp8 4B-int4 8B-int4] [--transformers 2B-bf16] [--json FILE]

Checkpoints are hollow (``hollow.py``), so nothing is downloaded; products take as long over zeros as over any
numbers, or a few percent less where the card would otherwise slow down to save power. Every engine runs in a
process of its own. What a row's figures mean, ``vlfit bench --help`` says; transformers' row has one request
at a time, without a share of the roof.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.engine import TRANSFORMERS, write_picture
from benchmarks.facts import card, commit
from benchmarks.hollow import write_hollow
from benchmarks.measure import ROOT, Job, Run, environment, run_worker

HEADING = [
    "checkpoint", "at once", "tokens/s", "ms a step", "GB/s", "roof, GB/s", "of the roof", "first token, ms",
    "file / resize / text / vision / prefill", "start s", "GPU MiB",
]  # fmt: skip
ALL = ["2B-bf16", "2B-fp8", "4B-fp8", "4B-int4", "8B-int4"]
# Its parts in int8 are what makes it fit a card of 8 GB.
IN_INT8 = {"8B-int4": ("head", "embedding", "vision")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("native", nargs="*", default=ALL, metavar="SIZE-FORMAT")
    parser.add_argument("--transformers", nargs="*", default=[], metavar="SIZE-bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--picture", default="1024x768", help="in pixels")
    parser.add_argument("--tokens", type=int, default=128, help="decoded in each round")
    parser.add_argument("--batch", default="1,8", help="requests at once")
    parser.add_argument("--rounds", type=int, default=3, help="after one that warms up")
    parser.add_argument("--json", type=Path, help="also write every measurement to this file")
    options = parser.parse_args()
    where = card() if options.device != "cpu" else "CPU"
    print(f"commit {commit()}; {where}; picture {options.picture}, {options.tokens} tokens out")
    runs = []
    failed = False
    _print_row(HEADING)
    _print_row(["---"] * len(HEADING))
    with tempfile.TemporaryDirectory() as folder:
        asked = [("native", name) for name in options.native]
        asked += [("transformers", name) for name in options.transformers]
        for engine, name in asked:
            print(f"  {engine}: {name}", file=sys.stderr)
            checkpoint = Path(folder) / name
            try:
                if not checkpoint.exists():
                    size, _, weights = name.partition("-")
                    write_hollow(checkpoint, size, weights, IN_INT8.get(name, ()))
                found = (
                    _native(checkpoint, options) if engine == "native" else _transformers(checkpoint, options)
                )
            except RuntimeError as error:  # what was measured stays
                print(error, file=sys.stderr)
                failed = True
                continue
            runs.append({"checkpoint": name, "engine": engine, **found})
    if options.json:
        report = {"commit": commit(), "card": where, "runs": runs}
        options.json.write_text(json.dumps(report), encoding="utf-8")
    sys.exit(1 if failed else 0)


def _native(checkpoint: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What ``vlfit bench`` says of one checkpoint. Raises ``RuntimeError`` with what it wrote if it fails."""
    asked = ["--device", options.device, "--size", options.picture, "--tokens", str(options.tokens)]
    asked += ["--batch", options.batch, "--repeat", str(options.rounds), "--json", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "vlfit", "bench", str(checkpoint), *asked],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(TOKENIZERS_PARALLELISM="false"),
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"vlfit bench {checkpoint.name} ended with {done.returncode}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    phases = " / ".join(f"{many['median'] * 1e3:.1f}" for many in found["first_token"].values())
    for each in found["decoding"]:
        _print_row(
            [
                f"{checkpoint.name} ({found['request']['prompt_tokens']} tokens)",
                str(each["at_once"]),
                _with_deviation(each["tokens_per_second"], 1, "{:.0f}"),
                _with_deviation(each["step"], 1e3, "{:.3f}"),
                _or_dash(each["read_bytes_per_second"], 1e-9),
                _or_dash(found["roof"]["bytes_per_second"], 1e-9),
                _or_dash(each["share_of_roof"], 100, "{:.1f} %"),
                _with_deviation(each["first_token"], 1e3, "{:.1f}"),
                phases,
                f"{sum(found['start'].values()):.1f}",
                _or_dash(found["memory"]["gpu_process"], 2**-20),
            ]
        )
    return found


def _transformers(checkpoint: Path, options: argparse.Namespace) -> dict[str, Any]:
    job = Job(
        folder=str(checkpoint),
        picture=str(write_picture(options.picture)),
        question="Describe this picture in detail.",
        device=options.device,
        dtype="bfloat16",
        tokens=options.tokens,
        rounds=options.rounds,
    )
    run: Run = run_worker(TRANSFORMERS, job)
    step = run.median_s("decode") / (options.tokens - 1)
    phases = f"{run.median_s('preprocess') * 1e3:.1f} / {run.median_s('prefill') * 1e3:.1f}"
    first = run.median_s("preprocess") + run.median_s("prefill")
    _print_row(
        [
            f"{checkpoint.name}, transformers",
            *("1", f"{1 / step:.0f}", f"{step * 1e3:.3f}", "-", "-", "-", f"{first * 1e3:.1f}"),
            *(phases, f"{run.load_s:.1f}", f"{run.gpu_bytes * 2**-20:.0f}"),
        ]
    )
    return asdict(run)


def _print_row(cells: list[str]) -> None:
    """At once: what was measured is not lost if a later process fails."""
    print("|", " | ".join(cells), "|", flush=True)


def _with_deviation(many: dict[str, Any], factor: float, form: str) -> str:
    return f"{form.format(many['median'] * factor)} ± {form.format(many['deviation'] * factor)}"


def _or_dash(value: float | None, factor: float, form: str = "{:,.0f}") -> str:
    return "-" if value is None else form.format(value * factor)


if __name__ == "__main__":
    main()
