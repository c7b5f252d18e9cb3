"""The watchdog stops a server whose engine hangs, not one that is slow, idle or asleep."""

from dataclasses import replace

import pytest

from tests.server.scripted import ScriptedBackend
from vlfit.api.stats import Counters, EngineAccount, EngineSettings, KVPool, MemoryUsage, SleepState
from vlfit.errors import EngineLost
from vlfit.server.http.disconnect import Shutdown
from vlfit.server.http.watchdog import Watchdog

CUDA = EngineSettings("cuda", "GPU-1", "bfloat16", 2, 4096, 256, 4, 512, 8192)
BUSY = EngineAccount(
    1.0,
    CUDA,
    running=1,
    waiting=0,
    pool=KVPool(9, 2, 16),
    memory=MemoryUsage({}, 0, 0, 0),
    counters=Counters(5),
)


class Hours:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("then", "hangs"),
    [
        (BUSY, True),
        (replace(BUSY, running=0, waiting=1), False),
        (replace(BUSY, counters=Counters(6)), False),
        (replace(BUSY, running=0), False),
        (replace(BUSY, asleep=SleepState("ram", 1, 1, 1.0)), False),
        (replace(BUSY, settings=replace(CUDA, device="cpu")), False),
    ],
)
def test_only_a_hang_is_reported(then: EngineAccount, hangs: bool) -> None:
    told: list[Exception] = []
    hours = Hours()
    watchdog = Watchdog(ScriptedBackend(), told.append, hang_seconds=60.0, clock=hours)
    assert not watchdog.check(BUSY)
    hours.now = 59.0
    assert not watchdog.check(BUSY)
    hours.now = 61.0
    assert watchdog.check(then) is hangs
    assert bool(told) is hangs


def test_a_hang_stops_the_server(caplog: pytest.LogCaptureFixture) -> None:
    shutdown, hours, drained = Shutdown(1.0), Hours(), []
    shutdown.on_crash = lambda: drained.append(True)
    watchdog = Watchdog(ScriptedBackend(), shutdown.stop_if_fatal, hang_seconds=60.0, clock=hours)
    watchdog.check(BUSY)
    hours.now = 90.0
    assert watchdog.check(BUSY)
    assert shutdown.crashed
    assert drained == [True]
    assert "90 s" in caplog.text
    assert EngineLost("x").http_status == 503
