"""``/metrics``: what the server does and holds, for Prometheus.

Knows: which numbers of a status (``status.py``) are worth a curve, and their names. Does not know: how they
are written (``meters.py``). A look costs the engine nothing, and does not wake it.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from vlfit.server.meters import CONTENT_TYPE, Meters, family

Facts = dict[str, Any]


class Metrics:
    def __init__(self, facts: Callable[[], Awaitable[Facts]], meters: Meters) -> None:
        self._facts = facts
        self._meters = meters

    async def answer(self, _: Request) -> Response:
        facts = await self._facts()
        lines = [*self._meters.lines(), *_of_server(facts)]
        if "ledger" in facts:
            lines += [*_of_engine(facts), *_of_memory(facts)]
        return Response("\n".join(lines) + "\n", media_type=CONTENT_TYPE)


def _of_server(facts: Facts) -> Iterable[str]:
    info = {"version": facts["vlfit"], "model": facts["model"], "device": facts.get("device", "")}
    yield from family("vlfit_info", "gauge", "What runs here.", [(info, 1)])
    yield from family("vlfit_up_seconds", "gauge", "Since the start.", [({}, facts["uptime_s"])])
    states = [({"state": state}, float(facts["state"] == state)) for state in ("ready", "asleep", "stopping")]
    yield from family("vlfit_state", "gauge", "1 for the state that it is in.", states)
    places = facts["places"]
    yield from family(
        "vlfit_places",
        "gauge",
        "Completions that may run and wait at once, and do.",
        [({"kind": "limit"}, places["limit"]), ({"kind": "taken"}, places["taken"])],
    )


def _of_engine(facts: Facts) -> Iterable[str]:
    requests, steps = facts["requests"], facts["steps"]
    yield from family(
        "vlfit_engine_requests",
        "gauge",
        "Completions in the engine now.",
        [({"state": state}, requests[state]) for state in ("running", "waiting")],
    )
    yield from family(
        "vlfit_engine_requests_total",
        "counter",
        "Completions that have left the engine.",
        [({"end": end}, requests[end]) for end in ("finished", "cancelled", "failed")],
    )
    yield from family(
        "vlfit_engine_pauses_total",
        "counter",
        "Completions that gave their blocks back for a while.",
        [({}, requests["pauses"])],
    )
    yield from family(
        "vlfit_tokens_total",
        "counter",
        "Tokens computed for prompts, found in the cache, and generated.",
        [({"kind": kind}, facts["tokens"][kind]) for kind in ("prompt", "shared", "generated")],
    )
    for name, about, which in (
        ("vlfit_steps", "Passes through the model", ""),
        ("vlfit_decode_steps", "Those that computed no prompt", "decode_"),
    ):
        yield from family(f"{name}_total", "counter", f"{about}.", [({}, steps[f"{which}count"])])
        yield from family(
            f"{name}_seconds_total", "counter", f"{about}, in seconds.", [({}, steps[f"{which}seconds"])]
        )
    blocks = facts["kv_blocks"]
    yield from family(
        "vlfit_kv_blocks",
        "gauge",
        "Blocks of the KV cache: all, held by requests, and full ones that may be shared.",
        [({"kind": kind}, blocks[kind]) for kind in ("total", "used", "known")],
    )


def _of_memory(facts: Facts) -> Iterable[str]:
    memory, cache = facts["memory"], facts["image_cache"]
    ledger = [
        ({"line": row["line"], "kind": kind}, row[kind])
        for row in facts["ledger"]
        for kind in ("planned", "actual")
    ]
    yield from family("vlfit_ledger_bytes", "gauge", "Memory line by line, planned and held.", ledger)
    card = memory["gpu"] or {}
    kinds = [({"kind": kind}, card[kind]) for kind in ("total", "free", "desktop") if kind in card]
    yield from family("vlfit_gpu_bytes", "gauge", "The card, as its driver tells.", kinds)
    yield from family("vlfit_held_bytes", "gauge", "What the server holds of it.", [({}, memory["held"])])
    resident = memory["ram"]["resident"]
    yield from family("vlfit_resident_bytes", "gauge", "RAM of the process.", [({}, resident)])
    yield from family(
        "vlfit_image_cache_bytes",
        "gauge",
        "Kept features of pictures.",
        [({"kind": kind}, cache[name]) for kind, name in (("limit", "limit"), ("taken", "bytes"))],
    )
