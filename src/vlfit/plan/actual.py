"""The plan against what is really held, line by line.

Knows: which line of the ledger a number that was measured belongs to, and which lines only have one number
together. Does not know how anything is measured (``usage.py``, ``survey.py``) or planned
(``plan/actual.py``), and imports neither, as ``vlfit top`` starts with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vlfit.checkpoint.catalog import BF16
from vlfit.checkpoint.quantization import FP8
from vlfit.checkpoint.source import Checkpoint
from vlfit.errors import VlfitError
from vlfit.machine.model import Gpu
from vlfit.plan.calibration import EXACT, with_bandwidth
from vlfit.plan.ledger import NATIVE, Line, Settings, kv_bytes, kv_words, ledger
from vlfit.plan.native.ram import offload_of, weights_in_ram
from vlfit.plan.shapes import Model, kv_bytes_per_token, model_of
from vlfit.plan.speed import TEXT_TOKENS, predict
from vlfit.units import MIB

OURS = (
    *("context", "weights.text", "weights.vision", "weights.embedding", "weights.offload", "kv_cache"),
    *("vision_workspace", "text_workspace", "graphs"),
)
# Above this a line is said to hold more than planned; below 8 MiB it is not worth a word.
TOLERANCE, LEAST = 0.03, 8 * MIB


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a decode step: ``base_s``, and ``per_token_s`` for each token that it reads of the cache."""

    base_s: float
    per_token_s: float

    def step(self, cached: float) -> float:
        """Seconds of a step that reads ``cached`` tokens, of all its requests together."""
        return self.base_s + self.per_token_s * cached


@dataclass(frozen=True, slots=True)
class Row:
    """One line: bytes ``planned`` and ``actual``, None where there is no such number; ``how`` the plan knows.

    ``remark`` is about the actual number.
    """

    line: str
    planned: int | None
    actual: int | None
    how: str = ""
    note: str = ""
    remark: str = ""


def held_on_gpu(
    gpu: "Gpu",
    expectation: "Expectation",
    weights: Mapping[str, int],
    kv_cache: int,
    reserved: int,
    graphs: int = 0,
) -> tuple[Row, ...]:
    """Rows for a model on a GPU. ``gpu`` was read by the process that runs it, which makes its share known.

    ``reserved`` is what torch took from the driver for tensors; ``weights``, ``kv_cache`` and ``graphs`` are
    part of it.
    """
    planned = {line.line: line.bytes for line in expectation.lines}
    used = gpu.total - gpu.free
    ours = used - gpu.desktop
    if ours >= max(reserved, 1):  # asleep, nothing is reserved
        desktop, context, remark = gpu.desktop, ours - reserved, ""
    else:
        # As under WSL2: the driver names no sizes of processes.
        desktop = max(used - reserved - planned.get("context", 0), 0)
        context, remark = None, "the driver tells no share of this process: the planned context is taken"
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


def held_in_ram(
    expectation: "Expectation",
    weights: Mapping[str, int],
    kv_cache: int,
    image_cache: int,
    resident_before: int | None,
) -> tuple[Row, ...]:
    """Rows for a model on a CPU: RAM of its process."""
    actual: dict[str, int | None] = {
        "context": resident_before,
        **weights,
        "kv_cache": kv_cache,
        "vision_workspace": image_cache,
    }
    remarks = {
        "context": "RAM of the process before weights were loaded: Python and torch",
        "kv_cache": "RAM is taken page by page, as the cache fills",
        "vision_workspace": "features of pictures seen before; workspaces are not told on a CPU",
    }
    return rows(expectation.lines, actual, remarks)


def rows(
    lines: "Sequence[Line]", actual: Mapping[str, int | None], remarks: Mapping[str, str]
) -> tuple[Row, ...]:
    """Planned lines and actual numbers side by side, in the order of ``actual``, the ledger's own."""
    planned = {line.line: line for line in lines}
    found = []
    for name, count in actual.items():
        line = planned.get(name)
        remark = remarks.get(name, "")
        if line is None:
            found.append(Row(name, None, count, remark=remark))
        else:
            found.append(Row(name, line.bytes, count, line.how, line.note, remark))
    return tuple(found)


def totals(found: Sequence[Row]) -> tuple[int | None, int | None]:
    """Bytes planned and actual of all rows; None where a sum would leave a line out."""
    planned = [row.planned for row in found if row.planned is not None]
    whole = len(planned) == len(found)
    actual = [row.actual for row in found if row.actual is not None]
    return (sum(planned) if whole and planned else None, sum(actual) if actual else None)


def over_plan(found: Sequence[Row]) -> tuple[tuple[str, int], ...]:
    """Lines of ours that hold more than planned by over 3 %, and by how many bytes."""
    return tuple((line, more) for line, more in off_plan(found) if more > 0)


