"""What verify found is kept, offered once, and used by the plan of the same model on the same device."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.plan.example import EXAMPLE
from tests.plan.test_processor_plan import XEON, plan_of
from vlfit.machine.model import Machine
from vlfit.plan.calibration import torch_version
from vlfit.plan.native import verified
from vlfit.plan.native.verified import (
    Device,
    KeptFinding,
    KeptSpeed,
    Verification,
    kept_verifications,
    load,
    offer_once,
    verified_path,
)
from vlfit.plan.report import plan_to_json
from vlfit.units import MIB

HERE = Device(XEON.name, "", XEON.threads)
FINDING = KeptFinding("tower_differs", "tower", "tower.embedding", "prefill", "kernel", "row 3", "add --x")


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def kept(**changes: object) -> Verification:
    plan = plan_of("2B-FP8")
    found = Verification(
        model=plan.model.name,
        weights=plan.model.weights,
        weights_format="fp8",
        device=HERE,
        torch=torch_version(),
        vlfit="0.1.0",
        date="2026-11-23",
        level="quick",
        ok=True,
        speed=KeptSpeed(4.0, 300, 6.0, 292, has_picture=True),
        planned=1000 * MIB,
        held=990 * MIB,
        lines=(("kv_cache", 5, 6), ("context", None, 7)),
    )
    return replace(found, **changes)  # type: ignore[arg-type]


def test_what_is_kept_is_loaded() -> None:
    for found in (kept(), kept(model="other", ok=False, findings=(FINDING,), speed=None)):
        path = verified.keep(found)
        assert path == verified_path(found.device, found.model, found.weights)
        assert load(found.device, found.model, found.weights) == found
    assert {each.model for each in kept_verifications()} == {kept().model, "other"}
    assert load(Device("another card"), "other", "fp8") is None


def test_names_that_differ_in_signs_have_files_of_their_own() -> None:
    paths = {
        verified_path(HERE, name, "fp8") for name in ("org/a b", "org-a-b", "org/a-b", "x" * 400, "x" * 401)
    }
    assert len(paths) == 5
    assert all(len(path.name) < 200 for path in paths)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"ok": False},
        {"findings": [{"code": "x"}]},
        {"date": "yesterday"},
        {"speed": {"tokens_per_s": float("nan")}},
        {"speed": {"tokens_per_s": 0.0}},
        {"speed": {"tokens_per_s": True}},
        {"held": -1},
        {"lines": [["kv_cache", 1]]},
        {"device": None},
        {"model": 7},
    ],
    ids=str,
)
def test_a_file_that_vlfit_did_not_write_is_passed_over(change: dict[str, object]) -> None:
    path = verified.keep(kept())
    facts = json.loads(path.read_text())
    for name, value in change.items():
        facts[name] = facts[name] | value if isinstance(value, dict) else value
    path.write_text(json.dumps(facts))
    assert load(HERE, kept().model, kept().weights) is None
    assert kept_verifications() == []
    assert plan_of("2B-FP8").speed is not None


@pytest.mark.parametrize("words", ["", "[", "[[" * 9000, "9" * 300_000, "null"], ids=lambda words: words[:3])
def test_a_broken_file_is_passed_over(words: str) -> None:
    path = verified.keep(kept())
    path.write_text(words)
    assert kept_verifications() == []


def test_it_is_offered_once_for_a_device_and_a_format() -> None:
    assert offer_once(HERE, "fp8")
    assert not offer_once(HERE, "fp8")
    assert offer_once(HERE, "int4")
    assert offer_once(Device("card", "580.1"), "fp8")
    assert not offer_once(Device("card", "581.0"), "fp8")  # a new driver is not a new card


def test_what_was_verified_is_not_offered() -> None:
    verified.keep(kept())
    assert not offer_once(HERE, "fp8")


def test_it_is_not_offered_where_that_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / "vlfit").write_text("a file")
    assert not offer_once(HERE, "fp8")


def test_a_plan_says_measured_here() -> None:
    predicted = plan_of("2B-FP8").speed
    verified.keep(kept())
    plan = plan_of("2B-FP8")
    assert predicted is not None
    assert plan.speed is not None
    assert (predicted.measured, plan.speed.measured) == ("", "2026-11-23")
    # The plan's request is not verify's, but near: a picture of 1024 tokens for one of 256.
    assert 0.7 * 4.0 < plan.speed.decode.expected <= 4.0
    assert plan.speed.decode.low < plan.speed.decode.expected < plan.speed.decode.high
    assert plan.speed.small_picture is not None
    assert plan.speed.small_picture.expected == pytest.approx(6.0, rel=0.1)
    (remark,) = [each for each in plan.remarks if each.code == "measured_here"]
    assert "4.0 tokens/s" in remark
    assert "990 MiB held of 1,000" in remark
    assert plan_to_json(plan)["speed"]["measured"] == "2026-11-23"
    assert "measured" not in plan_to_json(plan_of("4B-FP8"))["speed"]


def test_too_slow_as_measured_is_not_recommended() -> None:
    assert plan_of("2B-FP8").is_quick
    verified.keep(kept())
    assert not plan_of("2B-FP8").is_quick


@pytest.mark.parametrize(
    "change",
    [
        {"torch": "1.0"},
        {"device": replace(HERE, threads=64)},
        {"device": Device("another")},
        {"model": "another"},
        {"weights": "int4"},
        {"speed": None},
        {"speed": KeptSpeed(100_000.0, 300, 6.0, 292, has_picture=True)},
    ],
    ids=str,
)
def test_what_was_measured_otherwise_changes_no_plan(change: dict[str, object]) -> None:
    before = plan_of("2B-FP8")
    verified.keep(kept(**change))
    assert plan_of("2B-FP8") == before


def test_a_card_of_the_table_was_not_measured() -> None:
    machine = Machine((EXAMPLE.gpus[0],), EXAMPLE.host, ())
    card = replace(machine.gpus[0], driver="580.1")
    here = replace(machine, gpus=(card,))
    before, named = (
        plan_of("2B-FP8", here),
        plan_of("2B-FP8", replace(here, gpus=(replace(card, driver=""),))),
    )
    assert before.speed is not None
    speed = KeptSpeed(before.speed.decode.expected * 1.1, 300, 0.1, 292, has_picture=True)
    verified.keep(kept(device=Device(card.name, "580.1"), speed=speed, weights=before.model.weights))
    after = plan_of("2B-FP8", here)
    assert after.speed is not None
    assert after.speed.measured
    assert plan_of("2B-FP8", replace(here, gpus=(replace(card, driver=""),))) == named
    other = plan_of("2B-FP8", replace(here, gpus=(replace(card, driver="581.0"),)))
    assert other.speed is not None
    assert not other.speed.measured
