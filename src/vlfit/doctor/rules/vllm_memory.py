"""vLLM's own messages about GPU memory: its budget, the KV cache, profiling, the sampler.

Messages as in the sources of vLLM 0.8.5 to 0.33.0.
"""

from dataclasses import dataclass, field
from typing import Any

from vlfit.doctor.logs import NUMBER
from vlfit.doctor.remedies import (
    CAPPED_IMAGE_TOKENS,
    CUDA_CONTEXT_GIB,
    CUDA_GRAPHS_GIB,
    DEFAULT_CONTEXT,
    LOG_PRECISION_GIB,
    SAMPLER_ROW_GIB,
    UNCAPPED_IMAGE_GIB,
    VLLM_GROWTH_GIB,
    VLLM_MAX_NUM_SEQS,
    ModelMemory,
    format_gib,
    fp8_model_name,
    image_cap_kwargs,
    is_named_quantized,
    kv_cache_gib,
    largest_utilization,
    longest_context,
    qwen3_vl_memory,
    qwen3_vl_size,
    suggest_native_plan,
    suggest_vllm_plan,
    vllm_command,
)
from vlfit.doctor.rule import Finding, Rule, TemplateValues
from vlfit.units import GIB, format_bytes

_MIN_SEQS = 2
_SMALL_BATCHED_TOKENS = 2048
_CONTEXTS = (131072, 65536, 32768, 16384, 8192, 4096)
_BASIS = "estimated from vLLM 0.22 on one H200; other versions and cards differ by some hundred MiB"


@dataclass
class _FlagChanges:
    """Flags to set, descriptions with what each frees, and the sum of that in GiB."""

    flags: dict[str, Any] = field(default_factory=dict)
    descriptions: list[str] = field(default_factory=list)
    frees: float = 0.0
    model: str | None = None

    def add(self, description: str, frees: float, **flags: Any) -> None:
        self.flags.update(flags)
        self.descriptions.append(f"{description} ({frees:.2f} GiB)")
        self.frees += frees


def suggest_less_memory(
    finding: Finding, missing_gib: float | None, available_gib: float = 0.0
) -> TemplateValues:
    """Values ``why``, ``advice`` and ``run`` (a command) of a rule's templates, for a start without memory.

    The advice is a plan if vlfit can plan the model on the finding's machine, else flags to change by
    estimate; it says so if they may not be enough. ``missing_gib``: what vLLM lacks without any KV cache;
    None: unknown. ``available_gib``: what is left for the KV cache; 0: nothing or unknown.
    """
    facts = finding.facts
    size = qwen3_vl_size(facts.model)
    if size is None:
        return _unknown_model(finding)
    model = qwen3_vl_memory(size)
    requested = facts.int_argument("max_model_len", DEFAULT_CONTEXT)
    planned = suggest_planned_start(finding, requested)
    if planned is not None:
        return planned
    length = min(requested, DEFAULT_CONTEXT)
    kv = kv_cache_gib(model, length)
    needed = (missing_gib or 0.0) + kv - available_gib
    changes = _cheapest_changes(finding, model, needed if missing_gib is not None or available_gib else None)
    changes.flags["max_model_len"] = length
    why = _why(finding)
    lacking = f"{missing_gib:.2f} GiB missing and " if missing_gib else ""
    target = f"{lacking}{kv:.2f} GiB of KV cache for {length} tokens" + (
        f", {available_gib:g} GiB available" if available_gib else ""
    )
    listed = "; ".join(changes.descriptions) or "nothing is left to reduce"
    if missing_gib is None and not available_gib:
        advice = (
            f"Change: {listed}. The log does not say how much is missing, so whether that is enough is "
            "unchecked."
        )
    elif changes.frees >= needed:
        advice = f"Change: {listed}. Together {changes.frees:.2f} GiB, for {target} ({_BASIS})."
    else:
        advice = (
            f"No flag makes this checkpoint fit vLLM: {listed}, together {changes.frees:.2f} GiB, but it "
            f"needs {target}. Use a smaller one{_smaller_model(size)}."
        )
        plan, run = suggest_native_plan(finding.machine, size)
        plan = plan or " `vlfit plan` shows which fit this GPU."
        if _free_and_total_gib(finding) is None:
            plan += " The log does not say what is free: with --gpu NAME the doctor can raise the share, too."
        return {"why": why, "advice": advice + plan, "run": run}
    return {"why": why, "advice": advice, "run": vllm_command(facts, changes.flags, model=changes.model)}


