"""Ledger of a model that the native engine knows, in bf16, as transformers runs it with sdpa."""

from dataclasses import replace

from vlfit.checkpoint.config import VisionConfig
from vlfit.machine.model import Gpu
from vlfit.plan import allocator, calibration
from vlfit.plan.calibration import CONTEXT_ELSEWHERE, EXACT, H200, MEASURED, Constant
from vlfit.plan.ledger import (
    Line,
    PlanSettings,
    VisionPeak,
    cuda_context_line,
    desktop_line,
    kv_cache_line,
    reserve_line,
    weight_lines,
    workspace_lines,
)
from vlfit.plan.shapes import (
    HALF,
    HOST_SAMPLER_BYTES,
    SINGLE,
    Model,
    feature_bytes,
    kv_bytes_per_token,
    pass_input_bytes,
)
from vlfit.units import MIB

# Without what the native engine does about stacks (``engine/device.py``).
_CONTEXT_MEASURED = {
    (9, 0): Constant(704 * MIB, MEASURED, f"process less torch's pool, 2B, 4B and 8B, bf16; {H200}"),
}
# transformers 5.17.
VISION_PER_TOKEN = Constant(
    0.162 * MIB,
    MEASURED,
    f"peak of the 2B's tower in transformers 5.17, linear from 256 to 16384 tokens; {H200}",
)
# Reserved growth / peak of live tensors: 200/166, 802/665 and 3210/2660 MiB for 1024, 4096, 16384 image
# tokens.
VISION_SLACK = Constant(
    1.21, MEASURED, f"torch's pool grows by more than what lives in it, the 2B's tower; {H200}"
)
TEXT_SLACK = Constant(
    1.4,
    MEASURED,
    "torch's pool over the peak of a pass: keys and values that stay are cut out of workspaces, which are "
    f"then taken anew; 0.7-1.36 in five processes with one to eight requests, 2B, 4B and 8B in bf16; {H200}",
)


def transformers_lines(model: Model, gpu: Gpu, settings: PlanSettings) -> tuple[Line, ...]:
    """The ledger of ``model`` under transformers on ``gpu``, in the order in which the memory is taken."""
    constants = calibration.constants_for(gpu)
    return (
        desktop_line(gpu),
        cuda_context_line(cuda_context(gpu), constants),
        *_weights(model),
        kv_cache_line(
            model, settings, pool_tokens(settings), kv_bytes_per_token(model.cache_spec, settings.kv_dtype)
        ),
        *workspace_lines(
            settings,
            round(TEXT_SLACK.value * text_peak_bytes(model, settings)),
            _vision_peak(model, settings),
            _pool_overhead(model, settings),
            constants,
        ),
        Line("graphs", 0, EXACT, "the transformers backend captures no CUDA graphs"),
        reserve_line(),
    )


def cuda_context(gpu: Gpu) -> Constant:
    """Bytes that CUDA and its libraries hold beside torch's pool in a process of transformers.

    Not from the calibration, which is of the native engine.
    """
    return _CONTEXT_MEASURED.get(gpu.compute_capability, CONTEXT_ELSEWHERE)


def pool_tokens(settings: PlanSettings) -> int:
    """How many tokens the KV cache has: ``settings.sequences`` whole contexts."""
    return settings.context * settings.sequences


def tower_peak_bytes(image_tokens: int) -> int:
    """Peak bytes of transformers' vision tower for ``image_tokens`` in one call, of one or more pictures.

    Measured with Qwen3-VL 2B and taken for every model.
    """
    return round(image_tokens * VISION_PER_TOKEN.value)


def text_peak_bytes(model: Model, settings: PlanSettings) -> int:
    """Peak bytes of a text pass over the prompts of all requests, each of ``settings.chunk`` tokens.

    Without weights and KV cache. The inputs, and the largest of: logits with one row being sampled, or a step
    of a layer in plain PyTorch (bf16, norms in float32).
    """
    text = model.text
    rows = max(settings.chunk * settings.sequences, settings.sequences)
    logits = settings.sequences * text.vocab_size * HALF + text.vocab_size * HOST_SAMPLER_BYTES
    hidden, inner = text.hidden_size, text.intermediate_size
    queries, keys = text.num_attention_heads * text.head_dim, text.num_key_value_heads * text.head_dim
    joined = queries + 2 * keys
    norm = rows * ((2 * SINGLE + HALF) * hidden + SINGLE)  # the last: each row's mean square
    x = rows * HALF * hidden
    head_norm = x + rows * (HALF * joined + (2 * SINGLE + HALF) * (queries + keys))
    head_norm += rows * SINGLE * (text.num_attention_heads + text.num_key_value_heads)
    output = x + rows * HALF * (joined + 2 * (queries + keys) + queries) + x
    gate_up = x + rows * 2 * HALF * inner
    return pass_input_bytes(model, rows, settings.sequences) + max(logits, norm, head_norm, output, gate_up)


def _weights(model: Model) -> tuple[Line, ...]:
    """Weights with one row of a q or k norm for all heads; the native engine repeats it for each."""
    first, *others = weight_lines(model)
    text = model.text
    if not text.query_key_norm:
        return first, *others
    heads = text.num_attention_heads - 1 + text.num_key_value_heads - 1
    less = text.num_hidden_layers * heads * text.head_dim * HALF
    return replace(first, bytes=first.bytes - less), *others


def _vision_peak(model: Model, settings: PlanSettings) -> VisionPeak | None:
    """The pictures of all requests in one call; features and pixels of all stay to the end."""
    vision = model.vision
    if vision is None or not settings.image_tokens:
        return None
    slack = VISION_SLACK.value
    features = feature_bytes(vision, settings.image_tokens)
    kept = settings.sequences * (features + _pixels(vision, settings.image_tokens))
    peak = round(slack * tower_peak_bytes(settings.image_tokens * settings.sequences))
    # There are no keys and values yet while the tower runs.
    kv_cache = pool_tokens(settings) * kv_bytes_per_token(model.cache_spec, settings.kv_dtype)
    return VisionPeak(settings.image_tokens, round(slack * kept), peak, kv_cache, "features and pixels")


def _pixels(vision: VisionConfig, image_tokens: int) -> int:
    """Patches in float32, as transformers' processor makes them."""
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return image_tokens * vision.spatial_merge_size**2 * values * SINGLE


def _pool_overhead(model: Model, settings: PlanSettings) -> int:
    """Bytes of torch's pool beside weights and KV cache, of which each layer has two tensors."""
    kv_cache = pool_tokens(settings) * kv_bytes_per_token(model.cache_spec, settings.kv_dtype)
    tensors = 2 * model.text.num_hidden_layers
    segments = allocator.reserved_bytes([kv_cache // tensors] * tensors)
    return model.separate_pool + segments - kv_cache + allocator.PARTIAL_SEGMENTS
