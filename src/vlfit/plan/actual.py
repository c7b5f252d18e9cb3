"""Planned and actual memory side by side, line by line.

Light to import, as ``vlfit top`` starts with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vlfit.machine.model import Gpu
from vlfit.plan.ledger import Line
from vlfit.units import MIB

OURS = (
    *("context", "weights.text", "weights.vision", "weights.embedding", "weights.offload", "kv_cache"),
    *("vision_workspace", "text_workspace", "graphs"),
)
# A line is off the plan by more than this share of it, and by more than 8 MiB.
TOLERANCE, MIN_DIFFERENCE = 0.03, 8 * MIB


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a decode step: ``base_s``, and ``per_token_s`` for each cached token that it reads."""

    base_s: float
    per_token_s: float

    def step(self, cached: float) -> float:
        """Seconds of a step that reads ``cached`` tokens, of all requests together."""
        return self.base_s + self.per_token_s * cached


@dataclass(frozen=True, slots=True)
class Row:
    """One line: bytes ``planned`` and ``actual``, None where not known; ``how`` the plan knows its number.

    ``remark`` is about the actual number.
    """

    line: str
    planned: int | None
    actual: int | None
    how: str = ""
    note: str = ""
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Expectation:
    """The plan of a model that is loaded: ledger lines, and the time of a decode step.

    ``why_not`` says why there are no lines. ``expected`` and ``slowest`` are None where no bandwidth is
    known; a step that takes longer than ``slowest`` is outside of the prediction. ``waiting``: indices of
    layers that are offloaded to RAM.
    """

    lines: tuple[Line, ...] = ()
    expected: Pace | None = None
    slowest: Pace | None = None
    why_not: str = ""
    waiting: tuple[int, ...] = ()


def compare_on_gpu(
    gpu: Gpu,
    expectation: Expectation,
    weights: Mapping[str, int],
    kv_cache: int,
    reserved: int,
    graphs: int = 0,
) -> tuple[Row, ...]:
    """Rows for a model on a GPU; ``gpu``: as the process that runs the model sees it.

    ``reserved`` is what torch took from the driver for tensors; ``weights``, ``kv_cache`` and ``graphs`` are
    part of it.
    """
    planned = {line.line: line.bytes for line in expectation.lines}
    used = gpu.total - gpu.free
    ours = used - gpu.desktop
    if ours >= max(reserved, 1):  # asleep, nothing is reserved
        desktop, context, remark = gpu.desktop, ours - reserved, ""
    else:
        # The driver does not report sizes of processes, as under WSL2.
        desktop = max(used - reserved - planned.get("context", 0), 0)
        context, remark = None, "the driver does not report this process: the planned context is taken"
    actual: dict[str, int | None] = {
        "desktop": desktop,
        "context": context,
        **weights,
        "kv_cache": kv_cache,
        "vision_workspace": None,
        "text_workspace": max(reserved - sum(weights.values()) - kv_cache - graphs, 0),
        "graphs": graphs,
        "reserve": None,
    }
    remarks = {
        "desktop": remark,
        "vision_workspace": "in text_workspace: torch takes both from one pool",
        "text_workspace": "both workspaces, and what torch keeps for the next one",
        "reserve": f"{gpu.free / MIB:,.0f} MiB of the card are free",
    }
    return rows(expectation.lines, actual, remarks)


def compare_in_ram(
    expectation: Expectation,
    weights: Mapping[str, int],
    kv_cache: int,
    image_cache: int,
    resident_before: int | None,
    decoders: int | None = None,
) -> tuple[Row, ...]:
    """Rows for a model on a CPU, in RAM of its process. ``decoders``: of its decode workers, if any."""
    actual: dict[str, int | None] = {
        "context": resident_before,
        **weights,
        "kv_cache": kv_cache,
        "vision_workspace": image_cache,
    }
    if any(line.line == "image_decoders" for line in expectation.lines):
        actual["image_decoders"] = decoders
    remarks = {
        "context": "RAM of the process before weights were loaded: Python and torch",
        "kv_cache": "RAM is taken page by page, as the cache fills",
        "vision_workspace": "features of pictures seen before; workspaces are unknown on a CPU",
        "image_decoders": "RAM of the processes that decode pictures; the plan is their limit",
    }
    return rows(expectation.lines, actual, remarks)


def rows(
    lines: Sequence[Line], actual: Mapping[str, int | None], remarks: Mapping[str, str]
) -> tuple[Row, ...]:
    """Planned lines and actual numbers side by side, in the order of ``actual``."""
    planned = {line.line: line for line in lines}
    compared = []
    for name, count in actual.items():
        line = planned.get(name)
        remark = remarks.get(name, "")
        if line is None:
            compared.append(Row(name, None, count, remark=remark))
        else:
            compared.append(Row(name, line.bytes, count, line.how, line.note, remark))
    return tuple(compared)


def totals(rows: Sequence[Row]) -> tuple[int | None, int | None]:
    """Bytes planned and actual of all rows; None where some are not known."""
    planned = [row.planned for row in rows if row.planned is not None]
    whole = len(planned) == len(rows)
    actual = [row.actual for row in rows if row.actual is not None]
    return (sum(planned) if whole and planned else None, sum(actual) if actual else None)


def over_plan(rows: Sequence[Row]) -> tuple[tuple[str, int], ...]:
    """Our lines that hold over 3 % more than planned, and by how many bytes."""
    return tuple((line, more) for line, more in off_plan(rows) if more > 0)


def off_plan(rows: Sequence[Row]) -> tuple[tuple[str, int], ...]:
    """Our lines that are off the plan by over 3 %, and by how many bytes: negative, they hold less.

    The two workspaces have one number together, and are compared together.
    """
    off = []
    for row in rows:
        if row.line not in OURS or row.planned is None or row.actual is None:
            continue
        planned = planned_for(row, rows)
        more = row.actual - planned
        if abs(more) > max(TOLERANCE * planned, MIN_DIFFERENCE):
            off.append((row.line, more))
    return tuple(off)


def planned_for(row: Row, rows: Sequence[Row]) -> int:
    """Bytes planned for ``row``: of both workspaces where they have one actual number together."""
    shared = row.line == "text_workspace"
    others = (each for each in rows if shared and each.line == "vision_workspace" and each.actual is None)
    return (row.planned or 0) + sum(each.planned or 0 for each in others)
