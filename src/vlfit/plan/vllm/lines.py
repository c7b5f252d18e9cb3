"""Ledger of a vLLM process: on one card, on one of several, or in RAM (vLLM's CPU build).

Numbers of earlier starts on this machine (``starts.py``) replace modelled lines.
"""

from dataclasses import replace

from vlfit.machine.model import Gpu
from vlfit.plan.calibration import EXACT, MEASURED, MODELLED
from vlfit.plan.ledger import Line, desktop_line, kv_cache_line, reserve_line, weight_lines
from vlfit.plan.plans import Plan
from vlfit.plan.shapes import HALF, Model
from vlfit.plan.vllm import cost, starts
from vlfit.plan.vllm.args import VllmSettings
from vlfit.plan.vllm.starts import StartRecord
from vlfit.units import MIB, format_bytes


def vllm_lines(model: Model, gpu: Gpu, settings: VllmSettings) -> tuple[Line, ...]:
    """The ledger of ``model`` under vLLM on ``gpu``, in the order in which the memory is taken.

    Of several cards the ledger is for each; with ``settings.vllm.on_cpu``, ``gpu`` stands for the RAM. Reads
    records of earlier starts on this machine, unless ``settings.vllm.version`` is "".
    """
    if settings.vllm.on_cpu:
        return _cpu_lines(model, gpu, settings)
    place, version = starts.model_key(model, settings), settings.vllm.version
    record = starts.find_start(gpu.name, version, place, settings) if version else None
    earlier = starts.latest_start(gpu.name, version, place) if version else None
    captured = "of few sequences, as vLLM captures them" if settings.graphs else "none: --enforce-eager"
    lines = (
        desktop_line(gpu),
        _context(earlier),
        *_peers(gpu, settings, earlier),
        *_weights(model, settings),
        _kv_cache(model, settings),
        *_workspaces(model, settings),
        Line("graphs", cost.graph_bytes(settings), MODELLED, captured),
        Line(
            "growth",
            cost.growth_bytes(settings),
            MODELLED,
            "what vLLM takes beyond its budget at its first requests",
        ),
        reserve_line(model.rounding),
    )
    return lines if record is None else _as_measured(lines, record)


def _kv_cache(model: Model, settings: VllmSettings) -> Line:
    token_bytes = cost.kv_bytes_per_token(model, settings.kv_dtype, settings.vllm)
    return kv_cache_line(model, settings, cost.pool_tokens(settings), token_bytes, cost.LARGEST_BLOCK)


def bytes_outside_budget(lines: tuple[Line, ...]) -> int:
    """Bytes of ``lines`` that are taken before vLLM first reads free memory: CUDA's context and peers.

    They are not part of vLLM's budget (--gpu-memory-utilization).
    """
    sizes = {line.line: line.bytes for line in lines}
    return sizes["context"] - cost.LIBRARIES.bytes + sizes.get("peers", 0)


def _context(earlier: StartRecord | None) -> Line:
    inside = cost.LIBRARIES.bytes
    if earlier is not None and earlier.own_context is not None:
        note = (
            f"{earlier.own_context / MIB:.0f} MiB of CUDA outside vLLM's budget, measured at a start on "
            f"{earlier.date[:10]}; {inside / MIB:.0f} MiB of libraries inside, by one H200"
        )
        return Line("context", earlier.own_context + inside, MEASURED, note)
    before = cost.CONTEXT.bytes
    note = (
        f"{before / MIB:.0f} MiB of CUDA outside vLLM's budget, {inside / MIB:.0f} MiB "
        f"of libraries inside; measured on one H200 (vLLM {cost.MEASURED_WITH})"
    )
    return Line("context", before + inside, MODELLED, note)


def _peers(gpu: Gpu, settings: VllmSettings, earlier: StartRecord | None) -> tuple[Line, ...]:
    tensor = settings.vllm.tensor
    if tensor == 1:
        return ()
    if earlier is not None and earlier.own_context is not None:
        return (Line("peers", 0, MEASURED, "in context: one number at a start with as many cards"),)
    return (Line("peers", cost.peer_bytes(gpu, tensor), MODELLED, cost.peers_note(gpu, tensor)),)


def _weights(model: Model, settings: VllmSettings) -> tuple[Line, ...]:
    """Weights on one card; 16-bit weights are held in the dtype of the computation, which may be float32."""
    lines: tuple[Line, ...] = weight_lines(model)
    if settings.vllm.tensor > 1:
        lines = _split(lines, model, settings)
    times = settings.vllm.value_bytes // HALF
    if times == 1:
        return lines
    wide = f", held in {settings.vllm.dtype}"
    return tuple(replace(line, bytes=times * line.bytes, note=line.note + wide) for line in lines)


