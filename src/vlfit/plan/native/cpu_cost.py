"""The native engine on a CPU: its RAM line by line, and how long tokens, prompts and pictures take there.

**The constants of speed stand at the top of this module**; ``python -m benchmarks.cpu_plan 2B-int4 2B-fp8``
runs the engine beside them and prints by which factor each prediction is off. ``READ_SHARE``,
``DECODE_WORK`` and ``LAYER_SECONDS`` decide tokens per second, ``PROMPT_SHARE`` and ``_ManyRows`` the first
token of a text, and with ``TOWER_SHARE`` that of a picture. All are relative to what
``machine/processor.py`` measures of a processor in a second: bytes that its cores read, and float32
operations of a matrix product.
"""

from dataclasses import dataclass
from functools import lru_cache

from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.catalog import BF16
from vlfit.checkpoint.quantization import FP8, INT4, INT8
from vlfit.machine.model import Processor
from vlfit.machine.processor import PORTABLE, vector_level
from vlfit.models.cache_spec import snapshot_ram_bytes
from vlfit.plan.calibration import MEASURED, MODELLED, Constant
from vlfit.plan.ledger import (
    Line,
    PlanSettings,
    desktop_line,
    kv_cache_note,
    state_cache_lines,
)
from vlfit.plan.native.cost import BLOCK_SIZE, feature_rows, kv_tokens, text_peak_bytes
from vlfit.plan.native.ram import (
    CpuWeights,
    image_decoders_line,
    snapshots_in_ram_line,
    weight_lines_in_ram,
    weights_in_ram,
)
from vlfit.plan.processors import Ram
from vlfit.plan.shapes import (
    HALF,
    HOST_SAMPLER_BYTES,
    SINGLE,
    Model,
    ModelFiles,
    kv_bytes_per_token,
    tower_cost,
)
from vlfit.plan.speed import BYTES_PER_WEIGHT, TEXT_TOKENS, Range, Speed
from vlfit.units import MIB

# --- speed: what the engine reaches of what was measured of the processor -----------------------------------

XEON = "two cores of a Xeon with AVX-512 (Sapphire Rapids), float32, 2B, 2026-11-23 (benchmarks/cpu_plan.py)"
# A prediction is its range's middle: low and high are this factor away, 1.5 from one to the other.
RANGE = 1.5**0.5
# Share of the measured bandwidth at which weights are read.
READ_SHARE = Constant(0.95, MEASURED, f"bfloat16 weights of a decode step; {XEON}")
# Operations, at the measured rate of a matrix product, for each weight of a decode step: decoding codes and
# multiplying them, as far as reading does not hide it, by form as it is multiplied.
DECODE_WORK = {BF16: 0.0, FP8: 2.0, INT8: 1.0, INT4: 2.0, "gguf": 2.0, "gguf_8": 2.0, "f16": 1.0, "f32": 0.0}
# Seconds for each layer of a decode step, beside its products: norms, attention.
LAYER_SECONDS = Constant(0.2e-3, MEASURED, f"of a decode step; {XEON}")
# Share of the measured operations per second that prompts reach in float32, and the tower.
PROMPT_SHARE = Constant(0.9, MEASURED, f"text of 256 tokens; {XEON}")
TOWER_SHARE = Constant(0.85, MEASURED, f"a picture of 256 tokens; {XEON}")
TOWER_ATTENTION_SHARE = Constant(0.6, MEASURED, f"of patches to all others, a picture of 1024 tokens; {XEON}")


@dataclass(frozen=True)
class _ManyRows:
    """How products of many rows compare with float32's: ``speed`` as a factor of the operations per second.

    ``unpack``: operations at that rate for each weight of a pass, before it is multiplied.
    """

    speed: float
    unpack: float


