"""Records of earlier vLLM starts replace the table's numbers for the same card, version and model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.plan.vllm_plans import machine_of
from vlfit.machine.cards import CARDS
from vlfit.plan.backends import VLLM
from vlfit.plan.calibration import MEASURED, MODELLED
from vlfit.plan.ledger import Line
from vlfit.plan.model_lookup import find_exact_models
from vlfit.plan.planner import find_plan
from vlfit.plan.plans import Plan
from vlfit.plan.preference import safety_margin
from vlfit.plan.vllm import cost as constants
from vlfit.plan.vllm import starts
from vlfit.plan.vllm.command import budget_bytes
from vlfit.plan.vllm.starts import StartRecord
from vlfit.plan.wishes import Wishes
from vlfit.units import MIB

CARD = next(each for each in CARDS if each.name == "GeForce RTX 4060")
VERSION = "0.32.0"


def planned(count: int = 1, version: str = VERSION, **wishes: Any) -> Plan:
    told = {"context": 4096, "image_tokens": 1024, "sequences": 2, "chunk": 1024, **wishes}
    asked = Wishes(backend=VLLM.name, vllm_version=version, **told)
    return find_plan(find_exact_models("2B", "fp8"), machine_of(CARD, count), asked)


def sizes(made: Plan) -> dict[str, int]:
    return {line.line: line.bytes for line in made.ledger}


def lines(made: Plan) -> dict[str, Line]:
    return {line.line: line for line in made.ledger}


@pytest.fixture(autouse=True)
def _a_home_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def started() -> Callable[..., None]:
    """Save a record like that of ``made`` with less of everything, and with ``others``."""

    def keep(made: Plan, **others: Any) -> None:
        settings = made.settings
        held = sizes(made)
        context = 400 * MIB
        known = {
            "own_context": context,
            "graph_pool": 20 * MIB,
            "kv_cache": held["kv_cache"],
            "process": made.total - held["reserve"] - held["growth"] - 300 * MIB,
        }
        began = StartRecord(
            "2026-11-22T05:00:00",
            settings.context,
            settings.image_tokens,
            settings.sequences,
            settings.chunk,
            settings.graphs,
            settings.kv_dtype,
            **{**known, **others},
        )
        starts.save_start(made.gpu.name, VERSION, starts.model_key(made.model, settings), began)

    return keep


def test_same_settings_use_the_recorded_start(started: Callable[..., None]) -> None:
    before = planned()
    started(before)
    after = planned()
    assert after.settings == before.settings
    found = lines(after)
    assert found["context"].how == MEASURED
    assert found["context"].bytes == 400 * MIB + constants.LIBRARIES.bytes
    assert (found["graphs"].bytes, found["graphs"].how) == (20 * MIB, MEASURED)
    assert found["text_workspace"].how == found["vision_workspace"].how == MEASURED
    assert "2026-11-22" in found["text_workspace"].note
    # All that the process held is on a line, once; what it grows by later comes on top.
    held = after.total - found["reserve"].bytes - found["growth"].bytes - found["desktop"].bytes
    assert held == before.total - sizes(before)["reserve"] - sizes(before)["growth"] - 300 * MIB
    assert found["growth"].how == MODELLED
    assert safety_margin(after.ledger) < safety_margin(before.ledger)
    assert budget_bytes(after.ledger) == held + found["growth"].bytes - 400 * MIB


def test_other_settings_use_only_the_recorded_context(started: Callable[..., None]) -> None:
    started(planned())
    other = planned(sequences=4)
    assert lines(other)["context"].how == MEASURED
    assert lines(other)["text_workspace"].how == MODELLED
    assert lines(planned(context=8192))["text_workspace"].how == MEASURED  # it moves the pool alone


def test_other_versions_and_parallelism_use_no_record(started: Callable[..., None]) -> None:
    started(planned())
    assert lines(planned(version="0.31.0"))["context"].how == MODELLED
    over_two = planned(2, tensor_parallel=2)
    assert lines(over_two)["context"].how == MODELLED
    started(over_two, own_context=1200 * MIB)
    found = lines(planned(2, tensor_parallel=2))
    assert found["context"].bytes == 1200 * MIB + constants.LIBRARIES.bytes  # NCCL among it
    assert (found["peers"].bytes, found["peers"].how) == (0, MEASURED)
    assert lines(planned())["context"].bytes == 400 * MIB + constants.LIBRARIES.bytes


def test_partial_records_replace_only_known_lines(started: Callable[..., None]) -> None:
    before = planned()
    started(before, own_context=None, process=None)
    found = lines(planned())
    assert found["context"].how == found["text_workspace"].how == MODELLED
    assert found["graphs"].how == MEASURED


def test_lines_are_never_negative(started: Callable[..., None]) -> None:
    started(planned(), process=MIB)
    assert lines(planned())["text_workspace"].bytes == 0