def _split(lines: tuple[Line, ...], model: Model, settings: VllmSettings) -> tuple[Line, ...]:
    """One card's part of split weights."""
    text, vision, embedding = lines
    tensor = settings.vllm.tensor
    part = f"one of {tensor} parts: "
    tower = part if settings.vllm.split_tower and model.vision else "whole on each card: "
    return (
        replace(text, bytes=cost.text_bytes(model, tensor), note=part + text.note),
        replace(vision, bytes=cost.vision_bytes(model, settings), note=tower + vision.note),
        replace(embedding, bytes=cost.embedding_bytes(model, tensor), note=part + embedding.note),
    )


def _workspaces(model: Model, settings: VllmSettings) -> tuple[Line, Line]:
    """Tower and text model never run at once: the larger peak, and what both keep."""
    text = cost.text_peak_bytes(model, settings)
    positions = cost.position_table_bytes(model, settings)
    kept = positions + cost.deepstack_bytes(model, settings)
    compiles = settings.graphs and not cost.has_newer_runner(settings.vllm)
    compiling = ", compiling included" if compiles else ""
    says = (
        f"{kept / MIB:.0f} MiB stay, {positions / MIB:.0f} of them a table of positions; peak of a pass of "
    )
    says += f"{settings.chunk} tokens{compiling} {text / MIB:.0f} MiB"
    if model.vision is None or not settings.image_tokens:
        return Line("vision_workspace", 0, EXACT, "no pictures"), Line(
            "text_workspace", kept + text, MODELLED, says
        )
    vision = cost.vision_peak_bytes(model.vision, settings)
    features = cost.encoder_cache_bytes(model.vision, settings)
    together = cost.max_encoder_tokens(settings)
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


def _as_measured(lines: tuple[Line, ...], record: StartRecord) -> tuple[Line, ...]:
    """``lines`` with the numbers of a start with the same settings.

    Both workspaces have one number together: what is neither context, weights, KV cache nor graphs. It is
    known only if the size of the whole process is.
    """
    sizes = {line.line: line.bytes for line in lines}
    when = f"measured at a start on {record.date[:10]}"
    new: dict[str, Line] = {}
    if record.graph_pool is not None:
        new["graphs"] = Line("graphs", record.graph_pool, MEASURED, f"CUDA graphs, {when}")
    if record.process is not None and record.kv_cache is not None:
        others = ("context", "peers", "weights.text", "weights.vision", "weights.embedding")
        known = sum(sizes.get(name, 0) for name in others) + record.kv_cache
        known += new["graphs"].bytes if "graphs" in new else sizes["graphs"]
        rest = max(record.process - known, 0)
        new["vision_workspace"] = Line("vision_workspace", 0, MEASURED, "in text_workspace: one number")
        new["text_workspace"] = Line(
            "text_workspace", rest, MEASURED, f"both workspaces and the table of positions, {when}"
        )
    return tuple(new.get(line.line, line) for line in lines)


def _cpu_lines(model: Model, gpu: Gpu, settings: VllmSettings) -> tuple[Line, ...]:
    """Lines of the build for processors: its processes in place of a CUDA context, and no graphs."""
    processes = cost.FRONT_RAM.bytes + cost.ENGINE_RAM.bytes + cost.WORKER_RAM.bytes
    return (
        desktop_line(gpu, "RAM that other programs and the system hold"),
        Line(
            "context",
            processes,
            MODELLED,
            "three Python processes with torch: requests, engine, worker; measured by hand with vLLM 0.32",
        ),
        *_weights(model, settings),
        _kv_cache(model, settings),
        *_workspaces(model, settings),
        Line("graphs", 0, EXACT, "none on a processor"),
        reserve_line(),
    )


def kv_cache_problem(plan: Plan) -> str:
    """Why vLLM will refuse the KV cache of ``plan``, in a sentence; "" if not, or for another backend.

    It refuses one that holds less than a request of ``settings.context`` tokens
    (``check_enough_kv_cache_memory`` in vLLM's ``v1/core/kv_cache_utils.py``).
    """
    settings = plan.settings
    if not isinstance(settings, VllmSettings):
        return ""
    context, tokens = settings.context, cost.pool_tokens(settings)
    if tokens >= context:
        return ""
    each = cost.kv_bytes_per_token(plan.model, settings.kv_dtype, settings.vllm)
    return (
        f"vLLM will not start so: one request of {context} tokens needs a KV cache of "
        f"{format_bytes(context * each)}, and it is given {format_bytes(tokens * each)}, which hold {tokens}."
    )
