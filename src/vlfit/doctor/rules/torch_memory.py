"""Out of memory in PyTorch and transformers. The remedy depends on the stage that the traceback shows."""

import re
from dataclasses import dataclass, field
from typing import Any

from vlfit.doctor.remedies import (
    CAPPED_IMAGE_TOKENS,
    fp8_model_name,
    image_cap_kwargs,
    is_named_quantized,
    qwen3_vl_size,
    suggest_native_plan,
    vllm_command,
)
from vlfit.doctor.rule import Finding, Rule, TemplateValues
from vlfit.doctor.rules.vllm_memory import suggest_planned_start
from vlfit.units import GIB

_SIZE = r"[\d.]+ (?:[KMGT]i?B|bytes)"
_MAX_CONTEXT = 8192  # the longest to plan for
_CAP = image_cap_kwargs(CAPPED_IMAGE_TOKENS)


@dataclass(frozen=True, slots=True)
class OomStage:
    """A stage of vLLM's work at which memory may run out, and what helps then.

    - ``name``: the stage's name in ``Failure.stage``.
    - ``function_pattern``: a regular expression for functions in the traceback of this stage.
    - ``description``: ``while CUDA graphs were captured``, for the diagnosis's cause.
    - ``remedy``: text in which ``{smaller}`` stands for a sentence on a smaller model.
    - ``changes``: flags of the remedy's command, as for ``vllm_command``.
    """

    name: str
    function_pattern: str
    description: str
    remedy: str
    changes: dict[str, Any] = field(default_factory=dict)


# The first match counts: captures run inside a warm-up, the vision encoder inside the profiling run.
VLLM_STAGES = (
    OomStage(
        "graphs",
        r"capture_model|cudagraph_utils|torch/cuda/graphs\.py",
        "while CUDA graphs were captured",
        "Run without CUDA graphs (slower), or capture few: --cudagraph-capture-sizes 1 2 4.",
        {"enforce_eager": True},
    ),
    OomStage(
        "sampler",
        r"_dummy_sampler_run|\bsampler\.py",
        "during sampling",
        "Allow fewer requests at once.",
        {"max_num_seqs": 4},
    ),
    OomStage(
        "pictures",
        r"embed_multimodal|get_multimodal_embeddings|_execute_mm_encoder|_process_image_input|_process_video_input"
        r"|embed_images|self\.visual\(",
        "while a picture was encoded",
        (
            "Limit pictures to 1,024 tokens and disable video: the encoder's peak grows with the largest "
            "picture."
        ),
        {"mm_processor_kwargs": _CAP, "limit_mm_per_prompt": {"image": 1, "video": 0}, "max_num_seqs": 4},
    ),
    OomStage(
        "weights",
        r"load_model|initialize_model|_initialize_model|create_weights|process_weights_after_loading",
        "while the weights were loaded",
        "The weights alone are too large. {smaller}",
    ),
    OomStage(
        "pass",
        r"profile_run|_dummy_run|determine_available_memory|determine_num_available_blocks",
        "during vLLM's profiling run",
        "Allow fewer tokens and requests in one step.",
        {"max_num_batched_tokens": 1024, "max_num_seqs": 4},
    ),
    OomStage(
        "requests",
        r"execute_model|engine_step|run_busy_loop|worker_busy_loop|_merge_multimodal_embeddings",
        "while answering a request",
        "Nothing was left for its growth beyond the budget: leave more of the GPU free, limit pictures, "
        "allow fewer requests.",
        {"mm_processor_kwargs": _CAP, "max_num_seqs": 4},
    ),
)
_TRANSFORMERS_STAGES = (
    (r"transformers/.{0,80}?vision|modeling_qwen\w*vl", "while transformers ran the model"),
    (r"from_pretrained|load_checkpoint|_load_state_dict", "while transformers loaded the weights"),
    (r"transformers/generation|\.generate\(", "while transformers generated"),
)


def _is_vllm(finding: Finding) -> bool:
    facts = finding.facts
    return "vllm" in finding.match.lines_above or facts.version is not None or bool(facts.arguments)


