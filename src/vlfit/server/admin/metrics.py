"""``/metrics`` in Prometheus' text format: request counters, and gauges from the server's status.

https://prometheus.io/docs/instrumenting/exposition_formats/ is simple enough to write by hand; the engine
already keeps the counters that a client library's registry would duplicate.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from vlfit.api.outputs import Chunk
from vlfit.images.decode_pool import DecodeStats

Kind = Literal["counter", "gauge"]
Labels = Mapping[str, str]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Seconds: Prometheus' default buckets and longer ones, as long answers on a CPU take minutes.
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram:
    """A Prometheus histogram of durations in seconds, with the buckets ``BUCKETS``."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration of ``seconds``."""
        self._counts[bisect_left(BUCKETS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str, labels: Labels) -> Iterable[str]:
        """Sample lines of the metric ``name``: cumulative buckets, sum, count; without HELP and TYPE."""
        total = 0
        for edge, count in zip((*map(_number, BUCKETS), "+Inf"), self._counts, strict=True):
            total += count
            yield f"{name}_bucket{_labels_text({**labels, 'le': edge})} {total}"
        yield f"{name}_sum{_labels_text(labels)} {_number(self._sum)}"
        yield f"{name}_count{_labels_text(labels)} {total}"


class RequestMetrics:
    """Counts of responses and errors, and durations of completions. Belongs to one event loop.

    ``paths``: request paths with a label of their own; all others share the label ``other``. ``restarts``:
    how often the server was restarted after a crash.
    """

    def __init__(self, paths: Iterable[str] = (), restarts: int = 0) -> None:
        self._restarts = restarts
        self.paths = frozenset(paths)
        self._responses: Counter[tuple[str, int]] = Counter()
        self._errors: Counter[str] = Counter()
        self._phases = {phase: Histogram() for phase in ("queue", "first_token", "decode", "total")}

    def count_response(self, path: str, status: int) -> None:
        """Count a response to ``path`` with the HTTP ``status``."""
        self._responses[path if path in self.paths else "other", status] += 1

    def count_error(self, reason: str) -> None:
        """Count an error; ``reason``: its code, such as ``queue_full``."""
        self._errors[reason] += 1

    def record_completion(self, chunk: Chunk) -> None:
        """Record the durations of a completion; ``chunk``: its last. No effect if it has no timings."""
        timings = chunk.timings
        if timings is None:
            return
        for phase, seconds in (
            ("queue", timings.queued_s),
            ("first_token", timings.first_token_s),
            ("decode", timings.total_s - timings.first_token_s),
            ("total", timings.total_s),
        ):
            self._phases[phase].observe(seconds)

    def lines(self) -> Iterable[str]:
        """All metric families of this class in Prometheus' text format."""
        about = "Restarts after a crash of the server."
        yield from family_lines("vlfit_restarts_total", "counter", about, [({}, self._restarts)])
        yield from family_lines(
            "vlfit_requests_total",
            "counter",
            "HTTP requests by path and status.",
            [
                ({"path": path, "status": str(status)}, count)
                for (path, status), count in self._responses.items()
            ],
        )
        yield from family_lines(
            "vlfit_refusals_total",
            "counter",
            "Requests refused or failed, by error code.",
            [({"reason": reason}, count) for reason, count in self._errors.items()],
        )
        name = "vlfit_completion_seconds"
        yield from _head(
            name, "histogram", "Duration of completions by phase; total is first_token + decode."
        )
        for phase, histogram in self._phases.items():
            yield from histogram.lines(name, {"phase": phase})


def family_lines(
    name: str, kind: Kind, about: str, samples: Iterable[tuple[Labels, float | None]]
) -> Iterable[str]:
    """HELP, TYPE and sample lines of one metric family. ``about``: the help text.

    Samples whose value is None are left out.
    """
    yield from _head(name, kind, about)
    for labels, value in samples:
        if value is not None:
            yield f"{name}{_labels_text(labels)} {_number(value)}"


def _head(name: str, kind: str, about: str) -> Iterable[str]:
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"


def _labels_text(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


JSONObject = dict[str, Any]


class MetricsEndpoint:
    """``/metrics`` in Prometheus' text format.

    ``facts``: returns the server's status (``StatusEndpoints.facts``). ``decoders``: returns the statistics
    of the decode pool.
    """

    def __init__(
        self,
        facts: Callable[[], Awaitable[JSONObject]],
        metrics: RequestMetrics,
        decoders: Callable[[], DecodeStats],
    ) -> None:
        self._facts = facts
        self._metrics = metrics
        self._decoders = decoders

    async def answer(self, _: Request) -> Response:
        """Reply with all metrics; those of engine and memory are left out for a backend without account."""
        facts = await self._facts()
        lines = [*self._metrics.lines(), *_server_lines(facts), *_decoder_lines(self._decoders())]
        if "models" in facts:
            lines += _model_lines(facts)
        if "ledger" in facts:
            lines += [*_engine_lines(facts), *_memory_lines(facts)]
        return Response("\n".join(lines) + "\n", media_type=CONTENT_TYPE)


def _server_lines(facts: JSONObject) -> Iterable[str]:
    info = {"version": facts["vlfit"], "model": facts["model"], "device": facts.get("device", "")}
    yield from family_lines("vlfit_info", "gauge", "Version, model and device.", [(info, 1)])
    yield from family_lines(
        "vlfit_up_seconds", "gauge", "Seconds since the server started.", [({}, facts["uptime_s"])]
    )
    states = [({"state": state}, float(facts["state"] == state)) for state in ("ready", "asleep", "stopping")]
    yield from family_lines("vlfit_state", "gauge", "1 for the current state.", states)
    places = facts["places"]
    yield from family_lines(
        "vlfit_places",
        "gauge",
        "Admission slots: limit, and taken by running and waiting completions.",
        [({"kind": "limit"}, places["limit"]), ({"kind": "taken"}, places["taken"])],
    )


def _model_lines(facts: JSONObject) -> Iterable[str]:
    """Metrics of a server of several models."""
    rows = facts["models"]
    yield from family_lines(
        "vlfit_model_state",
        "gauge",
        "1 for the current state of each model.",
        [
            ({"model": row["model"], "state": state}, float(row["state"] == state))
            for row in rows
            for state in ("unloaded", "loading", "ready", "sleeping")
        ],
    )
    yield from family_lines(
        "vlfit_model_requests",
        "gauge",
        "Completions of each model, running and waiting, those in line for its memory included.",
        [({"model": row["model"], "state": s}, row[s]) for row in rows for s in ("running", "waiting")],
    )
    yield from family_lines(
        "vlfit_model_bytes",
        "gauge",
        "Memory of each model: planned and held on the device, and its weights that wait in RAM.",
        [({"model": row["model"], "kind": k}, row[k]) for row in rows for k in ("planned", "held", "ram")],
    )
    yield from family_lines(
        "vlfit_model_changes_total",
        "counter",
        "Models that were loaded or woken.",
        [({}, facts["model_changes"]["count"])],
    )


def _decoder_lines(decoders: DecodeStats) -> Iterable[str]:
    idle = decoders.workers - decoders.busy
    yield from family_lines(
        "vlfit_image_decode_workers",
        "gauge",
        "Processes that decode pictures.",
        [({"state": "busy"}, decoders.busy), ({"state": "idle"}, idle)],
    )
    yield from family_lines(
        "vlfit_image_decode_waiting",
        "gauge",
        "Pictures that wait for a decode worker or for RAM.",
        [({}, decoders.waiting)],
    )
    yield from family_lines(
        "vlfit_image_decode_room_bytes",
        "gauge",
        "RAM for decoding large pictures: limit, and taken.",
        [({"kind": "limit"}, decoders.memory_limit), ({"kind": "taken"}, decoders.memory_in_use)],
    )
    yield from family_lines(
        "vlfit_image_decode_stopped_total",
        "counter",
        "Pictures whose decoding was stopped: by a limit, by the client, or by a crash of the decoder.",
        [({"reason": reason}, count) for reason, count in decoders.stopped.items()],
    )


def _engine_lines(facts: JSONObject) -> Iterable[str]:
    requests, steps = facts["requests"], facts["steps"]
    yield from family_lines(
        "vlfit_engine_requests",
        "gauge",
        "Completions now in the engine.",
        [({"state": state}, requests[state]) for state in ("running", "waiting")],
    )
    yield from family_lines(
        "vlfit_engine_requests_total",
        "counter",
        "Completions that have left the engine.",
        [({"end": end}, requests[end]) for end in ("finished", "cancelled", "failed")],
    )
    yield from family_lines(
        "vlfit_engine_pauses_total",
        "counter",
        "Preemptions of running completions.",
        [({}, requests["pauses"])],
    )
    yield from family_lines(
        "vlfit_tokens_total",
        "counter",
        "Prompt tokens computed, prompt tokens found in the prefix cache, tokens generated.",
        [({"kind": kind}, facts["tokens"][kind]) for kind in ("prompt", "shared", "generated")],
    )
    for name, about, which in (
        ("vlfit_steps", "Engine steps", ""),
        ("vlfit_decode_steps", "Decode-only engine steps", "decode_"),
    ):
        yield from family_lines(f"{name}_total", "counter", f"{about}.", [({}, steps[f"{which}count"])])
        yield from family_lines(
            f"{name}_seconds_total", "counter", f"{about}, in seconds.", [({}, steps[f"{which}seconds"])]
        )
    blocks = facts["kv_blocks"]
    yield from family_lines(
        "vlfit_kv_blocks",
        "gauge",
        "KV cache blocks: total, used by requests, and full ones in the prefix cache.",
        [({"kind": kind}, blocks[kind]) for kind in ("total", "used", "known")],
    )


def _memory_lines(facts: JSONObject) -> Iterable[str]:
    memory, cache = facts["memory"], facts["image_cache"]
    ledger = [
        ({"line": row["line"], "kind": kind}, row[kind])
        for row in facts["ledger"]
        for kind in ("planned", "actual")
    ]
    yield from family_lines(
        "vlfit_ledger_bytes", "gauge", "Memory by ledger line, planned and actual.", ledger
    )
    card = memory["gpu"] or {}
    kinds = [({"kind": kind}, card[kind]) for kind in ("total", "free", "desktop") if kind in card]
    yield from family_lines("vlfit_gpu_bytes", "gauge", "GPU memory as the driver reports it.", kinds)
    yield from family_lines(
        "vlfit_held_bytes", "gauge", "GPU memory held by the server.", [({}, memory["held"])]
    )
    resident = memory["ram"]["resident"]
    yield from family_lines("vlfit_resident_bytes", "gauge", "Resident RAM of the process.", [({}, resident)])
    yield from family_lines(
        "vlfit_image_cache_bytes",
        "gauge",
        "Encoder cache: limit, and bytes taken.",
        [({"kind": kind}, cache[name]) for kind, name in (("limit", "limit"), ("taken", "bytes"))],
    )
    snapshots = facts["state_snapshots"]
    yield from family_lines(
        "vlfit_state_snapshots_bytes",
        "gauge",
        "Snapshots of recurrent states for the prefix cache: limit, and bytes taken.",
        [({"kind": kind}, snapshots[name]) for kind, name in (("limit", "limit"), ("taken", "bytes"))],
    )