def suggest_planned_start(finding: Finding, max_context: int) -> TemplateValues | None:
    """Values ``why``, ``advice`` and ``run`` (a command) of a rule's templates: a plan for vLLM that fits.

    Its context is the longest, up to ``max_context``, that fits with the log's checkpoint, else with the FP8
    checkpoint. If neither fits, the advice is a plan of the native engine. None if vlfit cannot plan: for
    other models than Qwen3-VL 2B to 8B, and as in ``suggest_vllm_plan``.
    """
    name = finding.facts.model or ""
    if (size := qwen3_vl_size(name)) is None:
        return None
    contexts = dict.fromkeys((max_context, *(step for step in _CONTEXTS if step < max_context)))
    planned = suggest_vllm_plan(finding.machine, finding.facts, (name, fp8_model_name(name)), contexts)
    if planned is None:
        return None
    sentence, run = planned
    if run:
        advice = f"Start it with these settings: {sentence} ({_BASIS})."
        return {"why": _why(finding), "advice": advice, "run": run}
    sentence, run = suggest_native_plan(finding.machine, size)
    advice = "No flag makes this checkpoint fit vLLM on this GPU, by the planner's estimate."
    return {"why": _why(finding), "advice": advice + sentence, "run": run}


def _cheapest_changes(finding: Finding, model: ModelMemory, needed: float | None) -> _FlagChanges:
    """Changes from the cheapest on until ``needed`` GiB are freed; if None, those that cost little."""
    facts, changes = finding.facts, _FlagChanges()
    arguments = facts.arguments
    _change_utilization(finding, changes, lower=True)
    if not arguments.get("language_model_only") and not _images_capped(arguments):
        changes.add(
            "pictures of at most 1,024 tokens and no video, where vLLM's profiling run had 16,384",
            UNCAPPED_IMAGE_GIB,
            mm_processor_kwargs=image_cap_kwargs(CAPPED_IMAGE_TOKENS),
            limit_mm_per_prompt={"image": 1, "video": 0},
        )
    if facts.int_argument("max_num_seqs", VLLM_MAX_NUM_SEQS) > 16 and not arguments.get("enforce_eager"):
        changes.add(
            "two requests at once, which need few CUDA graphs",
            CUDA_GRAPHS_GIB,
            max_num_seqs=_MIN_SEQS,
            max_num_batched_tokens=_SMALL_BATCHED_TOKENS,
        )
    if needed is None or changes.frees >= needed:
        return changes
    _change_utilization(finding, changes, lower=False)
    name = facts.model or ""
    if changes.frees < needed and not is_named_quantized(name) and "quantization" not in arguments:
        changes.add(f"the FP8 checkpoint {fp8_model_name(name)}", model.bf16_gib - model.fp8_gib)
        changes.model = fp8_model_name(name)
    return changes


def _change_utilization(finding: Finding, changes: _FlagChanges, *, lower: bool) -> None:
    """Lower or raise ``--gpu-memory-utilization`` to what is free, if that is known."""
    memory, utilization = _free_and_total_gib(finding), _utilization(finding)
    if memory is None or utilization is None:
        return
    free, total = memory
    best = largest_utilization(free, total)
    gain = (best - utilization) * total
    description = f"{best:.2f} of the GPU instead of {utilization:g}"
    if lower and gain < 0:
        description += ", which is more than is free once vLLM has grown"
        changes.add(description, gain, gpu_memory_utilization=best)
    elif not lower and gain > 0:
        changes.add(description, gain, gpu_memory_utilization=best)


def _free_and_total_gib(finding: Finding) -> tuple[float, float] | None:
    """Memory that is free after vLLM's CUDA context, and all: of the described machine, else from the log."""
    facts, gpu = finding.facts, finding.gpu
    if gpu is not None:
        return gpu.free / GIB - CUDA_CONTEXT_GIB, gpu.total / GIB
    return (facts.free_gib, facts.total_gib) if facts.free_gib and facts.total_gib else None


def _utilization(finding: Finding) -> float | None:
    facts = finding.facts
    given = facts.arguments.get("gpu_memory_utilization", facts.utilization)
    if isinstance(given, int | float) and not isinstance(given, bool):
        return float(given)
    if facts.version is None:
        return None
    return 0.92 if facts.version_at_least(0, 20, 2) else 0.9  # vLLM's defaults


