"""``/v1/vlfit/status`` and ``/v1/vlfit/ledger``: what the server does and holds, the plan beside it.

Knows: field names (docs/top.md has them all), and that looking must cost the engine nothing: its account is
read without a lock, the driver is asked in a thread of its own, and many who look share one answer. Does not
know: how bytes are counted (``engine/memory/usage.py``) or compared (``plan/actual.py``).
"""

import asyncio
import json
import os
import time
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, get_args
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from vlfit._version import __version__
from vlfit.api.engine_options import Park
from vlfit.api.stats import Asleep, EngineAccount, Rest
from vlfit.backends.base import Accountable, Itemized, LocalBackend, OpenBackend, Planned, Sleeper
from vlfit.checkpoint.quantization import FP8
from vlfit.checkpoint.source import Checkpoint
from vlfit.errors import InvalidRequest, UsageError
from vlfit.machine.gpu import gpu_behind
from vlfit.machine.model import Gpu
from vlfit.machine.survey import Watch
from vlfit.plan import actual
from vlfit.plan import actual as expect
from vlfit.plan.actual import Expectation, Row
from vlfit.plan.ledger import Settings
from vlfit.server.http.admission import Places
from vlfit.server.http.disconnect import Closing
from vlfit.server.http.threads import Threads
from vlfit.server.openai.error_replies import JSONReply
from vlfit.server.openai.generation import read_body
from vlfit.units import KIB

# ``POST /v1/vlfit/sleep`` and ``/v1/vlfit/wake``: the memory is given back, and taken again.
#
# Knows: what may be asked for and how it is told what came of it. Does not know: how an engine sleeps
# (``engine/memory/sleep.py``) or when it does so by itself (``engine/loop.py``).


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


VERSION = 1
FRESH_SECONDS = 0.2  # an answer of this age is given again: however many look, the driver is asked this often


class Status:
    """The two routes. Belongs to one event loop."""

    def __init__(
        self, backend: LocalBackend, expectation: Expectation, closing: Closing, places: Places
    ) -> None:
        self._backend = backend
        self._expectation = expectation
        self._closing = closing
        self._places = places
        self._run = uuid4().hex[:12]
        self._started = time.perf_counter()
        self._watch: Watch | None = None
        self._thread = Threads(1)
        self._told: dict[str, Any] = {}
        self._told_at = float("-inf")

    async def status(self, _: Request) -> Response:
        """All of it."""
        return JSONReply(await self.facts())

    async def ledger(self, _: Request) -> Response:
        """What is planned and held, line by line."""
        facts = await self.facts()
        names = ("version", "model", "backend", "device", "settings", "ledger", "total", "over_plan", "note")
        return JSONReply({name: facts[name] for name in names if name in facts})

    async def facts(self) -> dict[str, Any]:
        """As they are, or were a moment ago."""
        return await self._thread.run(self._look)

    def _look(self) -> dict[str, Any]:
        """Called in one thread at a time."""
        now = time.perf_counter()
        if now - self._told_at < FRESH_SECONDS:
            return self._told
        facts: dict[str, Any] = {
            "version": VERSION,
            "vlfit": __version__,
            "model": self._backend.model,
            "state": "stopping" if self._closing.draining else "ready",
            "pid": os.getpid(),
            "run": self._run,
            "uptime_s": round(now - self._started, 3),
            "places": {
                "limit": self._places.limit,
                "taken": self._places.taken,
                "refused": self._places.refused,
            },
        }
        if isinstance(self._backend, Accountable):
            facts |= self._about_engine(self._backend)
        elif isinstance(self._backend, OpenBackend):
            facts |= {
                "backend": self._backend.kind,
                "device": self._backend.device,
                "note": self._expectation.why_not,
            }
            if isinstance(self._backend, Itemized):
                facts |= row_facts(self._backend.rows())
        self._told, self._told_at = facts, now
        return facts

    def _about_engine(self, backend: Accountable) -> dict[str, Any]:
        account = backend.account()
        watch = None
        gpu = None
        if account.settings.device != "cpu":
            watch = self._watch = self._watch or Watch()
            gpu = gpu_of(account, watch.look()[0])
        found = ledger_rows(account, gpu, self._expectation)
        asleep = {"state": "asleep"} if account.asleep and not self._closing.draining else {}
        return {
            "backend": backend.kind,
            **asleep,
            "sleep": sleep_facts(account.asleep),
            **engine_facts(account),
            "memory": memory_facts(account, gpu, found),
            **ledger_facts(found, self._expectation, account),
            "decode_step": {
                "expected": _pace(self._expectation.expected),
                "slowest": _pace(self._expectation.slowest),
            },
            "spills": bool(watch and watch.wsl2),
        }


def expectation_of(backend: LocalBackend, gpus: tuple[Gpu, ...]) -> Expectation:
    """What the plan says of the model that ``backend`` runs; ``gpus`` were read before it was loaded."""
    if isinstance(backend, Planned):
        return backend.expectation
    if not isinstance(backend, Accountable):
        where = f"at {backend.device}" if isinstance(backend, OpenBackend) else "elsewhere"
        return Expectation(why_not=f"the model runs {where}: what it holds is not known here")
    account, checkpoint = backend.account(), backend.checkpoint
    if not isinstance(checkpoint, Checkpoint):
        return Expectation(why_not="no plan is known of a checkpoint of this architecture")
    wishes = account.settings
    if wishes.device == "cpu":
        return expect.expect_in_ram(
            checkpoint,
            wishes.kv_tokens,
            wishes.value_bytes,
            halves=wishes.halves,
            kv_dtype=wishes.kv_dtype,
        )
    gpu = gpu_of(account, gpus)
    if gpu is None:
        return Expectation(why_not="the driver's library does not tell of the GPU that the model is on")
    settings = Settings(
        checkpoint.weights_format,
        wishes.context,
        wishes.image_tokens,
        wishes.sequences,
        wishes.chunk,
        offload=wishes.offload,
        kv_dtype=wishes.kv_dtype,
        speculate=wishes.speculate,
    )
    return expect.expect_on_gpu(checkpoint, gpu, settings, wishes.value_bytes, wishes.kv_tokens)