_IN_FLOAT32 = _ManyRows(1.0, 60.0)
_WIDENED = {
    "f16": _ManyRows(1.0, 0.0),
    "f32": _ManyRows(1.0, 0.0),
    "gguf": _ManyRows(1.0, 100.0),
    "gguf_8": _ManyRows(1.0, 100.0),
}
_AMX = {BF16: _ManyRows(2.5, 6.0), FP8: _ManyRows(2.2, 30.0)}
_INTEGERS = (INT4, INT8, "gguf", "gguf_8")  # forms that are multiplied as integers
_AMX |= dict.fromkeys(_INTEGERS, _ManyRows(2.2, 25.0))
# By vector unit and form, without a ``--dtype``: parts of bfloat16 (AMX), bfloat16, integers of 8 and of 16
# bits (``kernels/cpu/``). Prompts on the Xeon, also held to less; AVX2 beside products in float32 that were
# held to AVX2 as well. ``avx512_bf16``: two cores of an AMD EPYC (Zen 4), 2B, 2026-11-24. Integers of 8 bits
# with VNNI alone were not measured: what 16 bits reached on the Xeon, times what 8 gained on the EPYC.
_GAIN_OF_8_BITS = 1.6
_MANY_ROWS: dict[str, dict[str, _ManyRows]] = {
    "amx": _AMX,
    "avx512_bf16": {
        INT4: _ManyRows(3.1, 12.0),
        INT8: _ManyRows(2.1, 12.0),
        "gguf": _ManyRows(2.5, 14.0),
        "gguf_8": _ManyRows(1.9, 14.0),
        BF16: _ManyRows(2.1, 14.0),
        FP8: _ManyRows(2.0, 20.0),
    },
    "avx512_vnni": {
        **dict.fromkeys((INT4, "gguf"), _ManyRows(1.35 * _GAIN_OF_8_BITS, 44.0)),
        **dict.fromkeys((INT8, "gguf_8"), _ManyRows(1.35, 44.0)),
    },
    "avx2_vnni": {
        **dict.fromkeys((INT4, "gguf"), _ManyRows(1.5 * _GAIN_OF_8_BITS, 32.0)),
        **dict.fromkeys((INT8, "gguf_8"), _ManyRows(1.5, 32.0)),
    },
    "avx2": dict.fromkeys(_INTEGERS, _ManyRows(1.15, 30.0)),
}
# Bytes of a weight, from which on blocks keep inputs of 16 bits (Q5_1 has 0.75, Q6_K 0.82), and from which on
# it is in 16 bits itself.
_LEAST_GGUF_8, _LEAST_HALF = 0.8, 1.9
_FAST = "avx512_bf16"  # where integers of 16 bits are twice as many a second as float32's
_FAST_DECODE = 2.0  # by this ``DECODE_WORK`` of 4 and 8 bits is less there
# Attention in bfloat16, as a factor of what it is in float32.
_ATTENTION = {"avx512_bf16": 2.2}
# Models with fewer bytes a token (mini) are multiplied by torch, in float32, and lie in caches of many
# processors: 222 tokens/s, first token after 0.18 s on two cores of an AMD EPYC; 240 and 0.22 s on a Xeon.
SMALL_BYTES = 64 * MIB
SMALL_READ_SHARE, SMALL_LAYER_SECONDS, SMALL_FIRST_TOKEN = 0.55, 0.35e-3, 1.8
SMALL_RANGE = 3.0**0.5
SMALL_PICTURE = 256  # image tokens of 512x512 pixels
PICTURE_SECONDS = 0.05  # to decode and resize a picture, and to answer
# Products without vector units (portable C): no such processor was measured.
PORTABLE_FACTOR = 4.0

# --- RAM ----------------------------------------------------------------------------------------------------

RUNTIME = Constant(
    256 * MIB, MEASURED, "Python, torch, tokenizer and server: 184 MiB without weights, and air for requests"
)
WORKSPACE_SLACK = Constant(1.3, MEASURED, f"what malloc keeps beside the largest pass; {XEON}")
PRODUCT_BUFFER = 16 * MIB  # of weights widened for products of many rows (``kernels/cpu/products.py``)
RESERVE = Constant(
    512 * MIB, MODELLED, "a choice, not a measurement: air for other programs, as RAM that is full is slow"
)
CHUNK = EngineOptions().max_num_batched_tokens
IMAGE_CACHE = EngineOptions().image_cache_bytes


def keeps_16_bit(processor: Processor) -> bool:
    """Whether weights stay in float16 on ``processor`` where our products are not compiled.

    torch multiplies by those (FBGEMM) with AVX2 alone; elsewhere weights are widened to float32.
    """
    return "avx2" in processor.units


