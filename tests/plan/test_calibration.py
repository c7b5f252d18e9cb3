"""Numbers measured on this machine: saved, loaded, used by the plan, and refused if broken."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.wording import figures_in
from vlfit.errors import UsageError
from vlfit.machine.cards import machine_with_card
from vlfit.machine.model import Gpu
from vlfit.plan import calibration
from vlfit.plan import calibration as measured
from vlfit.plan.backends import NATIVE, TRANSFORMERS
from vlfit.plan.calibration import (
    CONTEXT_ELSEWHERE,
    MEASURED,
    Calibration,
    calibration_path,
    constants_for,
    load,
    save,
    with_bandwidth,
)
from vlfit.plan.cost_model import CostModel
from vlfit.plan.ledger import PlanSettings
from vlfit.plan.model_lookup import find_exact_models
from vlfit.units import MIB

TABLE_CARD = machine_with_card("RTX 5060").gpus[0]
GPU = replace(TABLE_CARD, driver="596.49", cuda="13.2")
NUMBERS = Calibration(
    gpu=GPU.name,
    driver=GPU.driver,
    torch="2.13.0",
    date="2026-11-21",
    context=420 * MIB,
    workspace=8 * MIB,
    vision_slack=1.5,
    text_slack=1.1,
    copy_bandwidth=0.8 * 448e9,
    launch=300e-6,
    multiplications=100e12,
)


@pytest.fixture(autouse=True)
def _a_home_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(measured, "torch_version", lambda: "2.13.0")


def lines(gpu: Gpu, image_tokens: int = 1024, costs: CostModel = NATIVE) -> dict[str, Any]:
    model = find_exact_models("4B", "fp8" if costs is NATIVE else "bf16")[0]
    settings = PlanSettings(model.weights, 4096, image_tokens, 2, 256)
    return {line.line: line for line in costs.lines(model, gpu, settings)}


def test_saved_numbers_are_loaded() -> None:
    assert load(GPU.name, GPU.driver, "2.13.0") is None
    path = save(NUMBERS)
    assert load(GPU.name, GPU.driver, "2.13.0") == NUMBERS
    assert json.loads(path.read_text())["version"] == 1
    assert list(path.parent.iterdir()) == [path]  # nothing is left beside it


@pytest.mark.parametrize(
    "other", [{"gpu": "NVIDIA GeForce RTX 5060 Ti"}, {"driver": "600"}, {"torch": "2.14"}]
)
def test_numbers_are_for_one_gpu_driver_and_torch(other: dict[str, str]) -> None:
    save(NUMBERS)
    asked = {"gpu": GPU.name, "driver": GPU.driver, "torch": "2.13.0", **other}
    assert load(**asked) is None


def test_file_names_stay_inside_the_folder() -> None:
    path = calibration_path("../../etc/passwd", "/", "")
    assert path.parent.name == "calibration"
    assert path.name == "etc-passwd-none-none.json"


def test_cache_folder_follows_the_standard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert calibration_path("a", "b", "c") == tmp_path / "cache" / "vlfit" / "calibration" / "a-b-c.json"
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert calibration_path("a", "b", "c") == tmp_path / ".cache" / "vlfit" / "calibration" / "a-b-c.json"


def test_unwritable_folder_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UsageError) as caught:
        save(NUMBERS)
    assert "XDG_CACHE_HOME" in caught.value.hint
    assert load(GPU.name, GPU.driver, "2.13.0") is None


def test_measured_numbers_change_the_ledger() -> None:
    before = lines(GPU)
    save(NUMBERS)
    after = lines(GPU)
    assert before["context"].how == "modelled"
    assert after["context"].how == MEASURED
    assert after["context"].bytes == 420 * MIB
    assert "2026-11-21" in after["context"].note
    assert 8 in figures_in(after["text_workspace"].note)
    # What was measured is the native engine's.
    assert lines(GPU, costs=TRANSFORMERS)["context"].how == "modelled"
    large = lines(GPU, 16384)["vision_workspace"].bytes, lines(TABLE_CARD, 16384)["vision_workspace"].bytes
    assert large[0] > 1.15 * large[1]  # 1.5 over 1.29


def test_measured_slack_never_lowers_the_tables() -> None:
    save(NUMBERS)
    constants = constants_for(GPU)
    assert constants.text_slack == calibration.TEXT_SLACK  # 1.1 was measured
    assert constants.vision_slack.value == 1.5


def test_named_cards_use_the_table() -> None:
    save(replace(NUMBERS, driver=""))
    assert lines(TABLE_CARD)["context"].bytes == lines(replace(GPU, driver="1"))["context"].bytes


def test_new_measurements_count_at_once() -> None:
    save(NUMBERS)
    assert constants_for(GPU).context.bytes == 420 * MIB
    path = save(replace(NUMBERS, context=430 * MIB))
    assert path.stat().st_size
    assert constants_for(GPU).context.bytes == 430 * MIB
    path.unlink()
    assert constants_for(GPU).context.how == "modelled"


def test_measured_numbers_change_the_speed() -> None:
    model = find_exact_models("4B", "bf16")[0]
    settings = PlanSettings("bf16", 4096, 1024, 1, 1024)
    table = NATIVE.speed(model, GPU, settings)
    by_transformers = TRANSFORMERS.speed(model, GPU, settings)
    small = find_exact_models("2B", "fp8")[0]  # which is read sooner than launched
    without_graphs = PlanSettings("fp8", 4096, 1024, 1, 1024, offloaded_layers=3)  # launched one by one
    launched = NATIVE.speed(small, GPU, without_graphs)
    save(NUMBERS)
    here = NATIVE.speed(model, GPU, settings)
    launched_here = NATIVE.speed(small, GPU, without_graphs)
    assert table
    assert here
    # 8 GB at 448 GB/s: bound by bandwidth, of which a copy reached less than the table supposes.
    assert here.decode.expected < table.decode.expected
    assert launched
    assert launched_here
    assert launched_here.decode.expected > launched.decode.expected  # launching is faster here
    assert here.first_token != table.first_token
    # What was launched was the native engine.
    again = TRANSFORMERS.speed(model, GPU, settings)
    assert again
    assert by_transformers
    assert again.decode.low == by_transformers.decode.low


def test_slow_copies_bound_all_efficiencies() -> None:
    save(replace(NUMBERS, copy_bandwidth=0.3 * 448e9))
    constants = constants_for(GPU)
    shares = (constants.efficiency_low, constants.efficiency, constants.efficiency_high)
    assert [share.value for share in shares] == pytest.approx([0.3] * 3)


def test_unknown_bandwidth_is_that_of_a_copy() -> None:
    untold = replace(GPU, bandwidth=None, bandwidth_how="unknown")
    assert with_bandwidth(untold) is untold
    save(NUMBERS)
    found = with_bandwidth(untold)
    assert (found.bandwidth, found.bandwidth_how) == (round(0.8 * 448e9), "measured")
    assert constants_for(found).efficiency_high.value == pytest.approx(1)
    assert with_bandwidth(GPU) is GPU


def changed(**fields: Any) -> Callable[[], str]:
    return lambda: json.dumps({"version": 1, **asdict(NUMBERS), **fields})


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (lambda: "{", "JSON"),
        (lambda: "[" * 100_000, "JSON"),
        (lambda: "[]", "JSON"),
        (lambda: "\0" * 2**21, "JSON"),
        (changed(version=2), "version"),
        (changed(gpu="NVIDIA H200"), "'NVIDIA H200'"),
        (changed(date=None), "date"),
        (changed(context=-1), "-1"),
        (changed(context="420 MiB"), "'420 MiB'"),
        (changed(context=True), "True"),
        (changed(text_slack=float("nan")), "nan"),
        (changed(launch=0), "launch"),
        (changed(copy_bandwidth=1e300), "1e+300"),
        (
            lambda: json.dumps({"version": 1, "gpu": GPU.name, "driver": GPU.driver, "torch": "2.13.0"}),
            "date",
        ),
    ],
)
def test_broken_files_are_not_used(contents: Callable[[], str], words: str) -> None:
    path = save(NUMBERS)
    path.write_text(contents())
    with pytest.raises(UsageError) as caught:
        load(GPU.name, GPU.driver, "2.13.0")
    assert words in caught.value.message
    assert "vlfit plan --calibrate" in caught.value.hint
    constants = constants_for(GPU)
    assert words in constants.broken
    assert constants.context == constants_for(TABLE_CARD).context
    note = lines(GPU)["context"].note
    assert words in note
    assert CONTEXT_ELSEWHERE.source in note


def test_unreadable_files_are_not_used() -> None:
    path = save(NUMBERS)
    path.unlink()
    path.mkdir()
    assert str(path) in constants_for(GPU).broken


def test_files_without_link_bandwidth_are_read() -> None:
    assert NUMBERS.link_bandwidth is None
    path = save(NUMBERS)
    facts = json.loads(path.read_text("utf-8"))
    del facts["link_bandwidth"]
    path.write_text(json.dumps(facts), "utf-8")
    assert constants_for(GPU).context.bytes == 420 * MIB
    assert constants_for(GPU).link_bandwidth is None
    save(replace(NUMBERS, link_bandwidth=12e9))
    link = constants_for(GPU).link_bandwidth
    assert link is not None
    assert (link.value, link.how) == (12e9, "measured")
    save(replace(NUMBERS, link_bandwidth=12.0))
    assert "link_bandwidth" in constants_for(GPU).broken
