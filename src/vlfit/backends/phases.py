"""Where the seconds of a start went: phases, one after the other, from when the process began.

Knows clocks. Does not know what a phase does: whoever loads names each as it begins. No torch.
"""

import os
import time
from pathlib import Path

PROGRAM = "program"  # Python itself, the command line, and what they import


class Phases:
    """Begins with the process, in ``PROGRAM``."""

    def __init__(self) -> None:
        self._begun = [(PROGRAM, time.perf_counter() - process_age())]
        self._ended: float | None = None

    def begin(self, name: str) -> None:
        """``name`` begins, and what went on before ends. The same name again changes nothing."""
        if self._ended is None and self._begun[-1][0] != name:
            self._begun.append((name, time.perf_counter()))

    def end(self) -> None:
        """All is done, once."""
        if self._ended is None:
            self._ended = time.perf_counter()

    @property
    def loaded(self) -> bool:
        """Whether anything has begun but the program."""
        return len(self._begun) > 1

    @property
    def total(self) -> float:
        """Seconds from the beginning of the process to ``end``, or until now."""
        return self._end() - self._begun[0][1]

    @property
    def seconds(self) -> dict[str, float]:
        """Of each phase, in the order in which they began; one that came twice has both."""
        ends = [*(begun for _, begun in self._begun[1:]), self._end()]
        found: dict[str, float] = {}
        for (name, begun), end in zip(self._begun, ends, strict=True):
            found[name] = found.get(name, 0.0) + end - begun
        return found

    def in_words(self) -> str:
        """``4.2 s: program 0.31, importing torch 1.62, ...``."""
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
        return f"{self.total:.1f} s: {parts}"

    def _end(self) -> float:
        return time.perf_counter() if self._ended is None else self._ended


def process_age(proc: Path = Path("/proc")) -> float:
    """Seconds since this process began; 0 where the system does not tell."""
    try:
        words = (proc / "self" / "stat").read_text("ascii", errors="replace").rpartition(")")[2].split()
        began = int(words[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), in seconds since boot
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - began, 0.0)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
