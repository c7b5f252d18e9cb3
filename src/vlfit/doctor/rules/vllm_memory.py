"""vLLM's own account of GPU memory: budget, KV cache, profiling, sampler.

Messages as in the sources of vLLM 0.8.5 to 0.33.0; the sums behind each remedy are in ``doctor/remedies.py``.
"""

from dataclasses import dataclass, field
from typing import Any

from vlfit.doctor.remedies import (
    CONTEXT,
    CONTEXT_WISHED,
    DEFAULT_SEQUENCES,
    GRAPHS_OF_MANY,
    GROWTH,
    PICTURE_CAP,
    QWEN3_VL,
    SAMPLER_ROW,
    TWO_DIGITS,
    UNCAPPED_PICTURE,
    Model,
    fp8_name,
    in_words,
    is_quantized,
    kv_gib,
    largest_utilization,
    length_that_fits,
    own_plan,
    serve,
    size_of,
    vllm_plan,
    without_model,
)
from vlfit.doctor.rule import Case, Rule, Values
from vlfit.units import GIB, format_bytes

# What to change when vLLM has no room for its KV cache: the cheapest first, and whether it is enough.


_SMALLEST_BATCH = 2
_FEW_BATCHED = 2048
_CONTEXTS = (131072, 65536, 32768, 16384, 8192, 4096)
_CHECKED_ON = "sums from vLLM 0.22 measured on one H200; other versions and cards differ by some hundred MiB"


@dataclass
class _Changes:
    """Flags to set, in words with what each frees; ``frees`` is their sum in GiB."""

    flags: dict[str, Any] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    frees: float = 0.0
    model: str | None = None

    def add(self, words: str, frees: float, **flags: Any) -> None:
        self.flags.update(flags)
        self.words.append(f"{words} ({frees:.2f} GiB)")
        self.frees += frees


def make_room(case: Case, missing: float | None, have: float = 0.0) -> Values:
    """``why``, ``advice`` and ``run`` for a start that lacks ``missing`` GiB, or has only ``have`` for KV.

    ``missing`` is None when the log does not say it. A remedy is said to fit only where the sums say so.
    """
    facts = case.facts
    size = size_of(facts.model)
    if size is None:
        return _unknown_model(case)
    model = QWEN3_VL[size]
    asked = facts.whole("max_model_len", CONTEXT_WISHED)
    planned = planned_start(case, asked)
    if planned is not None:
        return planned
    length = min(asked, CONTEXT_WISHED)
    wanted = kv_gib(model, length)
    needed = (missing or 0.0) + wanted - have
    changes = _cheapest(case, model, needed if missing is not None or have else None)
    changes.flags["max_model_len"] = length
    why = _why(case)
    lacking = f"{missing:.2f} GiB missing and " if missing else ""
    target = f"{lacking}{wanted:.2f} GiB of KV cache for {length} tokens" + (
        f", {have:g} GiB there" if have else ""
    )
    listed = "; ".join(changes.words) or "nothing is left to save"
    if missing is None and not have:
        advice = (
            f"Change: {listed}. The log does not say how much is missing, so whether that is enough is "
            f"unchecked."
        )
    elif changes.frees >= needed:
        advice = f"Change: {listed}. Together {changes.frees:.2f} GiB, for {target} ({_CHECKED_ON})."
    else:
        advice = (
            f"No flag makes this checkpoint fit vLLM: {listed}, together {changes.frees:.2f} GiB, against "
            f"{target}. Take a smaller one{_smaller(size)}."
        )
        says, run = own_plan(case.machine, size)
        says = says or " `vlfit plan` shows which fit this GPU."
        if _memory(case) is None:
            says += " What is free is not in the log: with --gpu NAME the doctor counts a larger share, too."
        return {"why": why, "advice": advice + says, "run": run}
    return {"why": why, "advice": advice, "run": serve(facts, changes.flags, model=changes.model)}