@lru_cache(maxsize=256)
def _weights(files: ModelFiles, *, cpu_16_bit: bool, cpu_stored: bool) -> dict[str, CpuWeights]:
    return weights_in_ram(files, SINGLE, cpu_16_bit=cpu_16_bit, cpu_stored=cpu_stored)


def weights_of(model: Model, processor: Processor) -> dict[str, CpuWeights]:
    """RAM of the weights by part of the model, for an engine that computes in float32 on ``processor``."""
    if model.files is None:
        raise ValueError(f"{model.name} has no files to count")
    return _weights(model.files, cpu_16_bit=keeps_16_bit(processor), cpu_stored=processor.compiles)


def pool_tokens(settings: PlanSettings) -> int:
    """How many tokens the KV cache has with ``settings``, in whole blocks."""
    return kv_tokens(settings.context, settings.sequences)


def lines_in_ram(model: Model, ram: Ram, settings: PlanSettings) -> tuple[Line, ...]:
    """The ledger of ``model`` on the processor of ``ram``, in the order in which the memory is taken."""
    weights = dict(weights_of(model, ram.processor))
    drafts = settings.uses_draft_model and bool(model.draft_cache)
    if not drafts:
        weights.pop("draft", None)
    spec = model.caches(drafts=settings.uses_draft_model)
    each, tokens = kv_bytes_per_token(spec, settings.kv_dtype, SINGLE), pool_tokens(settings)
    found = [
        desktop_line(ram, "what other programs hold"),
        Line("context", RUNTIME.bytes, RUNTIME.how, RUNTIME.source),
        *weight_lines_in_ram(weights, "float32", how=_how(model, ram.processor)),
        Line(
            "kv_cache",
            tokens * each,
            "exact",
            f"{kv_cache_note(tokens, each, settings)}, in blocks of {BLOCK_SIZE}",
        ),
        *state_cache_lines(spec, settings.sequences),
    ]
    if snapshots := snapshot_ram_bytes(spec):
        found.append(snapshots_in_ram_line(snapshots))
    found += _workspaces(model, settings)
    if model.vision is not None:
        found.append(image_decoders_line())
    found.append(Line("reserve", RESERVE.bytes, RESERVE.how, f"{RESERVE.bytes // MIB} MiB of air (a choice)"))
    return tuple(found)


def _how(model: Model, processor: Processor) -> str:
    """How large matrices are kept, in words."""
    if processor.compiles:
        return f"large matrices as stored ({model.weights})"
    return "large matrices widened to 16 bits" if keeps_16_bit(processor) else "all widened to 32 bits"


def _workspaces(model: Model, settings: PlanSettings) -> tuple[Line, Line]:
    """What passes take: of tower and text model, which never run at once, the larger one."""
    slack = WORKSPACE_SLACK.value
    text = round(slack * _text_peak(model, settings)) + PRODUCT_BUFFER
    note = f"{settings.chunk} tokens a pass at a context of {settings.context}, and logits, in float32"
    if model.vision is None or not settings.image_tokens:
        return Line("vision_workspace", 0, "exact", "no pictures"), Line(
            "text_workspace", text, MODELLED, note
        )
    tower = tower_cost(model.vision)
    widen = SINGLE // HALF
    peak = round(slack * widen * tower.peak_bytes(model.vision, settings.image_tokens, 0))
    rows = feature_rows(settings.chunk, settings.image_tokens)
    features = widen * tower.feature_bytes(model.vision, min(rows, settings.sequences * settings.context))
    kept = IMAGE_CACHE + features
    about = f"{kept / MIB:.0f} MiB of features, with those of pictures seen before; peak {peak / MIB:.0f} MiB"
    if text > peak:
        lent = f"{about} for {settings.image_tokens} image tokens, which text_workspace lends"
        return Line("vision_workspace", kept, MODELLED, lent), Line("text_workspace", text, MODELLED, note)
    return (
        Line("vision_workspace", kept + peak, MODELLED, f"{about} for {settings.image_tokens} image tokens"),
        Line("text_workspace", 0, MODELLED, f"{note}: {text / MIB:.0f} MiB, which vision_workspace lends"),
    )


