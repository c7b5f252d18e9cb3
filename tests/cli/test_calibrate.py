"""``vlfit plan --calibrate``: measured first, then planned with; and a broken file is said."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.conftest import Vlfit
from tests.machine import nvml
from tests.plan.test_calibration import NUMBERS
from tests.wording import figures_in
from vlfit.machine.model import Gpu
from vlfit.plan import calibration as measured
from vlfit.plan.calibration import Calibration, calibration_path
from vlfit.plan.native import tiles as tuned
from vlfit.plan.native.tiles import BUILT_IN, CardKind, save_tiles
from vlfit.units import MIB

CARD = nvml.FakeCard()
FILE = ("NVIDIA GeForce RTX 5060", "596.49", "2.13.0")


@pytest.fixture(autouse=True)
def _a_home_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measured, "torch_version", lambda: FILE[2])


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is there, and measuring it gives NUMBERS; this process then holds 1 GiB more of it."""
    nvml.install(monkeypatch, CARD)

    def calibrate(gpu: Gpu, say: object) -> Calibration:
        assert callable(say)
        say("memory")
        nvml.install(monkeypatch, replace(CARD, free=CARD.free - 1024))
        return replace(NUMBERS, gpu=gpu.name, driver=gpu.driver)

    def tune_gpu(gpu: Gpu, say: object) -> Path:
        assert callable(say)
        say("tiles")
        return save_tiles(CardKind(gpu.name, gpu.compute_capability), BUILT_IN)

    monkeypatch.setattr("vlfit.tuning.calibration_run.calibrate", calibrate)
    monkeypatch.setattr("vlfit.tuning.tune.tune_gpu", tune_gpu)


@pytest.mark.usefixtures("measuring")
def test_the_plan_that_follows_counts_with_what_was_measured(vlfit: Vlfit) -> None:
    before = vlfit("plan", "2B", "-w", "fp8")
    ended = vlfit("plan", "2B", "-w", "fp8", "--calibrate")
    assert "RTX 5060" in ended.err.splitlines()[0]
    assert {420, 8} <= set(figures_in(ended.err))
    assert str(calibration_path(*FILE)) in ended.err
    assert calibration_path(*FILE).is_file()
    assert str(tuned.tiles_path(CardKind(str(CARD.name), (12, 0)))) in ended.err
    assert "2026-11-21" not in before.out
    assert "2026-11-21" in ended.out
    assert re.search(r"desktop +951 ", ended.out)  # and not what measuring itself took
    assert ended.code == 0


@pytest.mark.usefixtures("measuring")
def test_without_a_model_everything_is_planned(vlfit: Vlfit) -> None:
    ended = vlfit("plan", "--calibrate")
    assert ended.code == 0
    assert "Qwen3-VL-4B-Instruct" in ended.out


@pytest.mark.parametrize("where", [("--gpu", "RTX 5060"), ("--machine", "FILE")])
def test_another_machine_cannot_be_measured_here(
    vlfit: Vlfit, tmp_path: Path, where: tuple[str, str]
) -> None:
    file = tmp_path / "machine.json"
    vlfit("machine", "--gpu", "RTX 4090", "--save", file)
    option, value = where
    ended = vlfit("plan", "4B", "--calibrate", option, file if value == "FILE" else value)
    assert ended.code == 2
    assert "--calibrate" in ended.err
    assert ended.out == ""


def test_without_a_gpu_the_processor_is_measured_again(
    vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvml.install(monkeypatch, failure=nvml.LIBRARY_NOT_FOUND)
    kept = tmp_path / "kept.json"
    monkeypatch.setattr("vlfit.plan.processors.speeds_path", lambda _: kept)
    assert vlfit("plan", "--calibrate").code == 0
    kept.write_text(kept.read_text("utf-8").replace("2026-11-23", "2001-01-01"), "utf-8")
    assert vlfit("plan").code == 0
    assert "2001-01-01" in kept.read_text("utf-8")
    assert vlfit("plan", "--calibrate").code == 0
    assert "2001-01-01" not in kept.read_text("utf-8")
    refused = vlfit("plan", "--calibrate", "--backend", "transformers")
    assert (refused.code, refused.out) == (1, "")
    assert "Traceback" not in refused.err


def test_without_torch_nothing_can_be_measured(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.install(monkeypatch, CARD)
    monkeypatch.delitem(sys.modules, "vlfit.tuning.calibration_run", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    ended = vlfit("plan", "--calibrate")
    assert ended.code == 1
    assert "torch" in ended.err
    assert "vlfit doctor" in ended.err


def test_a_torch_that_sees_no_gpu_is_said(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real thing, as far as it gets with NVML's card and torch's none."""
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    nvml.install(monkeypatch, CARD)
    ended = vlfit("plan", "--calibrate")
    assert ended.code == 1
    assert " 0 " in ended.err
    assert "CUDA_VISIBLE_DEVICES" in ended.err
    assert not calibration_path(*FILE).exists()


def test_a_broken_file_is_a_warning_and_the_table_is_used(
    vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.install(monkeypatch, CARD)
    sound = vlfit("plan", "4B", "-w", "fp8", "--json")
    assert sound.err == ""
    path = measured.save(NUMBERS)
    path.write_text(path.read_text().replace(f'"context": {420 * MIB}', '"context": "much"'))
    broken = vlfit("plan", "4B", "-w", "fp8", "--json")
    assert broken.code == sound.code
    assert broken.err.startswith("warning: ")
    assert "'much'" in broken.err
    assert "vlfit plan --calibrate" in broken.err
    assert len(broken.err.splitlines()) == 1