def planned_start(case: Case, most: int) -> Values | None:
    """``why``, ``advice`` and ``run`` for a machine and a model that the planner knows; else None.

    What fits there, whatever the log's own numbers leave open: the longest context up to ``most`` tokens, of
    this checkpoint if any fits, else of the same in FP8.
    """
    name = case.facts.model or ""
    if (size := size_of(name)) is None:
        return None
    contexts = dict.fromkeys((most, *(step for step in _CONTEXTS if step < most)))
    planned = vllm_plan(case.machine, case.facts, (name, fp8_name(name)), contexts)
    if planned is None:
        return None
    says, run = planned
    if run:
        return {"why": _why(case), "advice": f"Start it anew: {says} ({_CHECKED_ON}).", "run": run}
    says, run = own_plan(case.machine, size)
    advice = "No flag makes this checkpoint fit vLLM on this GPU, by the planner's sums."
    return {"why": _why(case), "advice": advice + says, "run": run}


def _cheapest(case: Case, model: Model, needed: float | None) -> _Changes:
    """Changes in order of what they cost the person, until ``needed`` GiB are freed (None: the free ones)."""
    facts, changes = case.facts, _Changes()
    arguments = facts.arguments
    _change_share(case, changes, lower=True)
    if not arguments.get("language_model_only") and not _pictures_capped(arguments):
        cap = {"size": {"longest_edge": PICTURE_CAP, "shortest_edge": 65536}}
        changes.add(
            "pictures of at most 1,024 tokens and no video, where the trial run had 16,384",
            UNCAPPED_PICTURE,
            mm_processor_kwargs=cap,
            limit_mm_per_prompt={"image": 1, "video": 0},
        )
    if facts.whole("max_num_seqs", DEFAULT_SEQUENCES) > 16 and not arguments.get("enforce_eager"):
        changes.add(
            "two requests at once, which need few CUDA graphs",
            GRAPHS_OF_MANY,
            max_num_seqs=_SMALLEST_BATCH,
            max_num_batched_tokens=_FEW_BATCHED,
        )
    if needed is None or changes.frees >= needed:
        return changes
    _change_share(case, changes, lower=False)
    name = facts.model or ""
    if changes.frees < needed and not is_quantized(name) and "quantization" not in arguments:
        changes.add(f"the FP8 checkpoint {fp8_name(name)}", model.bf16 - model.fp8)
        changes.model = fp8_name(name)
    return changes


def _change_share(case: Case, changes: _Changes, *, lower: bool) -> None:
    """The share that is free, where that is known, with what vLLM takes beside its budget."""
    memory, now = _memory(case), _share(case)
    if memory is None or now is None:
        return
    free, total = memory
    share = largest_utilization(free, total)
    gain = (share - now) * total
    if lower and gain < 0:
        words = f"{share:.2f} of the GPU instead of {now:g}, which is more than is free once vLLM has grown"
        changes.add(words, gain, gpu_memory_utilization=share)
    elif not lower and gain > 0:
        words = f"{share:.2f} of the GPU instead of {now:g}"
        changes.add(words, gain, gpu_memory_utilization=share)


def _memory(case: Case) -> tuple[float, float] | None:
    """GiB that are free once vLLM has its CUDA context, and all GiB: of the named machine, else the log."""
    facts, gpu = case.facts, case.gpu
    if gpu is not None:
        return gpu.free / 2**30 - CONTEXT, gpu.total / 2**30
    return (facts.free_gib, facts.total_gib) if facts.free_gib and facts.total_gib else None


def _share(case: Case) -> float | None:
    given = case.facts.arguments.get("gpu_memory_utilization", case.facts.utilization)
    if isinstance(given, int | float) and not isinstance(given, bool):
        return float(given)
    if case.facts.version is None:
        return None
    return 0.92 if case.facts.at_least(0, 20, 2) else 0.9  # vLLM's defaults


def _pictures_capped(arguments: dict[str, Any]) -> bool:
    cap = arguments.get("mm_processor_kwargs")
    limit = arguments.get("limit_mm_per_prompt")
    without_pictures = isinstance(limit, dict) and limit.get("image") == 0 and limit.get("video") == 0
    return without_pictures or (isinstance(cap, dict) and bool({"size", "max_pixels"} & cap.keys()))


