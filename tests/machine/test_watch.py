"""NVML is opened once for many looks, and given back; a driver that fails may come back."""

from dataclasses import replace

import pytest

from tests.machine.nvml import DESKTOP, install
from vlfit.machine.survey import Watch
from vlfit.units import MIB


def test_many_looks_one_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, DESKTOP)
    with Watch() as watch:
        assert nvml.open == 1
        first, problems = watch.look()
        nvml.cards = (replace(DESKTOP, free=6000),)
        second, _ = watch.look()
        assert nvml.open == 1
    assert nvml.open == 0
    assert problems == ()
    assert [gpu.free for gpu in (*first, *second)] == [7200 * MIB, 6000 * MIB]


def test_a_driver_that_fails_is_told_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, DESKTOP, failure=9)
    with Watch() as watch:
        gpus, (problem,) = watch.look()
        assert gpus == ()
        assert "kernel module is not loaded" in problem.what
        nvml.failure = None
        assert len(watch.look()[0]) == 1
    assert nvml.open == 0


def test_closing_twice_is_closing_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, DESKTOP)
    watch = Watch()
    watch.close()
    watch.look()
    watch.close()
    watch.close()
    assert nvml.open == 0
