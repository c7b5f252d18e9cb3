"""Measuring a GPU: parts run on a CPU; the whole runs on a GPU."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.machine.nvml import FakeCard, Process, install
from vlfit.checkpoint import catalog
from vlfit.checkpoint.config import ModelConfig
from vlfit.errors import DeviceError
from vlfit.machine.cards import machine_with_card
from vlfit.machine.gpu import read_gpus
from vlfit.models.qwen3_vl.vision import VisionTower
from vlfit.plan.allocator import PARTIAL_SEGMENTS
from vlfit.plan.calibration import load, save
from vlfit.tuning import calibration_run as calibrate
from vlfit.tuning.calibration_run import MeasuringEngineSettings
from vlfit.units import GIB, MIB

CPU = torch.device("cpu")
GPU = replace(machine_with_card("RTX 5060").gpus[0], uuid="GPU-aaaa", driver="596.49")


def small_config() -> ModelConfig:
    """2B at shapes small enough for a CPU."""
    entry = catalog.family_entries("2B")[0]
    assert isinstance(entry.config, ModelConfig)
    text = replace(
        entry.config.text, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2
    )
    text = replace(text, head_dim=16, vocab_size=4096, mrope_section=(4, 2, 2))
    vision = replace(
        entry.config.required_vision, hidden_size=64, intermediate_size=96, num_heads=2, out_hidden_size=64
    )
    return replace(entry.config, text=text, vision=vision)


def test_calibration_engine_runs_images_and_full_contexts() -> None:
    sizes = MeasuringEngineSettings(image_tokens=64, max_model_len=256, max_num_batched_tokens=64)
    engine = calibrate.four_layer_engine(CPU, sizes, small_config())
    assert isinstance(engine.runner.vision, VisionTower)
    assert len(engine.runner.text.layers) == len(engine.runner.vision.blocks) == 4
    calibrate.encode_synthetic_image(engine, 64)
    assert engine.counters.steps == 0
    calibrate.prefill_and_decode(engine)
    assert engine.counters.failed == 0
    assert engine.counters.finished == 4
    assert engine.counters.prompt_tokens > 2 * 256


def test_layer_launch_seconds() -> None:
    assert 0 < calibrate.measure_layer_launch_seconds(CPU) < 10


def test_allocator_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"memory_allocated": 100, "memory_reserved": 120, "max_memory_allocated": 300}
    numbers["max_memory_reserved"] = 420 + PARTIAL_SEGMENTS
    for name, value in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda _: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    ran: list[bool] = []
    assert calibrate.measure_allocator_slack(lambda: ran.append(True), CPU) == 1.5
    assert ran == [True]
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 130 + PARTIAL_SEGMENTS)
    assert calibrate.measure_allocator_slack(lambda: None, CPU) == 1


@pytest.mark.parametrize(("told", "others", "held"), [(True, 9, 409), (True, 500, 432), (False, 50, 450)])
def test_bytes_outside_torch(monkeypatch: pytest.MonkeyPatch, told: bool, others: int, held: int) -> None:
    """Memory that the driver does not report counts; memory that another program took counts not, if
    processes are reported.
    """
    import os

    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 1000 * MIB)
    install(monkeypatch, FakeCard(free=7000))
    [before] = read_gpus()[0]
    ours = (Process(os.getpid(), "python", 1400 if told else None),)
    install(monkeypatch, FakeCard(free=7000 - 1400 - others, compute=ours))
    assert calibrate.measure_bytes_outside_torch(before, CPU) == held * MIB
    install(monkeypatch)
    with pytest.raises(DeviceError, match=before.name):
        calibrate.measure_bytes_outside_torch(before, CPU)


def fake_devices(monkeypatch: pytest.MonkeyPatch, *uuids: str) -> None:
    """As in torch, reading device properties initializes CUDA."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)

    def properties(device: torch.device) -> SimpleNamespace:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        return SimpleNamespace(uuid=uuids[device.index])

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


def test_torch_device_is_matched_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_devices(monkeypatch, "bbbb", "aaaa")
    assert calibrate.torch_device(GPU).index == 1
    fake_devices(monkeypatch, "unknown")
    assert calibrate.torch_device(GPU).index == 0
    for uuids in ((), ("bbbb", "cccc")):
        fake_devices(monkeypatch, *uuids)
        with pytest.raises(DeviceError, match=rf"\b{len(uuids)} CUDA"):
            calibrate.torch_device(GPU)


def test_full_or_used_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_devices(monkeypatch, "aaaa")
    with pytest.raises(DeviceError, match=r"3\.00 GiB.* 1\.00 GiB"):
        calibrate.calibrate(replace(GPU, free=GIB), print)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(DeviceError) as caught:
        calibrate.calibrate(GPU, print)
    assert "--calibrate" in caught.value.hint


def test_fresh_process_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_devices(monkeypatch, "bbbb", "aaaa")
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(calibrate, "measure_gpu", lambda *_: "measured")
    assert calibrate.calibrate(GPU, print) == "measured"  # type: ignore[comparison-overlap]
    assert [device.index for device in chosen] == [1]


def test_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_devices(monkeypatch, "aaaa")

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(calibrate, "measure_gpu", full)
    with pytest.raises(DeviceError, match=r"2 GiB"):
        calibrate.calibrate(GPU, print)


# In a process of its own: other tests have used the GPU in this one.
ON_A_GPU = """
import json, sys
from dataclasses import asdict
from vlfit.tuning.calibration_run import calibrate
from vlfit.machine.survey import survey
from vlfit.plan.gpus import emptiest_gpu
print(json.dumps(asdict(calibrate(emptiest_gpu(survey()), lambda what: print(what, file=sys.stderr)))))
"""


@pytest.mark.gpu
def test_a_real_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import json
    import subprocess
    import sys

    from vlfit.plan.calibration import Calibration

    done = subprocess.run(
        [sys.executable, "-c", ON_A_GPU], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    found = Calibration(**json.loads(done.stdout))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save(found)
    assert load(found.gpu, found.driver, found.torch) == found  # within the bounds of what is plausible
    assert 200 * MIB < found.context < 2 * GIB
    assert 1 <= found.vision_slack < 2
    assert 1 <= found.text_slack < 2
    assert found.driver