def _why(case: Case) -> str:
    facts, parts = case.facts, []
    if facts.weights_gib is not None:
        parts.append(f"the weights take {facts.weights_gib:.2f} GiB")
    if (share := _share(case)) is not None:
        total = case.gpu.total / 2**30 if case.gpu else facts.total_gib
        of = f" of {total:.2f} GiB, {share * total:.2f} GiB" if total else ""
        parts.append(f"its share is {share:g}{of}")
    text = "; ".join(parts)
    return (text[:1].upper() + text[1:] + ". " if text else "") + (
        "The share is the ceiling for weights, workspace and KV cache together: lowering it makes this worse."
    )


def _smaller(size: str) -> str:
    return {"8B": " (4B in FP8)", "4B": " (2B in FP8)"}.get(size, " (4-bit weights)")


def _unknown_model(case: Case) -> Values:
    flags = {"max_num_seqs": _SMALLEST_BATCH, "max_num_batched_tokens": _FEW_BATCHED, "enforce_eager": True}
    changes: dict[str, Any] = {**flags, "max_model_len": CONTEXT_WISHED}
    advice = (
        "Allow two requests at once, small batches, a context of 4,096 tokens and no CUDA graphs. What that "
        "frees cannot be counted for a model that is not known here, so it is unchecked; if it is not "
        "enough, take "
        "weights of fewer bits." + without_model(case.facts)
    )
    return {"why": _why(case), "advice": advice, "run": serve(case.facts, changes)}


_NUMBER = r"-?\d+(?:\.\d+)?"
_FEW_SEQUENCES = 8
_LEFT = "are left for it beside weights and workspace"
# What a length that vLLM counted leaves open, where no machine or no known model is named.
_GROWS_LATER = (
    f"Whether the {GROWTH:g} GiB that its process grows later are free, too, is unchecked: the planner "
    "counts that for an official Qwen3-VL where --gpu or --machine names the card."
)


def _utilization_that_is_free(case: Case) -> Values:
    """The planner's start; else the share that is free now, less what vLLM takes beyond its budget later."""
    free, total = case.found.number("free"), case.found.number("total")
    share = largest_utilization(free, total)
    holders = f"{total - free:.2f} GiB of the {total:g} GiB are taken by other programs and the CUDA context"
    asked = case.facts.whole("max_model_len", CONTEXT_WISHED)
    if (planned := planned_start(case, asked)) is not None:
        return {"holders": holders, "advice": planned["advice"], "run": planned["run"]}
    if share < 0.1:
        return {
            "holders": holders,
            "advice": "No share is worth trying: free the GPU first.",
            "run": "nvidia-smi",
        }
    advice = (
        f"Ask for {share:.2f}: {share:.2f} x {total:g} = {share * total:.2f} GiB, and with the {GROWTH:g} "
        f"GiB that a vLLM process grows beyond its budget this is within the {free:g} GiB that are free. "
        f"Raising the value cannot help; closing programs that use the GPU can. Whether the model fits "
        f"{share * total:.2f} GiB is the next question: the next log will say." + without_model(case.facts)
    )
    return {"holders": holders, "advice": advice, "run": serve(case.facts, {"gpu_memory_utilization": share})}


def _negative(case: Case) -> Values:
    missing = -case.found.number("kv")
    return make_room(case, missing)


def _none(case: Case) -> Values:
    known = case.facts.kv_gib
    return make_room(case, -known if known is not None and known <= 0 else None)


def _shorter_context(case: Case) -> Values:
    length, needed = int(case.found.groups["length"]), case.found.number("needed")
    available = case.found.number("available")
    estimate = case.found.groups.get("estimate")
    given = case.facts.whole("kv_cache_memory_bytes", 0)
    shown = {"needed": in_words(needed), "there": f"{in_words(available)} {_LEFT}"}
    # Where it was told the size, the log has its bytes, beside which two digits of GiB say little.
    if given and abs(given / GIB - available) <= TWO_DIGITS:
        return shown | _given_too_little(case, given, int(estimate) if estimate else 0)
    if available <= 0:
        return {**shown, **make_room(case, -available), "why": ""}
    # vLLM's own estimate is exact where it is given: it knows the bytes, the log only two digits of GiB.
    fits = int(estimate) if estimate else length_that_fits(length, needed, available)
    per_token = needed * 2**20 / length
    why = f"{length} tokens x {per_token:.3g} KiB = {needed:g} GiB."
    return shown | _what_fits(case, fits, why, per_token)


