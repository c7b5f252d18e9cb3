"""What is expected of a model that the native engine has loaded: ledger and duration of a decode step."""

from dataclasses import replace

from vlfit.checkpoint.catalog import BF16
from vlfit.checkpoint.quantization import FP8
from vlfit.checkpoint.source import Checkpoint
from vlfit.checkpoint.tensors import has_draft_model, used_cache_spec
from vlfit.errors import VlfitError
from vlfit.machine.model import Gpu
from vlfit.plan.actual import Expectation, StepTime
from vlfit.plan.calibration import EXACT, with_bandwidth
from vlfit.plan.ledger import Line, PlanSettings, kv_cache_note, state_cache_lines
from vlfit.plan.native.cost_model import NativeCosts
from vlfit.plan.native.ram import Headers, offload_of, weight_lines_in_ram, weights_in_ram
from vlfit.plan.shapes import FROM_HEADERS, Model, kv_bytes_per_token, model_of
from vlfit.plan.speed import TEXT_TOKENS

_COSTS = NativeCosts()


def expect_on_gpu(
    checkpoint: Checkpoint, gpu: Gpu, settings: PlanSettings, value_bytes: int, kv_tokens: int | None = None
) -> Expectation:
    """What the plan expects of ``checkpoint`` on ``gpu``. ``gpu``: as it was before loading began.

    ``settings``: of the running engine; ``settings.weights`` is ignored. ``value_bytes``: of the engine's
    dtype; any but 2 gives no lines. ``kv_tokens``: actual size of the KV cache; None: as planned. If there is
    no plan, ``no_lines_reason`` says why; no ``VlfitError`` is raised.
    """
    if value_bytes != 2:
        return Expectation(
            no_lines_reason="the plan counts values of 16 bits; this engine computes in others"
        )
    gpu = with_bandwidth(gpu)
    try:
        model = model_of(checkpoint.name, checkpoint.config, checkpoint.tensors, FROM_HEADERS)
        model = replace(model, weights=checkpoint.stored_format)  # what people call it, in notes
        lines = _COSTS.lines(model, gpu, replace(settings, weights=model.weights))
        if kv_tokens is not None:
            lines = tuple(
                _pool(line, model, settings, kv_tokens) if line.line == "kv_cache" else line for line in lines
            )
    except VlfitError as error:
        return Expectation(no_lines_reason=error.message)

    waiting = offload_of(model, settings.offloaded_layers).layers

    def step(cached: int) -> tuple[float, float] | None:
        # The prediction is for a picture and a question: together they are what the step reads of the cache.
        speed = _COSTS.speed(model, gpu, replace(settings, image_tokens=cached - TEXT_TOKENS))
        return None if speed is None else (1 / speed.decode.expected, 1 / speed.decode.low)

    few, many = step(TEXT_TOKENS), step(TEXT_TOKENS + settings.context)
    if few is None or many is None:
        return Expectation(lines, offloaded_layers=waiting)
    expected, slowest = (_pace(few[which], many[which], settings.context) for which in (0, 1))
    return Expectation(lines, expected, slowest, offloaded_layers=waiting)


def _pool(planned: Line, model: Model, settings: PlanSettings, tokens: int) -> Line:
    """The line of a KV cache of ``tokens``; the planned line if that is as large."""
    each = kv_bytes_per_token(model.caches(drafts=settings.uses_draft_model), settings.kv_dtype)
    size = tokens * each
    if size == planned.bytes:
        return planned
    return replace(planned, bytes=size, note=kv_cache_note(tokens, each, settings))


def _pace(few: float, many: float, tokens: int) -> StepTime:
    per_token = (many - few) / tokens
    return StepTime(few - per_token * TEXT_TOKENS, per_token)


def expect_in_ram(
    checkpoint: Headers,
    kv_tokens: int,
    value_bytes: int,
    *,
    cpu_16_bit: bool = False,
    cpu_stored: bool = False,
    kv_dtype: str = BF16,
    sequences: int,
    speculate: bool = True,
) -> Expectation:
    """What the plan expects of ``checkpoint`` on a CPU: weights and KV cache, both exact, and nothing else.

    ``value_bytes``: of the engine's dtype. ``cpu_16_bit``: large matrices stay in 16 bits all the same.
    ``cpu_stored``: they stay as they are stored, which goes before it.
    ``kv_dtype``: fp8, or any other name for values of ``value_bytes``. ``sequences``: number of requests
    whose recurrent states are counted. ``speculate``: a draft model of the checkpoint is loaded.
    """
    sizes = weights_in_ram(checkpoint, value_bytes, cpu_16_bit=cpu_16_bit, cpu_stored=cpu_stored)
    if not speculate or not has_draft_model(checkpoint.config, checkpoint.tensors):
        sizes.pop("draft", None)
    spec = used_cache_spec(checkpoint.config, checkpoint.tensors, speculate=speculate)
    per_token = kv_bytes_per_token(spec, kv_dtype, value_bytes)
    narrow = " in FP8" if kv_dtype == FP8 else ""
    large = "" if cpu_stored or not cpu_16_bit else ", large matrices in 2"
    widened = f"values of {value_bytes} bytes{large}"
    return Expectation(
        (
            *weight_lines_in_ram(sizes, widened),
            Line(
                "kv_cache",
                kv_tokens * per_token,
                EXACT,
                f"{kv_tokens} tokens of {per_token:,} bytes{narrow}",
            ),
            *state_cache_lines(spec, sequences),
        )
    )
