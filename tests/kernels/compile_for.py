"""Compile the kernels that benchmark checkpoints launch for cards that need not be there, and what they take.

    python -m tests.kernels.compile_for 8.6,8.9 4B-int4,4B-fp8        as JSON: shared memory, registers, stack
    python -m tests.kernels.compile_for --changed DAY 8.6,8.9 4B-int4 what is not on record, or has its turn
    python -m tests.kernels.compile_for --record [CASE...]            into compiled.json, by default all cases

The launches are those of a dry run of the engine (``engine/execution/dry_run.py``) at true shapes. Not in
Triton's interpreter: ``TRITON_INTERPRET`` must not be set.

A launch is on record by a hash of all that Triton compiles it from (``key_of``). So what is there holds as
long as Triton and ptxas are the record's, and ``--record`` compiles only what is not.
"""

import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, is_dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
from triton.runtime import driver
from triton.runtime.jit import JITCallable

from benchmarks.checkpoints import MIXES, write_sparse_checkpoint, write_sparse_gguf
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint import catalog
from vlfit.checkpoint.source import Checkpoint, mini_folder, open_checkpoint, read_checkpoint
from vlfit.engine.execution.dry_run import engine_launches
from vlfit.engine.execution.precompile import follow_parent
from vlfit.kernels.launch import LaunchCache
from vlfit.kernels.launches import (
    Launch,
    Pointer,
    compile_for,
    compile_launch,
    import_kernels,
    resources_of,
)
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
# A launch on record is compiled again every so many days.
TURNS = 16
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


def key_of(launch: Launch, capability: tuple[int, int]) -> str:
    """A hash of all that ``launch`` is compiled from for cards of ``capability``, besides Triton and ptxas.

    That is what Triton's own key has: the source of the kernel and of all functions that it calls, types,
    alignment, constants and compiler options. Of constants that are objects of ours it also has what a kernel
    can read of them (``_readable``). It lacks the lines on which functions begin, which Triton's key has for
    the sake of debuggers. Changes global state of the kernels, so for a process of its own.
    """
    module, _, name = launch.kernel.partition(":")
    wrapped = getattr(importlib.import_module(module), name)
    kernel = wrapped.kernel if isinstance(wrapped, LaunchCache) else wrapped
    asked: list[str] = []

    def ask(source: Any, target: Any, options: dict[str, Any], **_: Any) -> None:
        wanted = {
            "kernel": source.fn.cache_key,
            "signature": sorted(source.signature.items()),
            "constants": [(place, _readable(value)) for place, value in sorted(source.constants.items())],
            "attributes": sorted(source.attrs.items()),
            "target": vars(target),
            # Not the folder of a library that comes with Triton.
            "options": {key: value for key, value in sorted(options.items()) if key != "extern_libs"},
        }
        asked.append(repr(wanted))

    with compile_for(capability):
        kernel.device_caches[driver.active.get_current_device()]  # where Triton sets ``compile``
        kernel.compile = ask
        compile_launch(launch)
    [text] = asked
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _readable(value: Any) -> Any:
    """``value``, and where it is of a dataclass all that its attributes and properties say.

    Raises ``TypeError`` for what a kernel could call, as a method: what that reads is not known.
    """
    if not is_dataclass(value):
        if callable(value):
            raise TypeError(f"a kernel's constant, {value!r}, can be called")
        return value
    names = [name for name in dir(value) if not name.startswith("_")]
    return [type(value).__name__, [(name, _readable(getattr(value, name))) for name in names]]


def keys_of(launches: Iterable[Launch], capability: tuple[int, int]) -> dict[str, Launch]:
    """``launches`` by ``key_of`` each."""
    _forget_lines()
    return {key_of(launch, capability): launch for launch in launches}


def _forget_lines() -> None:
    """Set the first lines of our functions, which Triton hashes with their sources, to 0."""
    import_kernels()
    for name, module in list(sys.modules.items()):
        if name.startswith("vlfit.kernels."):
            for each in vars(module).values():
                function = each.kernel if isinstance(each, LaunchCache) else each
                if isinstance(function, JITCallable):
                    function.starting_line_number = 0


def measure(launch: Launch, capability: tuple[int, int]) -> dict[str, int]:
    """Bytes of shared memory, registers of a thread, and bytes of its stack."""
    with compile_for(capability):
        return asdict(resources_of(compile_launch(launch)))


def launches_of_all(cases: Sequence[str], cards: Sequence[str]) -> dict[str, dict[str, Launch]]:
    """``launches_of`` each case on each card, by card and key.

    On all cores; each dry run in a process of its own, which finds imported what it needs.
    """
    leave_out_compiler()
    import_kernels()
    meta = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    torch.embedding(meta, meta)  # imports what torch needs of the meta device
    pairs = [(case, capability_of(card)) for card in cards for case in cases]
    with get_context("fork").Pool(min(len(pairs), num_cores()), maxtasksperchild=1) as pool:
        found = dict(zip(pairs, pool.starmap(launches_of, pairs, chunksize=1), strict=True))
    capabilities = [capability_of(card) for card in cards]
    launches = [
        [launch for case in cases for launch in found[case, capability]] for capability in capabilities
    ]
    with _processes() as processes:
        return dict(zip(cards, processes.map(keys_of, launches, capabilities), strict=True))


