"""Settings that vLLM refuses: unknown flags, lengths, formats that the GPU lacks, requests too large.

Messages as in the sources of vLLM 0.8.5 to 0.33.0. Which flags came and went with which version is in
``plan/vllm/flags.py``.
"""

import re

from vlfit.doctor.remedies import QWEN3_VL, kv_gib, serve, size_of, without_model
from vlfit.doctor.rule import Case, Rule, Values
from vlfit.doctor.rules.vllm_memory import planned_start
from vlfit.plan.vllm.flags import GONE

_MODEST_CONTEXT = 8192


def _unknown(case: Case) -> Values:
    flags = re.findall(r"--[\w-]+", case.found.groups["flags"])
    reasons = [f"{flag}: {GONE[flag]}" for flag in flags if flag in GONE]
    known = (
        "; ".join(reasons)
        or "perhaps it is misspelt, or of another version: `vllm serve --help=all` lists all"
    )
    drop = tuple(flag[2:].replace("-", "_") for flag in flags)
    version = ".".join(map(str, case.facts.version)) if case.facts.version else ""
    return {
        "version": f" {version}" if version else "",
        "known": known,
        "run": serve(case.facts, without=drop) if case.facts.model else "vllm serve --help=all",
    }


def _shown_length(case: Case) -> Values:
    """The longest context that the planner fits; else the model's own, if any Qwen3-VL could have it here."""
    most = int(case.found.groups["most"])
    if (planned := planned_start(case, most)) is not None:
        return planned
    size = size_of(case.facts.model)
    needed = kv_gib(QWEN3_VL[size or "2B"], most)
    room = case.gpu.free / 2**30 if case.gpu else case.facts.total_gib
    whose = f"Qwen3-VL {size}" if size else "the smallest Qwen3-VL"
    advice = (
        f"The model was made for {most}, which says nothing of what fits: their KV cache takes {needed:.1f} "
        f"GiB for {whose}. "
    )
    length = most
    if room is not None and needed > room:
        length = _MODEST_CONTEXT
        advice += f"This GPU has {room:.1f} GiB, so ask for {length:,}. "
    missing = "an official Qwen3-VL" if case.machine else "the machine (--gpu or --machine)"
    advice += f"That it fits is unchecked: the log and the options do not name {missing}."
    run = serve(case.facts, {"max_model_len": length})
    return {"advice": advice + without_model(case.facts), "run": run}


# Architectures that came with a version of vLLM; Qwen3-VL is in the registry from 0.11.0 on.
_ARCHITECTURES = {"Qwen3VLForConditionalGeneration": "0.11", "Qwen3VLMoeForConditionalGeneration": "0.11"}


def _architecture(case: Case) -> Values:
    kind = case.found.groups["kind"]
    since = _ARCHITECTURES.get(kind)
    version = ".".join(map(str, case.facts.version)) if case.facts.version else ""
    return {
        "version": f" {version}" if version else "",
        "since": f" It came with vLLM {since}." if since else " It may have come with a later version.",
        "run": f'pip install --upgrade "vllm>={since}"' if since else "pip install --upgrade vllm",
    }


def _half(case: Case) -> Values:
    return {"run": serve(case.facts, {"dtype": "half"}), "model": without_model(case.facts)}


def _pixels(case: Case) -> Values:
    most = int(case.found.groups["most"])
    cap = {"size": {"longest_edge": most * 1024, "shortest_edge": min(65536, most * 1024)}}
    return {"run": serve(case.facts, {"mm_processor_kwargs": cap}), "pixels": f"{most * 1024:,}"}


def _chunk(case: Case) -> Values:
    tokens = int(case.found.groups["tokens"])
    most = case.facts.whole("max_num_batched_tokens", 2048)
    cap = {"size": {"longest_edge": most * 1024, "shortest_edge": 65536}}
    return {"most": str(most), "tokens": str(tokens), "run": serve(case.facts, {"mm_processor_kwargs": cap})}


def _format(case: Case) -> Values:
    """Capabilities as vLLM prints them: 86 is 8.6."""
    return {name: f"{int(case.found.groups[name]) / 10:.1f}" for name in ("has", "need")}


