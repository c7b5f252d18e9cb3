"""The phases of a start, with a fake clock."""

import time
from pathlib import Path

import pytest

from vlfit.backends import startup as phases
from vlfit.backends.startup import StartupTimer, process_age_seconds


def test_seconds_of_each_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(phases, "process_age_seconds", lambda: 0.25)
    start = StartupTimer()
    assert not start.has_begun_loading
    for name, seconds in (("weights", 2.0), ("graphs", 0.5), ("weights", 1.0), ("weights", 1.0)):
        start.begin(name)
        now[0] += seconds
    start.end()
    now[0] += 7.0
    start.begin("too late")
    assert start.has_begun_loading
    assert start.seconds_by_phase == {"program": 0.25, "weights": 4.0, "graphs": 0.5}
    assert start.summary() == "4.8 s: program 0.25, weights 4.00, graphs 0.50"


def test_process_age_is_plausible(tmp_path: Path) -> None:
    before = process_age_seconds()
    time.sleep(0.02)
    if Path("/proc/self/stat").exists():
        assert 0.0 < before < process_age_seconds()
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "stat").write_text("1 (a (strange) name) S 1")
    assert process_age_seconds(tmp_path) == process_age_seconds(tmp_path / "nowhere") == 0.0
