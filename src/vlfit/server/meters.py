"""What is counted of requests, and how numbers are written for Prometheus. No clock of its own.

Knows: sums, buckets and the text format (https://prometheus.io/docs/instrumenting/exposition_formats/).
Does not know: who asks or where numbers come from (``metrics.py``). Written by hand as it is forty lines:
the engine counts already, and a registry beside it would have to be fed with what is known.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

from vlfit.engine.answer import Chunk

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
