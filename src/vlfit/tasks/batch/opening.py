"""A backend opened for a batch: with room for as many requests as fit, and how many to keep it busy with.

Knows what each kind of backend can run at once. Does not know what is asked.
"""

from collections.abc import Callable
from dataclasses import replace

from vlfit.backends.base import LocalBackend, OpenBackend
from vlfit.backends.opening import Wanted, open_backend
from vlfit.errors import DoesNotFit, UsageError
from vlfit.machine.host import own_cores
from vlfit.plan.preference import SEQUENCES
from vlfit.tasks.batch.crew import Pace
from vlfit.tasks.batch.failures import TRIES

# Requests at a server that does not say how many it runs: as many as a plan asks for at most.
AT_A_SERVER = SEQUENCES[0]
_MOST_READERS = 8
# More is a slip: each reader is a thread of this process, each request one at a server, and a thousand tries
# with half a minute between them are eight hours.
_AT_MOST = {"concurrency": 1024, "readers": 64, "tries": 1000}

Progress = Callable[[str, float], None]


def open_for_batch(
    wanted: Wanted,
    at_once: int | None = None,
    progress: Progress | None = None,
    *,
    readers: int | None = None,
    tries: int = TRIES,
    alike: bool = False,
) -> tuple[OpenBackend, Pace]:
    """Open what is ``wanted`` so that ``at_once`` requests run together; None: as many as fit, of the numbers
    that plans try. ``readers``: threads that read ahead; None: one for each processor, 2 to 8. ``alike``: all
    begin with the same words, before the picture.

    Raises ``UsageError`` for numbers that make no sense, and what ``open_backend`` raises.
    """
    check_numbers(at_once, readers, tries)
    if wanted.kind == "native":
        backend = _open_native(_for_pictures_that_differ(wanted, alike=alike), at_once, progress)
    else:
        backend = open_backend(_with_room(wanted, at_once), progress)
    return backend, pace_for(backend, at_once, readers=readers, tries=tries)


def check_numbers(at_once: int | None, readers: int | None = None, tries: int | None = None) -> None:
    """Raises ``UsageError`` for one that makes no sense; None: nobody named it."""
    for name, value in (("concurrency", at_once), ("readers", readers), ("tries", tries)):
        if value is not None and not 1 <= value <= _AT_MOST[name]:
            raise UsageError(f"{name} is {value}", f"it must be at least 1, and at most {_AT_MOST[name]}")


def pace_for(
    backend: LocalBackend, at_once: int | None = None, *, readers: int | None = None, tries: int = TRIES
) -> Pace:
    """How to keep ``backend`` busy: with ``at_once`` requests, None: as many as it runs together."""
    readers = readers or min(_MOST_READERS, max(2, own_cores()))
    runs = getattr(backend, "sequences", None)
    if runs is None:
        return Pace(at_once or AT_A_SERVER, readers, tries)
    return Pace(_with_next(min(at_once or runs, runs)), readers, tries)


def _with_next(runs: int) -> int:
    """Those that run, and some that wait inside: where one ends, the next begins in the same step."""
    return runs + max(1, runs // 4)


def _with_room(wanted: Wanted, at_once: int | None) -> Wanted:
    """So that ``at_once`` requests are let in, where somebody asked for a number."""
    if at_once is not None and wanted.kind == "remote":
        return replace(wanted, at_once=at_once)
    if at_once is not None and wanted.kind == "vllm":
        from vlfit.backends.vllm.options import VllmOptions

        return replace(wanted, vllm=replace(wanted.vllm or VllmOptions(), sequences=at_once))
    return wanted


def _for_pictures_that_differ(wanted: Wanted, *, alike: bool) -> Wanted:
    """Nothing of one picture is kept for another: a crew asks about the same bytes once. What would be kept
    took 215 MiB of mini in 466 pictures, by hand.
    """
    options = replace(wanted.options, prefix_cache=wanted.options.prefix_cache and alike, image_cache_bytes=0)
    return replace(wanted, options=options)


def _open_native(wanted: Wanted, at_once: int | None, progress: Progress | None) -> OpenBackend:
    """With the most sequences that there is memory for. What does not fit is known before anything loads."""
    steps = (at_once,) if at_once else SEQUENCES
    for runs in steps:
        # A process that does nothing else for hours: it keeps to its plan, as a server does.
        options = replace(wanted.options, sequences=runs, keep_to_plan=True)
        try:
            return open_backend(replace(wanted, options=options), progress)
        except DoesNotFit:
            if runs == steps[-1]:
                raise
    raise AssertionError("steps are never empty")
