"""Faults of `tests/parity/faults.py`: how many `vlfit verify` finds, and how many by the right component.

`python -m benchmarks.verify_faults [NAME ...]`: names begin a fault's name; none: all. `--clean N`: no
faults, but N runs over clean engines, each another checkpoint by family, format and seed, another level and
the instructions that the processor is allowed (`ATEN_CPU_CAPABILITY`): every finding is a false alarm. In
half of the runs all matrices are multiplied by compiled products, which otherwise only large ones are.
"""

import argparse
import dataclasses
import itertools
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.parity.faults import FAULTS, build_spec, run_fault
from vlfit.parity.findings import Level
from vlfit.parity.run_checks import float_reference, run_checks

# VLFIT_CPU_KERNELS and ATEN_CPU_CAPABILITY of processes of clean runs; "": all that the processor has.
CAPABILITIES = (("", ""), ("avx2", "avx2"), ("0", "default"), ("avx512_vnni", ""))
CLEAN_LEVELS: tuple[Level, ...] = ("quick", "normal", "quick", "full")
_SWITCHES = ("VLFIT_CPU_KERNELS", "ATEN_CPU_CAPABILITY")
RUNS_A_PROCESS = 40  # of one capability, which torch reads as it starts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--transformers", action="store_true", help="the reference is transformers' model")
    parser.add_argument("--clean", type=int, metavar="N", help="run N clean checks in place of faults")
    parser.add_argument("--first", type=int, default=0, help="with --clean: number of the first run")
    parser.add_argument("--seconds", type=float, help="with --clean: begin no run after as many")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if arguments.clean is None:
        run_faults(arguments.names, transformers=arguments.transformers)
    elif arguments.here:
        run_clean(arguments.first, arguments.clean, arguments.seconds)
    else:
        start_clean(arguments.first, arguments.clean, arguments.seconds)


def run_faults(names: list[str], *, transformers: bool) -> None:
    """Print what is found of each fault, then the counts."""
    chosen = [
        each for name, each in FAULTS.items() if not names or any(name.startswith(wanted) for wanted in names)
    ]
    reference = float_reference
    if transformers:
        from tests.parity.transformers_reference import TransformersReference

        reference = lambda checkpoint: TransformersReference(checkpoint.folder)  # noqa: E731
    found = named = 0
    with tempfile.TemporaryDirectory() as scratch:
        specs: dict[str, Path] = {}
        for number, each in enumerate(chosen):
            if each.spec not in specs:
                specs[each.spec] = build_spec(each.spec, Path(scratch) / f"spec-{len(specs)}")
            began = time.perf_counter()
            place = Path(scratch) / f"fault-{number}"
            place.mkdir()
            report = run_fault(each, specs[each.spec], place, reference)
            verdict = report.verdict
            found += verdict is not None
            right = verdict is not None and verdict.component in each.names
            named += right
            mark = "missed" if verdict is None else "right " if right else "WRONG "
            said = "" if verdict is None else f"{verdict.component}: {verdict.stage}, {verdict.condition}"
            print(f"{mark}  {each.name:60}  {said}  ({time.perf_counter() - began:.1f} s)", flush=True)
    print(f"{len(chosen)} faults, {found} found, {named} by the right component")


def start_clean(first: int, count: int, seconds: float | None) -> None:
    """Run ``count`` clean checks in processes of ``RUNS_A_PROCESS``, each with another capability."""
    began = time.perf_counter()
    done = alarms = 0
    for number, start in enumerate(range(first, first + count, RUNS_A_PROCESS)):
        left = None if seconds is None else seconds - (time.perf_counter() - began)
        if left is not None and left <= 0:
            break
        named = dict(zip(_SWITCHES, CAPABILITIES[number % len(CAPABILITIES)], strict=True))
        environment = {name: value for name, value in os.environ.items() if name not in named}
        environment |= {name: value for name, value in named.items() if value}
        command = [sys.executable, "-m", "benchmarks.verify_faults", "--here", "--first", str(start)]
        command += ["--clean", str(min(RUNS_A_PROCESS, first + count - start))]
        command += [] if left is None else ["--seconds", str(left)]
        ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        lines = ended.stdout.splitlines()
        print("\n".join(lines[:-1]), flush=True)
        if ended.returncode or not lines:
            raise SystemExit(f"a process of clean runs ended with {ended.returncode}")
        ran, alarmed = map(int, lines[-1].split())
        done, alarms = done + ran, alarms + alarmed
        said = ", ".join(f"{name}={value}" for name, value in named.items() if value)
        print(f"  {said or 'all instructions'}: {ran} runs, {alarmed} false alarms", flush=True)
    print(f"{done} clean runs, {alarms} false alarms, {time.perf_counter() - began:.0f} s")


