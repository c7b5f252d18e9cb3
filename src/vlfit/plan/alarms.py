"""Alarms for what goes wrong slowly while a model runs: memory spilling, leaking, or taken by other programs.

Each alarm is a pure function of samples and limits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from vlfit.plan.actual import StepTime
from vlfit.units import MIB, format_bytes, format_seconds

# A decode step that takes this many times the slowest predicted. People report spilled models as 2 to 10
# times slower (github.com/syv-ai/qwen38-27b-rtx3090/pull/83).
SPILL_FACTOR = 2.0
SPILL_STEPS = 16  # to average over, at least
RECENT = 60.0  # seconds; older samples are not used
# Memory may be spilling if less than this share of the card is free: a choice, not measured.
FULL_SHARE = 0.06

LEAK_SECONDS = 30.0  # of idling, at least
LEAK_SETTLE = 5.0  # seconds after the last request in which memory may still move
LEAK_BYTES = 32 * MIB  # less may be normal fluctuation
LEAK_PARTS = 4  # the growth must go on in every quarter of the time: one jump is no leak

CROWDED_SAMPLES = 3  # in a row, so that a video that starts and stops raises no alarm


@dataclass(frozen=True, slots=True)
class WorkCounters:
    """A server's counters at one moment, all but ``busy`` totals since its start.

    ``busy``: a request runs or waits. ``requests``: ended ones (finished, failed or cancelled).
    ``tokens``: generated. ``decode_cached``: cached tokens that the decode steps read, summed over the steps.
    """

    busy: bool
    requests: int
    prompt_tokens: int
    tokens: int
    decode_steps: int
    decode_seconds: float
    decode_cached: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory and counters at one moment; memory in bytes, None: not known.

    - ``at``: seconds on a clock that all samples of one ``run`` share.
    - ``run``: identifies the server process, so that a restart is noticed; "" without a server.
    - ``total``, ``free``: of the card. ``desktop``: what other programs hold of the card.
    - ``held``: what the server process holds of the card, or of RAM if it runs on a CPU.
    - ``work``: the server's counters; None without a server, or if it reports none.
    """

    at: float
    run: str = ""
    total: int | None = None
    free: int | None = None
    desktop: int | None = None
    held: int | None = None
    work: WorkCounters | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """The plan's numbers that samples are checked against; without those it needs, an alarm is never raised.

    - ``ours``: planned bytes of all lines of the server itself. ``desktop``, ``reserve``: of those lines.
    - ``slowest``: the longest decode step that the plan expects.
    - ``spills``: the system moves GPU memory into RAM instead of refusing an allocation (WSL2, Windows).
    """

    ours: int | None = None
    desktop: int | None = None
    reserve: int | None = None
    slowest: StepTime | None = None
    spills: bool = False


@dataclass(frozen=True, slots=True)
class Alarm:
    """A warning: ``id`` (spill, leak or crowded), ``what`` happened, and a ``hint`` what to do about it."""

    id: str
    what: str
    hint: str


@dataclass(frozen=True, slots=True)
class Rates:
    """What a server did between two samples.

    - ``tokens``, ``prompt_tokens``: generated and prompt tokens per second.
    - ``step_s``: mean seconds of a decode step; None if there was no step.
    - ``cached``: mean number of cached tokens that a decode step read; 0.0 if there was no step.
    """

    tokens: float
    prompt_tokens: float
    step_s: float | None
    cached: float


def active_alarms(samples: Sequence[Sample], limits: Limits) -> tuple[Alarm, ...]:
    """Alarms at the last of ``samples`` (oldest first). Samples of earlier server processes are ignored."""
    series = latest_run(samples)
    raised = (detect_spill(series, limits), detect_leak(series), detect_crowding(series, limits))
    return tuple(alarm for alarm in raised if alarm is not None)


def latest_run(samples: Sequence[Sample]) -> Sequence[Sample]:
    """The samples since the server's last start: those at the end with the same ``run`` as the last."""
    start = len(samples)
    while start and samples[start - 1].run == samples[-1].run:
        start -= 1
    return samples[start:]


def rates_between(earlier: Sample, later: Sample) -> Rates | None:
    """Rates between two samples; None if one has no counters, the server restarted, or no time passed."""
    before, after, seconds = earlier.work, later.work, later.at - earlier.at
    if before is None or after is None or earlier.run != later.run or seconds <= 0:
        return None
    steps = after.decode_steps - before.decode_steps
    return Rates(
        tokens=(after.tokens - before.tokens) / seconds,
        prompt_tokens=(after.prompt_tokens - before.prompt_tokens) / seconds,
        step_s=(after.decode_seconds - before.decode_seconds) / steps if steps else None,
        cached=(after.decode_cached - before.decode_cached) / steps if steps else 0.0,
    )


