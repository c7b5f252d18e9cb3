"""``/v1/vlfit/status``, ``/v1/vlfit/ledger``, ``/v1/vlfit/sleep`` and ``/v1/vlfit/wake``.

docs/top.md lists the fields. Status costs the engine nothing: its account is read without a lock, the driver
is queried in a thread, and the result is cached for a moment.
"""

import json
import os
import time
from collections.abc import Coroutine, Sequence
from dataclasses import asdict
from typing import Any, get_args
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from vlfit._version import __version__
from vlfit.api.engine_options import SleepLevel
from vlfit.api.stats import EngineAccount, SleepResult, SleepState
from vlfit.backends.base import Backend
from vlfit.backends.held_memory import engine_gpu, ledger_rows
from vlfit.checkpoint.quantization import FP8
from vlfit.errors import InvalidRequest, UsageError
from vlfit.images.decode_memory import max_bytes_of_workers
from vlfit.images.media_pool import decoder_resident_bytes
from vlfit.machine.model import Gpu
from vlfit.machine.survey import GpuMonitor
from vlfit.plan import actual
from vlfit.plan.actual import Expectation, Row
from vlfit.server.error_replies import JSONReply
from vlfit.server.generation import read_body
from vlfit.server.http.admission import AdmissionQueue
from vlfit.server.http.disconnect import Shutdown
from vlfit.server.http.threads import DaemonThreadPool
from vlfit.server.models.all_models import AllModels
from vlfit.server.models.served_models import ServedModel, ServedModels
from vlfit.units import KIB

VERSION = 1
CACHE_SECONDS = 0.2  # limits how often the driver is queried, however many clients poll
_BODY_LIMIT = 4 * KIB
_WAKE_EXAMPLE = "{}"
_SLEEP_EXAMPLE = '{"park": "files"}'
_PARKS: dict[str, SleepLevel] = {park: park for park in get_args(SleepLevel)}


class SleepEndpoints:
    """``/v1/vlfit/sleep`` and ``/v1/vlfit/wake``; both reply when the model has changed its state.

    A client that disconnects before the reply withdraws its request. The body's ``model`` names one of
    several. Both raise ``UsageError`` for a backend that cannot sleep, ``UnknownModel``, and
    ``InvalidRequest`` for unknown fields.
    """

    def __init__(self, backend: Backend, shutdown: Shutdown, models: ServedModels) -> None:
        self._backend = backend
        self._shutdown = shutdown
        self._models = models

    async def sleep(self, request: Request) -> Response:
        """Reply once the model sleeps; requests that run, wait or arrive before that finish first.

        The body's ``park`` says where the weights are kept (``parse_sleep``). Without ``model``, all sleep
        that are in memory.
        """
        self._check()
        body = await self._shutdown.run_until_disconnect(read_body(request, _BODY_LIMIT))
        park, name = parse_sleep(body)
        models = (self._models.find(name),) if name is not None else self._models.all
        return await self._answer(self._sleep_all(models, park), request)

    async def wake(self, request: Request) -> Response:
        """Reply once the model is awake. Without ``model`` in the body, that is the first of several.

        Raises ``CannotWake`` if the memory is not free.
        """
        self._check()
        body = await self._shutdown.run_until_disconnect(read_body(request, _BODY_LIMIT))
        fields = _parse_object(body, _WAKE_EXAMPLE)
        name = _model_field(fields)
        for other in fields:
            raise _unknown_field(other, _WAKE_EXAMPLE)
        return await self._answer(self._models.wake(self._models.find(name)), request)

    async def _sleep_all(self, models: Sequence[ServedModel], park: SleepLevel) -> SleepResult:
        """Put ``models`` to sleep in turn; the result sums up what was in memory, or the first if nothing."""
        awake = [model for model in models if not model.backend.asleep] or models[:1]
        results = [await self._models.sleep(model, park) for model in awake]
        if len(results) == 1:
            return results[0]
        states = [result.asleep for result in results if result.asleep is not None]
        seconds = round(sum(result.seconds for result in results), 3)
        if len(states) < len(results):  # a request woke one of them again
            return SleepResult(None, True, seconds)
        level = "ram" if any(state.level == "ram" for state in states) else "files"
        ram, freed = (sum(getattr(state, size) for state in states) for size in ("ram_bytes", "freed_bytes"))
        return SleepResult(SleepState(level, ram, freed, seconds), True, seconds)

    def _check(self) -> None:
        self._shutdown.check_accepting()
        if not self._backend.capabilities.sleep:
            raise UsageError(
                f"the backend of {self._backend.model} does not support sleep", "Stop the server instead."
            )

    async def _answer(self, result: Coroutine[Any, Any, SleepResult], request: Request) -> Response:
        began = time.perf_counter()
        done = await self._shutdown.run_until_disconnect(result, request.receive)
        waited = max(time.perf_counter() - began - done.seconds, 0.0)
        request.state.note = "asleep" if done.asleep else "awake"
        return JSONReply(sleep_result_json(done) | {"waited_s": round(waited, 3)})


