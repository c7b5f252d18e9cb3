"""A GPU monitor opens NVML once, closes it, and recovers with a driver that failed."""

from dataclasses import replace

import pytest

from tests.machine.nvml import DESKTOP, install
from vlfit.machine.survey import GpuMonitor
from vlfit.units import MIB


def test_nvml_is_opened_once_for_many_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, DESKTOP)
    with GpuMonitor() as monitor:
        assert nvml.open == 1
        first, problems = monitor.read()
        nvml.cards = (replace(DESKTOP, free=6000),)
        second, _ = monitor.read()
        assert nvml.open == 1
    assert nvml.open == 0
    assert problems == ()
    assert [gpu.free for gpu in (*first, *second)] == [7200 * MIB, 6000 * MIB]


def test_a_driver_that_fails_and_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, DESKTOP, failure=9)
    with GpuMonitor() as monitor:
        gpus, (problem,) = monitor.read()
        assert gpus == ()
        assert problem.fix  # the id depends on the computer that runs this
        nvml.failure = None
        assert len(monitor.read()[0]) == 1
    assert nvml.open == 0


def test_closing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, DESKTOP)
    monitor = GpuMonitor()
    monitor.close()
    monitor.read()
    monitor.close()
    monitor.close()
    assert nvml.open == 0