def off_plan(found: Sequence[Row]) -> tuple[tuple[str, int], ...]:
    """Lines of ours that are off the plan by over 3 %, and by how many bytes: negative, they hold less.

    The two workspaces have one number together, and are compared together.
    """
    off = []
    for row in found:
        if row.line not in OURS or row.planned is None or row.actual is None:
            continue
        planned = planned_for(row, found)
        more = row.actual - planned
        if abs(more) > max(TOLERANCE * planned, LEAST):
            off.append((row.line, more))
    return tuple(off)


def planned_for(row: Row, found: Sequence[Row]) -> int:
    """Bytes planned for what ``row`` holds: of both workspaces where they have one number together."""
    shared = row.line == "text_workspace"
    others = (each for each in found if shared and each.line == "vision_workspace" and each.actual is None)
    return (row.planned or 0) + sum(each.planned or 0 for each in others)


# What the plan says of a model that is loaded: its ledger, and how long a decode step takes.
#
# Knows: how to ask the planner for a checkpoint with settings that are already chosen. Does not know what
# is really held (``actual.py``).


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the plan says of a model that is loaded: ledger lines, and how long a decode step takes.

    ``why_not`` says in words why there are no lines. ``expected`` and ``slowest`` are None where no bandwidth
    is known; a step that takes longer than ``slowest`` is outside of what the plan predicts. ``waiting``:
    layers that are in RAM.
    """

    lines: tuple[Line, ...] = ()
    expected: Pace | None = None
    slowest: Pace | None = None
    why_not: str = ""
    waiting: tuple[int, ...] = ()


def expect_on_gpu(
    checkpoint: Checkpoint, gpu: Gpu, settings: Settings, value_bytes: int, kv_tokens: int | None = None
) -> Expectation:
    """What the plan says of ``checkpoint`` on ``gpu`` as it was before loading began.

    ``kv_tokens``: of a pool that has another size than the plan's own.
    """
    if value_bytes != 2:
        return Expectation(why_not="the plan counts values of 16 bits; this engine computes in others")
    gpu = with_bandwidth(gpu)
    try:
        model = model_of(checkpoint.name, checkpoint.config, checkpoint.tensors, "read from its headers")
        lines = ledger(model, gpu, NATIVE, replace(settings, weights=model.weights))
        if kv_tokens is not None:
            lines = tuple(
                _pool(line, model, settings, kv_tokens) if line.line == "kv_cache" else line for line in lines
            )
    except VlfitError as error:
        return Expectation(why_not=error.message)

    waiting = offload_of(model, settings.offload).layers

    def step(cached: int) -> tuple[float, float] | None:
        # The prediction is for a picture and a question: together they are what the step reads of the cache.
        speed = predict(model, gpu, NATIVE, replace(settings, image_tokens=cached - TEXT_TOKENS))
        return None if speed is None else (1 / speed.decode.expected, 1 / speed.decode.low)

    few, many = step(TEXT_TOKENS), step(TEXT_TOKENS + settings.context)
    if few is None or many is None:
        return Expectation(lines, waiting=waiting)
    expected, slowest = (_pace(few[which], many[which], settings.context) for which in (0, 1))
    return Expectation(lines, expected, slowest, waiting=waiting)


def _pool(planned: Line, model: Model, settings: Settings, tokens: int) -> Line:
    """The line of a KV pool of ``tokens``, the planned one if that is as large."""
    each = kv_bytes(model, NATIVE, settings)
    if tokens * each == planned.bytes:
        return planned
    return replace(planned, bytes=tokens * each, note=kv_words(tokens, each, settings))


def _pace(few: float, many: float, tokens: int) -> Pace:
    per_token = (many - few) / tokens
    return Pace(few - per_token * TEXT_TOKENS, per_token)


def expect_in_ram(
    checkpoint: Checkpoint,
    kv_tokens: int,
    value_bytes: int,
    *,
    halves: bool = False,
    kv_dtype: str = BF16,
) -> Expectation:
    """What a CPU must hold: weights and KV cache, both exact. Workspaces and speed are not planned there.

    ``halves``: large matrices are kept in 16 bits though values have ``value_bytes``. ``kv_dtype``: fp8, or
    whatever stands for values as they are.
    """
    sizes = weights_in_ram(checkpoint, value_bytes, halves=halves)
    per_token = kv_bytes_per_token(checkpoint.config.text, kv_dtype, value_bytes)
    narrow = " in FP8" if kv_dtype == FP8 else ""
    widened = f"values of {value_bytes} bytes" + (", large matrices in 2" if halves else "")
    return Expectation(
        (
            *(Line(f"weights.{part}", size, EXACT, widened) for part, size in sizes.items()),
            Line(
                "kv_cache", kv_tokens * per_token, EXACT, f"{kv_tokens} tokens of {per_token:,} bytes{narrow}"
            ),
        )
    )
