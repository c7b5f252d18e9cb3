"""Qwen3-VL at its true sizes in each format: `vlfit bench` for each checkpoint, and transformers.

    python -m benchmarks.sizes --json FILE                        five checkpoints on a GPU: some five minutes
    python -m benchmarks.sizes 4B-fp8 --transformers 2B-bf16
    python -m benchmarks.sizes mini --device cpu --picture 320x240 --tokens 8 --rounds 1      to see it run

Checkpoints are sparse (``checkpoints.py``), so nothing is downloaded; GEMMs over zeros take as long as over
any numbers, or a few per cent less where the card would otherwise slow down to save power. Each engine runs
in a process of its own. `vlfit bench --help` explains a row's figures; transformers' row has one request at a
time and no share of the memory bandwidth ("roof").
"""

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import checkpoint_of, write_picture
from benchmarks.engine_workers import TRANSFORMERS, EngineJob, run_engine
from benchmarks.harness import (
    add_json_option,
    argument_parser,
    card,
    commit,
    print_row,
    require_gpu,
    run_vlfit,
    write_json,
)
from vlfit.errors import VlfitError

HEADING = [
    "checkpoint", "at once", "tokens/s", "ms a step", "GB/s", "roof, GB/s", "of the roof", "first token, ms",
    "file / resize / text / vision / prefill", "start s", "GPU MiB",
]  # fmt: skip
ALL = ["2B-bf16", "2B-fp8", "4B-fp8", "4B-int4", "8B-int4-E8-H8-V8"]  # without int8 parts 8B needs over 8 GB


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "native", nargs="*", default=ALL, metavar="SIZE-FORMAT", help=f"default: {' '.join(ALL)}"
    )
    parser.add_argument("--transformers", nargs="*", default=[], metavar="SIZE-bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--picture", default="1024x768", help="in pixels")
    parser.add_argument("--tokens", type=int, default=128, help="decoded in each round")
    parser.add_argument("--batch", default="1,8", help="requests at once")
    parser.add_argument("--rounds", type=int, default=3, help="after one that warms up")
    add_json_option(parser)
    options = parser.parse_args()
    if options.device != "cpu":
        require_gpu("sizes")
    device = card() if options.device != "cpu" else "CPU"
    print(f"commit {commit()}; {device}; picture {options.picture}, {options.tokens} tokens out")
    runs = []
    failed = False
    print_row(HEADING)
    print_row(["---"] * len(HEADING))
    with tempfile.TemporaryDirectory() as folder:
        jobs = [("native", name, measure_native) for name in options.native]
        jobs += [("transformers", name, measure_transformers) for name in options.transformers]
        for engine, name, measure in jobs:
            print(f"  {engine}: {name}", file=sys.stderr)
            try:
                checkpoint = checkpoint_of(name, Path(folder))
                result = measure(name, checkpoint, options)
            except (RuntimeError, VlfitError) as error:  # the others are measured all the same
                print(error, file=sys.stderr)
                failed = True
                continue
            runs.append({"checkpoint": name, "engine": engine, **result})
    write_json(options.json, {"commit": commit(), "card": device, "runs": runs})
    sys.exit(1 if failed else 0)


def measure_native(name: str, checkpoint: Path, options: argparse.Namespace) -> dict[str, Any]:
    """`vlfit bench` of one checkpoint. Raises ``RuntimeError`` with its stderr if it fails."""
    arguments = ["--device", options.device, "--size", options.picture, "--tokens", str(options.tokens)]
    arguments += ["--batch", options.batch, "--repeat", str(options.rounds), "--json", "--quiet"]
    result = run_vlfit("bench", str(checkpoint), *arguments)
    phases = " / ".join(f"{samples['median'] * 1e3:.1f}" for samples in result["first_token"].values())
    for each in result["decoding"]:
        print_row(
            [
                f"{name} ({result['request']['prompt_tokens']} tokens)",
                str(each["at_once"]),
                _with_deviation(each["tokens_per_second"], 1, "{:.0f}"),
                _with_deviation(each["step"], 1e3, "{:.3f}"),
                _or_dash(each["read_bytes_per_second"], 1e-9),
                _or_dash(result["roof"]["bytes_per_second"], 1e-9),
                _or_dash(each["share_of_roof"], 100, "{:.1f} %"),
                _with_deviation(each["first_token"], 1e3, "{:.1f}"),
                phases,
                f"{sum(result['start'].values()):.1f}",
                _or_dash(result["memory"]["gpu_process"], 2**-20),
            ]
        )
    return result


def measure_transformers(name: str, checkpoint: Path, options: argparse.Namespace) -> dict[str, Any]:
    job = EngineJob(
        folder=str(checkpoint),
        picture=str(write_picture(options.picture)),
        question="Describe this picture in detail.",
        device=options.device,
        dtype="bfloat16",
        tokens=options.tokens,
        rounds=options.rounds,
    )
    run = run_engine(TRANSFORMERS, job)
    step = run.median_s("decode") / (options.tokens - 1)
    phases = f"{run.median_s('preprocess') * 1e3:.1f} / {run.median_s('prefill') * 1e3:.1f}"
    first = run.median_s("preprocess") + run.median_s("prefill")
    print_row(
        [
            f"{name}, transformers",
            *("1", f"{1 / step:.0f}", f"{step * 1e3:.3f}", "-", "-", "-", f"{first * 1e3:.1f}"),
            *(phases, f"{run.load_s:.1f}", f"{run.gpu_bytes * 2**-20:.0f}"),
        ]
    )
    return asdict(run)


def _with_deviation(samples: dict[str, Any], factor: float, template: str) -> str:
    return f"{template.format(samples['median'] * factor)} ± {template.format(samples['deviation'] * factor)}"


def _or_dash(value: float | None, factor: float, template: str = "{:,.0f}") -> str:
    return "-" if value is None else template.format(value * factor)


if __name__ == "__main__":
    main()
