"""What to change when vLLM has no room for its KV cache: the cheapest first, and whether it is enough.

Knows: how much each change frees (``arithmetic.py``), and which of them the failed run had made already. Does
not know when to ask (``memory.py``).
"""

from dataclasses import dataclass, field
from typing import Any

from vlfit.doctor.arithmetic import (
    CONTEXT,
    CONTEXT_WISHED,
    DEFAULT_SEQUENCES,
    GRAPHS_OF_MANY,
    PICTURE_CAP,
    QWEN3_VL,
    UNCAPPED_PICTURE,
    Model,
    fp8_name,
    is_quantized,
    kv_gib,
    largest_utilization,
    size_of,
)
from vlfit.doctor.command import serve, without_model
from vlfit.doctor.planned import own_plan, vllm_plan
from vlfit.doctor.rule import Case, Values

_FEW_SEQUENCES = 2
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
            max_num_seqs=_FEW_SEQUENCES,
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
    flags = {"max_num_seqs": _FEW_SEQUENCES, "max_num_batched_tokens": _FEW_BATCHED, "enforce_eager": True}
    changes: dict[str, Any] = {**flags, "max_model_len": CONTEXT_WISHED}
    advice = (
        "Allow two requests at once, small batches, a context of 4,096 tokens and no CUDA graphs. What that "
        "frees cannot be counted for a model that is not known here, so it is unchecked; if it is not "
        "enough, take "
        "weights of fewer bits." + without_model(case.facts)
    )
    return {"why": _why(case), "advice": advice, "run": serve(case.facts, changes)}
