"""``keep_alive``: how long the model stays in memory after a request, by the sleep of the backend."""

import asyncio
import re
import time
from typing import Any

from vlfit.errors import InvalidRequest
from vlfit.server.generation import ServerContext

FOREVER = float("inf")
_LONGEST = 10 * 365 * 24 * 3600.0  # seconds; more is for ever
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")


def parse_keep_alive(value: Any) -> float | None:
    """``value`` in seconds: a number of seconds, or a duration as Go writes it (``5m``, ``1h30m``).

    ``FOREVER`` for negative values and those from ten years. None if ``value`` is None. Raises
    ``InvalidRequest`` for anything else.
    """
    if value is None:
        return None
    seconds: float | None = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value) if abs(value) < _LONGEST else FOREVER
    elif isinstance(value, str) and len(value) <= 100:
        seconds = _parse_duration(value.strip())
    if seconds is None:
        raise InvalidRequest(
            f"keep_alive is {str(value)[:60]!r}",
            "Use a duration such as 5m, a number of seconds, 0 (free the memory) or -1 (keep it).",
            param="keep_alive",
        )
    return FOREVER if seconds < 0 or seconds >= _LONGEST else seconds


def _parse_duration(text: str) -> float | None:
    sign = -1.0 if text.startswith("-") else 1.0
    text = text[1:] if text[:1] in ("+", "-") else text
    if text.isascii() and text.isdigit():  # Go wants a unit, clients do not always send one
        return sign * float(text)
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return sign * sum(float(number) * _UNITS[unit] for number, unit in parts)


class KeepAlive:
    """Puts the model to sleep when the ``keep_alive`` of the last request to set it has passed.

    Call ``request_ended`` after each request to Ollama's API; requests to other APIs put the sleep off, too.
    A request without ``keep_alive`` cancels the one before; ``--idle-sleep`` works besides, always. No effect
    if the backend cannot sleep. Belongs to the server's event loop.
    """

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._timer: asyncio.TimerHandle | None = None
        self._seconds: float | None = None

    @property
    def supported(self) -> bool:
        """Whether the model can sleep at all."""
        return self._context.backend.capabilities.sleep

    def expires_in(self) -> float:
        """Seconds until the model sleeps if no request comes, also by ``--idle-sleep``; or ``FOREVER``."""
        left = [FOREVER]
        idle = time.monotonic() - self._context.last_used
        if self._seconds is not None:
            left.append(self._seconds - idle)
        idle_sleep = idle_sleep_of(self._context)
        if idle_sleep is not None:
            left.append(idle_sleep - idle)
        return max(min(left), 0.0)

    def request_ended(self, seconds: float | None) -> None:
        """Sleep after ``seconds`` without a request. 0: once no request runs; None or ``FOREVER``: never."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._seconds = None if seconds == FOREVER else seconds
        if self._seconds is None or not self.supported:
            return
        if self._seconds == 0:
            self._sleep()
        else:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._check)

    def _check(self) -> None:
        """Sleep, unless a request of any dialect has come meanwhile: then wait for as long after it."""
        if self._seconds is None:
            return
        loop = asyncio.get_running_loop()
        left = self._seconds - (time.monotonic() - self._context.last_used)
        if self._context.admission.in_use:
            self._timer = loop.call_later(self._seconds, self._check)
        elif left > 0.001:
            self._timer = loop.call_later(left, self._check)
        else:
            self._timer = None
            self._sleep()

    def _sleep(self) -> None:
        """Sleep once running and waiting requests are over; a failure is in the engine's log."""
        backend = self._context.backend
        if not backend.asleep and not self._context.shutdown.draining:
            backend.sleep().add_done_callback(lambda future: future.cancelled() or future.exception())


def idle_sleep_of(context: ServerContext) -> float | None:
    """Seconds of ``--idle-sleep``; None without it, and for a backend without an engine of its own."""
    options = getattr(getattr(context.backend, "engine", None), "options", None)
    seconds: float | None = getattr(options, "idle_sleep", None)
    return seconds