def sleep_result_json(result: SleepResult) -> dict[str, Any]:
    """The JSON of ``result``; its ``seconds`` exclude the wait for running requests."""
    return {
        "state": "asleep" if result.asleep else "ready",
        "changed": result.changed,
        "seconds": result.seconds,
        "sleep": sleep_json(result.asleep),
    }


def sleep_json(asleep: SleepState | None) -> dict[str, Any] | None:
    """The JSON of ``asleep``; None for None (awake).

    ``park``: where the weights are kept. ``ram``: bytes of RAM for them. ``freed``: bytes released, of GPU
    memory or, on a CPU, RAM. ``seconds``: time it took to fall asleep.
    """
    if asleep is None:
        return None
    return {
        "park": asleep.level,
        "ram": asleep.ram_bytes,
        "freed": asleep.freed_bytes,
        "seconds": asleep.seconds,
    }


def parse_sleep(body: bytes | bytearray) -> tuple[SleepLevel, str | None]:
    """Read ``park`` and ``model`` from a body like ``{"park": "files"}``; ``auto`` and None if absent.

    Raises ``InvalidRequest`` for other values and other fields.
    """
    fields = _parse_object(body, _SLEEP_EXAMPLE)
    name = _model_field(fields)
    park = fields.pop("park", "auto")
    for other in fields:  # a misspelt "park" must not mean "auto"
        raise _unknown_field(other, _SLEEP_EXAMPLE)
    if not isinstance(park, str) or park not in _PARKS:
        raise InvalidRequest(f"park is {park!r}"[:200], f"Use {', '.join(_PARKS)}.", param="park")
    return _PARKS[park], name


def _model_field(fields: dict[str, Any]) -> str | None:
    """Take ``model`` out of ``fields``; None if it is absent."""
    name = fields.pop("model", None)
    if name is not None and not isinstance(name, str):
        raise InvalidRequest(f"model is {name!r}"[:200], "Name a served model.", param="model")
    return name


def _parse_object(body: bytes | bytearray, example: str) -> dict[str, Any]:
    """Parse a JSON object; an empty body is an empty object. Raises ``InvalidRequest``."""
    if not body.strip():
        return {}
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidRequest("the body is not valid JSON", f"Send no body, or {example}.") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the body is JSON, but not an object", f"Send no body, or {example}.")
    return fields


def _unknown_field(name: str, example: str) -> InvalidRequest:
    return InvalidRequest(
        f"vlfit does not support {name!r} here"[:200], f"Send no body, or {example}.", param=name
    )


