"""The ledger of a vLLM process on one card: its lines, and what earlier starts here say of them.

Knows: which formula (``costs.py``), constant (``cost.py``) or start (``starts.py``) stands behind each
line, also of one card among several (``cost.py``) and of vLLM's build for processors, which keeps all of
it in RAM. Does not know what to choose (``search.py``).
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from vlfit.machine.model import Gpu
from vlfit.plan.calibration import EXACT, MEASURED, MODELLED
from vlfit.plan.ledger import (
    VLLM,
    Line,
    Settings,
    held_by_others,
    kv_bytes,
    kv_cache,
    pool_tokens,
    reserve,
    weight_lines,
)
from vlfit.plan.shapes import HALF, Model
from vlfit.plan.vllm import cost as constants
from vlfit.plan.vllm import cost as costs
from vlfit.plan.vllm import cost as parallel
from vlfit.plan.vllm import starts
from vlfit.plan.vllm.starts import Began
from vlfit.units import MIB, format_bytes

if TYPE_CHECKING:
    from vlfit.plan.search import Plan


def of_vllm(model: Model, gpu: Gpu, settings: Settings) -> tuple[Line, ...]:
    """Every line, in the order in which the memory is taken; what was measured here goes before the table."""
    if settings.vllm.in_ram:
        return _in_ram(model, gpu, settings)
    place, version = starts.place_of(model, settings), settings.vllm.version
    began = starts.held_by(gpu.name, version, place, settings) if version else None
    earlier = starts.any_of(gpu.name, version, place) if version else None
    captured = "of few sequences, as vLLM captures them" if settings.graphs else "none: --enforce-eager"
    lines = (
        Line("desktop", held_by_others(gpu), MEASURED, "what other programs and the driver hold"),
        _context(earlier),
        *_peers(gpu, settings, earlier),
        *_weights(model, settings),
        kv_cache(model, VLLM, settings),
        *_workspaces(model, settings),
        Line("graphs", costs.graphs(settings), MODELLED, captured),
        Line(
            "growth",
            costs.growth(settings),
            MODELLED,
            "what vLLM takes beyond its budget at its first requests",
        ),
        reserve(model.rounding),
    )
    return lines if began is None else _as_measured(lines, began)


def outside(lines: tuple[Line, ...]) -> int:
    """Bytes that a process holds before vLLM's first look: CUDA's context, and what cards hold for others."""
    sizes = {line.line: line.bytes for line in lines}
    return sizes["context"] - constants.LIBRARIES.bytes + sizes.get("peers", 0)


def _context(earlier: Began | None) -> Line:
    inside = constants.LIBRARIES.bytes
    if earlier is not None and earlier.own_context is not None:
        note = (
            f"{earlier.own_context / MIB:.0f} MiB of CUDA outside vLLM's budget, measured at a start on "
            f"{earlier.date[:10]}; {inside / MIB:.0f} MiB of libraries inside, by one H200"
        )
        return Line("context", earlier.own_context + inside, MEASURED, note)
    before = constants.CONTEXT.bytes
    note = (
        f"{before / MIB:.0f} MiB of CUDA outside vLLM's budget, {inside / MIB:.0f} MiB "
        f"of libraries inside; measured on one H200 (vLLM {constants.MEASURED_WITH})"
    )
    return Line("context", before + inside, MODELLED, note)


def _peers(gpu: Gpu, settings: Settings, earlier: Began | None) -> tuple[Line, ...]:
    tensor = settings.vllm.tensor
    if tensor == 1:
        return ()
    if earlier is not None and earlier.own_context is not None:
        return (Line("peers", 0, MEASURED, "in context: one number at a start with as many cards"),)
    return (Line("peers", parallel.peers(gpu, tensor), MODELLED, parallel.peers_note(gpu, tensor)),)


def _weights(model: Model, settings: Settings) -> tuple[Line, ...]:
    """Of one card, as they are held: weights of 16 bits in what is computed with, which may be wider."""
    lines = weight_lines(model)
    if settings.vllm.tensor > 1:
        lines = _shared_out(lines, model, settings)
    times = settings.vllm.value_bytes // HALF
    if times == 1:
        return lines
    wide = f", held in {settings.vllm.dtype}"
    return tuple(replace(line, bytes=times * line.bytes, note=line.note + wide) for line in lines)


def _shared_out(lines: tuple[Line, ...], model: Model, settings: Settings) -> tuple[Line, ...]:
    """One card's part of what is shared out."""
    text, vision, embedding = lines
    tensor = settings.vllm.tensor
    part = f"one of {tensor} parts: "
    tower = part if settings.vllm.split_tower and model.vision else "whole on each card: "
    return (
        replace(text, bytes=parallel.text_bytes(model, tensor), note=part + text.note),
        replace(vision, bytes=parallel.vision_bytes(model, settings), note=tower + vision.note),
        replace(embedding, bytes=parallel.embedding_bytes(model, tensor), note=part + embedding.note),
    )


