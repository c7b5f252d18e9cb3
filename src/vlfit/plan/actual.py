"""The plan against what is really held, line by line.

Knows: which line of the ledger a number that was measured belongs to, and which lines only have one number
together. Does not know how anything is measured (``engine/holdings.py``, ``machine/watch.py``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vlfit.checkpoint.cache import count_weights
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.source import Checkpoint
from vlfit.errors import VlfitError
from vlfit.machine.model import Gpu
from vlfit.plan.calibration import EXACT
from vlfit.plan.ledger import NATIVE, Line, Settings, ledger
from vlfit.plan.model import ledger_part, model_of
from vlfit.plan.speed import TEXT_TOKENS, predict
from vlfit.units import MIB

OURS = (
    *("context", "weights.text", "weights.vision", "weights.embedding", "kv_cache"),
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
class Expectation:
    """What the plan says of a model that is loaded: ledger lines, and how long a decode step takes.

    ``why_not`` says in words why there are no lines. ``expected`` and ``slowest`` are None where no bandwidth
    is known; a step that takes longer than ``slowest`` is outside of what the plan predicts.
    """

    lines: tuple[Line, ...] = ()
    expected: Pace | None = None
    slowest: Pace | None = None
    why_not: str = ""


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


def expect_on_gpu(checkpoint: Checkpoint, gpu: Gpu, settings: Settings, value_bytes: int) -> Expectation:
    """What the plan says of ``checkpoint`` on ``gpu`` as it was before loading began."""
    if value_bytes != 2:
        return Expectation(why_not="the plan counts values of 16 bits; this engine computes in others")
    try:
        model = model_of(checkpoint.name, checkpoint.config, checkpoint.tensors, "read from its headers")
        lines = ledger(model, gpu, NATIVE, replace(settings, weights=model.weights))
    except VlfitError as error:
        return Expectation(why_not=error.message)

    def step(cached: int) -> tuple[float, float] | None:
        # The prediction is for a picture and a question: together they are what the step reads of the cache.
        speed = predict(model, gpu, NATIVE, replace(settings, image_tokens=cached - TEXT_TOKENS))
        return None if speed is None else (1 / speed.decode.expected, 1 / speed.decode.low)

    few, many = step(TEXT_TOKENS), step(TEXT_TOKENS + settings.context)
    if few is None or many is None:
        return Expectation(lines)
    expected, slowest = (_pace(few[which], many[which], settings.context) for which in (0, 1))
    return Expectation(lines, expected, slowest)


def _pace(few: float, many: float, tokens: int) -> Pace:
    per_token = (many - few) / tokens
    return Pace(few - per_token * TEXT_TOKENS, per_token)


def expect_in_ram(checkpoint: Checkpoint, kv_tokens: int, value_bytes: int) -> Expectation:
    """What a CPU must hold: weights and KV cache, both exact. Workspaces and speed are not planned there."""
    sizes = _weights_in_ram(checkpoint.config, checkpoint, value_bytes)
    text = checkpoint.config.text
    per_token = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * value_bytes
    widened = f"values of {value_bytes} bytes"
    return Expectation(
        (
            *(Line(f"weights.{part}", size, EXACT, widened) for part, size in sizes.items()),
            Line("kv_cache", kv_tokens * per_token, EXACT, f"{kv_tokens} tokens of {per_token:,} bytes"),
        )
    )


def _weights_in_ram(config: ModelConfig, checkpoint: Checkpoint, value_bytes: int) -> dict[str, int]:
    """On a CPU every weight is widened, and the norms of q and k are repeated for each head."""
    heads = {
        ".q_norm.weight": config.text.num_attention_heads,
        ".k_norm.weight": config.text.num_key_value_heads,
    }
    sizes = {"text": 0, "vision": 0, "embedding": 0}
    for name, info in checkpoint.tensors.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        copies = next((count for ending, count in heads.items() if name.endswith(ending)), 1)
        sizes[ledger_part(name)] += copies * count_weights(info) * value_bytes
    return sizes


def held_on_gpu(
    gpu: Gpu, expectation: Expectation, weights: Mapping[str, int], kv_cache: int, reserved: int
) -> tuple[Row, ...]:
    """Rows for a model on a GPU. ``gpu`` was read by the process that runs it, which makes its share known.

    ``reserved`` is what torch took from the driver for tensors; ``weights`` and ``kv_cache`` are part of it.
    """
    planned = {line.line: line.bytes for line in expectation.lines}
    used = gpu.total - gpu.free
    ours = used - gpu.desktop
    if ours >= reserved > 0:
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
        "text_workspace": max(reserved - sum(weights.values()) - kv_cache, 0),
        "graphs": 0,
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
    expectation: Expectation,
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
    lines: Sequence[Line], actual: Mapping[str, int | None], remarks: Mapping[str, str]
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
    """Lines of ours that hold more than planned by over 3 %, and by how many bytes.

    The two workspaces have one number together, and are compared together.
    """
    over = []
    shared = sum(row.planned or 0 for row in found if row.line == "vision_workspace" and row.actual is None)
    for row in found:
        if row.line not in OURS or row.planned is None or row.actual is None:
            continue
        planned = row.planned + (shared if row.line == "text_workspace" else 0)
        more = row.actual - planned
        if more > max(TOLERANCE * planned, LEAST):
            over.append((row.line, more))
    return tuple(over)
