"""``/metrics``: what the server does and holds, for Prometheus.

Knows: which numbers of a status (``status.py``) are worth a curve, and their names. Does not know: how they
are written (``server/admin/metrics.py``). A look costs the engine nothing, and does not wake it.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from vlfit.api.outputs import Chunk

# What is counted of requests, and how numbers are written for Prometheus. No clock of its own.
#
# Knows: sums, buckets and the text format (https://prometheus.io/docs/instrumenting/exposition_formats/).
# Does not know: who asks or where numbers come from (``metrics.py``). Written by hand as it is forty lines:
# the engine counts already, and a registry beside it would have to be fed with what is known.


Kind = Literal["counter", "gauge"]
Labels = Mapping[str, str]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Seconds. Prometheus' own, with more above: pictures and long answers on a CPU take minutes.
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram:
    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BUCKETS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str, labels: Labels) -> Iterable[str]:
        total = 0
        for edge, count in zip((*map(_number, BUCKETS), "+Inf"), self._counts, strict=True):
            total += count
            yield f"{name}_bucket{_written({**labels, 'le': edge})} {total}"
        yield f"{name}_sum{_written(labels)} {_number(self._sum)}"
        yield f"{name}_count{_written(labels)} {total}"


class Meters:
    """Sums over the life of a server. ``paths`` are told apart, all others are one. Of one event loop."""

    def __init__(self, paths: Iterable[str] = (), restarts: int = 0) -> None:
        self._restarts = restarts
        self.paths = frozenset(paths)
        self._answered: Counter[tuple[str, int]] = Counter()
        self._refused: Counter[str] = Counter()
        self._phases = {phase: Histogram() for phase in ("queue", "first_token", "decode", "total")}

    def answered(self, path: str, status: int) -> None:
        """A request is over."""
        self._answered[path if path in self.paths else "other", status] += 1

    def refused(self, reason: str) -> None:
        """``reason``: the code that the client was told."""
        self._refused[reason] += 1

    def ended(self, chunk: Chunk) -> None:
        """The last chunk of a completion: it knows how long each phase took."""
        timings = chunk.timings
        if timings is None:
            return
        for phase, seconds in (
            ("queue", timings.queued_s),
            ("first_token", timings.first_token_s),
            ("decode", timings.total_s - timings.first_token_s),
            ("total", timings.total_s),
        ):
            self._phases[phase].add(seconds)

    def lines(self) -> Iterable[str]:
        about = "How often the server died and was started again."
        yield from family("vlfit_restarts_total", "counter", about, [({}, self._restarts)])
        yield from family(
            "vlfit_requests_total",
            "counter",
            "HTTP requests that were answered.",
            [
                ({"path": path, "status": str(status)}, count)
                for (path, status), count in self._answered.items()
            ],
        )
        yield from family(
            "vlfit_refusals_total",
            "counter",
            "Requests that were refused or failed, by the code that the client was told.",
            [({"reason": reason}, count) for reason, count in self._refused.items()],
        )
        name = "vlfit_completion_seconds"
        yield from _head(name, "histogram", "Completions by phase; total is first_token and decode.")
        for phase, histogram in self._phases.items():
            yield from histogram.lines(name, {"phase": phase})


def family(
    name: str, kind: Kind, about: str, samples: Iterable[tuple[Labels, float | None]]
) -> Iterable[str]:
    """The lines of one metric; a sample of None is left out."""
    yield from _head(name, kind, about)
    for labels, value in samples:
        if value is not None:
            yield f"{name}{_written(labels)} {_number(value)}"


def _head(name: str, kind: str, about: str) -> Iterable[str]:
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"


def _written(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


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