def _weights_too_large(finding: Finding) -> str:
    """A sentence if the weights in the log are larger than the card, else ""."""
    weights = finding.facts.weights_gib
    total = finding.gpu.total / GIB if finding.gpu else finding.facts.total_gib
    if weights is None or total is None or weights <= total:
        return ""
    return (
        f" The weights alone take {weights:.2f} GiB, more than the {total:.2f} GiB of the card: under "
        "Windows and WSL2 the driver spills the rest into RAM until that is full, too."
    )


def _smaller_weights(finding: Finding) -> tuple[str, str]:
    """What to load instead: a sentence, and the name for a command ("" if none is known)."""
    model = finding.facts.model or ""
    if qwen3_vl_size(model) is not None and not is_named_quantized(model):
        return f"Use the FP8 checkpoint, {fp8_model_name(model)}.", fp8_model_name(model)
    return "Use a smaller model, or weights of fewer bits.", ""


def _out_of_memory(finding: Finding) -> TemplateValues:
    above = finding.match.lines_above
    is_vllm, stage = _is_vllm(finding), _stage(above)
    too_large = _weights_too_large(finding)
    values = {
        "numbers": _card_numbers(finding),
        "weights": too_large,
        "stage": stage.name if stage else "",
        "when": f" {stage.description}" if stage else "",
    }
    context = min(finding.facts.int_argument("max_model_len", _MAX_CONTEXT), _MAX_CONTEXT)
    if is_vllm and (start := suggest_planned_start(finding, context)) is not None:
        return values | {"advice": start["advice"], "run": start["run"]}
    plan, run = suggest_native_plan(finding.machine, qwen3_vl_size(finding.facts.model))
    sentence, name = _smaller_weights(finding)
    if is_vllm and too_large:
        run = vllm_command(finding.facts, model=name) if name else run
        return values | {"advice": sentence + _UNCHECKED, "run": run}
    if "vllm" in above:
        if stage is None:
            return values | {"advice": _NO_STAGE + plan, "run": run}
        advice = stage.remedy.replace("{smaller}", sentence)
        if stage.changes or name:
            run = vllm_command(finding.facts, stage.changes, model=name or None)
            return values | {"advice": advice + _UNCHECKED, "run": run}
        return values | {"advice": advice + plan, "run": run}
    for functions, when in _TRANSFORMERS_STAGES:
        if re.search(functions, above):
            return values | {"when": f" {when}", "advice": _TRANSFORMERS_ADVICE + plan, "run": run}
    return values | {"when": "", "advice": _NO_STAGE + plan, "run": run}


def _stage(lines_above: str) -> OomStage | None:
    return next((stage for stage in VLLM_STAGES if re.search(stage.function_pattern, lines_above)), None)


def _card_numbers(finding: Finding) -> str:
    groups = finding.match.groups
    total, free = (groups.get(name) or groups.get(f"{name}_old") for name in ("total", "free"))
    if not total:
        return ""
    return f" on a GPU of {total}" + (f", of which {free} were free" if free else "")


_UNCHECKED = " Whether that is enough is unchecked: the log does not say."
_TRANSFORMERS_ADVICE = (
    "transformers does not plan memory: it loads all weights in one format and pictures at full size. Use "
    "weights of fewer bits or smaller pictures; `vlfit plan` shows what fits this GPU."
)
_NO_STAGE = (
    "The lines above the error, which show what was running, are missing. `vlfit plan` shows what fits this "
    "GPU; paste the whole traceback for more."
)


def _illegal_access(finding: Finding) -> TemplateValues:
    if not (finding.facts.model and _is_vllm(finding)):
        return {
            "advice": (
                "To find the kernel, run the program again with CUDA_LAUNCH_BLOCKING=1. The system log says "
                "whether the card itself reported a fault (Xid)."
            ),
            "run": "sudo dmesg -T | grep -i xid | vlfit doctor --log -",
        }
    variables = {"CUDA_LAUNCH_BLOCKING": "1"}
    return {
        "advice": (
            "Start it without compiled graphs and with blocking launches (slow): if that works, keep only "
            "--enforce-eager; if not, its traceback now names the kernel to report. That it helps is "
            "unchecked."
        ),
        "run": vllm_command(finding.facts, {"enforce_eager": True}, environment=variables),
    }


_INDEX = re.compile(r"srcIndex < srcSelectDimSize|index out of bounds|ind(?:ex)? >= 0 && ind")


