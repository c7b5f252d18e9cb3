"""Every kernel that the engine launches fits the cards it is for, compiled without one.

``compiled.json`` records what all checkpoints of ``compile_for.CASES`` take on all cards. After a change of a
kernel or of a tile: ``python -m tests.kernels.compile_for --record``, and read the difference.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

# Bytes of shared memory that a program may have (CUDA C++ Programming Guide, technical specifications).
SHARED = {"8.0": 163 * 1024, "8.6": 99 * 1024, "8.9": 99 * 1024, "12.0": 99 * 1024}
# A thread's spilled registers. A few come from L1 in no time; where the compiler gives up, it is kilobytes.
STACK = 1024
RECORD = json.loads(Path(__file__).with_name("compiled.json").read_text())
CASES = tuple(RECORD["cases"])
# The five checkpoints of docs/bench.md, all of whose kernels `make test-cards` compiles.
BENCHMARKED = ("2B-bf16", "2B-fp8", "4B-fp8", "4B-int4", "8B-int4-int8")
SAMPLE = ("vision_attention_kernel", "rope_store_kv_kernel", "add_layer_norm_kernel")


def run_module(module: str, *arguments: str, **settings: str) -> Any:
    """What a module prints as JSON, in a process of its own with Triton's compiler."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed (torch's CPU build comes without it)")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=Path(__file__).parents[2],
        env={**environment, **settings},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_limits(card: str, kernels: dict[str, dict[str, int]]) -> None:
    assert not {name: used for name, used in kernels.items() if used["shared"] > SHARED[card]}
    assert not {name: used for name, used in kernels.items() if used["stack"] > STACK}


def test_the_record_has_every_case_and_card() -> None:
    assert set(RECORD["cards"]) == set(SHARED)
    assert set(CASES) >= set(BENCHMARKED)
    for kernels in RECORD["cards"].values():
        assert set(kernels) >= {
            "paged_decode_kernel",
            "paged_prefill_kernel",
            "vision_attention_kernel",
            "quantized_matmul_kernel",
            "dense_matmul_kernel",
            "sample_tokens_kernel",
        }


@pytest.mark.parametrize("card", SHARED)
def test_recorded_kernels_fit(card: str) -> None:
    check_limits(card, RECORD["cards"][card])


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache for all cases: they share most kernels."""
    return str(tmp_path_factory.mktemp("triton"))


def test_a_sample_is_as_recorded(cache: str) -> None:
    check_cases("8.6", ("2B-bf16",), cache, *SAMPLE)


@pytest.mark.cards
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("card", SHARED)
def test_the_five_benchmark_checkpoints_are_as_recorded(card: str, cache: str) -> None:
    check_cases(card, BENCHMARKED, cache)


@pytest.mark.slow
@pytest.mark.parametrize("card", SHARED)
@pytest.mark.parametrize("case", [case for case in CASES if case not in BENCHMARKED])
def test_others_are_as_recorded(card: str, case: str, cache: str) -> None:
    check_cases(card, (case,), cache)


def check_cases(card: str, cases: Sequence[str], cache: str, *names: str) -> None:
    """Compile kernels of cases: within the card's limits, and as recorded if the compiler is the same."""
    found = run_module("tests.kernels.compile_for", card, ",".join(cases), *names, TRITON_CACHE_DIR=cache)
    kernels = {name.partition("(")[0] for name in found}
    assert kernels
    assert kernels >= set(names)
    check_limits(card, found)
    if RECORD["versions"] == run_module("tests.kernels.compile_for", "--versions"):
        recorded = RECORD["cards"][card]
        assert not {
            name: used
            for name, used in found.items()
            for what in used
            if used[what] > recorded[name.partition("(")[0]][what]
        }
