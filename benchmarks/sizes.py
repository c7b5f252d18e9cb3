"""One request at the true sizes of Qwen3-VL on this GPU: a picture's prefill and decoding, in each format.

    python -m benchmarks.sizes [2B-bf16 4B-fp8 4B-int4] [--transformers 2B-bf16] [--json FILE]

Checkpoints are hollow (``hollow.py``), so nothing is downloaded; products take as long over zeros as over any
numbers, or a few percent less where the card would otherwise slow down to save power. Every engine runs in a
process of its own. GB/s are the text model's weights as stored, once for each token, over the time it took.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.engine import NATIVE, TRANSFORMERS, write_picture
from benchmarks.facts import card, commit, copy_bandwidth
from benchmarks.hollow import write_hollow
from benchmarks.measure import MIB, Job, Run, run_worker

HEADING = [
    "checkpoint", "engine", "load s", "prepare ms", "prefill ms", "decode ms/token", "tokens/s", "GB/s",
    "of copying", "GPU MiB",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("native", nargs="*", default=["2B-bf16", "4B-fp8", "4B-int4"], metavar="SIZE-FORMAT")
    parser.add_argument("--transformers", nargs="*", default=[], metavar="SIZE-bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--picture", default="1024x768", help="in pixels")
    parser.add_argument("--tokens", type=int, default=64, help="decoded in each round")
    parser.add_argument("--rounds", type=int, default=3, help="after one that warms up")
    parser.add_argument("--json", type=Path, help="also write every measurement to this file")
    options = parser.parse_args()
    copy = copy_bandwidth(options.device, 1)
    where = card() if options.device != "cpu" else "CPU"
    print(f"commit {commit()}; {where}; copies at {copy:.0f} GB/s; picture {options.picture}")
    runs = []
    _print_row(HEADING)
    _print_row(["---"] * len(HEADING))
    with tempfile.TemporaryDirectory() as folder:
        asked = [(NATIVE, name) for name in options.native]
        asked += [(TRANSFORMERS, name) for name in options.transformers]
        for module, name in asked:
            print(f"  {module.split('.')[-1]}: {name}", file=sys.stderr)
            checkpoint = Path(folder) / name
            if not checkpoint.exists():
                write_hollow(checkpoint, *name.split("-"))
            run = run_worker(module, _job(checkpoint, options))
            _print_row(_row(name, run, _read_for_a_token(checkpoint), options.tokens, copy))
            runs.append({"checkpoint": name, **asdict(run)})
    if options.json:
        report = {"commit": commit(), "card": where, "copy_gb_per_s": copy, "runs": runs}
        options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


def _print_row(cells: list[str]) -> None:
    """At once: what was measured is not lost if a later process fails."""
    print("|", " | ".join(cells), "|", flush=True)


def _job(checkpoint: Path, options: argparse.Namespace) -> Job:
    return Job(
        folder=str(checkpoint),
        picture=str(write_picture(options.picture)),
        question="Describe this picture in detail.",
        device=options.device,
        dtype="bfloat16",
        tokens=options.tokens,
        rounds=options.rounds,
    )


def _read_for_a_token(checkpoint: Path) -> int:
    """Bytes of weights that decoding reads: no tower's, and no embedding's where a head is apart."""
    from vlfit.checkpoint.source import open_checkpoint

    tensors = open_checkpoint(checkpoint).tensors
    apart = "lm_head.weight" in tensors
    return sum(
        info.bytes
        for name, info in tensors.items()
        if ".visual." not in name and not (apart and name.endswith("embed_tokens.weight"))
    )


def _row(name: str, run: Run, read: int, tokens: int, copy: float) -> list[str]:
    decode = run.median_s("decode") / (tokens - 1)
    speed = read / decode / 1e9
    return [
        f"{name} ({run.prompt_tokens} tokens)",
        run.engine,
        f"{run.load_s:.1f}",
        f"{run.median_s('preprocess') * 1e3:.1f}",
        f"{run.median_s('prefill') * 1e3:.1f}",
        f"{decode * 1e3:.2f}",
        f"{1 / decode:.0f}",
        f"{speed:.0f}",
        f"{speed / copy:.0%}",
        f"{run.gpu_bytes / MIB:.0f}",
    ]


if __name__ == "__main__":
    main()
