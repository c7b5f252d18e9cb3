"""A download's progress on stderr: one line that rewrites itself on a terminal, a line now and then in a log.

Knows: bytes done and bytes in all. Does not know: what is downloaded or by whom.
"""

import sys
import time
from collections.abc import Callable

from vlfit.units import format_bytes, format_seconds

Progress = Callable[[int, int], None]  # bytes done, bytes in all


class StderrProgress:
    """Prints how far a download is. Call it with bytes done and bytes in all; ``close`` ends the line."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._started = time.monotonic()
        self._printed = float("-inf")
        self._already: int | None = None
        self._open_line = False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        on_terminal = sys.stderr.isatty()
        if self._already is None:
            # Bytes of an earlier, interrupted download are not this one's speed.
            self._already, self._started = done, now
        if now - self._printed < (0.1 if on_terminal else 5.0) and done < total:
            return
        self._printed = now
        text = f"{self._label}: {self._describe(done, total, now - self._started)}"
        if on_terminal:
            print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)
            self._open_line = True
        else:
            print(text, file=sys.stderr, flush=True)

    def _describe(self, done: int, total: int, seconds: float) -> str:
        share = 100 * done // total if total else 100
        text = f"{share:3d} %  {format_bytes(done)} of {format_bytes(total)}"
        speed = (done - (self._already or 0)) / seconds if seconds > 0.2 else 0.0
        if speed > 0:
            text += f"  {format_bytes(int(speed))}/s"
            if done < total:
                text += f"  {format_seconds((total - done) / speed)} left"
        return text

    def close(self) -> None:
        if self._open_line:
            print(file=sys.stderr, flush=True)
            self._open_line = False
