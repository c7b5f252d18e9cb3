"""A batch on this machine: from a source through a crew into an output, with a tally of how it goes.

Knows what is done already, when the output is made safe, and how a run is stopped. Does not know how a
backend is kept busy (``crew.py``) or how the tally is shown.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from vlfit.errors import VlfitError
from vlfit.tasks.batch.crew import Crew, Outcome, Run
from vlfit.tasks.batch.item import Item, Record, Source

FLUSH_SECONDS = 5.0  # what the end of the machine may cost: so much is asked about again
TICK_SECONDS = 0.5
_WINDOW_SECONDS = 60.0  # speeds are those of the last minute


class Place(Protocol):
    """What a run needs of an output."""

    def is_settled(self, key: str) -> bool: ...
    def write(self, item: Item, record: Record) -> None: ...
    def fail(self, item: Item, error: Exception, tries: int) -> None: ...
    def flush(self) -> None: ...


@dataclass(slots=True)
class Tally:
    """What a run has done so far. ``same`` of ``done`` took over an answer; ``skipped`` were settled before.

    ``total``: items of the source, where known. ``stopped``: somebody ended it before its end.
    """

    done: int = 0
    same: int = 0
    failed: int = 0
    skipped: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total: int | None = None
    stopped: bool = False
    began: float = field(default_factory=time.monotonic)
    _marks: deque[tuple[float, int, int]] = field(default_factory=deque)

    @property
    def settled(self) -> int:
        """Pictures that this run is through with."""
        return self.done + self.failed

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def take(self, outcome: Outcome) -> None:
        """Count ``outcome``."""
        record = outcome.record
        if record is None:
            self.failed += 1
            return
        self.done += 1
        if "same_as" in record:
            self.same += 1  # its tokens were the other's
            return
        self.prompt_tokens += record["usage"]["prompt_tokens"]
        self.completion_tokens += record["usage"]["completion_tokens"]

    def mark(self) -> None:
        """Note the time, for speeds. Called now and then."""
        now = time.monotonic()
        self._marks.append((now, self.settled, self.completion_tokens))
        while self._marks[0][0] < now - _WINDOW_SECONDS:
            self._marks.popleft()

    def speeds(self) -> tuple[float, float]:
        """Pictures and tokens of answers in a second, over the last minute."""
        now = time.monotonic()
        then, settled, tokens = self._marks[0] if self._marks else (self.began, 0, 0)
        seconds = max(now - then, 1e-9)
        return (self.settled - settled) / seconds, (self.completion_tokens - tokens) / seconds

    def seconds_left(self, before: int) -> float | None:
        """Until the end, at the speed of the last minute; ``before`` were settled in earlier runs."""
        speed = self.speeds()[0]
        if self.total is None or speed <= 0:
            return None
        return max(0, self.total - before - self.settled) / speed


class Runner:
    """One run. ``limit``: of so many pictures at most. ``ordered``: records stand in the source's order.
    ``watch`` is told of the tally twice a second or less often.
    """

    def __init__(
        self,
        crew: Crew,
        source: Source,
        output: Place,
        *,
        limit: int | None = None,
        ordered: bool = False,
        watch: Callable[[Tally], None] = lambda _: None,
    ) -> None:
        self.tally = Tally()
        self._crew = crew
        self._source = source
        self._output = output
        self._limit = limit
        self._ordered = ordered
        self._watch = watch
        self._run: Run | None = None
        self._flushed = self._ticked = 0.0

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
                self._look_around()
        except VlfitError:
            self._keep_the_rest(run)
            raise
        else:
            self._keep_the_rest(run)
        finally:
            run.close()
            with suppress(VlfitError):  # whoever closes the output is told
                self._output.flush()
        self._watch(tally)
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
        self.tally.take(outcome)

    def _keep_the_rest(self, run: Run) -> None:
        """What has ended by now was paid for."""
        with suppress(VlfitError):  # the first of them is on its way already
            while (outcome := run.next(0.0)) is not None:
                self._keep(outcome)

    def _look_around(self) -> None:
        now = time.monotonic()
        if now - self._flushed >= FLUSH_SECONDS:
            self._flushed = now
            self._output.flush()
        if now - self._ticked >= TICK_SECONDS:
            self._ticked = now
            self.tally.mark()
            self._watch(self.tally)
