"""``POST /v1/vlfit/sleep`` and ``/v1/vlfit/wake``: the memory is given back, and taken again.

Knows: what may be asked for and how it is told what came of it. Does not know: how an engine sleeps
(``engine/sleep.py``) or when it does so by itself (``engine/loop.py``).
"""

import asyncio
import json
import time
from concurrent.futures import Future
from typing import Any, get_args

from starlette.requests import Request
from starlette.responses import Response

from vlfit.backends.base import LocalBackend, Sleeper
from vlfit.engine.account import Asleep, Rest
from vlfit.engine.options import Park
from vlfit.errors import InvalidRequest, UsageError
from vlfit.server.closing import Closing
from vlfit.server.failures import JSONReply
from vlfit.server.generating import read_body
from vlfit.units import KIB

_BODY_LIMIT = 4 * KIB
_LIKE = '{"park": "files"}'
_PARKS: dict[str, Park] = {park: park for park in get_args(Park)}


class SleepEndpoints:
    """The two routes. A client that hangs up while it waits withdraws its wish."""

    def __init__(self, backend: LocalBackend, closing: Closing) -> None:
        self._backend = backend
        self._closing = closing

    async def sleep(self, request: Request) -> Response:
        """Answers when it sleeps: what runs or waits, and what comes before that has ended, goes first."""
        backend = self._check()
        park = read_park(await self._closing.watch(read_body(request, _BODY_LIMIT)))
        return await self._answer(backend.sleep(park), request)

    async def wake(self, request: Request) -> Response:
        """Answers when it is awake."""
        backend = self._check()
        body = await self._closing.watch(read_body(request, _BODY_LIMIT))
        for name in _wishes(body, "{}"):
            raise _unknown(name, "{}")
        return await self._answer(backend.wake(), request)

    def _check(self) -> Sleeper:
        self._closing.check()
        if not isinstance(self._backend, Sleeper):
            raise UsageError(f"the backend of {self._backend.model} cannot sleep", "stop the server instead")
        return self._backend

    async def _answer(self, wish: "Future[Rest]", request: Request) -> Response:
        began = time.perf_counter()
        rest = await self._closing.watch(_result_of(wish), request.receive)
        waited = max(time.perf_counter() - began - rest.seconds, 0.0)
        request.state.note = "asleep" if rest.asleep else "awake"
        return JSONReply(rest_facts(rest) | {"waited_s": round(waited, 3)})


async def _result_of(wish: "Future[Rest]") -> Rest:
    """Cancelled, it cancels the wish."""
    return await asyncio.wrap_future(wish)


def rest_facts(rest: Rest) -> dict[str, Any]:
    """What a client is told; ``seconds`` are those of going to sleep or waking, without what ran before."""
    return {
        "state": "asleep" if rest.asleep else "ready",
        "changed": rest.changed,
        "seconds": rest.seconds,
        "sleep": sleep_facts(rest.asleep),
    }


def sleep_facts(asleep: Asleep | None) -> dict[str, Any] | None:
    """Where the weights wait and how much was given back; None while awake."""
    if asleep is None:
        return None
    return {"park": asleep.parked, "ram": asleep.ram, "freed": asleep.freed, "seconds": asleep.seconds}


def read_park(body: bytes) -> Park:
    """``park`` of a body like ``{"park": "files"}``; ``auto`` of an empty one. Raises ``InvalidRequest``."""
    wishes = _wishes(body, _LIKE)
    for name in wishes:  # a misspelt park would be one that nobody asked for
        if name != "park":
            raise _unknown(name, _LIKE)
    park = wishes.get("park", "auto")
    if not isinstance(park, str) or park not in _PARKS:
        raise InvalidRequest(f"park is {park!r}"[:200], f"use {', '.join(_PARKS)}", param="park")
    return _PARKS[park]


def _wishes(body: bytes, like: str) -> dict[str, Any]:
    """The object in a body that may be empty. Raises ``InvalidRequest`` for anything else."""
    if not body.strip():
        return {}
    try:
        wishes = json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidRequest("the body is no JSON", f"send none, or {like}") from None
    if not isinstance(wishes, dict):
        raise InvalidRequest("the body is JSON, but not an object", f"send none, or {like}")
    return wishes


def _unknown(name: str, like: str) -> InvalidRequest:
    return InvalidRequest(
        f"vlfit does not support {name!r} here"[:200], f"send nothing, or {like}", param=name
    )
