"""Compile the kernels that benchmark checkpoints launch for cards that need not be there, and what they take.

    python -m tests.kernels.compile_for 8.6 4B-int4,4B-fp8 [KERNEL...]   as JSON: shared memory, registers,
                                                                         stack
    python -m tests.kernels.compile_for --record [CASE...]         into compiled.json, all cases by default

The launches are those of a dry run of the engine (``engine/execution/dry_run.py``) at true shapes. Not in
Triton's interpreter: ``TRITON_INTERPRET`` must not be set.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton

from benchmarks.checkpoints import MIXES, write_sparse_checkpoint, write_sparse_gguf
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint import catalog
from vlfit.checkpoint.source import Checkpoint, mini_folder, open_checkpoint, read_checkpoint
from vlfit.engine.execution.dry_run import engine_launches
from vlfit.engine.execution.precompile import follow_parent
from vlfit.kernels.launches import Launch, Pointer, compile_for, compile_launch, resources_of
from vlfit.kernels.target import TargetCard
from vlfit.loading.preload import leave_out_compiler
from vlfit.plan.native.tiles import dequant_config_for

RECORD = Path(__file__).with_name("compiled.json")
# Multiprocessors of a card of each compute capability: A100, RTX 3050, RTX 4060, RTX 5060.
CARDS = {"8.0": 108, "8.6": 20, "8.9": 24, "12.0": 30}
# The five checkpoints of the side by side of docs/bench.md, and what else brings kernels of its own.
CASES = (
    "2B-bf16",
    "2B-fp8",
    "4B-fp8",
    "4B-int4",
    "8B-int4-int8",
    "4B-fp8+kv",
    "4B-Q4_K_M",
    "4B-Q8_0",
    "4B-IQ4_XS",
    "Qwen3.5-4B-bf16",
    "Qwen3.5-4B-int4",
)
_FREE = 7200 * 2**20  # bytes of an 8 GB card


def checkpoint_of(case: str, folder: Path) -> Checkpoint:
    """The checkpoint of ``case``, its headers alone, in the new ``folder``."""
    name = case.removesuffix("+kv")
    size, _, weights = name.rpartition("-")
    if name.startswith("Qwen3.5"):
        entry = next(each for each in catalog.entries() if each.name.split("/")[-1] == _qwen35_name(name))
        return Checkpoint(entry.name, mini_folder(), entry.config, entry.tensors)
    if weights in MIXES:
        return open_checkpoint(write_sparse_gguf(folder, size, weights))
    int8 = ("head", "embedding", "vision") if weights == "int8" else ()
    size, weights = (size.split("-")[0], "int4") if int8 else (size, weights)
    return read_checkpoint(case, write_sparse_checkpoint(folder, size, weights, int8))


def _qwen35_name(name: str) -> str:
    base, _, weights = name.rpartition("-")
    return base if weights == "bf16" else f"{base}-{weights.upper()}"


def launches_of(case: str, capability: tuple[int, int]) -> list[Launch]:
    """What an engine with ``case`` launches on a card of ``capability``."""
    torch.set_num_threads(1)
    leave_out_compiler()
    options = EngineOptions(kv_dtype="fp8" if case.endswith("+kv") else "auto", max_num_seqs=8)
    with TemporaryDirectory() as folder:
        checkpoint = checkpoint_of(case, Path(folder) / "checkpoint")
        multiprocessors = CARDS[".".join(map(str, capability))]
        card = TargetCard(capability, multiprocessors=multiprocessors)
        dequant = dequant_config_for(_FREE, capability)
        return list(engine_launches(checkpoint, options, card, dequant))


def describe(launch: Launch) -> str:
    """A launch in a line: the kernel, types of its pointers, and its constants."""
    pointers = ",".join(each.dtype for each in launch.arguments if isinstance(each, Pointer))
    numbers = ",".join(str(each) for each in launch.arguments if not isinstance(each, Pointer))
    return f"{launch.name}({pointers}; {numbers}; {' '.join(f'{k}={v}' for k, v in launch.constants)})"


def measure(launch: Launch, capability: tuple[int, int]) -> dict[str, int]:
    """Bytes of shared memory, registers of a thread, and bytes of its stack."""
    with compile_for(capability):
        return asdict(resources_of(compile_launch(launch)))


def measure_all(launches: Iterable[Launch], capability: tuple[int, int]) -> dict[str, dict[str, int]]:
    """``measure`` of each launch, by its description, on all cores."""
    listed = list(launches)
    with ProcessPoolExecutor(num_cores(), get_context("fork"), follow_parent, (os.getpid(),)) as pool:
        found = pool.map(measure, listed, [capability] * len(listed), chunksize=4)
        return dict(sorted(zip(map(describe, listed), found, strict=True)))


def capability_of(card: str) -> tuple[int, int]:
    """(8, 6) of ``8.6``."""
    major, minor = card.split(".")
    return int(major), int(minor)


def versions() -> dict[str, str]:
    """Those of what compiles; registers and stacks are theirs."""
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    said = subprocess.run([str(ptxas), "--version"], capture_output=True, text=True, check=True).stdout
    return {"triton": triton.__version__, "ptxas": said.strip().splitlines()[-1].strip()}


def record(cases: Iterable[str]) -> None:
    """Compile ``cases`` for all ``CARDS``, and add them to ``RECORD``: the most that each kernel takes."""
    now: dict[str, Any] = {"versions": versions(), "cases": [], "cards": {}}
    if RECORD.exists():
        before = json.loads(RECORD.read_text())
        if before["versions"] == now["versions"]:
            now = before
    for case in cases:
        for card in CARDS:
            kernels = now["cards"].setdefault(card, {})
            for description, taken in measure_all(launches_of_all([case], card), capability_of(card)).items():
                most = kernels.setdefault(description.partition("(")[0], dict.fromkeys(taken, 0))
                most.update({key: max(most[key], value) for key, value in taken.items()})
        now["cases"] = sorted({*now["cases"], case})
        RECORD.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n")
        print(case, file=sys.stderr, flush=True)


def launches_of_all(cases: Sequence[str], card: str) -> list[Launch]:
    """``launches_of`` each case, without repeats, on all cores, each in a process of its own."""
    with get_context("fork").Pool(min(len(cases), num_cores()), maxtasksperchild=1) as pool:
        found = pool.starmap(launches_of, [(case, capability_of(card)) for case in cases], chunksize=1)
    return list(dict.fromkeys(launch for launches in found for launch in launches))


def num_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--record"]:
        record(arguments[1:] or CASES)
        return
    if arguments == ["--versions"]:
        print(json.dumps(versions()))
        return
    card, cases, *names = arguments
    launches = launches_of_all(cases.split(","), card)
    wanted = [launch for launch in launches if not names or launch.name in names]
    print(json.dumps(measure_all(wanted, capability_of(card)), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
