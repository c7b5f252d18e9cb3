"""The native engine's ledger on a GPU."""

from dataclasses import replace

from vlfit.checkpoint.config import VisionConfig
from vlfit.machine.model import Gpu
from vlfit.models.cache_spec import State, paged_shapes
from vlfit.plan import allocator, calibration
from vlfit.plan.calibration import EXACT, MODELLED, Constants
from vlfit.plan.ledger import (
    Line,
    PlanSettings,
    VisionPeak,
    cuda_context_line,
    desktop_line,
    held_by_others,
    kv_cache_line,
    reserve_line,
    weight_lines,
    workspace_lines,
)
from vlfit.plan.native import cost
from vlfit.plan.native.ram import SLOTS, offload_of, torch_reserved_bytes
from vlfit.plan.native.tiles import CardKind, DequantConfig, dequant_config_for, load_tiles
from vlfit.plan.shapes import Model, feature_bytes, kv_bytes_per_token
from vlfit.units import MIB


def native_lines(model: Model, gpu: Gpu, settings: PlanSettings) -> tuple[Line, ...]:
    """The native engine's ledger of ``model`` on ``gpu``, in the order in which the memory is taken.

    Reads the files of ``vlfit plan --calibrate`` for this card, if there are any.
    """
    dequant = dequant_config_on(gpu)
    constants = calibration.constants_for(gpu)
    # Tiles that were measured on a card count on any of its kind.
    table = load_tiles(CardKind(gpu.name, gpu.compute_capability))
    text_peak = cost.text_peak_bytes(
        model,
        settings.chunk,
        settings.context,
        settings.sequences,
        dequant=dequant,
        table=table,
        # A pass with draft tokens is one of these where steps are not captured; else it runs once before.
        draft_rows=_draft_rows(settings),
    )
    return (
        desktop_line(gpu),
        cuda_context_line(constants.context, constants),
        *_weights(model, settings.offloaded_layers),
        kv_cache_line(
            model,
            settings,
            cost.pool_tokens(settings),
            kv_bytes_per_token(model.cache_spec, settings.kv_dtype),
            cost.BLOCK_SIZE,
        ),
        *workspace_lines(
            settings,
            round(constants.text_slack.value * text_peak),
            _vision_peak(model, settings, constants, dequant),
            _pool_overhead(model, settings),
            constants,
        ),
        _graphs(model, settings, constants, dequant),
        reserve_line(),
    )


def dequant_config_on(gpu: Gpu) -> DequantConfig:
    """How quantized weights are computed with on ``gpu``, by its free memory and compute capability."""
    return dequant_config_for(gpu.total - held_by_others(gpu), gpu.compute_capability)


def _draft_rows(settings: PlanSettings) -> int:
    return cost.MAX_DRAFT_ROWS if settings.speculate else 0


def _weights(model: Model, num_offloaded: int) -> tuple[Line, ...]:
    """Weights on the card, with a line for the two slots of ``num_offloaded`` layers in RAM."""
    text, *others = weight_lines(model)
    if not num_offloaded:
        return text, *others
    offload = offload_of(model, num_offloaded)
    layers = model.text.num_hidden_layers
    text = replace(
        text,
        bytes=text.bytes - offload.weight_bytes,
        note=f"{layers - num_offloaded} of {layers} {text.note}",
    )
    note = f"{offload.description} and come through {SLOTS} slots of {offload.slot_bytes / MIB:.0f} MiB"
    return text, *others, Line("weights.offload", offload.slots_bytes, EXACT, note)


def _vision_peak(
    model: Model, settings: PlanSettings, constants: Constants, dequant: DequantConfig
) -> VisionPeak | None:
    """The tower's peak, and the features of all pictures of a pass, which stay."""
    vision = model.vision
    if vision is None or not settings.image_tokens:
        return None
    # Features that stay lie between temporary tensors, so the pool grows by more than either.
    slack = constants.vision_slack.value
    peak = cost.vision_peak_bytes(
        vision, settings.image_tokens, quantized_tower=model.tower_is_quantized, dequant=dequant
    )
    # The picture that the tower encodes is one of those that stay.
    encoded = round(slack * feature_bytes(vision, settings.image_tokens))
    kept = round(slack * _features_kept(vision, settings))
    return VisionPeak(settings.image_tokens, kept, round(slack * peak), encoded, "features")


def _features_kept(vision: VisionConfig, settings: PlanSettings) -> int:
    reached = cost.feature_rows(settings.chunk, settings.image_tokens)
    # No more than all contexts hold: a picture that fills most of one has no second beside it.
    return feature_bytes(vision, min(reached, settings.sequences * settings.context))


def _pool_overhead(model: Model, settings: PlanSettings) -> int:
    """Bytes of torch's pool beside weights and KV cache, once both are allocated (``allocator.py``)."""
    weights = model.pool
    if settings.offloaded_layers:
        offload = offload_of(model, settings.offloaded_layers)
        weights = torch_reserved_bytes(model, offload) - (model.weight_bytes - offload.freed_bytes)
    cache = sum(map(allocator.rounding_bytes, _cache_tensors(model, settings)))
    return weights + cache + allocator.PARTIAL_SEGMENTS


def _cache_tensors(model: Model, settings: PlanSettings) -> list[int]:
    """Bytes of the cache's tensors: keys and values of all layers of one shape, and each layer's states."""
    tokens = cost.pool_tokens(settings)
    sizes = []
    for layers in paged_shapes(model.cache_spec).values():
        each = kv_bytes_per_token([model.cache_spec[layer] for layer in layers], settings.kv_dtype)
        sizes += [tokens * each // 2] * 2
    states = [layer.nbytes for layer in model.cache_spec if isinstance(layer, State)]
    return [*sizes, *(settings.sequences * size for size in states)]


def _graphs(model: Model, settings: PlanSettings, constants: Constants, dequant: DequantConfig) -> Line:
    """CUDA graphs of decode steps and, with enough memory, of the vision tower.

    Steps with offloaded layers cannot be captured.
    """
    if settings.offloaded_layers:
        return Line("graphs", 0, EXACT, "no CUDA graphs: layers come from RAM at each step")
    draft_rows = _draft_rows(settings)
    pool = cost.decode_graph_bytes(model, settings.sequences, draft_rows)
    note = f"tensors of captured decode steps: batch up to {settings.sequences}"
    if draft_rows:
        note += f", {draft_rows} rows with draft tokens"
    if dequant.encoder_graphs and model.vision is not None and settings.image_tokens:
        scratch = dequant.scratch_bytes if model.tower_is_quantized else 0
        workspace = constants.workspace.bytes
        pool += cost.encoder_graph_bytes(model.vision, settings.image_tokens, workspace, scratch)
        note += ", and of the vision tower"
    return Line("graphs", pool, MODELLED, note)