def measure_all(launches: dict[str, dict[str, Launch]]) -> dict[str, dict[str, dict[str, int]]]:
    """``measure`` of each launch, by card and key as they are, on all cores."""
    listed = [(card, key) for card, keys in launches.items() for key in keys]
    with _processes() as processes:
        found = processes.map(
            measure,
            [launches[card][key] for card, key in listed],
            [capability_of(card) for card, _ in listed],
            chunksize=4,
        )
        taken: dict[str, dict[str, dict[str, int]]] = {card: {} for card in launches}
        for (card, key), each in zip(listed, found, strict=True):
            taken[card][key] = each
        return taken


def _processes() -> ProcessPoolExecutor:
    """One for each core, with all that is imported here."""
    return ProcessPoolExecutor(num_cores(), get_context("fork"), follow_parent, (os.getpid(),))


def capability_of(card: str) -> tuple[int, int]:
    """(8, 6) of ``8.6``."""
    major, minor = card.split(".")
    return int(major), int(minor)


def versions() -> dict[str, str]:
    """Those of what compiles; registers and stacks are theirs."""
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    said = subprocess.run([str(ptxas), "--version"], capture_output=True, text=True, check=True).stdout
    return {"triton": triton.__version__, "ptxas": said.strip().splitlines()[-1].strip()}


def kept() -> dict[str, Any]:
    """What is on record of the compiler that is here: of another one, nothing."""
    now: dict[str, Any] = {"versions": versions(), "cases": [], "cards": {}}
    if RECORD.exists():
        before: dict[str, Any] = json.loads(RECORD.read_text())
        if before["versions"] == now["versions"]:
            return before
    return now


def not_recorded(card: str, launches: dict[str, Launch], recorded: dict[str, Any]) -> dict[str, Launch]:
    """Those of ``launches``, by key, that ``recorded`` lacks for ``card``."""
    kernels = recorded["cards"].get(card, {})
    return {key: each for key, each in launches.items() if key not in kernels.get(each.name, {})}


def launches_of_day(
    card: str, launches: dict[str, Launch], recorded: dict[str, Any], day: int
) -> dict[str, Launch]:
    """Those of ``launches``, by key, that ``recorded`` lacks, and those whose turn is on ``day``.

    Each launch has its turn every ``TURNS`` days.
    """
    new = not_recorded(card, launches, recorded)
    return {key: each for key, each in launches.items() if key in new or int(key, 16) % TURNS == day % TURNS}


def record(cases: Sequence[str]) -> None:
    """Compile what is not on record of ``cases`` for all ``CARDS``, and record it.

    Of all ``CASES``, what none of them launches any longer is left out.
    """
    now = kept()
    launches = launches_of_all(cases, list(CARDS))
    new = {card: not_recorded(card, launches[card], now) for card in CARDS}
    print(f"{sum(map(len, new.values()))} to compile", file=sys.stderr, flush=True)
    taken = measure_all(new)
    for card in CARDS:
        before = now["cards"].get(card, {})
        kernels: dict[str, dict[str, Any]] = {} if set(cases) >= set(CASES) else before
        for key, launch in launches[card].items():
            known = before.get(launch.name, {}).get(key)
            kernels.setdefault(launch.name, {})[key] = known or list(taken[card][key].values())
        now["cards"][card] = kernels
    now["cases"] = sorted({*now["cases"], *cases})
    text = json.dumps(now, indent=1, sort_keys=True)
    # The three numbers of a launch in one line.
    RECORD.write_text(re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3]", text) + "\n")


def num_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--record"]:
        record(arguments[1:] or CASES)
        return
    day = None
    if arguments[:1] == ["--changed"]:
        day, arguments = int(arguments[1]), arguments[2:]
    cards, cases = (each.split(",") for each in arguments)
    launches = launches_of_all(cases, cards)
    recorded = kept()
    wanted = launches
    if day is not None:
        wanted = {card: launches_of_day(card, keys, recorded, day) for card, keys in launches.items()}
    taken = measure_all(wanted)
    found = {
        card: {
            key: {"kernel": launch.name, "launch": describe(launch), **taken[card][key]}
            for key, launch in keys.items()
        }
        for card, keys in wanted.items()
    }
    asked_for = {card: {key: each.name for key, each in keys.items()} for card, keys in launches.items()}
    print(json.dumps({"same_compiler": bool(recorded["cases"]), "asked_for": asked_for, "compiled": found}))


if __name__ == "__main__":
    main(sys.argv[1:])
