"""Planned and actual memory line by line; the plan of a CPU is exact."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from vlfit.api.engine_options import EngineOptions
from vlfit.backends.native import NativeBackend
from vlfit.checkpoint.catalog import entries
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.source import Checkpoint, open_checkpoint
from vlfit.machine.cards import machine_with_card
from vlfit.machine.model import Gpu
from vlfit.plan.actual import Expectation, Row, compare_on_gpu, lines_over_plan, pair_rows, totals
from vlfit.plan.ledger import Line, PlanSettings
from vlfit.plan.native.expectation import expect_in_ram, expect_on_gpu
from vlfit.units import GIB, MIB

GPU = machine_with_card("RTX 5060", 951 * MIB, wsl2=True).gpus[0]
SETTINGS = PlanSettings("fp8", 4096, 1024, 2, 512)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    entry = next(each for each in entries() if each.name == "Qwen/Qwen3-VL-4B-Instruct-FP8")
    assert isinstance(entry.config, ModelConfig)
    return Checkpoint(entry.name, Path("nowhere"), entry.config, entry.tensors)


@pytest.fixture(scope="module")
def planned(checkpoint: Checkpoint) -> Expectation:
    return expect_on_gpu(checkpoint, GPU, SETTINGS, value_bytes=2)


@pytest.mark.parametrize("name", ["tied", "untied_sharded", "fp8", "half_with_biases"])
def test_cpu_memory_matches_the_plan(name: str, tiny: Callable[[str], Path]) -> None:
    """Except for the table of rotary frequencies, which is not counted as a weight."""
    options = EngineOptions(device="cpu", max_model_len=256, max_num_seqs=2)
    with NativeBackend.load(tiny(name), options) as backend:
        account = backend.account()
    planned = expect_in_ram(
        open_checkpoint(tiny(name)), account.settings.kv_tokens, 4, sequences=account.settings.sequences
    ).lines
    actual = {**account.memory.weights, "kv_cache": account.memory.kv_cache}
    for line in planned:
        assert 0 <= actual[line.line] - line.bytes < 512, line.line
    assert {line.line for line in planned} == set(actual)


def test_gpu_lines_are_the_plans(planned: Expectation) -> None:
    names = [line.line for line in planned.lines]
    assert names[:2] == ["desktop", "context"]
    assert names[-1] == "reserve"
    assert planned.lines[0].bytes == 951 * MIB
    assert planned.no_lines_reason == ""


def test_pace_grows_with_cached_tokens(planned: Expectation) -> None:
    assert planned.expected is not None
    assert planned.slowest is not None
    weights = sum(line.bytes for line in planned.lines if line.line.startswith("weights."))
    assert GPU.bandwidth is not None
    assert planned.slowest.base_s > planned.expected.base_s > 0
    assert planned.slowest.base_s > 0.5 * weights / GPU.bandwidth
    assert planned.slowest.step(4000) > planned.slowest.step(0)


def test_no_pace_without_bandwidth(checkpoint: Checkpoint) -> None:
    unknown = expect_on_gpu(checkpoint, replace(GPU, bandwidth=None), SETTINGS, value_bytes=2)
    assert unknown.lines
    assert unknown.expected is unknown.slowest is None


def test_float32_on_a_gpu_has_no_plan(checkpoint: Checkpoint) -> None:
    none = expect_on_gpu(checkpoint, GPU, SETTINGS, value_bytes=4)
    assert none.lines == ()
    assert "16 bits" in none.no_lines_reason


WEIGHTS = {"weights.text": 3 * GIB, "weights.vision": GIB // 2, "weights.embedding": GIB // 2}


def by_line(found: tuple[Row, ...]) -> dict[str, int | None]:
    return {row.line: row.actual for row in found}


def loaded(held: int, told: bool) -> Gpu:
    """The card with 951 MiB of other programs and ``held`` of ours, reported by the driver or not."""
    free = GPU.total - 951 * MIB - held
    return replace(GPU, free=free, desktop=951 * MIB if told else GPU.total - free)


def test_context_if_the_driver_reports_processes(planned: Expectation) -> None:
    reserved = 4 * GIB + 576 * MIB + 100 * MIB
    gpu = loaded(reserved + 500 * MIB, told=True)
    found = compare_on_gpu(gpu, planned, WEIGHTS, 576 * MIB, reserved)
    actual = by_line(found)
    assert (actual["desktop"], actual["context"]) == (951 * MIB, 500 * MIB)
    assert (actual["kv_cache"], actual["text_workspace"]) == (576 * MIB, 100 * MIB)
    assert actual["vision_workspace"] is actual["reserve"] is None
    assert totals(found)[1] == gpu.total - gpu.free


def test_planned_context_if_it_does_not(planned: Expectation) -> None:
    context = next(line.bytes for line in planned.lines if line.line == "context")
    reserved = 4 * GIB + 576 * MIB
    found = compare_on_gpu(loaded(reserved + context, told=False), planned, WEIGHTS, 576 * MIB, reserved)
    actual = by_line(found)
    assert actual["desktop"] == 951 * MIB
    assert actual["context"] is None
    assert found[0].remark
    assert not any(row.remark for row in found if row.line == "context")


def test_over_plan_lists_lines_over_the_plan() -> None:
    lines = (
        Line("desktop", GIB, "measured", ""),
        Line("kv_cache", 500 * MIB, "exact", ""),
        Line("vision_workspace", 300 * MIB, "modelled", ""),
        Line("text_workspace", 0, "modelled", ""),
        Line("weights.vision", 10 * MIB, "exact", ""),
    )
    actual: dict[str, int | None] = {
        "desktop": 2 * GIB,  # others' doing
        "kv_cache": 520 * MIB,  # 4 %
        "vision_workspace": None,
        "text_workspace": 305 * MIB,  # with the tower's: 1.7 %
        "weights.vision": 17 * MIB,  # 70 %, but of little
    }
    found = pair_rows(lines, actual, {})
    assert lines_over_plan(found) == (("kv_cache", 20 * MIB),)
    assert totals(found) == (GIB + 810 * MIB, 2 * GIB + 842 * MIB)


def test_total_is_unknown_with_an_unplanned_line() -> None:
    found = pair_rows((Line("kv_cache", 5, "exact", ""),), {"context": 7, "kv_cache": 5}, {})
    assert totals(found) == (None, 12)
    assert totals(()) == (None, None)
