"""How long `vlfit serve` takes to be ready: the first start of all, and later ones, by phase.

    python -m benchmarks.starts --vocabulary tokenizer.json          five checkpoints on a GPU: three minutes
    python -m benchmarks.small_card starts 4B-int4                   with the multiprocessors of a small card
    python -m benchmarks.starts mini --device cpu                    to see it run

``first``: nothing compiled and nothing remembered of the card, in folders of their own, as after an
installation; files of the model are in RAM, and Python's modules in the page cache. ``later``: once more.
Seconds are from the start of the command to the first answer of /health; in the same run, as what no start
can be below, a Python process that imports torch and does a first product on the device.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import checkpoint_of, ram_folder
from benchmarks.harness import (
    add_json_option,
    argument_parser,
    commit,
    device_name,
    print_row,
    require_gpu,
    versions_of,
    write_json,
)
from benchmarks.serving import DidNotStart, ServerProcess
from benchmarks.sizes import ALL

_BARE = "import torch; ones = torch.ones(64, 64, device={0!r}); (ones @ ones).sum().item()"


def main() -> None:
    options = read_options()
    if options.device != "cpu":
        require_gpu("starts")
    where = device_name(options.device)
    print(f"commit {commit()}; {where}; {versions_of('torch', 'triton')}; {os.cpu_count()} cores")
    limit = statistics.median(bare_start(options.device) for _ in range(options.starts))
    print(f"a process that imports torch and multiplies once: {limit:.2f} s")
    print_row(["checkpoint", "start", "ready, s", "of the bare process", "phases, s"])
    print_row(["---"] * 5)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="vlfit-starts-", dir=ram_folder()) as folder:
        for name in options.checkpoints:
            runs += measure(name, Path(folder), options, limit)
            write_json(options.json, {"commit": commit(), "where": where, "bare_s": limit, "runs": runs})
    if any(run["ready_s"] is None for run in runs):
        sys.exit(1)


def read_options() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("checkpoints", nargs="*", default=ALL, metavar="SIZE-FORMAT")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--vocabulary", type=Path, metavar="FILE", help="tokenizer.json of a true model")
    parser.add_argument("--starts", type=int, default=3, metavar="N", help="later ones, after the first")
    parser.add_argument("--serve", default="", metavar="OPTIONS", help="of vlfit serve, in one argument")
    add_json_option(parser)
    options = parser.parse_args()
    if options.starts < 1:
        parser.error("--starts takes 1 or more")
    return options


def bare_start(device: str) -> float:
    """Seconds of a process that imports torch and multiplies two small matrices on ``device``."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", _BARE.format(device)], check=True)
    return time.perf_counter() - began


def measure(name: str, folder: Path, options: argparse.Namespace, limit: float) -> list[dict[str, Any]]:
    """Starts of a server with the checkpoint ``name``: one with nothing remembered, then later ones."""
    path = checkpoint_of(name, folder, random=True, vocabulary=options.vocabulary)
    found = []
    with tempfile.TemporaryDirectory(prefix="vlfit-caches-") as caches:
        settings = {
            "XDG_CACHE_HOME": f"{caches}/cache",
            "XDG_STATE_HOME": f"{caches}/state",
            "TRITON_CACHE_DIR": f"{caches}/triton",
        }
        arguments = [str(path), "--device", options.device, *options.serve.split()]
        for number in range(options.starts + 1):
            run: dict[str, Any] = {"checkpoint": name, "start": "later" if number else "first"}
            try:
                with ServerProcess(arguments, None, settings=settings) as server:
                    run |= {"ready_s": round(server.ready_s, 2), "phases_s": server.facts["phases_s"]}
            except DidNotStart as error:
                run |= {"ready_s": None, "error": str(error)}
            found.append(run)
            ready = run["ready_s"]
            times = ("-", "-") if ready is None else (f"{ready:.2f}", f"{ready / limit:.1f} x")
            print_row([name, run["start"], *times, run.get("error") or describe(run["phases_s"])])
    return found


def describe(phases: dict[str, float]) -> str:
    """``program 0.31, importing torch 1.62, ...``."""
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())


if __name__ == "__main__":
    main()
