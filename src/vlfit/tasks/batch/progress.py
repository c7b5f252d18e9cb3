"""How far a batch is, how fast, and how long it will take.

Counts, and knows times. Does not know how that is shown: whoever shows it makes a ``Progress`` of its own.
"""

import time
from collections import deque
from dataclasses import dataclass, field

from vlfit.tasks.batch.crew import Outcome

_WINDOW_SECONDS = 60.0  # speeds are those of the last minute


@dataclass(slots=True)
class Tally:
    """What a run has done so far. ``same`` of ``done`` took over an answer; ``skipped`` were settled before.

    ``total``: items of the source, where known; ``about``: reckoned, not counted.
    ``stopped``: somebody ended it before its end.
    """

    done: int = 0
    same: int = 0
    failed: int = 0
    skipped: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total: int | None = None
    about: bool = False
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
        if not self._marks:
            self._marks.append((self.began, 0, 0))
        self._marks.append((now, self.settled, self.completion_tokens))
        # The last of those before the window stays: marks may be further apart than it is long.
        while self._marks[1][0] < now - _WINDOW_SECONDS:
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


class Progress:
    """Told what becomes of pictures, by one thread. This one counts and says nothing."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.source_told = False  # whether what the source left out has been noted already

    def settled(self, outcome: Outcome) -> None:
        """A picture is over, and in the output or on the list of failures."""
        self.tally.take(outcome)

    def tick(self) -> None:
        """Time has passed; called about twice a second."""
        self.tally.mark()

    def note(self, text: str) -> None:
        """Something that a person should read."""