def _quarter(case: Case) -> Values:
    groups = case.found.groups
    tokens = groups["tokens"] or groups["tokens_too"]
    most = groups["most"] or groups["most_too"]
    quarter = max(int(most) // 4, 64)
    cap = {"size": {"longest_edge": quarter * 1024, "shortest_edge": min(65536, quarter * 1024)}}
    run = serve(case.facts, {"mm_processor_kwargs": cap})
    return {"tokens": tokens, "most": most, "quarter": str(quarter), "run": run}


def _one_more(case: Case) -> Values:
    limit = case.facts.arguments.get("limit_mm_per_prompt")
    limits = dict(limit) if isinstance(limit, dict) else {}
    limits[case.found.groups["kind"]] = int(case.found.groups["most"]) + 1
    return {"run": serve(case.facts, {"limit_mm_per_prompt": limits})}


def _pinned(case: Case) -> Values:
    model = without_model(case.facts)
    if case.facts.version is not None and not case.facts.at_least(0, 24):
        advice = "This version cannot do it under WSL2: use its older model runner, and no --cpu-offload-gb."
        run = serve(case.facts, without=("cpu_offload_gb",), environment={"VLLM_USE_V2_MODEL_RUNNER": "0"})
        return {"advice": advice, "run": run, "model": model}
    run = serve(case.facts, environment={"VLLM_WSL2_ENABLE_PIN_MEMORY": "1"})
    return {
        "advice": "Switch it on (from 0.24), or update to 0.30, which does without.",
        "run": run,
        "model": model,
    }


SETTINGS = (
    Rule(
        id="vllm.unknown_flag",
        words=("unrecognized arguments",),
        pattern=r"error: unrecognized arguments: (?P<flags>--[\w-]+[^\n]{0,200})",
        one_line=True,
        cause="This vLLM{version} has no such flag: {flags}. {known}.",
        remedy="Start it without the flag.",
        command="{run}",
        compute=_unknown,
    ),
    Rule(
        id="vllm.bad_value",
        words=("error: argument",),
        pattern=r"error: argument (?P<flag>--[\w/-]+(?:, ?--?[\w-]+)*): (?P<why>[^\n]{1,200}?)\.?$",
        one_line=True,
        cause="vLLM cannot read the value of {flag}: {why}.",
        remedy=(
            "See what the flag takes. Sizes are best plain integers (8k is 8000 and 8K is 8192), and limits "
            "are JSON: "
            '--limit-mm-per-prompt \'{"image": 1, "video": 0}\'.'
        ),
        command="vllm serve --help={word}",
        compute=lambda case: {"word": case.found.groups["flag"].split(",")[0].split("/")[0].lstrip("-")},
    ),
    Rule(
        id="vllm.max_len_over_model",
        words=("is greater than the derived max_model_len",),
        pattern=(
            r"User-specified max_model_len \((?P<length>\d+)\) is greater than the derived max_model_len "
            r"\((?:\w+=)*(?P<most>\d+)"
        ),
        cause="A context of {length} tokens was asked for, and the model was made for {most}.",
        remedy="{advice}",
        command="{run}",
        compute=_shown_length,
    ),
    Rule(
        id="vllm.architecture",
        words=("are not supported for now",),
        pattern=r"Model architectures \['(?P<kind>\w{1,80})'[^\]\n]{0,200}\] are not supported for now",
        cause="This vLLM{version} does not know models of the kind {kind}.{since}",
        remedy="Update vLLM in the environment that runs it; a newer one brings a newer PyTorch, too.",
        command="{run}",
        compute=_architecture,
    ),
    Rule(
        id="vllm.bf16",
        words=("Bfloat16 is only supported",),
        pattern=(
            r"Bfloat16 is only supported on GPUs with compute capability of at least 8\.0\. "
            r"Your (?P<card>.{1,80}?) GPU has compute capability (?P<has>[\d.]+\d)"
        ),
        cause=(
            "The weights are bfloat16, and the {card} (compute capability {has}) is older than that format "
            "(8.0)."
        ),
        remedy="Run them as float16.{model}",
        command="{run}",
        compute=_half,
    ),
    Rule(
        id="vllm.quant_gpu",
        words=("is not supported for the current GPU. Minimum capability",),
        pattern=(
            r"The quantization method (?P<method>\S+) is not supported for the current GPU\. "
            r"Minimum capability: (?P<need>\d+)\. Current capability: (?P<has>\d+)"
        ),
        cause="{method} weights need a GPU of compute capability {need}, and this one has {has}.",
        remedy=(
            "Take another format of the same model: 0.33 runs awq and fp8 from 7.5 and compressed-tensors "
            "from 7.0. `vlfit plan` shows which formats fit this card."
        ),
        command="vlfit plan",
        compute=_format,
    ),
    Rule(
        id="vllm.quant_scheme_gpu",
        words=("Quantization scheme is not supported for",),
        pattern=(
            r"Quantization scheme is not supported for.{1,12}the current GPU.{1,8}Min capability: "
            r"(?P<need>\d+)\D{1,12}"
            r"Current capability: (?P<has>\d+)"
        ),
        cause=(
            "These compressed-tensors weights need a GPU of compute capability {need}, and this one has "
            "{has}."
        ),
        remedy=(
            "Take another format of the same model (AWQ or GPTQ). `vlfit plan` shows which formats fit this "
            "card."
        ),
        command="vlfit plan",
        compute=_format,
    ),
    Rule(
        id="vllm.mm_chunk",
        words=("Chunked MM input disabled",),
        pattern=r"Chunked MM input disabled but max_tokens_per_mm_item \((?P<tokens>\d+)\)",
        cause=(
            "One picture may have {tokens} tokens, but only {most} are taken in one step and pictures may "
            "not be cut."
        ),
        remedy="Cap pictures at {most} tokens.",
        command="{run}",
        compute=_chunk,
    ),
    Rule(
        id="vllm.encoder_cache",
        words=("exceeds the pre-allocated encoder cache size",),
        pattern=(
            r"The decoder prompt contains a\(n\) (?P<kind>\w+) item with length (?P<tokens>\d+), which "
            r"exceeds the "
            r"pre-allocated encoder cache size (?P<most>\d+)"
        ),
        cause="One {kind} has {tokens} tokens, and this server was started with room for {most}.",
        remedy=(
            "For Qwen3-VL a picture has width x height / 1024 tokens: send at most {pixels} pixels, or let "
            "the server scale pictures down."
        ),
        command="{run}",
        compute=_pixels,
    ),
    Rule(
        id="vllm.prompt_too_long",
        words=("exceeds model's maximum context length", "maximum context length is"),
        pattern=(
            r"(?:Input length \((?P<tokens>\d+)\) exceeds model's maximum context length \((?P<most>\d+)\)"
            r"|maximum context length is (?P<most_too>\d+) tokens\. However, you requested "
            r"(?P<tokens_too>\d+) tokens)"
        ),
        cause=(
            "One request has {tokens} tokens, and the server was started for {most}. The server itself is "
            "well."
        ),
        remedy=(
            "Send smaller pictures (width x height / 1024 tokens each for Qwen3-VL) or less text, or let "
            "the server scale pictures down to a quarter of its context: {quarter} tokens."
        ),
        command="{run}",
        compute=_quarter,
    ),
    Rule(
        id="vllm.too_many_images",
        words=("may be provided in one",),
        pattern=(
            r"At most (?P<most>\d+) (?P<kind>image|video|audio)\(s\) may be provided in one "
            r"(?:prompt|request)"
        ),
        cause=(
            "A request had more than {most} {kind}s, which is this server's limit. The server itself is well."
        ),
        remedy="Send fewer, or raise the limit; each one more costs KV cache.",
        command="{run}",
        compute=_one_more,
    ),
    Rule(
        id="wsl.uva",
        words=("UVA is not available", "requires uva (pin memory) support"),
        pattern=(
            r"(?:RuntimeError: UVA is not available|V1 CPU offloading requires uva \(pin memory\) support)"
        ),
        cause=(
            "vLLM wants memory of the computer that the GPU reads directly, and switches that off under "
            "WSL2 by default (0.24 to 0.29 need it to start at all)."
        ),
        remedy="{advice}{model}",
        command="{run}",
        compute=_pinned,
    ),
)
