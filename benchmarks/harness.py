"""What every benchmark shares: arguments, facts about the machine, child processes, rounds, tables and JSON.

Checkpoints to measure are in ``checkpoints.py``, GPU memory in ``gpu_memory.py``, servers and clients in
``serving.py``.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from vlfit.bench.results import cpu_name as cpu_name
from vlfit.bench.results import markdown_table as markdown_table
from vlfit.bench.results import versions_of as versions_of
from vlfit.units import MIB as MIB

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "examples" / "pictures"

T = TypeVar("T")
Variant = TypeVar("Variant")

# --- arguments and results ---------------------------------------------------------------------------------


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a module's docstring as it is written."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_json_option(parser: argparse.ArgumentParser, content: str = "every measurement") -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"also write {content} to this file")


def write_json(file: Path | None, content: object) -> None:
    """Write ``content``, if a file was named. Long benchmarks do so after every row."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def print_table(rows: list[list[str]]) -> None:
    """Print a Markdown table with aligned columns; the first row is its head."""
    print("\n".join(markdown_table(rows)), flush=True)


def print_row(cells: Sequence[str]) -> None:
    """Print one row of a Markdown table at once: it is not lost if a later measurement fails."""
    print("|", " | ".join(cells), "|", flush=True)


def in_mib(size: float | None, places: int = 0) -> str:
    return "-" if size is None else f"{size / MIB:,.{places}f}"


# --- the machine -------------------------------------------------------------------------------------------


def commit() -> str:
    """The commit checked out, with ``+changes`` when the tree differs from it; ``unknown`` without git."""
    try:
        changed = output_of("git", "status", "--porcelain")
        return output_of("git", "rev-parse", "--short", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def card() -> str:
    """Name and driver of the first GPU."""
    try:
        return output_of(
            "nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"
        ).splitlines()[0]
    except (OSError, subprocess.CalledProcessError):
        return "a GPU that nvidia-smi does not name"


def device_name(device: str) -> str:
    """The processor or the GPU that ``device`` means."""
    return f"CPU {cpu_name()}" if device == "cpu" else card()


def require_gpu(benchmark: str) -> None:
    import torch

    if not torch.cuda.is_available():
        sys.exit(f"benchmarks.{benchmark} needs a CUDA device")


# --- child processes ---------------------------------------------------------------------------------------


def environment(**settings: str) -> dict[str, str]:
    """This process's environment and ``settings``, with the source tree first and the model hub offline."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(path for path in paths if path)
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **settings}


def output_of(*command: str) -> str:
    """Standard output of ``command``. Raises ``CalledProcessError`` if it fails."""
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout.strip()


def run_module(
    module: str, *arguments: str, timeout: float | None = None, **settings: str
) -> "subprocess.CompletedProcess[str]":
    """Run ``python -m MODULE ARGUMENTS`` to its end; ``settings`` are environment variables."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(TOKENIZERS_PARALLELISM="false", **settings),
        timeout=timeout,
        check=False,
    )


def run_worker(module: str, *arguments: str, timeout: float | None = None, **settings: str) -> dict[str, Any]:
    """The JSON object in the last line that a worker prints. Raises ``RuntimeError`` with its stderr."""
    done = run_module(module, *arguments, timeout=timeout, **settings)
    if done.returncode:
        raise RuntimeError(f"{module} failed with exit code {done.returncode}:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def run_vlfit(*arguments: str) -> dict[str, Any]:
    """What ``vlfit ARGUMENTS`` prints as JSON. Raises ``RuntimeError`` with its stderr."""
    done = run_module("vlfit", *arguments)
    if done.returncode:
        raise RuntimeError(f"vlfit {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def process_memory(line: str, pid: int | None = None) -> int:
    """``VmRSS`` (resident now), ``VmHWM`` (its peak) or ``RssAnon`` in bytes; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid or 'self'}/status").read_text("ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(each.split()[1]) * 1024 for each in lines if each.startswith(f"{line}:")), 0)


def process_tree(pid: int) -> list[int]:
    """A process and all its descendants whose parents still run."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text("ascii", "replace").rpartition(")")[2].split()
            parents[int(entry.parent.name)] = int(fields[1])
        except (OSError, IndexError):  # it ended meanwhile
            continue
    tree = [pid]
    for parent in tree:
        tree += [child for child, its_parent in parents.items() if its_parent == parent]
    return tree


class LineCounter:
    """Counts the lines of a growing file; reads each byte once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = self._lines = 0

    def count(self) -> int:
        if self._path.exists() and self._path.stat().st_size > self._offset:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
            # A partial last line may be cut off when the program is killed: it is read again.
            self._offset += data.rfind(b"\n") + 1
            self._lines += data.count(b"\n")
        return self._lines


# --- rounds ------------------------------------------------------------------------------------------------


def alternate(rounds: int, variants: Sequence[Variant]) -> Iterator[tuple[int, Variant]]:
    """``(round, variant)``: every variant once a round, in reverse order every other round (A B, B A, A B).

    A machine that becomes slower or faster meanwhile is so for all variants alike.
    """
    for number in range(rounds):
        for variant in variants if number % 2 == 0 else reversed(variants):
            yield number, variant


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Run all ``calls`` in threads that start at the same moment; their results in order."""
    results: list[T | None] = [None] * len(calls)
    failures: list[BaseException] = []
    barrier = threading.Barrier(len(calls))

    def run(number: int) -> None:
        try:
            barrier.wait()
            results[number] = calls[number]()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results  # type: ignore[return-value]