class StatusEndpoints:
    """``/v1/vlfit/status`` and ``/v1/vlfit/ledger``. Belongs to one event loop.

    ``takes_media``: the server takes documents or videos, whose workers take RAM, too.
    """

    def __init__(
        self,
        backend: Backend,
        expectation: Expectation,
        shutdown: Shutdown,
        admission: AdmissionQueue,
        models: ServedModels,
        *,
        takes_media: bool = False,
    ) -> None:
        self._decoder_limit = max_bytes_of_workers(media=takes_media)
        self._backend = backend
        self._planned = expectation
        self._models = models
        self._shutdown = shutdown
        self._admission = admission
        self._run_id = uuid4().hex[:12]
        self._started = time.perf_counter()
        self._watch: GpuMonitor | None = None
        self._thread = DaemonThreadPool(1)
        self._cached: dict[str, Any] = {}
        self._cached_at = float("-inf")

    async def status(self, _: Request) -> Response:
        """Reply with the whole status (fields: docs/top.md)."""
        return JSONReply(await self.facts())

    async def ledger(self, _: Request) -> Response:
        """Reply with the memory part of the status: ledger lines, planned and actual, and their sums."""
        facts = await self.facts()
        names = (
            *("version", "model", "backend", "device", "settings", "ledger", "total", "over_plan", "note"),
            "models",
        )
        return JSONReply({name: facts[name] for name in names if name in facts})

    async def facts(self) -> dict[str, Any]:
        """The status, at most ``CACHE_SECONDS`` old. Callers share the dict: do not change it."""
        return await self._thread.run(self._collect)

    @property
    def _expectation(self) -> Expectation:
        """The plan of what is in memory: of several models that changes."""
        return self._backend.expectation if isinstance(self._backend, AllModels) else self._planned

    def _collect(self) -> dict[str, Any]:
        """Collect the status; runs in one thread at a time."""
        now = time.perf_counter()
        if now - self._cached_at < CACHE_SECONDS:
            return self._cached
        facts: dict[str, Any] = {
            "version": VERSION,
            "vlfit": __version__,
            "model": self._backend.model,
            "state": "stopping" if self._shutdown.draining else "ready",
            "pid": os.getpid(),
            "run": self._run_id,
            "uptime_s": round(now - self._started, 3),
            "places": {
                "limit": self._admission.limit,
                "taken": self._admission.in_use,
                "refused": self._admission.num_refused,
            },
        }
        if self._backend.capabilities.account:
            facts |= self._engine_status(self._backend)
        else:
            facts |= {
                "backend": self._backend.kind,
                "device": self._backend.device,
                "note": self._expectation.no_lines_reason,
            }
            if self._backend.capabilities.ledger:
                facts |= rows_json(self._backend.ledger_rows())
        facts |= self._models.facts()
        self._cached, self._cached_at = facts, now
        return facts

    def _engine_status(self, backend: Backend) -> dict[str, Any]:
        account = backend.account()
        watch = None
        gpu = None
        if account.settings.device != "cpu":
            watch = self._watch = self._watch or GpuMonitor()
            gpu = engine_gpu(account, watch.read()[0])
        plan = self._expectation
        rows = ledger_rows(account, gpu, plan)
        asleep = {"state": "asleep"} if account.asleep and not self._shutdown.draining else {}
        return {
            "backend": backend.kind,
            **asleep,
            "sleep": sleep_json(account.asleep),
            **engine_json(account),
            "memory": memory_json(account, gpu, rows, self._decoder_limit),
            **ledger_json(rows, plan, account),
            "decode_step": {
                "expected": _pace_json(plan.expected),
                "slowest": _pace_json(plan.slowest),
            },
            "spills": bool(watch and watch.wsl2),
        }