def _assertion(finding: Finding) -> TemplateValues:
    assertions = re.findall(r"Assertion [`']?(.{1,120}?)[`']? failed", finding.match.lines_above)
    last = assertions[-1] if assertions else ""
    meaning = "a value was not what the kernel expects"
    if _INDEX.search(last):
        meaning = (
            "an index was too large, most often a token outside the model's vocabulary (from a tokenizer or "
            "processor of another model), or a text longer than the model's positions"
        )
    return {"which": f" ({last})" if last else "", "meaning": meaning}


TORCH = (
    Rule(
        id="cuda.illegal_access",
        keywords=("an illegal memory access was encountered",),
        pattern=r"CUDA error: an illegal memory access was encountered",
        cause=(
            "A kernel accessed GPU memory outside its buffers: a fault of the program, most often an "
            "extension that does not match this card or PyTorch, not a lack of memory. Kernels run "
            "asynchronously, so the traceback may name the wrong place."
        ),
        compute=_illegal_access,
    ),
    Rule(
        id="cuda.device_assert",
        keywords=("device-side assert triggered",),
        pattern=r"device-side assert triggered",
        cause="A check inside a kernel failed{which}: {meaning}. Every later call in this process fails.",
        remedy=(
            "Use model, tokenizer and processor of one checkpoint. Running on the CPU (device_map='cpu') or "
            "with this variable shows the place."
        ),
        command="export CUDA_LAUNCH_BLOCKING=1",
        compute=_assertion,
    ),
    Rule(
        id="cuda.graph_oom",
        keywords=("CUDA error: out of memory",),
        pattern=(
            r"(?:capture_end\(\)|capture_begin\([^)]{0,80}\)) {1,4}"
            r"(?:torch\.AcceleratorError|RuntimeError): CUDA error: out of memory"
        ),
        cause=(
            "Beside weights and KV cache too little memory was left to capture CUDA graphs (0.3 to 0.7 GiB "
            "by default)."
        ),
        remedy=(
            "Start without CUDA graphs (slower), or capture few: --cudagraph-capture-sizes 1 2 4 (vLLM 0.12)."
        ),
        compute=lambda finding: {"run": vllm_command(finding.facts, {"enforce_eager": True})},
        hides=("cuda.oom", "torch.oom"),
    ),
    Rule(
        id="torch.oom",
        keywords=("out of memory. Tried to allocate",),
        pattern=(
            rf"(?:CUDA|HIP) out of memory\. Tried to allocate (?P<wanted>{_SIZE})\b\.?"
            rf"(?: GPU \d+ has a total capac(?:i)?ty of (?P<total>{_SIZE}) of which (?P<free>{_SIZE}) is free"
            rf"| \(GPU \d+; (?P<total_old>{_SIZE}) total capacity; {_SIZE} already allocated; "
            rf"(?P<free_old>{_SIZE}) free)?"
        ),
        cause="GPU memory ran out{when}: {wanted} more were requested{numbers}.{weights}",
        compute=_out_of_memory,
    ),
    Rule(
        id="cuda.oom",
        keywords=("CUDA error: out of memory",),
        pattern=r"(?:RuntimeError|AcceleratorError): CUDA error: out of memory",
        cause="The driver ran out of GPU memory, for a CUDA context or an allocation outside PyTorch.",
        remedy="See which programs hold the GPU (WSL2 shows no names), close them, and leave more free.",
        command="nvidia-smi",
    ),
    Rule(
        id="transformers.dispatched",
        keywords=("Some modules are dispatched on the CPU or the disk",),
        pattern=r"Some modules are dispatched on the CPU or the disk",
        cause=(
            "The quantized weights do not fit the free GPU memory, so transformers would put some of them "
            "into RAM, where bitsandbytes cannot use them."
        ),
        remedy=(
            "Free GPU memory, or use a smaller model; `vlfit plan` shows which fit. The message does not say "
            "how much is missing."
        ),
        command="vlfit plan",
    ),
    Rule(
        id="transformers.architecture",
        keywords=("Transformers does not recognize this architecture",),
        pattern=r"model type `(?P<kind>[\w.-]{1,60})` but Transformers does not recognize this architecture",
        cause="The installed transformers is older than the model ({kind}). 4.57.0 added Qwen3-VL.",
        remedy="Update it in the environment that runs the model.",
        command='pip install --upgrade "transformers>=4.57"',
    ),
)
