"""What the plan says of a model that is loaded: its ledger, and how long a decode step takes.

Knows: how to ask the planner for a checkpoint with settings that are already chosen. Does not know what is
really held (``actual.py``).
"""

from dataclasses import dataclass, replace

from vlfit.checkpoint.catalog import BF16
from vlfit.checkpoint.quantization import FP8
from vlfit.checkpoint.source import Checkpoint
from vlfit.errors import VlfitError
from vlfit.machine.model import Gpu
from vlfit.plan.actual import Pace
from vlfit.plan.calibration import EXACT, with_bandwidth
from vlfit.plan.in_ram import weights_in_ram
from vlfit.plan.ledger import NATIVE, Line, Settings, kv_bytes, kv_words, ledger
from vlfit.plan.model import Model, kv_bytes_per_token, model_of
from vlfit.plan.offload import offload_of
from vlfit.plan.speed import TEXT_TOKENS, predict


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
