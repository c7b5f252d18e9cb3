"""Alarms are raised for the series they are meant for, and not for similar ones."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tests.wording import figures_in
from vlfit.plan.actual import StepTime
from vlfit.plan.alarms import (
    Limits,
    Rates,
    Sample,
    WorkCounters,
    active_alarms,
    detect_crowding,
    detect_leak,
    detect_spill,
    rates_between,
)
from vlfit.units import GIB, MIB

TOTAL = 8151 * MIB
IDLE = WorkCounters(False, 3, 900, 120, 117, 2.0, 40_000)
LIMITS = Limits(
    ours=6 * GIB, desktop=951 * MIB, reserve=128 * MIB, slowest=StepTime(0.020, 1e-6), spills=True
)


def ids(samples: Sequence[Sample], limits: Limits = LIMITS) -> list[str]:
    return [alarm.id for alarm in active_alarms(samples, limits)]


# --- spill -------------------------------------------------------------------------------------------------


def decoding(step_s: float, *, free: int = 100 * MIB, count: int = 5, steps: int = 10) -> list[Sample]:
    """One sample a second, with ``steps`` decode steps of ``step_s`` between them that read 1000 tokens."""
    return [
        Sample(
            at=float(look),
            run="a",
            total=TOTAL,
            free=free,
            desktop=951 * MIB,
            held=6 * GIB,
            work=WorkCounters(
                True, 0, 500, look * steps, look * steps, look * steps * step_s, look * steps * 1000
            ),
        )
        for look in range(count)
    ]


def test_spill_is_slow_steps_on_a_full_card() -> None:
    alarm = detect_spill(decoding(0.084), LIMITS)
    assert alarm is not None
    assert alarm.id == "spill"
    # ms, times the slowest expected, that in ms (20 and 1000 tokens of 1 us), and MiB free
    assert figures_in(alarm.what) == [84, 4, 21, 100]


@pytest.mark.parametrize(
    ("samples", "limits"),
    [
        pytest.param(decoding(0.021), LIMITS, id="as slow as planned"),
        pytest.param(decoding(0.041), LIMITS, id="not yet twice as slow"),
        pytest.param(decoding(0.084, free=GIB), LIMITS, id="room on the card: something else is slow"),
        pytest.param(decoding(0.084), replace(LIMITS, spills=False), id="this system refuses, never spills"),
        pytest.param(decoding(0.084), replace(LIMITS, slowest=None), id="no bandwidth known"),
        pytest.param(decoding(0.084, count=1), LIMITS, id="one look tells no time"),
        pytest.param(decoding(0.084, count=2), LIMITS, id="ten steps are no average"),
        pytest.param(decoding(0.084, steps=0), LIMITS, id="no steps"),
        pytest.param([], LIMITS, id="nothing seen"),
        pytest.param([Sample(0.0, total=TOTAL, free=0)] * 3, LIMITS, id="no server"),
    ],
)
def test_no_spill(samples: list[Sample], limits: Limits) -> None:
    assert detect_spill(samples, limits) is None


def test_spill_allows_longer_steps_for_long_contexts() -> None:
    """The bound grows with the cached tokens."""
    samples = [
        replace(sample, work=replace(sample.work, decode_cached=sample.work.decode_steps * 60_000))
        for sample in decoding(0.084)
        if sample.work
    ]
    assert detect_spill(samples, LIMITS) is None


def test_old_spill_is_over() -> None:
    samples = decoding(0.084)
    later = [replace(samples[-1], at=samples[-1].at + 3600 + more) for more in range(3)]
    assert detect_spill([*samples, *later], LIMITS) is None


# --- leak --------------------------------------------------------------------------------------------------


def idle(held: Callable[[float], float], seconds: int = 60, work: WorkCounters = IDLE) -> list[Sample]:
    """One sample a second of an idle server that holds ``held(second)`` MiB."""
    return [
        Sample(float(at), "a", TOTAL, GIB, 951 * MIB, round(held(at) * MIB), work)
        for at in range(seconds + 1)
    ]


@pytest.mark.parametrize(
    "held",
    [
        pytest.param(lambda at: 4000 + at, id="a MiB a second"),
        pytest.param(lambda at: 4000 + 10 * (at // 5), id="in steps"),
        pytest.param(lambda at: 4000 + 2 * at + 3 * math.sin(at), id="with noise"),
        pytest.param(lambda at: 4000 + 50 * min(at, 4) + at, id="after the end of a request has settled"),
    ],
)
def test_leak_is_growth_without_requests(held: Callable[[float], float]) -> None:
    alarm = detect_leak(idle(held))
    assert alarm is not None
    assert alarm.id == "leak"
    grown, seconds = figures_in(alarm.what)
    assert grown >= 32
    assert seconds <= 60


@pytest.mark.parametrize(
    "held",
    [
        pytest.param(lambda at: 4000, id="flat"),
        pytest.param(lambda at: 4000 + 5 * math.sin(at), id="noise"),
        pytest.param(lambda at: 4000 + (200 if at > 30 else 0), id="one jump"),
        pytest.param(lambda at: 4000 + min(at, 8) * 50, id="it settles after a request"),
        pytest.param(lambda at: 4000 + 100 * (1 - math.exp(-at / 5)), id="it settles slowly"),
        pytest.param(lambda at: 4000 - at, id="it shrinks"),
        pytest.param(lambda at: 4000 + 40 * (at % 20) / 20, id="saw teeth"),
        pytest.param(lambda at: 4000 + at / 4, id="too little to tell"),
    ],
)
def test_no_leak(held: Callable[[float], float]) -> None:
    assert detect_leak(idle(held)) is None


def test_growth_during_requests_is_no_leak() -> None:
    growing = idle(lambda at: 4000 + 2 * at)
    assert detect_leak(growing) is not None
    busy = idle(lambda at: 4000 + 2 * at, work=replace(IDLE, busy=True))
    assert detect_leak(busy) is None
    one_each_second = [
        replace(sample, work=replace(IDLE, requests=number)) for number, sample in enumerate(growing)
    ]
    assert detect_leak(one_each_second) is None
    assert detect_leak(growing[:20]) is None  # too short to tell
    assert detect_leak([replace(sample, work=None) for sample in growing]) is None  # no server
    assert detect_leak([]) is None


def test_samples_of_an_earlier_server_do_not_count() -> None:
    """Growth in two processes, each too short for an alarm."""
    growing = idle(lambda at: 4000 + 2 * at, seconds=40)
    assert ids(growing) == ["leak"]
    restarted = [replace(sample, run="b") if sample.at > 20 else sample for sample in growing]
    assert ids(restarted) == []


# --- the reserve -------------------------------------------------------------------------------------------


def beside(desktop: int, *, held: int = 6 * GIB, count: int = 3) -> list[Sample]:
    """Samples of a server that holds ``held`` beside ``desktop`` MiB of other programs."""
    free = TOTAL - desktop * MIB - held
    return [Sample(float(at), "a", TOTAL, free, desktop * MIB, held, IDLE) for at in range(count)]


def test_crowded_is_a_desktop_in_the_reserve() -> None:
    alarm = detect_crowding(beside(1950), LIMITS)  # 8151 - 6144 - 1950 leaves 57 of 128
    assert alarm is not None
    assert figures_in(alarm.what) == [
        1.9,
        999,
        128,
        57,
    ]  # held, more than at the start, reserve, what is left


def test_crowded_counts_the_servers_own_growth() -> None:
    """5 GiB are held and 6 planned: the GiB to come is not free for other programs."""
    assert detect_crowding(beside(1950, held=5 * GIB), LIMITS) is not None


def test_crowded_beyond_the_reserve() -> None:
    alarm = detect_crowding(beside(1990, held=6 * GIB - 100 * MIB), LIMITS)
    assert alarm is not None
    assert figures_in(alarm.what)[-1] == 17
    alarm = detect_crowding(beside(2050, held=6 * GIB - 100 * MIB), LIMITS)
    assert alarm is not None
    assert figures_in(alarm.what)[-1] == 43


@pytest.mark.parametrize(
    ("samples", "limits"),
    [
        pytest.param(beside(951), LIMITS, id="as planned"),
        pytest.param(beside(1850), LIMITS, id="more, but within the headroom"),
        pytest.param(beside(951, held=7100 * MIB), LIMITS, id="our own doing"),
        pytest.param([*beside(951), *beside(1990, count=2)], LIMITS, id="for a moment"),
        pytest.param(beside(1990), replace(LIMITS, reserve=None), id="no plan"),
        pytest.param([Sample(0.0, "a", held=GIB, work=IDLE)] * 3, LIMITS, id="on a CPU"),
        pytest.param([Sample(0.0, "", TOTAL, 0, TOTAL)] * 3, LIMITS, id="no server"),
        pytest.param([], LIMITS, id="nothing seen"),
    ],
)
def test_not_crowded(samples: list[Sample], limits: Limits) -> None:
    assert detect_crowding(samples, limits) is None


# --- together ----------------------------------------------------------------------------------------------


def test_one_sample_raises_only_crowded() -> None:
    assert ids(beside(1990, count=1)) == ["crowded"]


def test_several_alarms() -> None:
    samples = [replace(sample, desktop=1990 * MIB, free=17 * MIB) for sample in decoding(0.084)]
    assert ids(samples) == ["spill", "crowded"]


def test_rates() -> None:
    first, second = decoding(0.03, count=2)
    seen = rates_between(first, second)
    assert seen is not None
    assert (seen.tokens, seen.prompt_tokens, seen.cached) == (10.0, 0.0, 1000.0)
    assert seen.step_s == pytest.approx(0.03)
    assert rates_between(first, replace(second, run="b")) is None
    assert rates_between(first, first) is None
    assert rates_between(first, replace(second, work=None)) is None
    assert rates_between(second, replace(second, at=9.0)) == Rates(0.0, 0.0, None, 0.0)
