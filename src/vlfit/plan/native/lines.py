"""The native engine's ledger on a GPU."""

from dataclasses import replace

from vlfit.checkpoint.config import VisionConfig
from vlfit.machine.model import Gpu
from vlfit.models.cache_spec import CacheSpec, State, paged_shapes, snapshot_bytes
from vlfit.plan import allocator, calibration
from vlfit.plan.calibration import EXACT, MODELLED, Constant, Constants
from vlfit.plan.ledger import (
    Line,
    PlanSettings,
    VisionPeak,
    cuda_context_line,
    desktop_line,
    held_by_others,
    kv_cache_line,
    reserve_line,
    state_cache_lines,
    weight_lines,
    workspace_lines,
)
from vlfit.plan.native import cost
from vlfit.plan.native.ram import SLOTS, offload_of, table_bytes_in_ram, torch_reserved_bytes
from vlfit.plan.native.tiles import CardKind, DequantConfig, Table, dequant_config_for, load_tiles
from vlfit.plan.shapes import Model, feature_bytes, kv_bytes_per_token
from vlfit.units import MIB, format_bytes


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
        drafts=bool(model.draft_cache) and settings.uses_draft_model,
    )
    return (
        desktop_line(gpu),
        cuda_context_line(_context(model, constants), constants),
        *_weights(model, settings),
        kv_cache_line(
            model,
            settings,
            cost.pool_tokens(settings),
            kv_bytes_per_token(_caches(model, settings), settings.kv_dtype),
            cost.BLOCK_SIZE,
        ),
        *state_cache_lines(_caches(model, settings), settings.sequences, settings.state_snapshots),
        *workspace_lines(
            settings,
            round(constants.text_slack.value * text_peak),
            _vision_peak(model, settings, constants, dequant),
            _pool_overhead(model, settings),
            constants,
        ),
        _graphs(model, settings, constants, dequant, table),
        reserve_line(),
    )


def _context(model: Model, constants: Constants) -> Constant:
    """Memory of CUDA itself: more for a model with linear attention, which has kernels of its own."""
    has_states = any(isinstance(layer, State) for layer in model.cache_spec)
    return calibration.context_with_states(constants.context) if has_states else constants.context


def dequant_config_on(gpu: Gpu) -> DequantConfig:
    """How quantized weights are computed with on ``gpu``, by its free memory and compute capability."""
    return dequant_config_for(gpu.total - held_by_others(gpu), gpu.compute_capability)


def _caches(model: Model, settings: PlanSettings) -> CacheSpec:
    return model.caches(drafts=settings.uses_draft_model)


def _draft_rows(settings: PlanSettings) -> int:
    return cost.MAX_DRAFT_ROWS if settings.speculate else 0


def _weights(model: Model, settings: PlanSettings) -> tuple[Line, ...]:
    """Weights on the card, with lines for what drafts tokens, and for the two slots of layers in RAM."""
    text, vision, embedding = weight_lines(model)
    if table := table_bytes_in_ram(model, settings):
        row = table // model.text.vocab_size
        note = (
            f"output head; the table of tokens ({format_bytes(table)}, locked) is in RAM, from where {row:,} "
            "bytes are read for each token"
        )
        embedding = replace(embedding, bytes=embedding.bytes - table, note=note)
    others = [vision, embedding]
    if model.draft_bytes and settings.uses_draft_model:
        others.append(
            Line("weights.draft", model.draft_bytes, EXACT, "multi-token prediction, which drafts tokens")
        )
    num_offloaded = settings.offloaded_layers
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
    table = table_bytes_in_ram(model, settings)
    weights = model.pool_without_table if table else model.pool
    if settings.offloaded_layers:
        offload = offload_of(model, settings.offloaded_layers)
        on_card = model.weight_bytes - table - offload.freed_bytes
        weights = torch_reserved_bytes(model, offload, table_in_ram=bool(table)) - on_card
    cache = sum(map(allocator.rounding_bytes, _cache_tensors(model, settings)))
    states = _state_tensors(model, settings)
    cache += allocator.reserved_bytes(states) - sum(states)
    return weights + cache + allocator.PARTIAL_SEGMENTS


def _cache_tensors(model: Model, settings: PlanSettings) -> list[int]:
    """Bytes of the KV cache's tensors: keys and values of all layers of one shape."""
    tokens = cost.pool_tokens(settings)
    sizes = []
    spec = _caches(model, settings)
    for layers in paged_shapes(spec).values():
        each = kv_bytes_per_token([spec[layer] for layer in layers], settings.kv_dtype)
        sizes += [tokens * each // 2] * 2
    return sizes


def _state_tensors(model: Model, settings: PlanSettings) -> list[int]:
    """Bytes of the tensors of each layer's states, and of the copies of all, in order of allocation."""
    spec = _caches(model, settings)
    layers = [layer for layer in spec if isinstance(layer, State)]
    states = [settings.sequences * each.nbytes for layer in layers for each in layer.tensors]
    copies = settings.state_snapshots * snapshot_bytes(spec)
    return [*states, copies] if copies else states


def _graphs(
    model: Model, settings: PlanSettings, constants: Constants, dequant: DequantConfig, table: Table
) -> Line:
    """CUDA graphs of decode steps, of short prompts and, with enough memory, of long ones and the tower.

    Steps with offloaded layers cannot be captured.
    """
    if settings.offloaded_layers:
        return Line("graphs", 0, EXACT, "no CUDA graphs: layers come from RAM at each step")
    draft_rows = _draft_rows(settings)
    drafts = bool(model.draft_cache) and settings.uses_draft_model
    longest = min(settings.chunk, settings.context)
    pool = cost.text_graph_bytes(
        model,
        settings.sequences,
        draft_rows,
        drafts=drafts,
        longest_prompt=longest,
        dequant=dequant,
        table=table,
    )
    note = f"tensors of captured decode steps: batch up to {settings.sequences}"
    if draft_rows:
        note += f", {draft_rows} rows with draft tokens"
    captured = cost.longest_captured_prompt(longest) if dequant.captures_prompts else 0
    note += f", of prompts of up to {captured or cost.PROMPT_GRAPH_ROWS[-1]} tokens"
    workspace = constants.workspace.bytes
    if dequant.captures_prompts and model.vision is not None and settings.image_tokens:
        scratch = dequant.scratch_bytes if model.tower_is_quantized else 0
        pool += cost.encoder_graph_bytes(model.vision, settings.image_tokens, workspace, scratch)
        note += ", and of the vision tower"
    elif captured or cost.captures_cublas(model, settings.sequences):
        pool += workspace
    return Line("graphs", pool, MODELLED, note)
