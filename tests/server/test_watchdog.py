"""An engine that ends no step while somebody waits is given up; one that is slow, idle or asleep is not."""

from dataclasses import replace

import pytest

from tests.server.scripted import ScriptedBackend
from vlfit.api.stats import Asleep, Counters, EngineAccount, EngineSettings, Holdings, Pool
from vlfit.errors import EngineLost
from vlfit.server.http.disconnect import Closing
from vlfit.server.http.watchdog import Watchdog

CUDA = EngineSettings("cuda", "GPU-1", "bfloat16", 2, 4096, 256, 4, 512, 8192)
BUSY = EngineAccount(
    1.0, CUDA, running=1, waiting=0, pool=Pool(9, 2, 16), holdings=Holdings({}, 0, 0, 0), counters=Counters(5)
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
        (replace(BUSY, asleep=Asleep("ram", 1, 1, 1.0)), False),
        (replace(BUSY, settings=replace(CUDA, device="cpu")), False),
    ],
)
def test_only_a_wait_without_any_step_is_a_loss(then: EngineAccount, hangs: bool) -> None:
    told: list[Exception] = []
    hours = Hours()
    watchdog = Watchdog(ScriptedBackend(), told.append, seconds=60.0, clock=hours)
    assert not watchdog.look(BUSY)
    hours.now = 59.0
    assert not watchdog.look(BUSY)
    hours.now = 61.0
    assert watchdog.look(then) is hangs
    assert bool(told) is hangs


def test_a_loss_ends_the_server(caplog: pytest.LogCaptureFixture) -> None:
    closing, hours, drained = Closing(1.0), Hours(), []
    closing.on_crash = lambda: drained.append(True)
    watchdog = Watchdog(ScriptedBackend(), closing.judge, seconds=60.0, clock=hours)
    watchdog.look(BUSY)
    hours.now = 90.0
    assert watchdog.look(BUSY)
    assert closing.crashed
    assert drained == [True]
    assert "the engine is lost: the engine has ended no step for 90 s" in caplog.text
    assert EngineLost("x").http_status == 503
