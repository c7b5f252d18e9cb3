"""Settings and requests that vLLM refuses: unknown flags, too long contexts, formats the GPU lacks.

Messages as in the sources of vLLM 0.8.5 to 0.33.0.
"""

import re

from vlfit.doctor.remedies import image_cap_kwargs, kv_cache_gib, qwen3_vl_memory, qwen3_vl_size, vllm_command
from vlfit.doctor.rule import Finding, Rule, TemplateValues
from vlfit.doctor.rules.vllm_memory import suggest_planned_start
from vlfit.plan.vllm.flags import FLAG_HISTORY
from vlfit.units import GIB

_SHORT_CONTEXT = 8192
_ALL_FLAGS = "vllm serve --help=all"
# First version of vLLM with an architecture.
_ARCHITECTURES = {"Qwen3VLForConditionalGeneration": "0.11", "Qwen3VLMoeForConditionalGeneration": "0.11"}


def _version(finding: Finding) -> str:
    version = finding.facts.version
    return f" {'.'.join(map(str, version))}" if version else ""


def _unknown_flags(finding: Finding) -> TemplateValues:
    flags = re.findall(r"--[\w-]+", finding.match.groups["flags"])
    history = [f"{flag}: {FLAG_HISTORY[flag]}" for flag in flags if flag in FLAG_HISTORY]
    names = tuple(flag[2:].replace("-", "_") for flag in flags)
    return {
        "version": _version(finding),
        "known": "; ".join(history)
        or f"It may be misspelt, or belong to another version: `{_ALL_FLAGS}` lists all",
        "run": vllm_command(finding.facts, without=names) if finding.facts.model else _ALL_FLAGS,
    }


def _model_length(finding: Finding) -> TemplateValues:
    """The longest context that the planner fits, else the model's own if it could fit this GPU at all."""
    most = int(finding.match.groups["most"])
    if (planned := suggest_planned_start(finding, most)) is not None:
        return planned
    size = qwen3_vl_size(finding.facts.model)
    needed = kv_cache_gib(qwen3_vl_memory(size or "2B"), most)
    total = finding.gpu.total / GIB if finding.gpu else finding.facts.total_gib
    whose = f"Qwen3-VL {size}" if size else "the smallest Qwen3-VL"
    advice = f"Memory may hold fewer: the KV cache of {most} tokens takes {needed:.1f} GiB for {whose}. "
    length = most
    if total is not None and needed > total:
        length = _SHORT_CONTEXT
        advice += f"This GPU has {total:.1f} GiB, so set {length:,}. "
    missing = "an official Qwen3-VL" if finding.machine else "the machine (--gpu or --machine)"
    advice += f"That it fits is unchecked: the log and the options do not name {missing}."
    return {"advice": advice, "run": vllm_command(finding.facts, {"max_model_len": length})}


def _architecture(finding: Finding) -> TemplateValues:
    since = _ARCHITECTURES.get(finding.match.groups["kind"])
    return {
        "version": _version(finding),
        "since": f" vLLM {since} added it." if since else " A later version may support it.",
        "run": f'pip install --upgrade "vllm>={since}"' if since else "pip install --upgrade vllm",
    }


def _capped(finding: Finding, image_tokens: int) -> str:
    """The command with pictures scaled down to ``image_tokens``."""
    return vllm_command(finding.facts, {"mm_processor_kwargs": image_cap_kwargs(image_tokens)})


def _encoder_cache(finding: Finding) -> TemplateValues:
    most = int(finding.match.groups["most"])
    return {"run": _capped(finding, most), "pixels": f"{most * 1024:,}"}


def _chunk(finding: Finding) -> TemplateValues:
    most = finding.facts.int_argument("max_num_batched_tokens", 2048)
    return {"most": str(most), "run": _capped(finding, most)}