def _images_capped(arguments: dict[str, Any]) -> bool:
    cap = arguments.get("mm_processor_kwargs")
    limit = arguments.get("limit_mm_per_prompt")
    text_only = isinstance(limit, dict) and limit.get("image") == 0 and limit.get("video") == 0
    return text_only or (isinstance(cap, dict) and bool({"size", "max_pixels"} & cap.keys()))


def _why(finding: Finding) -> str:
    facts, parts = finding.facts, []
    if facts.weights_gib is not None:
        parts.append(f"the weights take {facts.weights_gib:.2f} GiB")
    if (utilization := _utilization(finding)) is not None:
        total = finding.gpu.total / GIB if finding.gpu else facts.total_gib
        budget = f" of {total:.2f} GiB, {utilization * total:.2f} GiB" if total else ""
        parts.append(f"the budget is {utilization:g}{budget}")
    text = "; ".join(parts)
    return (text[:1].upper() + text[1:] + ". " if text else "") + (
        "--gpu-memory-utilization limits weights, workspace and KV cache together: lowering it makes this "
        "worse."
    )


def _smaller_model(size: str) -> str:
    return {"8B": " (4B in FP8)", "4B": " (2B in FP8)"}.get(size, " (4-bit weights)")


def _unknown_model(finding: Finding) -> TemplateValues:
    changes = {
        "max_num_seqs": _MIN_SEQS,
        "max_num_batched_tokens": _SMALL_BATCHED_TOKENS,
        "enforce_eager": True,
        "max_model_len": DEFAULT_CONTEXT,
    }
    advice = (
        "Allow two requests at once, small batches, a context of 4,096 tokens and no CUDA graphs. The doctor "
        "cannot estimate what that frees for this model, so it is unchecked; if it is not enough, use "
        "weights of fewer bits."
    )
    return {"why": _why(finding), "advice": advice, "run": vllm_command(finding.facts, changes)}


_FEW_SEQS = 8
_GROWTH_UNCHECKED = (
    f"Whether the {VLLM_GROWTH_GIB:g} GiB by which its process grows later are free, too, is unchecked: the "
    "planner checks that for an official Qwen3-VL if --gpu or --machine describes the card."
)


def _free_utilization(finding: Finding) -> TemplateValues:
    """The planner's start, else the share that is free now, less vLLM's later growth beyond its budget."""
    free, total = finding.match.number("free"), finding.match.number("total")
    share = largest_utilization(free, total)
    holders = f"{total - free:.2f} GiB of the {total:g} GiB are held by other programs and the CUDA context"
    requested = finding.facts.int_argument("max_model_len", DEFAULT_CONTEXT)
    if (planned := suggest_planned_start(finding, requested)) is not None:
        return {**planned, "holders": holders}
    if share < 0.1:
        return {
            "holders": holders,
            "advice": "Too little is free for any share: close programs that use the GPU first.",
            "run": "nvidia-smi",
        }
    advice = (
        f"Set the flag to {share:.2f}: {share:.2f} x {total:g} = {share * total:.2f} GiB, which with the "
        f"{VLLM_GROWTH_GIB:g} GiB that a vLLM process grows beyond its budget is within the {free:g} GiB "
        "that are free. Raising the value cannot help; closing programs that use the GPU can. Whether the "
        f"model fits {share * total:.2f} GiB is unchecked: the next log will say."
    )
    run = vllm_command(finding.facts, {"gpu_memory_utilization": share})
    return {"holders": holders, "advice": advice, "run": run}


def _negative_kv(finding: Finding) -> TemplateValues:
    return suggest_less_memory(finding, -finding.match.number("kv"))


def _no_kv(finding: Finding) -> TemplateValues:
    kv = finding.facts.kv_gib
    return suggest_less_memory(finding, -kv if kv is not None and kv <= 0 else None)


