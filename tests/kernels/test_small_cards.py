"""Every kernel that the engine launches fits the cards it is for, compiled without one.

``compiled.json`` records what each launch of the checkpoints of ``compile_for.CASES`` takes on all cards, by
a hash of what it is compiled from: bytes of shared memory, registers, bytes of stack. After a change of a
kernel or of a tile: ``python -m tests.kernels.compile_for --record`` compiles what is new, and read the
difference.
"""

import importlib.util
import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.uninterpreted import output_of

# Bytes of shared memory that a program may have (CUDA C++ Programming Guide, technical specifications).
SHARED = {"8.0": 163 * 1024, "8.6": 99 * 1024, "8.9": 99 * 1024, "12.0": 99 * 1024}
# A thread's spilled registers. A few come from L1 in no time; where the compiler gives up, it is kilobytes.
STACK = 1024
RECORD = json.loads(Path(__file__).with_name("compiled.json").read_text())
CASES = tuple(RECORD["cases"])
# The five checkpoints of docs/bench.md, all of whose kernels `make test-cards` compiles.
BENCHMARKED = ("2B-bf16", "2B-fp8", "4B-fp8", "4B-int4", "8B-int4-int8")
WHAT = ("shared", "registers", "stack")


def run_module(module: str, *arguments: str, **settings: str) -> Any:
    """What a module prints as JSON, in a process of its own with Triton's compiler."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed (torch's CPU build comes without it)")
    return json.loads(output_of("-m", module, *arguments, timeout=900, **settings))


def check_limits(card: str, launches: dict[str, dict[str, Any]]) -> None:
    assert not {name: used for name, used in launches.items() if used["shared"] > SHARED[card]}
    assert not {name: used for name, used in launches.items() if used["stack"] > STACK}


def recorded_launches(card: str, kernel: str) -> dict[str, dict[str, int]]:
    """What each launch of ``kernel`` takes, by key."""
    launches = RECORD["cards"][card][kernel]
    return {key: dict(zip(WHAT, numbers, strict=True)) for key, numbers in launches.items()}


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
    for kernel in RECORD["cards"][card]:
        check_limits(card, recorded_launches(card, kernel))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache for all cases: they share most kernels."""
    return str(tmp_path_factory.mktemp("triton"))


@pytest.mark.changed
@pytest.mark.timeout(1200)
def test_what_changed_fits_and_a_share_of_the_rest_is_as_recorded(cache: str) -> None:
    """With what has its turn today: in sixteen days, all."""
    today = date.today().toordinal()
    check_cases(tuple(SHARED), BENCHMARKED, cache, "--changed", str(today))


@pytest.mark.changed
def test_a_launch_is_recorded_by_all_that_it_is_compiled_from() -> None:
    keys = run_module("tests.kernels.compile_keys")
    key = keys.pop("as it is")
    assert keys.pop("lines above") == key
    assert len({key, *keys.values()}) == 1 + len(keys) == 10


@pytest.mark.cards
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("card", SHARED)
def test_the_five_benchmark_checkpoints_are_as_recorded(card: str, cache: str) -> None:
    check_cases((card,), BENCHMARKED, cache)


@pytest.mark.slow
@pytest.mark.parametrize("card", SHARED)
@pytest.mark.parametrize("case", [case for case in CASES if case not in BENCHMARKED])
def test_others_are_as_recorded(card: str, case: str, cache: str) -> None:
    check_cases((card,), (case,), cache)


def check_cases(cards: Sequence[str], cases: Sequence[str], cache: str, *options: str) -> None:
    """Compile kernels of cases: within the cards' limits, and as recorded if the compiler is the same.

    A launch that is not on record, as its kernel changed, takes no more than the kernel did.
    """
    found = run_module(
        "tests.kernels.compile_for", *options, ",".join(cards), ",".join(cases), TRITON_CACHE_DIR=cache
    )
    for card in cards:
        compiled = found["compiled"][card]
        assert found["asked_for"][card].keys() >= compiled.keys()
        check_limits(card, compiled)
        if not found["same_compiler"]:
            assert compiled.keys() == found["asked_for"][card].keys()
            continue
        for key, used in compiled.items():
            recorded = recorded_launches(card, used["kernel"])
            taken = {what: used[what] for what in WHAT}
            if key in recorded:
                assert taken == recorded[key], used["launch"]
            else:
                most = {what: max(each[what] for each in recorded.values()) for what in WHAT}
                assert not {what for what in WHAT if taken[what] > most[what]}, used["launch"]