def _workspaces(model: Model, settings: Settings) -> tuple[Line, Line]:
    """Of tower and text model, which never run at once, the larger peak, and what both keep."""
    text = costs.text_peak(model, settings)
    positions = costs.positions(model, settings)
    kept = positions + costs.deepstack_buffers(model, settings)
    compiles = settings.graphs and not costs.has_newer_runner(settings.vllm)
    compiling = ", compiling included" if compiles else ""
    says = (
        f"{kept / MIB:.0f} MiB stay, {positions / MIB:.0f} of them a table of positions; peak of a pass of "
    )
    says += f"{settings.chunk} tokens{compiling} {text / MIB:.0f} MiB"
    if model.vision is None or not settings.image_tokens:
        return Line("vision_workspace", 0, EXACT, "no pictures"), Line(
            "text_workspace", kept + text, MODELLED, says
        )
    vision = costs.vision_peak(model.vision, settings)
    features = costs.picture_cache(model.vision, settings)
    together = costs.tokens_encoded_together(settings)
    stays = f"{features / MIB:.0f} MiB of features stay"
    note = f"{stays}; peak {vision / MIB:.0f} MiB for {together} image tokens at once"
    if vision >= text:
        return (
            Line("vision_workspace", features + vision, MODELLED, note),
            Line("text_workspace", kept, MODELLED, f"{says}, which vision_workspace lends"),
        )
    return (
        Line("vision_workspace", features, MODELLED, f"{note}, which text_workspace lends"),
        Line("text_workspace", kept + text, MODELLED, says),
    )


def _as_measured(lines: tuple[Line, ...], began: Began) -> tuple[Line, ...]:
    """``lines`` with what a start with the same settings was seen to hold.

    What is neither context, weights, KV cache nor graphs was one number then, which is that of both
    workspaces; without the whole of the process there is none.
    """
    sizes = {line.line: line.bytes for line in lines}
    when = f"measured at a start on {began.date[:10]}"
    new: dict[str, Line] = {}
    if began.graph_pool is not None:
        new["graphs"] = Line("graphs", began.graph_pool, MEASURED, f"CUDA graphs, {when}")
    if began.process is not None and began.kv_cache is not None:
        others = ("context", "peers", "weights.text", "weights.vision", "weights.embedding")
        known = sum(sizes.get(name, 0) for name in others) + began.kv_cache
        known += new["graphs"].bytes if "graphs" in new else sizes["graphs"]
        rest = max(began.process - known, 0)
        new["vision_workspace"] = Line("vision_workspace", 0, MEASURED, "in text_workspace: one number")
        new["text_workspace"] = Line(
            "text_workspace", rest, MEASURED, f"both workspaces and the table of positions, {when}"
        )
    return tuple(new.get(line.line, line) for line in lines)


def _in_ram(model: Model, gpu: Gpu, settings: Settings) -> tuple[Line, ...]:
    """As on a card, but the processes themselves instead of CUDA, and nothing is captured."""
    processes = constants.FRONT_RAM.bytes + constants.ENGINE_RAM.bytes + constants.WORKER_RAM.bytes
    return (
        Line("desktop", held_by_others(gpu), MEASURED, "RAM that other programs and the system hold"),
        Line(
            "context",
            processes,
            MODELLED,
            "three Python processes with torch: requests, engine, worker; measured by hand with vLLM 0.32",
        ),
        *_weights(model, settings),
        kv_cache(model, VLLM, settings),
        *_workspaces(model, settings),
        Line("graphs", 0, EXACT, "none on a processor"),
        reserve(),
    )


# Whether a planned KV cache holds one request of the planned context: if not, vLLM refuses to start.
#
# Knows: the one check that vLLM makes of a cache whose size it is told (``check_enough_kv_cache_memory`` of
# its ``v1/core/kv_cache_utils.py``). Does not know what else a start may fail on.


def too_small(plan: "Plan") -> str:
    """Why vLLM will not start with the KV cache of ``plan``, in a sentence; "" if it holds one request."""
    if plan.backend != VLLM:
        return ""
    context, tokens = plan.settings.context, pool_tokens(VLLM, plan.settings)
    if tokens >= context:
        return ""
    each = kv_bytes(plan.model, VLLM, plan.settings)
    return (
        f"vLLM will not start so: one request of {context} tokens needs a KV cache of "
        f"{format_bytes(context * each)}, and it is given {format_bytes(tokens * each)}, which hold {tokens}."
    )
