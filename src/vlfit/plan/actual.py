"""Planned and actual memory side by side, line by line.

Light to import, as ``vlfit top`` starts with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vlfit.machine.model import Gpu
from vlfit.plan.ledger import Line
from vlfit.units import MIB

OURS = (
    *("context", "weights.text", "weights.vision", "weights.embedding", "weights.draft", "weights.offload"),
    *("kv_cache", "state_cache", "state_snapshots", "vision_workspace", "text_workspace", "graphs"),
)
# Lines that are not the engine's, or limits that it need not reach.
_OF_OTHERS = (
    *("desktop", "reserve", "image_decoders", "state_snapshots", "snapshots_in_ram", "vision_workspace"),
)
# A line is off the plan by more than this share of it, and by more than 8 MiB.
TOLERANCE, MIN_DIFFERENCE = 0.03, 8 * MIB


@dataclass(frozen=True, slots=True)
class StepTime:
    """Duration of a decode step: ``base_s`` seconds, plus ``per_token_s`` for each cached token it reads."""

    base_s: float
    per_token_s: float

    def step(self, cached: float) -> float:
        """Seconds of a decode step that reads ``cached`` tokens, summed over the requests of the batch."""
        return self.base_s + self.per_token_s * cached


@dataclass(frozen=True, slots=True)
class Row:
    """The ledger line named ``line`` with ``planned`` and ``actual`` bytes; None: not known.

    ``how`` (exact, measured or modelled) and ``note`` explain ``planned``, ``remark`` explains ``actual``.
    Without a planned number, ``how`` and ``note`` are "".
    """

    line: str
    planned: int | None
    actual: int | None
    how: str = ""
    note: str = ""
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the plan expects of a loaded model: ledger ``lines``, and the duration of a decode step.

    ``expected`` and ``slowest`` are None if no bandwidth is known; a decode step that takes longer than
    ``slowest`` contradicts the plan. ``no_lines_reason``: why there are no lines, or why actual numbers are
    only those of the start (vLLM); else "". ``offloaded_layers``: indices of text layers kept in RAM.
    """

    lines: tuple[Line, ...] = ()
    expected: StepTime | None = None
    slowest: StepTime | None = None
    no_lines_reason: str = ""
    offloaded_layers: tuple[int, ...] = ()