def _quarter(finding: Finding) -> TemplateValues:
    groups = finding.match.groups
    most = groups["most"] or groups["most_too"]
    quarter = max(int(most) // 4, 64)
    return {
        "tokens": groups["tokens"] or groups["tokens_too"],
        "most": most,
        "quarter": str(quarter),
        "run": _capped(finding, quarter),
    }


def _capabilities(finding: Finding) -> TemplateValues:
    """vLLM prints capability 8.6 as 86."""
    return {name: f"{int(finding.match.groups[name]) / 10:.1f}" for name in ("has", "need")}


def _one_more(finding: Finding) -> TemplateValues:
    limit = finding.facts.arguments.get("limit_mm_per_prompt")
    limits = dict(limit) if isinstance(limit, dict) else {}
    limits[finding.match.groups["kind"]] = int(finding.match.groups["most"]) + 1
    return {"run": vllm_command(finding.facts, {"limit_mm_per_prompt": limits})}


def _pinned_memory(finding: Finding) -> TemplateValues:
    if finding.facts.version is not None and not finding.facts.version_at_least(0, 24):
        environment = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
        return {
            "advice": (
                "This version cannot do it under WSL2: use its older model runner, and no --cpu-offload-gb."
            ),
            "run": vllm_command(finding.facts, without=("cpu_offload_gb",), environment=environment),
        }
    return {
        "advice": "Switch it on (from 0.24), or update to 0.30, which does not need it.",
        "run": vllm_command(finding.facts, environment={"VLLM_WSL2_ENABLE_PIN_MEMORY": "1"}),
    }


VLLM_SETTINGS = (
    Rule(
        id="vllm.unknown_flag",
        keywords=("unrecognized arguments",),
        pattern=r"error: unrecognized arguments: (?P<flags>--[\w-]+[^\n]{0,200})",
        one_line=True,
        cause="This vLLM{version} does not have {flags}. {known}.",
        remedy="Start it without the flag.",
        compute=_unknown_flags,
    ),
    Rule(
        id="vllm.bad_value",
        keywords=("error: argument",),
        pattern=r"error: argument (?P<flag>--[\w/-]+(?:, ?--?[\w-]+)*): (?P<why>[^\n]{1,200}?)\.?$",
        one_line=True,
        cause="vLLM cannot read the value of {flag}: {why}.",
        remedy=(
            "See which values the flag takes. Use plain integers for sizes (8k is 8000 and 8K is 8192), and "
            'JSON for limits: --limit-mm-per-prompt \'{"image": 1, "video": 0}\'.'
        ),
        command="vllm serve --help={word}",
        compute=lambda finding: {
            "word": finding.match.groups["flag"].split(",")[0].split("/")[0].lstrip("-")
        },
    ),
    Rule(
        id="vllm.max_len_over_model",
        keywords=("is greater than the derived max_model_len",),
        pattern=(
            r"User-specified max_model_len \((?P<length>\d+)\) is greater than the derived max_model_len "
            r"\((?:\w+=)*(?P<most>\d+)"
        ),
        cause="--max-model-len is {length}, and the model supports at most {most} tokens.",
        compute=_model_length,
    ),
    Rule(
        id="vllm.architecture",
        keywords=("are not supported for now",),
        pattern=r"Model architectures \['(?P<kind>\w{1,80})'[^\]\n]{0,200}\] are not supported for now",
        cause="This vLLM{version} does not support the architecture {kind}.{since}",
        remedy="Update vLLM in its environment; that updates PyTorch, too.",
        compute=_architecture,
    ),
    Rule(
        id="vllm.bf16",
        keywords=("Bfloat16 is only supported",),
        pattern=(
            r"Bfloat16 is only supported on GPUs with compute capability of at least 8\.0\. "
            r"Your (?P<card>.{1,80}?) GPU has compute capability (?P<has>[\d.]+\d)"
        ),
        cause="The weights are bfloat16, which needs compute capability 8.0, and the {card} has {has}.",
        remedy="Run them as float16.",
        compute=lambda finding: {"run": vllm_command(finding.facts, {"dtype": "half"})},
    ),
    Rule(
        id="vllm.quant_gpu",
        keywords=("is not supported for the current GPU. Minimum capability",),
        pattern=(
            r"The quantization method (?P<method>\S+) is not supported for the current GPU\. "
            r"Minimum capability: (?P<need>\d+)\. Current capability: (?P<has>\d+)"
        ),
        cause="{method} weights need a GPU of compute capability {need}, and this one has {has}.",
        remedy=(
            "Use another format of the same model: 0.33 runs awq and fp8 from 7.5 and compressed-tensors "
            "from 7.0. `vlfit plan` shows which formats fit this card."
        ),
        command="vlfit plan",
        compute=_capabilities,
    ),
    Rule(
        id="vllm.quant_scheme_gpu",
        keywords=("Quantization scheme is not supported for",),
        pattern=(
            r"Quantization scheme is not supported for.{1,12}the current GPU.{1,8}Min capability: "
            r"(?P<need>\d+)\D{1,12}Current capability: (?P<has>\d+)"
        ),
        cause=(
            "These compressed-tensors weights need a GPU of compute capability {need}, and this one has "
            "{has}."
        ),
        remedy=(
            "Use another format of the same model (AWQ or GPTQ). `vlfit plan` shows which formats fit this "
            "card."
        ),
        command="vlfit plan",
        compute=_capabilities,
    ),
    Rule(
        id="vllm.mm_chunk",
        keywords=("Chunked MM input disabled",),
        pattern=r"Chunked MM input disabled but max_tokens_per_mm_item \((?P<tokens>\d+)\)",
        cause=(
            "A picture may have {tokens} tokens, but a step takes {most}, and splitting a picture over steps "
            "is disabled."
        ),
        remedy="Limit pictures to {most} tokens.",
        compute=_chunk,
    ),
    Rule(
        id="vllm.encoder_cache",
        keywords=("exceeds the pre-allocated encoder cache size",),
        pattern=(
            r"The decoder prompt contains a\(n\) (?P<kind>\w+) item with length (?P<tokens>\d+), which "
            r"exceeds the pre-allocated encoder cache size (?P<most>\d+)"
        ),
        cause="One {kind} has {tokens} tokens, and this server's encoder cache holds {most}.",
        remedy=(
            "For Qwen3-VL a picture has width x height / 1024 tokens: send at most {pixels} pixels, or let "
            "the server scale pictures down."
        ),
        compute=_encoder_cache,
    ),
    Rule(
        id="vllm.prompt_too_long",
        keywords=("exceeds model's maximum context length", "maximum context length is"),
        pattern=(
            r"(?:Input length \((?P<tokens>\d+)\) exceeds model's maximum context length \((?P<most>\d+)\)"
            r"|maximum context length is (?P<most_too>\d+) tokens\. However, you requested "
            r"(?P<tokens_too>\d+) tokens)"
        ),
        cause=(
            "One request has {tokens} tokens, and the server's context is {most}. The server itself is fine."
        ),
        remedy=(
            "Send smaller pictures (width x height / 1024 tokens each for Qwen3-VL) or less text, or let "
            "the server scale pictures down to a quarter of its context: {quarter} tokens."
        ),
        compute=_quarter,
    ),
    Rule(
        id="vllm.too_many_images",
        keywords=("may be provided in one",),
        pattern=(
            r"At most (?P<most>\d+) (?P<kind>image|video|audio)\(s\) may be provided in one "
            r"(?:prompt|request)"
        ),
        cause=(
            "A request had more than {most} {kind}s, which is this server's limit. The server itself is fine."
        ),
        remedy="Send fewer, or raise the limit; each additional one costs KV cache.",
        compute=_one_more,
    ),
    Rule(
        id="wsl.uva",
        keywords=("UVA is not available", "requires uva (pin memory) support"),
        pattern=(
            r"(?:RuntimeError: UVA is not available|V1 CPU offloading requires uva \(pin memory\) support)"
        ),
        cause=(
            "vLLM needs pinned RAM that the GPU reads directly, but disables it under WSL2 by default (0.24 "
            "to 0.29 do not start without it)."
        ),
        compute=_pinned_memory,
    ),
)