def _shorter_context(finding: Finding) -> TemplateValues:
    length, needed = int(finding.match.groups["length"]), finding.match.number("needed")
    available = finding.match.number("available")
    estimate = finding.match.groups.get("estimate")
    given = finding.facts.int_argument("kv_cache_memory_bytes", 0)
    there = f"{format_gib(available)} are left beside weights and workspace"
    shown = {"needed": format_gib(needed), "there": there}
    # The log has the exact bytes of a fixed size, which may be less than two decimals of GiB can show.
    if given and abs(given / GIB - available) <= LOG_PRECISION_GIB:
        return shown | _kv_bytes_too_small(finding, given, int(estimate) if estimate else 0)
    if available <= 0:
        return {**shown, **suggest_less_memory(finding, -available), "why": ""}
    # vLLM computes its estimate from exact bytes, the log has two decimals of GiB.
    fits = int(estimate) if estimate else longest_context(length, needed, available)
    kib_per_token = needed * 2**20 / length
    why = f"{length} tokens x {kib_per_token:.3g} KiB = {needed:g} GiB."
    return shown | _context_that_fits(finding, fits, why, kib_per_token)


def _kv_bytes_too_small(finding: Finding, given: int, estimate: int) -> TemplateValues:
    """The size of the KV cache was set with a flag, so free memory does not matter."""
    length = int(finding.match.groups["length"])
    flag = f"--kv-cache-memory-bytes is {format_bytes(given)}"
    if not estimate:
        return {
            "there": flag,
            "why": "",
            "advice": "Set more, or leave the flag out: the cache then takes the rest of vLLM's budget.",
            "run": vllm_command(finding.facts, without=("kv_cache_memory_bytes",)),
        }
    needed = format_bytes(-(-given * length // estimate))
    return {
        "needed": f"about {needed}",
        "there": f"{flag}, enough for {estimate} tokens",
        "why": "",
        "advice": f"Set a context of at most {estimate} tokens, or about {needed} if that is free.",
        "run": vllm_command(finding.facts, {"max_model_len": estimate}),
    }


def _context_that_fits(finding: Finding, fits: int, why: str, kib_per_token: float) -> TemplateValues:
    """A context of at most ``fits`` tokens; if that is short, less memory for other things."""
    length, needed = int(finding.match.groups["length"]), finding.match.number("needed")
    available = finding.match.number("available")
    if fits < DEFAULT_CONTEXT:
        why += f" What is left holds {fits} tokens, few for a picture and an answer."
        return {**suggest_less_memory(finding, None, available_gib=available), "why": why}
    counted = f"{fits} x {kib_per_token:.3g} KiB = {fits * needed / length:.2f} GiB, within {available:g} GiB"
    if (planned := suggest_planned_start(finding, fits)) is not None:
        estimate = f"By vLLM's own numbers {fits} tokens fit ({counted}), before its process grows. "
        return {**planned, "why": why, "advice": estimate + planned["advice"]}
    return {
        "why": why,
        "advice": f"Set a context of at most {fits} tokens: {counted}. {_GROWTH_UNCHECKED}",
        "run": vllm_command(finding.facts, {"max_model_len": fits}),
    }


def _stored_tokens(finding: Finding) -> TemplateValues:
    stored = int(finding.match.groups["stored"])
    if (planned := suggest_planned_start(finding, stored)) is not None:
        return planned
    return {
        "advice": f"Set a context of at most {stored} tokens, vLLM's own count. {_GROWTH_UNCHECKED}",
        "run": vllm_command(finding.facts, {"max_model_len": stored}),
    }


def _fewer_seqs(finding: Finding) -> TemplateValues:
    rows = int(finding.match.groups["rows"])
    few = min(_FEW_SEQS, max(rows // 2, 1))
    return {
        "few": str(few),
        "before": f"{rows * SAMPLER_ROW_GIB:.2f}",
        "after": f"{few * SAMPLER_ROW_GIB:.2f}",
        "run": vllm_command(finding.facts, {"max_num_seqs": few}),
    }


def _cpu_kv(finding: Finding) -> TemplateValues:
    gib = max(min(int(finding.match.number("free") / 4), 4), 1)
    return {"gib": str(gib), "run": vllm_command(finding.facts, {"kv_cache_memory_bytes": gib * GIB})}


VLLM_MEMORY = (
    Rule(
        id="vllm.free_lt_util",
        keywords=("is less than desired GPU memory utilization",),
        pattern=(
            rf"Free memory on device ?(?:cuda:\d+ ?)?\((?P<free>{NUMBER})/(?P<total>{NUMBER}) GiB\) on "
            rf"startup is less than desired GPU memory utilization "
            rf"\((?P<share>{NUMBER}), (?P<wanted>{NUMBER}) GiB\)"
        ),
        cause=(
            "--gpu-memory-utilization {share} asks for {wanted} GiB of {total} GiB, but only {free} GiB are "
            "free: {holders}. The flag is a share of all memory, checked against what is free."
        ),
        compute=_free_utilization,
    ),
    Rule(
        id="vllm.kv_negative",
        keywords=("Available KV cache memory: -", "reserved for KV Cache is -"),
        pattern=(
            r"(?:Available KV cache memory: |reserved for KV Cache is )"
            rf"(?P<kv>-{NUMBER.removeprefix('-?')}) ?GiB"
        ),
        cause=(
            "Weights and the peak of vLLM's profiling run need more than its budget: {kv} GiB are left for "
            "the KV cache. {why}"
        ),
        compute=_negative_kv,
        hides=("vllm.no_kv", "vllm.kv_too_small"),
    ),
    Rule(
        id="vllm.no_kv",
        keywords=("No available memory for the cache blocks",),
        pattern=r"No available memory for the cache blocks",
        cause=(
            "Weights and the peak of vLLM's profiling run fill its budget: nothing is left for the KV cache. "
            "{why}"
        ),
        compute=_no_kv,
    ),
    Rule(
        id="vllm.kv_too_small",
        keywords=("KV cache is needed, which is larger",),
        pattern=(
            rf"To serve at least one request with the models?'s max seq len \((?P<length>[1-9]\d*)\), "
            rf"\((?P<needed>{NUMBER}) GiB KV cache is needed, which is larger than the available KV cache "
            rf"memory \((?P<available>{NUMBER}) GiB\)"
            r"(?:\. ?Based on the available memory, the estimated maximum model length is (?P<estimate>\d+))?"
        ),
        cause="The KV cache of one request of {length} tokens needs {needed}, and {there}. {why}",
        compute=_shorter_context,
    ),
    Rule(
        id="vllm.kv_too_small_v0",
        keywords=("that can be stored in KV cache",),
        pattern=(
            r"The model's max seq len \((?P<length>[1-9]\d*)\) is larger than the maximum number of tokens "
            r"that can be stored in KV cache \((?P<stored>\d+)\)"
        ),
        cause="The context is {length} tokens, and the memory left for the KV cache holds {stored}.",
        compute=_stored_tokens,
    ),
    Rule(
        id="vllm.profile_race",
        keywords=("Error in memory profiling",),
        pattern=(
            rf"Error in memory profiling\. Initial free memory (?P<before>{NUMBER})(?: GiB)?, ?"
            rf"current free memory (?P<now>{NUMBER})"
        ),
        cause=(
            "Another program freed GPU memory while vLLM measured its own: free memory was {before} before "
            "and {now} after, which vLLM treats as an error. Nothing is wrong with the settings."
        ),
        remedy=(
            "Start it again with the same settings, and leave other programs on the GPU alone while it "
            "starts."
        ),
        compute=lambda finding: {"run": vllm_command(finding.facts)},
    ),
    Rule(
        id="vllm.sampler_oom",
        keywords=("when warming up sampler",),
        pattern=r"CUDA out of memory occurred when warming up sampler with (?P<rows>\d+) dummy requests",
        cause=(
            "vLLM's warm-up of the sampler for {rows} requests ran out of memory: their logits take up to "
            "{before} GiB for Qwen3's 151,936 tokens."
        ),
        remedy=(
            "Allow fewer requests at once: {few} take up to {after} GiB. Lowering --gpu-memory-utilization, "
            "as the message says, costs KV cache instead."
        ),
        compute=_fewer_seqs,
        hides=("torch.oom", "vllm.no_kv"),
    ),
    Rule(
        id="vllm.cpu_kv",
        keywords=("on kv cache allocation is less than",),
        pattern=(
            rf"Available memory on node \d+ \((?P<free>{NUMBER})/(?P<total>{NUMBER}) GiB\) on kv cache "
            rf"allocation is less than requested memory for kv "
            rf"\((?P<kv>{NUMBER})/(?P<wanted>{NUMBER}) GiB\)"
        ),
        cause=(
            "vLLM runs on the CPU and found too little RAM for its KV cache: {free} GiB of {total} GiB are "
            "free, it wanted {wanted} GiB and computed {kv} GiB as left."
        ),
        remedy="Set a size for the KV cache that is a part of what is free: {gib} GiB.",
        compute=_cpu_kv,
        hides=("vllm.no_kv",),
    ),
)
