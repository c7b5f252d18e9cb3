"""How long each phase of a start took, from the beginning of the process."""

import os
import time
from pathlib import Path

PROGRAM = "program"  # Python itself, the command line, and what they import


class StartupTimer:
    """Durations of a start's consecutive phases. The first, ``PROGRAM``, begins with the process.

    Call ``begin`` at the start of each other phase, ``end`` after the last. Until ``end`` the current phase
    counts up to now.
    """

    def __init__(self) -> None:
        self._begins = [(PROGRAM, time.perf_counter() - process_age_seconds())]
        self._ended: float | None = None

    def begin(self, name: str) -> None:
        """End the current phase and begin ``name``. No effect if ``name`` is current, or after ``end``."""
        if self._ended is None and self._begins[-1][0] != name:
            self._begins.append((name, time.perf_counter()))

    def end(self) -> None:
        """End the last phase. Further calls have no effect."""
        if self._ended is None:
            self._ended = time.perf_counter()

    @property
    def has_begun_loading(self) -> bool:
        """Whether a phase after ``PROGRAM`` has begun."""
        return len(self._begins) > 1

    @property
    def total_seconds(self) -> float:
        """Seconds from the beginning of the process to ``end``, or until now."""
        return self._end() - self._begins[0][1]

    @property
    def seconds_by_phase(self) -> dict[str, float]:
        """Seconds of each phase, in order of their first ``begin``; a phase begun twice has the sum."""
        ends = [*(begin for _, begin in self._begins[1:]), self._end()]
        sums: dict[str, float] = {}
        for (name, begin), end in zip(self._begins, ends, strict=True):
            sums[name] = sums.get(name, 0.0) + end - begin
        return sums

    def summary(self) -> str:
        """``4.2 s: program 0.31, importing torch 1.62, ...``."""
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds_by_phase.items())
        return f"{self.total_seconds:.1f} s: {parts}"

    def _end(self) -> float:
        return time.perf_counter() if self._ended is None else self._ended


def process_age_seconds(proc: Path = Path("/proc")) -> float:
    """Seconds since this process began, by the file system ``proc``; 0 if unknown (no Linux)."""
    try:
        words = (proc / "self" / "stat").read_text("ascii", errors="replace").rpartition(")")[2].split()
        started = int(words[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), in seconds since boot
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started, 0.0)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