def engine_json(account: EngineAccount) -> dict[str, Any]:
    """The engine's part of the status: settings, requests, tokens, steps, KV blocks, image cache."""
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
            "speculate": settings.speculate,
            "draft_model": settings.draft_model,
        },
        "engine_s": round(account.seconds, 6),
        "requests": {
            "running": account.running,
            "waiting": account.waiting,
            "finished": counters.finished,
            "cancelled": counters.cancelled,
            "failed": counters.failed,
            "pauses": account.num_preemptions,
        },
        "tokens": {
            "prompt": counters.prompt_tokens,
            "shared": counters.cached_prompt_tokens,
            "generated": counters.tokens,
            "guessed": counters.draft_tokens,
            "came_true": counters.accepted_tokens,
            "guessed_by_model": counters.model_draft_tokens,
            "came_true_by_model": counters.model_accepted_tokens,
        },
        "steps": {
            "count": counters.steps,
            "seconds": round(counters.seconds, 6),
            "decode_count": counters.decode_steps,
            "decode_seconds": round(counters.decode_seconds, 6),
            "decode_cached_tokens": counters.decode_cached_tokens,
            "again": counters.retried_steps,
        },
        "kv_blocks": {
            "total": pool.blocks,
            "used": pool.used,
            "known": pool.cached,
            "planned": pool.planned or pool.blocks,
            "tokens_each": pool.block_size,
        },
        "image_cache": {
            "bytes": account.memory.image_cache,
            "limit": account.memory.image_cache_limit,
        },
        "state_snapshots": {
            "bytes": account.memory.state_snapshots,
            "limit": account.memory.state_snapshots_limit,
        },
    }


def memory_json(
    account: EngineAccount, gpu: Gpu | None, rows: tuple[Row, ...], decoder_limit: int
) -> dict[str, Any]:
    """The status's ``memory``, in bytes: ``gpu``, ``pool`` (torch's allocator), ``ram``, ``held``.

    ``decoder_limit``: the most that the processes that decode pictures take.

    ``gpu`` and ``pool`` are null on a CPU. ``held`` is what the server takes: on a GPU, all but free and
    desktop memory (torch's reserved memory if NVML does not list the GPU); on a CPU, resident RAM.
    ``rows``: their line ``desktop`` gives the desktop's memory.
    """
    memory = account.memory
    gpu_json, server_bytes = None, memory.resident
    if gpu is not None:
        desktop = next((row.actual for row in rows if row.line == "desktop"), None) or 0
        server_bytes = max(gpu.total - gpu.free - desktop, 0)
        gpu_json = {"name": gpu.name, "total": gpu.total, "free": gpu.free, "desktop": desktop}
    names = ("allocated", "reserved", "peak_allocated", "peak_reserved")
    return {
        "gpu": gpu_json,
        "held": server_bytes if gpu is not None or account.settings.device == "cpu" else memory.reserved,
        "pool": {name: getattr(memory, name) for name in names} if memory.reserved is not None else None,
        "ram": {
            "resident": memory.resident,
            "image_decoders": {"limit": decoder_limit, "resident": decoder_resident_bytes()},
        },
    }


def rows_json(rows: tuple[Row, ...]) -> dict[str, Any]:
    """Ledger rows of a backend without an account: JSON with their sums and the lines over plan."""
    planned, held = actual.totals(rows)
    return {
        "ledger": [asdict(row) for row in rows],
        "total": {"planned": planned, "actual": held},
        "over_plan": [{"line": line, "bytes": more} for line, more in actual.lines_over_plan(rows)],
    }


def ledger_json(rows: tuple[Row, ...], expectation: Expectation, account: EngineAccount) -> dict[str, Any]:
    """Ledger rows as JSON, their sums, and the lines over plan; ``note`` says why there is no plan.

    In RAM the actual total is the process's resident size, not the sum of the lines: pages that were never
    written take no memory.
    """
    planned, held = actual.totals(rows)
    if account.settings.device == "cpu":
        held = account.memory.resident
    return {
        "ledger": [asdict(row) for row in rows],
        "total": {"planned": planned, "actual": held},
        "over_plan": [{"line": line, "bytes": more} for line, more in actual.lines_over_plan(rows)],
        **({"note": expectation.no_lines_reason} if expectation.no_lines_reason else {}),
    }


def _pace_json(pace: actual.StepTime | None) -> dict[str, float] | None:
    return None if pace is None else {"base_s": pace.base_s, "per_cached_token_s": pace.per_token_s}
