"""The plan of a model that the native engine has loaded: its ledger and the time of a decode step."""

from dataclasses import replace

from vlfit.checkpoint.catalog import BF16
from vlfit.checkpoint.quantization import FP8
from vlfit.checkpoint.source import Checkpoint
from vlfit.errors import VlfitError
from vlfit.machine.model import Gpu
from vlfit.models.cache_spec import state_bytes_per_sequence
from vlfit.models.registry import cache_spec_of
from vlfit.plan.actual import Expectation, Pace
from vlfit.plan.calibration import EXACT, with_bandwidth
from vlfit.plan.ledger import Line, PlanSettings, kv_note, state_bytes
from vlfit.plan.native.cost_model import NativeCosts
from vlfit.plan.native.ram import offload_of, weights_in_ram
from vlfit.plan.shapes import Model, kv_bytes_per_token, model_of
from vlfit.plan.speed import TEXT_TOKENS

_COSTS = NativeCosts()


def expect_on_gpu(
    checkpoint: Checkpoint, gpu: Gpu, settings: PlanSettings, value_bytes: int, kv_tokens: int | None = None
) -> Expectation:
    """The plan of ``checkpoint`` on ``gpu`` as it was before loading began.

    ``kv_tokens``: size of the KV cache where it is not the plan's own.
    """
    if value_bytes != 2:
        return Expectation(why_not="the plan counts values of 16 bits; this engine computes in others")
    gpu = with_bandwidth(gpu)
    try:
        model = model_of(checkpoint.name, checkpoint.config, checkpoint.tensors, "read from its headers")
        lines = _COSTS.lines(model, gpu, replace(settings, weights=model.weights))
        if kv_tokens is not None:
            lines = tuple(
                _pool(line, model, settings, kv_tokens) if line.line == "kv_cache" else line for line in lines
            )
    except VlfitError as error:
        return Expectation(why_not=error.message)

    waiting = offload_of(model, settings.offload).layers

    def step(cached: int) -> tuple[float, float] | None:
        # The prediction is for a picture and a question: together they are what the step reads of the cache.
        speed = _COSTS.speed(model, gpu, replace(settings, image_tokens=cached - TEXT_TOKENS))
        return None if speed is None else (1 / speed.decode.expected, 1 / speed.decode.low)

    few, many = step(TEXT_TOKENS), step(TEXT_TOKENS + settings.context)
    if few is None or many is None:
        return Expectation(lines, waiting=waiting)
    expected, slowest = (_pace(few[which], many[which], settings.context) for which in (0, 1))
    return Expectation(lines, expected, slowest, waiting=waiting)


def _pool(planned: Line, model: Model, settings: PlanSettings, tokens: int) -> Line:
    """The line of a KV cache of ``tokens``; the planned line if that is as large."""
    each = kv_bytes_per_token(model.cache_spec, settings.kv_dtype)
    size = tokens * each + state_bytes(model, settings)
    if size == planned.bytes:
        return planned
    return replace(planned, bytes=size, note=kv_note(tokens, each, settings))


def _pace(few: float, many: float, tokens: int) -> Pace:
    per_token = (many - few) / tokens
    return Pace(few - per_token * TEXT_TOKENS, per_token)


def expect_in_ram(
    checkpoint: Checkpoint,
    kv_tokens: int,
    value_bytes: int,
    *,
    cpu_16_bit: bool = False,
    kv_dtype: str = BF16,
    sequences: int = 0,
) -> Expectation:
    """Weights and KV cache in RAM, both exact. Workspaces and speed are not planned on a CPU.

    ``cpu_16_bit``: large matrices stay in 16 bits though values have ``value_bytes``. ``kv_dtype``: fp8, or
    any other name for values of ``value_bytes``. ``sequences``: most requests at once, each with its states.
    """
    sizes = weights_in_ram(checkpoint, value_bytes, cpu_16_bit=cpu_16_bit)
    per_token = kv_bytes_per_token(cache_spec_of(checkpoint.config), kv_dtype, value_bytes)
    states = sequences * state_bytes_per_sequence(cache_spec_of(checkpoint.config))
    narrow = " in FP8" if kv_dtype == FP8 else ""
    widened = f"values of {value_bytes} bytes" + (", large matrices in 2" if cpu_16_bit else "")
    return Expectation(
        (
            *(Line(f"weights.{part}", size, EXACT, widened) for part, size in sizes.items()),
            Line(
                "kv_cache",
                kv_tokens * per_token + states,
                EXACT,
                f"{kv_tokens} tokens of {per_token:,} bytes{narrow}",
            ),
        )
    )
