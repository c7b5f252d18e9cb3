"""A batch on this machine: from a source through a crew into an output.

Knows what is done already, when the output is made safe, and how a run is stopped. Does not know how a
backend is kept busy (``crew.py``) or how a person is told (``progress.py``).
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Protocol

from vlfit.errors import VlfitError
from vlfit.tasks.batch.crew import Crew, Outcome, Run
from vlfit.tasks.batch.item import Item, Record, Source
from vlfit.tasks.batch.progress import Progress, Tally

FLUSH_SECONDS = 5.0  # what the end of the machine may cost: so much is asked about again
TICK_SECONDS = 0.5
STALL_SECONDS = 5.0  # in which nothing succeeds before a person is told why


class Place(Protocol):
    """What a run needs of an output."""

    def is_settled(self, key: str) -> bool: ...
    def write(self, item: Item, record: Record) -> None: ...
    def fail(self, item: Item, error: Exception, tries: int) -> None: ...
    def flush(self) -> None: ...


class Runner:
    """One run. ``limit``: of so many pictures at most. ``ordered``: records stand in the source's order."""

    def __init__(
        self,
        crew: Crew,
        source: Source,
        output: Place,
        *,
        progress: Progress | None = None,
        limit: int | None = None,
        ordered: bool = False,
    ) -> None:
        self._progress = progress or Progress()
        self.tally = self._progress.tally
        self._crew = crew
        self._source = source
        self._output = output
        self._limit = limit
        self._ordered = ordered
        self._run: Run | None = None
        self._flushed = self._ticked = 0.0
        self._stall_told = False

    def run(self) -> Tally:
        """To the end of the source, or until ``stop``. Raises what concerns all pictures, with what was
        finished by then in the output; an interrupt too.
        """
        tally = self.tally
        self._flushed = self._ticked = time.monotonic()
        tally.began = self._flushed
        run = self._run = self._crew.run(islice(self._fresh(), self._limit), ordered=self._ordered)
        try:
            while not run.over and not tally.stopped:
                outcome = run.next(TICK_SECONDS)
                if outcome is not None:
                    self._keep(outcome)
                self._look_around(run)
        except VlfitError:
            self._keep_the_rest(run)
            raise
        else:
            self._keep_the_rest(run)
        finally:
            run.close()
            with suppress(VlfitError):  # whoever closes the output is told
                self._output.flush()
        self._progress.tick()
        return tally

    def stop(self) -> None:
        """End the run: what is under way is dropped. May be called from a signal's handler."""
        self.tally.stopped = True
        if self._run is not None:
            self._run.wake()

    def _fresh(self) -> Iterator[Item]:
        for item in self._source:
            if self._output.is_settled(item.key):
                self.tally.skipped += 1
            else:
                yield item

    def _keep(self, outcome: Outcome) -> None:
        if outcome.record is not None:
            self._output.write(outcome.item, outcome.record)
        elif outcome.error is not None:
            self._output.fail(outcome.item, outcome.error, outcome.tries)
        self._progress.settled(outcome)

    def _keep_the_rest(self, run: Run) -> None:
        """What has ended by now was paid for."""
        with suppress(VlfitError):  # the first of them is on its way already
            while (outcome := run.next(0.0)) is not None:
                self._keep(outcome)

    def _look_around(self, run: Run) -> None:
        now = time.monotonic()
        if now - self._flushed >= FLUSH_SECONDS:
            self._flushed = now
            self._output.flush()
        if now - self._ticked >= TICK_SECONDS:
            self._ticked = now
            self._tell_of_stall(run, now)
            self._progress.tick()

    def _tell_of_stall(self, run: Run, now: float) -> None:
        """Once, until something succeeds: who sees a bar that stands still wants to know."""
        if run.stalled is None:
            self._stall_told = False
            return
        since, error = run.stalled
        if not self._stall_told and now - since >= STALL_SECONDS:
            self._stall_told = True
            why = getattr(error, "message", repr(error))
            self._progress.note(f"nothing succeeds just now, and is tried again: {why}")