def compare_on_gpu(
    gpu: Gpu,
    expectation: Expectation,
    weights: Mapping[str, int],
    kv_cache: int,
    reserved: int,
    graphs: int = 0,
    states: int = 0,
    snapshots: int = 0,
) -> tuple[Row, ...]:
    """Rows of planned and actual bytes, one for each ledger line of a model on a GPU.

    ``gpu``: as it is now, read by the process that runs the model, so ``gpu.desktop`` is what others hold.
    ``reserved``: bytes that torch took from the driver (0 asleep). They consist of ``weights`` (by name of
    the ledger line), ``kv_cache``, recurrent ``states``, ``snapshots`` of them, ``graphs``, and the rest,
    which is the actual ``text_workspace``.

    If the driver does not report this process, the actual ``context`` is None, and ``desktop`` is what is
    left of the used memory after ``reserved`` and the planned context.
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
        **_states(expectation, states),
        **({"state_snapshots": snapshots} if "state_snapshots" in planned else {}),
        "vision_workspace": None,
        "text_workspace": max(reserved - sum(weights.values()) - kv_cache - states - snapshots - graphs, 0),
        "graphs": graphs,
        "reserve": None,
    }
    remarks = {
        "desktop": remark,
        "vision_workspace": "in text_workspace: torch takes both from one pool",
        "text_workspace": "both workspaces, and what torch keeps for the next one",
        "reserve": f"{gpu.free / MIB:,.0f} MiB of the card are free",
    }
    return pair_rows(expectation.lines, actual, remarks)


def compare_in_ram(
    expectation: Expectation,
    weights: Mapping[str, int],
    kv_cache: int,
    image_cache: int,
    resident_before: int | None,
    decoders: int | None = None,
    states: int = 0,
    snapshots: int = 0,
) -> tuple[Row, ...]:
    """Rows of planned and actual bytes of RAM, one for each ledger line of a model on a CPU.

    ``weights``: bytes by name of the ledger line. ``image_cache``: bytes of cached image features, the actual
    ``vision_workspace``. ``resident_before``: RAM of the process before weights were loaded, the actual
    ``context``. ``states``: bytes of recurrent states; ``snapshots``: of copies of them. ``decoders``: RAM of
    the decode workers. Both are ignored if the plan has no line for them. None: not known.
    """
    actual: dict[str, int | None] = {
        "context": resident_before,
        **weights,
        "kv_cache": kv_cache,
        **_states(expectation, states),
        "vision_workspace": image_cache,
    }
    limited = {"snapshots_in_ram": snapshots, "image_decoders": decoders}
    planned = {line.line for line in expectation.lines}
    actual |= {name: count for name, count in limited.items() if name in planned}
    remarks = {
        "context": "RAM of the process before weights were loaded: Python and torch",
        "kv_cache": "RAM is taken page by page, as the cache fills",
        "vision_workspace": "features of pictures seen before; workspaces are unknown on a CPU",
        "snapshots_in_ram": "copies of states taken so far; the plan is their limit",
        "image_decoders": "RAM of the processes that decode pictures; the plan is their limit",
    }
    return pair_rows(expectation.lines, actual, remarks)


def _states(expectation: Expectation, states: int) -> dict[str, int | None]:
    """The row of recurrent states; none for a model without."""
    is_planned = any(line.line == "state_cache" for line in expectation.lines)
    return {"state_cache": states} if states or is_planned else {}


def pair_rows(
    lines: Sequence[Line], actual: Mapping[str, int | None], remarks: Mapping[str, str]
) -> tuple[Row, ...]:
    """A row for each entry of ``actual``, in its order; ``planned`` is None if ``lines`` lacks the name.

    ``actual`` and ``remarks``: by name of the ledger line. ``lines`` whose name is not in ``actual`` are left
    out.
    """
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
    """Sums of planned and of actual bytes.

    The first is None if any row lacks planned bytes, the second only if all rows lack actual bytes.
    """
    planned = [row.planned for row in rows if row.planned is not None]
    whole = len(planned) == len(rows)
    actual = [row.actual for row in rows if row.actual is not None]
    return (sum(planned) if whole and planned else None, sum(actual) if actual else None)


def planned_and_held(rows: Sequence[Row]) -> tuple[int, int]:
    """Bytes planned for the engine's own lines whose actual bytes are known, too, and these bytes.

    Lines of others, and limits that an engine need not reach, are left out.
    """
    known = [(row.planned, row.actual) for row in rows if row.line not in _OF_OTHERS]
    both = [(planned, held) for planned, held in known if planned is not None and held is not None]
    return sum(planned for planned, _ in both), sum(held for _, held in both)


def lines_over_plan(rows: Sequence[Row]) -> tuple[tuple[str, int], ...]:
    """``lines_off_plan`` without the lines that hold less than planned: (name, bytes in excess)."""
    return tuple((line, more) for line, more in lines_off_plan(rows) if more > 0)


def lines_off_plan(rows: Sequence[Row]) -> tuple[tuple[str, int], ...]:
    """(name, actual minus planned bytes) of each line that differs by over 3 % of its plan and over 8 MiB.

    Only lines in ``OURS`` (not ``desktop``, ``reserve`` or ``image_decoders``), and only rows with both
    numbers. If ``vision_workspace`` has no actual number, ``text_workspace`` is compared with both plans.
    """
    off = []
    for row in rows:
        if row.line not in OURS or row.planned is None or row.actual is None:
            continue
        planned = planned_bytes_of(row, rows)
        more = row.actual - planned
        if abs(more) > max(TOLERANCE * planned, MIN_DIFFERENCE):
            off.append((row.line, more))
    return tuple(off)


def planned_bytes_of(row: Row, rows: Sequence[Row]) -> int:
    """Planned bytes to compare ``row.actual`` with; 0 if none are planned.

    For ``text_workspace``: with those of ``vision_workspace`` added, if that row of ``rows`` has no actual
    number, as ``text_workspace`` has the actual bytes of both then.
    """
    shared = row.line == "text_workspace"
    others = (each for each in rows if shared and each.line == "vision_workspace" and each.actual is None)
    return (row.planned or 0) + sum(each.planned or 0 for each in others)