def gpu_of(account: EngineAccount, gpus: tuple[Gpu, ...]) -> Gpu | None:
    """The GPU that the engine runs on, as the driver's library sees it; None on a CPU, or if it is unseen."""
    if account.settings.device == "cpu":
        return None
    return gpu_behind(gpus, account.settings.gpu_uuid, account.settings.device)


def ledger_rows(account: EngineAccount, gpu: Gpu | None, expectation: Expectation) -> tuple[Row, ...]:
    """Planned and actual, line by line."""
    held = account.holdings
    if account.settings.device == "cpu":
        return actual.held_in_ram(
            expectation, held.weights, held.kv_cache, held.image_cache, held.resident_before
        )
    if gpu is None:
        return actual.rows(expectation.lines, {**held.weights, "kv_cache": held.kv_cache}, {})
    return actual.held_on_gpu(gpu, expectation, held.weights, held.kv_cache, held.reserved or 0, held.graphs)


def engine_facts(account: EngineAccount) -> dict[str, Any]:
    """Settings, requests, tokens, steps and blocks."""
    settings, counters, pool = account.settings, account.counters, account.pool
    return {
        "device": settings.device,
        "settings": {
            "dtype": settings.dtype,
            "context": settings.context,
            "image_tokens": settings.image_tokens,
            "sequences": settings.sequences,
            "chunk": settings.chunk,
            "kv_tokens": settings.kv_tokens,
            "kv_dtype": settings.kv_dtype if settings.kv_dtype == FP8 else settings.dtype,
        },
        "engine_s": round(account.seconds, 6),
        "requests": {
            "running": account.running,
            "waiting": account.waiting,
            "finished": counters.finished,
            "cancelled": counters.cancelled,
            "failed": counters.failed,
            "pauses": account.pauses,
        },
        "tokens": {
            "prompt": counters.prompt_tokens,
            "shared": counters.shared_tokens,
            "generated": counters.tokens,
            "guessed": counters.guessed,
            "came_true": counters.came_true,
        },
        "steps": {
            "count": counters.steps,
            "seconds": round(counters.seconds, 6),
            "decode_count": counters.decode_steps,
            "decode_seconds": round(counters.decode_seconds, 6),
            "decode_cached_tokens": counters.decode_cached,
            "again": counters.again,
        },
        "kv_blocks": {
            "total": pool.blocks,
            "used": pool.used,
            "known": pool.known,
            "planned": pool.planned or pool.blocks,
            "tokens_each": pool.block_size,
        },
        "image_cache": {
            "bytes": account.holdings.image_cache,
            "limit": account.holdings.image_cache_limit,
        },
    }


def memory_facts(account: EngineAccount, gpu: Gpu | None, found: tuple[Row, ...]) -> dict[str, Any]:
    """The card (null on a CPU), torch's pool on it, and RAM. ``held`` is the server's own share of either."""
    held = account.holdings
    card, ours = None, held.resident
    if gpu is not None:
        desktop = next((row.actual for row in found if row.line == "desktop"), None) or 0
        ours = max(gpu.total - gpu.free - desktop, 0)
        card = {"name": gpu.name, "total": gpu.total, "free": gpu.free, "desktop": desktop}
    names = ("allocated", "reserved", "peak_allocated", "peak_reserved")
    return {
        "gpu": card,
        "held": ours if gpu is not None or account.settings.device == "cpu" else held.reserved,
        "pool": {name: getattr(held, name) for name in names} if held.reserved is not None else None,
        "ram": {"resident": held.resident},
    }


def row_facts(found: tuple[Row, ...]) -> dict[str, Any]:
    """Rows that a backend tells itself, their sums, and the lines that hold more than planned."""
    planned, held = actual.totals(found)
    return {
        "ledger": [asdict(row) for row in found],
        "total": {"planned": planned, "actual": held},
        "over_plan": [{"line": line, "bytes": more} for line, more in actual.over_plan(found)],
    }


def ledger_facts(found: tuple[Row, ...], expectation: Expectation, account: EngineAccount) -> dict[str, Any]:
    """The rows, their sums, and the lines that hold more than planned.

    In RAM the sum is what the system counts, not that of the lines: pages not yet written are not there.
    """
    planned, held = actual.totals(found)
    if account.settings.device == "cpu":
        held = account.holdings.resident
    return {
        "ledger": [asdict(row) for row in found],
        "total": {"planned": planned, "actual": held},
        "over_plan": [{"line": line, "bytes": more} for line, more in actual.over_plan(found)],
        **({"note": expectation.why_not} if expectation.why_not else {}),
    }


def _pace(pace: actual.Pace | None) -> dict[str, float] | None:
    return None if pace is None else {"base_s": pace.base_s, "per_cached_token_s": pace.per_token_s}