def _text_peak(model: Model, settings: PlanSettings) -> int:
    """Bytes of the largest pass of the text model in float32: twice those of 16 bits, and a row's logits."""
    widen = SINGLE // HALF
    drafts = bool(model.draft_cache) and settings.uses_draft_model
    peak = text_peak_bytes(
        model,
        settings.chunk,
        settings.context,
        settings.sequences,
        drafts=drafts,
    )
    return widen * peak + model.text.vocab_size * HOST_SAMPLER_BYTES


def mapped_bytes(model: Model, processor: Processor) -> int:
    """Bytes of weights that are mapped from files: pages that the system drops if programs need RAM."""
    return sum(each.mapped for each in weights_of(model, processor).values())


_OTHERS = ("desktop", "reserve", "image_decoders")  # not of the process that computes


def anonymous_bytes(model: Model, processor: Processor, lines: tuple[Line, ...]) -> int:
    """Bytes of ``lines`` that are memory of the engine's own process, without the mapped weights.

    Other programs, the reserve and decode workers are left out.
    """
    return sum(line.bytes for line in lines if line.line not in _OTHERS) - mapped_bytes(model, processor)


# --- seconds ------------------------------------------------------------------------------------------------


def predict_cpu_speed(model: Model, ram: Ram, settings: PlanSettings) -> Speed | None:
    """The speed of one request: a picture of ``settings.image_tokens`` and a question of 40 tokens.

    None if the processor's speed is not known.
    """
    processor = ram.processor
    if processor.bandwidth is None or processor.multiplications is None:
        return None
    cached = settings.image_tokens + TEXT_TOKENS
    moved = _bytes_per_token(model, processor, settings, cached)
    step = decode_seconds(model, processor, settings, cached)
    first = first_token_seconds(model, processor, settings.image_tokens, TEXT_TOKENS, settings.chunk)
    factor = SMALL_RANGE if _is_small(model, processor) else RANGE
    around = Range(first / factor, first, first * factor)
    return Speed(
        decode=Range(1 / (step * factor), 1 / step, factor / step),
        first_token=around,
        roof=processor.bandwidth / moved,
        bytes_per_token=round(moved),
        likely_first_token=around,
        small_picture=_small_picture(model, processor, settings),
    )


def _small_picture(model: Model, processor: Processor, settings: PlanSettings) -> Range | None:
    """Seconds to the first token of a picture of 512x512 pixels; None if there are none."""
    if model.vision is None or not settings.image_tokens:
        return None
    tokens = min(SMALL_PICTURE, settings.image_tokens)
    seconds = first_token_seconds(model, processor, tokens, TEXT_TOKENS, settings.chunk)
    factor = SMALL_RANGE if _is_small(model, processor) else RANGE
    return Range(seconds / factor, seconds, seconds * factor)


def _forms(model: Model, processor: Processor) -> list[tuple[str, float, int]]:
    """Form, bytes of a weight and number of weights of all matrices that a token passes, head last."""
    counted = [*model.text_matrices, (model.head, 1)]
    if not processor.compiles:
        form, size = ("f16", HALF) if keeps_16_bit(processor) else ("f32", SINGLE)
        return [(form, size, matrix.num_weights * count) for matrix, count in counted]
    if model.gguf_type:
        return _gguf_forms(model, processor)
    return [
        (
            matrix.form if matrix.form in BYTES_PER_WEIGHT else BF16,
            BYTES_PER_WEIGHT.get(matrix.form, HALF),
            matrix.num_weights * count,
        )
        for matrix, count in counted
    ]


def _gguf_forms(model: Model, processor: Processor) -> list[tuple[str, float, int]]:
    """``_forms`` of a GGUF, whose matrices lie in RAM as they do in the file."""
    held = weights_of(model, processor)
    layers = [matrix.num_weights * count for matrix, count in model.text_matrices]
    tied = model.files is None or model.files.config.tie_word_embeddings
    in_layers = held["text"].total / max(sum(layers), 1)
    in_head = held["embedding"].total / max(model.head.num_weights * (1 if tied else 2), 1)
    form, of_head = map(_gguf_form, (in_layers, in_head))
    return [*((form, in_layers, count) for count in layers), (of_head, in_head, model.head.num_weights)]


def _gguf_form(size: float) -> str:
    """How weights of ``size`` bytes each, codes and scales, are multiplied."""
    if size >= _LEAST_HALF:
        return BF16
    return "gguf_8" if size >= _LEAST_GGUF_8 else "gguf"