def clean_specs() -> list[str]:
    """Every family and format that ``build_spec`` writes."""
    from tests.loading.test_awq_gptq import FORMS
    from tests.loading.test_compressed import CASES
    from tests.tiny import TINY
    from tests.tiny_decoders import DECODERS
    from tests.tiny_qwen3_5 import QWEN3_5

    blocks = [f"gguf {kind} tied" for kind in ("f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")]
    blocks += ["gguf q8_0 qwen3", "gguf f16 llama_biased_stretched"]
    return ["mini", *TINY, *QWEN3_5, *DECODERS, *FORMS, *CASES, *blocks]


def clean_runs() -> Iterator[tuple[str, int, Level, bool]]:
    """Checkpoint, seed, level and whether all matrices stay as stored, of run 0, 1, 2, ...

    All checkpoints by turns, then with the next seed.
    """
    for seed in itertools.count():
        for number, spec in enumerate(clean_specs()):
            level = CLEAN_LEVELS[(number + seed) % len(CLEAN_LEVELS)]
            yield spec, seed, level, bool((number // len(CLEAN_LEVELS) + seed // 2) % 2)


def run_clean(first: int, count: int, seconds: float | None) -> None:
    """Run the checks numbered ``first`` on; print each false alarm, then how many ran and alarmed."""
    began = time.perf_counter()
    ran = alarms = 0
    with tempfile.TemporaryDirectory() as scratch:
        runs = itertools.islice(clean_runs(), first, first + count)
        for number, (spec, seed, level, stored) in enumerate(runs):
            if seconds is not None and time.perf_counter() - began > seconds:
                break
            report = _check(_clean_checkpoint(spec, seed, Path(scratch) / str(number)), level, stored=stored)
            ran += 1
            alarms += not report.ok
            for each in report.findings:
                print(f"ALARM {spec}, seed {seed}, {level}{', stored' * stored}: {each}", flush=True)
    print(f"{ran} {alarms}")


def _clean_checkpoint(spec: str, seed: int, folder: Path) -> Path:
    """A checkpoint with weights of its own: seeds of the families' tables are moved on by ``seed``."""
    from tests import tiny, tiny_decoders, tiny_qwen3_5
    from vlfit.checkpoint.source import mini_folder

    if spec == "mini":
        return mini_folder()
    tables: list[dict[str, Any]] = [tiny.TINY, tiny_decoders.DECODERS, tiny_qwen3_5.QWEN3_5]
    before = [dict(table) for table in tables]
    try:
        for table in tables:
            for name, each in list(table.items()):
                table[name] = dataclasses.replace(each, seed=each.seed + 1000 * seed)
        return build_spec(spec, folder)
    finally:
        for table, old in zip(tables, before, strict=True):
            table.update(old)


def _check(folder: Path, level: Level, *, stored: bool) -> Any:
    """``stored``: compiled products multiply small matrices, too."""
    from vlfit.api.engine_options import EngineOptions
    from vlfit.checkpoint.source import open_checkpoint
    from vlfit.engine.engine import NativeEngine
    from vlfit.plan.native import ram

    checkpoint = open_checkpoint(folder)
    options = EngineOptions(device="cpu", max_model_len=1024)

    def build(**changes: Any) -> NativeEngine:
        return NativeEngine(checkpoint, dataclasses.replace(options, **changes))

    as_they_are = ram.LEAST_WEIGHTS, ram.LEAST_INPUTS
    try:
        if stored:
            ram.LEAST_WEIGHTS = ram.LEAST_INPUTS = 1
        return run_checks(build, checkpoint, level)
    finally:
        ram.LEAST_WEIGHTS, ram.LEAST_INPUTS = as_they_are


if __name__ == "__main__":
    main()