def _given_too_little(case: Case, given: int, estimate: int) -> Values:
    """The size of the cache was named, and is no matter of what is free."""
    length = int(case.found.groups["length"])
    asked = f"{format_bytes(given)} were asked for (--kv-cache-memory-bytes)"
    if not estimate:
        advice = "Name a larger one, or none: then the cache takes what the share of the GPU leaves."
        run = serve(case.facts, without=("kv_cache_memory_bytes",))
        return {"there": asked, "why": "", "advice": advice + without_model(case.facts), "run": run}
    needed = -(-given * length // estimate)
    advice = f"Ask for at most {estimate} tokens, or name about {format_bytes(needed)}, where that is free."
    run = serve(case.facts, {"max_model_len": estimate})
    return {
        "needed": f"about {format_bytes(needed)}",
        "there": f"{asked}, which hold {estimate}",
        "why": "",
        "advice": advice + without_model(case.facts),
        "run": run,
    }


def _what_fits(case: Case, fits: int, why: str, per_token: float) -> Values:
    """A context of at most ``fits`` tokens of ``per_token`` KiB; more room where that is few."""
    length, needed = int(case.found.groups["length"]), case.found.number("needed")
    available = case.found.number("available")
    if fits < CONTEXT_WISHED:
        room = make_room(case, None, have=available)
        return {
            **room,
            "why": why + f" What is left holds {fits} tokens, few for a picture and an answer.",
        }
    counted = f"{fits} x {per_token:.3g} KiB = {fits * needed / length:.2f} GiB, within {available:g} GiB"
    if (planned := planned_start(case, fits)) is not None:
        estimate = f"By vLLM's own numbers {fits} tokens fit ({counted}), before it has grown. "
        return {**planned, "why": why, "advice": estimate + planned["advice"]}
    advice = f"Ask for at most {fits} tokens: {counted}. {_GROWS_LATER}" + without_model(case.facts)
    return {"why": why, "advice": advice, "run": serve(case.facts, {"max_model_len": fits})}


def _stored(case: Case) -> Values:
    stored = int(case.found.groups["stored"])
    if (planned := planned_start(case, stored)) is not None:
        return planned
    advice = f"Ask for at most {stored} tokens: that is what vLLM itself counted on this GPU. {_GROWS_LATER}"
    return {"advice": advice, "run": serve(case.facts, {"max_model_len": stored})}


def _again(case: Case) -> Values:
    return {"run": serve(case.facts), "model": without_model(case.facts)}


def _fewer_sequences(case: Case) -> Values:
    rows = int(case.found.groups["rows"])
    few = min(_FEW_SEQUENCES, max(rows // 2, 1))
    return {
        "few": str(few),
        "before": f"{rows * SAMPLER_ROW:.2f}",
        "after": f"{few * SAMPLER_ROW:.2f}",
        "run": serve(case.facts, {"max_num_seqs": few}),
    }


def _cpu_room(case: Case) -> Values:
    free = case.found.number("free")
    gib = max(min(int(free / 4), 4), 1)
    changes = {"kv_cache_memory_bytes": gib * 2**30}
    return {"gib": str(gib), "run": serve(case.facts, changes)}


MEMORY = (
    Rule(
        id="vllm.free_lt_util",
        words=("is less than desired GPU memory utilization",),
        pattern=(
            rf"Free memory on device ?(?:cuda:\d+ ?)?\((?P<free>{_NUMBER})/(?P<total>{_NUMBER}) GiB\) on "
            rf"startup is less than "
            rf"desired GPU memory utilization \((?P<share>{_NUMBER}), (?P<wanted>{_NUMBER}) GiB\)"
        ),
        cause=(
            "vLLM was told to take {share} of the whole GPU ({wanted} GiB of {total} GiB), but only {free} "
            "GiB are free: {holders}. --gpu-memory-utilization is a share of all memory, checked against "
            "what is free."
        ),
        remedy="{advice}",
        command="{run}",
        compute=_utilization_that_is_free,
    ),
    Rule(
        id="vllm.kv_negative",
        words=("Available KV cache memory: -", "reserved for KV Cache is -"),
        pattern=(
            rf"(?:Available KV cache memory: |reserved for KV Cache is "
            rf")(?P<kv>-{_NUMBER.removeprefix('-?')}) ?GiB"
        ),
        cause=(
            "Weights and the peak of vLLM's trial run need more than its share of the GPU: {kv} GiB are "
            "left for the KV cache. {why}"
        ),
        remedy="{advice}",
        command="{run}",
        compute=_negative,
        hides=("vllm.no_kv", "vllm.kv_too_small"),
    ),
    Rule(
        id="vllm.no_kv",
        words=("No available memory for the cache blocks",),
        pattern=r"No available memory for the cache blocks",
        cause=(
            "Weights and the peak of vLLM's trial run fill its share of the GPU: nothing is left for the KV "
            "cache. {why}"
        ),
        remedy="{advice}",
        command="{run}",
        compute=_none,
    ),
    Rule(
        id="vllm.kv_too_small",
        words=("KV cache is needed, which is larger",),
        pattern=(
            rf"To serve at least one request with the models?'s max seq len \((?P<length>[1-9]\d*)\), "
            rf"\((?P<needed>{_NUMBER}) GiB KV cache is needed, which is larger than the available KV cache "
            rf"memory "
            rf"\((?P<available>{_NUMBER}) GiB\)"
            r"(?:\. ?Based on the available memory, the estimated maximum model length is (?P<estimate>\d+))?"
        ),
        cause=("The KV cache of one request of {length} tokens needs {needed}, and {there}. {why}"),
        remedy="{advice}",
        command="{run}",
        compute=_shorter_context,
    ),
    Rule(
        id="vllm.kv_too_small_v0",
        words=("that can be stored in KV cache",),
        pattern=(
            r"The model's max seq len \((?P<length>[1-9]\d*)\) is larger than the maximum number of tokens "
            r"that can be stored in KV cache \((?P<stored>\d+)\)"
        ),
        cause="The context was to be {length} tokens, and the memory left for the KV cache holds {stored}.",
        remedy="{advice}",
        command="{run}",
        compute=_stored,
    ),
    Rule(
        id="vllm.profile_race",
        words=("Error in memory profiling",),
        pattern=(
            rf"Error in memory profiling\. Initial free memory (?P<before>{_NUMBER})(?: GiB)?, ?"
            rf"current free memory (?P<now>{_NUMBER})"
        ),
        cause=(
            "Another program gave GPU memory back while vLLM measured its own: free memory was {before} "
            "before and {now} after. vLLM takes growth for an error; nothing is wrong with the settings."
        ),
        remedy=(
            "Start it again with the same settings, and leave other programs on the GPU alone while it "
            "starts.{model}"
        ),
        command="{run}",
        compute=_again,
    ),
    Rule(
        id="vllm.sampler_oom",
        words=("when warming up sampler",),
        pattern=r"CUDA out of memory occurred when warming up sampler with (?P<rows>\d+) dummy requests",
        cause=(
            "vLLM rehearsed the choice of the next token for {rows} requests at once, and that took the "
            "last memory: the logits of {rows} requests take up to {before} GiB for Qwen3's 151,936 tokens."
        ),
        remedy=(
            "Allow fewer requests at once: {few} take up to {after} GiB. Lowering --gpu-memory-utilization, "
            "as the message says, costs KV cache instead."
        ),
        command="{run}",
        compute=_fewer_sequences,
        hides=("torch.oom", "vllm.no_kv"),
    ),
    Rule(
        id="vllm.cpu_kv",
        words=("on kv cache allocation is less than",),
        pattern=(
            rf"Available memory on node \d+ \((?P<free>{_NUMBER})/(?P<total>{_NUMBER}) GiB\) on kv cache "
            rf"allocation is less "
            rf"than requested memory for kv \((?P<kv>{_NUMBER})/(?P<wanted>{_NUMBER}) GiB\)"
        ),
        cause=(
            "vLLM runs on the CPU and found no room in RAM for its KV cache: {free} GiB of {total} GiB are "
            "free, it wanted {wanted} GiB and counted {kv} GiB left."
        ),
        remedy="Name the size of the KV cache, a part of what is free: {gib} GiB.",
        command="{run}",
        compute=_cpu_room,
        hides=("vllm.no_kv",),
    ),
)