def detect_spill(samples: Sequence[Sample], limits: Limits) -> Alarm | None:
    """The alarm ``spill``, if GPU memory seems to be swapped to RAM; else None, also if data is missing.

    Raised if ``limits.spills``, at most 6 % of the card is free, and the latest decode steps (16 or more, of
    the last 60 s) took on average twice ``limits.slowest`` or longer. ``samples``: of one server process,
    oldest first.
    """
    now = samples[-1] if samples else None
    if now is None or now.work is None or limits.slowest is None or not limits.spills:
        return None
    if now.free is None or now.total is None or now.free > FULL_SHARE * now.total:
        return None
    begin = _steps_ago(samples, now.work.decode_steps - SPILL_STEPS, now.at - RECENT)
    recent = rates_between(begin, now) if begin else None
    if recent is None or recent.step_s is None:
        return None
    slowest = limits.slowest.step(recent.cached)
    if recent.step_s < SPILL_FACTOR * slowest:
        return None
    return Alarm(
        "spill",
        f"a decode step takes {format_seconds(recent.step_s)}, {recent.step_s / slowest:.1f} times the "
        f"slowest that the card's bandwidth explains ({format_seconds(slowest)}), with "
        f"{format_bytes(now.free)} of the card free: memory has spilled into RAM",
        "Close programs that hold GPU memory, or start with a smaller --context, --image-tokens or"
        " --sequences.",
    )


def _steps_ago(samples: Sequence[Sample], steps: int, since: float) -> Sample | None:
    """The latest sample not after decode step ``steps``, if it is not older than ``since``."""
    for sample in reversed(samples):
        if sample.at < since:
            return None
        if sample.work is not None and sample.work.decode_steps <= steps:
            return sample
    return None


def detect_leak(samples: Sequence[Sample]) -> Alarm | None:
    """The alarm ``leak``, if the server's memory keeps growing while it is idle; else None.

    Raised if ``held`` grew by 32 MiB or more since the last request, over at least 30 s, and in every quarter
    of that time. ``samples``: of one server process, oldest first.
    """
    idle = _idle_samples(samples)
    if len(idle) <= LEAK_PARTS or idle[-1].at - idle[0].at < LEAK_SECONDS:
        return None
    seconds = idle[-1].at - idle[0].at
    marks = [_held_at(idle, idle[0].at + seconds * part / LEAK_PARTS) for part in range(LEAK_PARTS + 1)]
    growth = marks[-1] - marks[0]
    # If any part of the time has less than half of an even growth, it has ended, or was one jump.
    if growth < LEAK_BYTES or any(
        later - earlier < growth / (2 * LEAK_PARTS) for earlier, later in pairwise(marks)
    ):
        return None
    return Alarm(
        "leak",
        f"the server holds {format_bytes(growth)} more than {format_seconds(seconds)} ago, and no request "
        "came",
        "This is a fault of the server: restart it, and report it with what `vlfit top --once --json` "
        "prints.",
    )


def _idle_samples(samples: Sequence[Sample]) -> list[Sample]:
    """The latest samples in which nothing ran, without those in which memory may still settle."""
    idle: list[Sample] = []
    for sample in reversed(samples):
        last = samples[-1].work
        work = sample.work
        if work is None or last is None or sample.held is None or work.busy:
            break
        if replace(work, busy=False) != replace(last, busy=False):
            break
        idle.append(sample)
    idle.reverse()
    return [sample for sample in idle if sample.at >= idle[0].at + LEAK_SETTLE]


def _held_at(samples: Sequence[Sample], at: float) -> int:
    """Bytes held at the last sample not after ``at``."""
    held = samples[0].held or 0
    for sample in samples:
        if sample.at > at + 1e-6:
            break
        held = sample.held or 0
    return held


def detect_crowding(samples: Sequence[Sample], limits: Limits) -> Alarm | None:
    """The alarm ``crowded``, if other programs hold part of the reserve in each of the last three samples.

    That is: they hold more than planned (``limits.desktop``), and free memory no longer covers the reserve
    plus what the server has not taken yet of ``limits.ours``. None otherwise, also if a number is not known.
    With fewer than three samples, those count.
    """
    recent = samples[-CROWDED_SAMPLES:]
    shortages = [_shortage(sample, limits) for sample in recent]
    if not recent or any(shortage is None or shortage <= 0 for shortage in shortages):
        return None
    now, planned, shortage = recent[-1].desktop or 0, limits.desktop or 0, shortages[-1] or 0
    left = (limits.reserve or 0) - shortage
    state = f"{format_bytes(left)} of it are left" if left > 0 else f"and {format_bytes(-left)} more"
    return Alarm(
        "crowded",
        f"other programs hold {format_bytes(now)} of the card, {format_bytes(now - planned)} more than when "
        f"the server started: they eat into the reserve of {format_bytes(limits.reserve or 0)} ({state})",
        "Close what was opened since (`vlfit machine` says who holds how much), or start the server with"
        " less.",
    )


def _shortage(sample: Sample, limits: Limits) -> int | None:
    """Bytes of the reserve that other programs have taken; None where that is not known."""
    if None in (sample.free, sample.desktop, sample.held, limits.ours, limits.desktop, limits.reserve):
        return None
    free, desktop, held = sample.free or 0, sample.desktop or 0, sample.held or 0
    to_come = max((limits.ours or 0) - held, 0)
    shortage = (limits.reserve or 0) - (free - to_come)
    return min(shortage, desktop - (limits.desktop or 0))