def _bytes_per_token(model: Model, processor: Processor, settings: PlanSettings, cached: int) -> float:
    weights = sum(size * count for _, size, count in _forms(model, processor))
    keys = cached * kv_bytes_per_token(model.cache_spec, settings.kv_dtype, SINGLE)
    return weights + keys + model.state_bytes_per_step


def _is_small(model: Model, processor: Processor) -> bool:
    """Whether caches may hold ``model``, whose matrices are not kept as they are stored then."""
    return sum(size * count for _, size, count in _forms(model, processor)) < SMALL_BYTES


def decode_seconds(model: Model, processor: Processor, settings: PlanSettings, cached: int) -> float:
    """Expected seconds of a decode step with ``cached`` tokens before it.

    ``processor`` must have its speeds (``plan.processors.with_kept_speeds``).
    """
    bandwidth, rate = _speeds(processor)
    slow = PORTABLE_FACTOR if processor.compiles and vector_level(processor) == PORTABLE else 1.0
    fast = _FAST_DECODE if processor.compiles and vector_level(processor) == _FAST else 1.0
    work = sum(
        DECODE_WORK[form] * slow * count / (fast if form in _INTEGERS else 1.0)
        for form, _, count in _forms(model, processor)
    )
    moved = _bytes_per_token(model, processor, settings, cached)
    layers = model.text.num_hidden_layers
    if _is_small(model, processor):
        wide = SINGLE * model.num_weights_per_token
        return wide / (bandwidth * SMALL_READ_SHARE) + layers * SMALL_LAYER_SECONDS
    return moved / (bandwidth * READ_SHARE.value) + work / rate + layers * LAYER_SECONDS.value


def first_token_seconds(
    model: Model, processor: Processor, image_tokens: int, text_tokens: int, chunk: int = CHUNK
) -> float:
    """Expected seconds to the first token of a prompt with a picture and a text.

    ``image_tokens``: 0 without a picture. ``chunk``: prefill chunk in tokens. ``processor``: as in
    ``decode_seconds``.
    """
    _, rate = _speeds(processor)
    slow = PORTABLE_FACTOR if processor.compiles and vector_level(processor) == PORTABLE else 1.0
    prompt = image_tokens + text_tokens
    passes = -(-prompt // chunk)
    *layers, head = _forms(model, processor)
    text = model.text
    attention = 2.0 * prompt**2 * text.num_attention_heads * text.head_dim * text.num_hidden_layers
    attends = _ATTENTION.get(vector_level(processor), 1.0) if processor.compiles else 1.0
    seconds = (2.0 * head[2] + attention / attends) / (rate * PROMPT_SHARE.value)
    for form, _, count in layers:
        product = _many_rows(form, processor)
        seconds += 2.0 * count * prompt / (rate * PROMPT_SHARE.value * product.speed)
        seconds += slow * passes * product.unpack * count / rate
    seconds += passes * text.num_hidden_layers * LAYER_SECONDS.value
    if model.vision is not None and image_tokens:
        vision = model.vision
        patches = image_tokens * vision.spatial_merge_size**2
        between = 4.0 * patches**2 * vision.hidden_size * vision.depth
        products = tower_cost(vision).flops(vision, image_tokens) - between
        tower = model.vision_bytes // HALF if not model.tower_is_quantized else model.vision_bytes
        product = _many_rows(BF16 if processor.compiles else "f16", processor)
        seconds += products / (rate * TOWER_SHARE.value * product.speed)
        seconds += between / (rate * TOWER_ATTENTION_SHARE.value * attends)
        seconds += slow * product.unpack * tower / rate + PICTURE_SECONDS
    return seconds * (SMALL_FIRST_TOKEN if _is_small(model, processor) else 1.0)


def _many_rows(form: str, processor: Processor) -> _ManyRows:
    """Products of many rows with weights in ``form`` on ``processor``."""
    level = vector_level(processor) if processor.compiles else PORTABLE
    return _MANY_ROWS.get(level, {}).get(form) or _WIDENED.get(form, _IN_FLOAT32)


def _speeds(processor: Processor) -> tuple[int, int]:
    if processor.bandwidth is None or processor.multiplications is None:
        raise ValueError("the processor was not measured")
    return processor.bandwidth, processor.multiplications
