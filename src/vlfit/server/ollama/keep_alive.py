"""``keep_alive``: how long a model stays in memory after a request, by the sleep of the backend."""

import asyncio
import re
from typing import Any, Literal

from vlfit.api.stats import SleepResult
from vlfit.errors import InvalidRequest, UsageError
from vlfit.server.generation import ServerContext
from vlfit.server.models.served_models import ServedModel

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
    """Puts each model to sleep when the ``keep_alive`` of the last request to set it has passed.

    Call ``request_ended`` after each request to Ollama's API; requests to other APIs put the sleep off, too.
    A request without ``keep_alive`` cancels the one before; ``--idle-sleep`` works besides, always. No effect
    if the backend cannot sleep. Belongs to the server's event loop.
    """

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._seconds: dict[str, float] = {}
        self._sleeping: set[asyncio.Task[SleepResult]] = set()

    def supports(self, model: ServedModel) -> bool:
        """Whether ``model`` can sleep at all."""
        return model.backend.capabilities.sleep

    def expires_in(self, model: ServedModel) -> float:
        """Seconds until ``model`` sleeps if no request comes, also by ``--idle-sleep``; or ``FOREVER``."""
        models = self._context.models
        left = [FOREVER]
        idle = models.idle_seconds(model)
        if model.name in self._seconds:
            left.append(self._seconds[model.name] - idle)
        idle_sleep = models.idle_sleep(model)
        if idle_sleep is not None:
            left.append(idle_sleep - idle)
        return max(min(left), 0.0)

    def request_ended(self, model: ServedModel, seconds: float | None) -> None:
        """Sleep after ``seconds`` without a request. 0: once no request runs; None or ``FOREVER``: never."""
        timer = self._timers.pop(model.name, None)
        if timer is not None:
            timer.cancel()
        self._seconds.pop(model.name, None)
        if seconds is None or seconds == FOREVER or not self.supports(model):
            return
        self._seconds[model.name] = seconds
        if seconds == 0:
            self._sleep(model)
        else:
            self._check_after(model, seconds)

    async def load_or_unload(self, model: ServedModel, seconds: float | None) -> Literal["load", "unload"]:
        """Load ``model``, or unload it with ``seconds`` 0, once it has no requests; returns which.

        Raises ``UsageError`` if it cannot be unloaded, ``CannotWake`` if its memory is not free.
        """
        models = self._context.models
        if seconds == 0:
            if not self.supports(model):
                raise UsageError(
                    f"the backend of {model.name} cannot unload the model", "Stop the server instead."
                )
            self.request_ended(model, None)
            await models.sleep(model)
            return "unload"
        if model.backend.asleep:
            await models.wake(model)
        self.request_ended(model, seconds)
        return "load"

    def _check_after(self, model: ServedModel, seconds: float) -> None:
        self._timers[model.name] = asyncio.get_running_loop().call_later(seconds, self._check, model)

    def _check(self, model: ServedModel) -> None:
        """Sleep, unless a request of any dialect has come meanwhile: then wait for as long after it."""
        context = self._context
        self._timers.pop(model.name, None)
        seconds = self._seconds[model.name]
        left = seconds - context.models.idle_seconds(model)
        if context.models.in_use(model, context.admission.in_use):
            self._check_after(model, seconds)
        elif left > 0.001:
            self._check_after(model, left)
        else:
            self._sleep(model)

    def _sleep(self, model: ServedModel) -> None:
        """Sleep once running and waiting requests are over; a failure is in the engine's log."""
        if not model.backend.asleep and not self._context.shutdown.draining:
            task = asyncio.ensure_future(self._context.models.sleep(model))
            self._sleeping.add(task)
            task.add_done_callback(self._sleeping.discard)
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
