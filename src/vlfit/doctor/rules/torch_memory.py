"""Out of memory as PyTorch says it, and what transformers says when it has no room.

What helps depends on the stage at which the traceback stands.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from vlfit.doctor.remedies import PICTURE_CAP, fp8_name, is_quantized, own_plan, serve, size_of, without_model
from vlfit.doctor.rule import Case, Rule, Values
from vlfit.doctor.rules.vllm_memory import planned_start

_SIZE = r"[\d.]+ (?:[KMGT]i?B|bytes)"
_LONGEST = 8192  # the context that a plan begins with where vLLM was asked for more
_CAP = {"size": {"longest_edge": PICTURE_CAP, "shortest_edge": 65536}}


@dataclass(frozen=True, slots=True)
class Stage:
    """Where in a program's life memory ran out: names of functions in the traceback, and what helps there.

    ``name``: for a program that acts on it.
    """

    name: str
    functions: str
    when: str
    remedy: str
    changes: dict[str, Any] = field(default_factory=dict)


# The first that stands in the traceback counts: a capture runs inside a warm-up, a picture in a trial run.
VLLM_STAGES = (
    Stage(
        "graphs",
        r"capture_model|cudagraph_utils|torch/cuda/graphs\.py",
        "while CUDA graphs were captured",
        "Do without graphs (slower), or capture few: --cudagraph-capture-sizes 1 2 4.",
        {"enforce_eager": True},
    ),
    Stage(
        "sampler",
        r"_dummy_sampler_run|\bsampler\.py",
        "while the next tokens were chosen",
        "Allow fewer requests at once.",
        {"max_num_seqs": 4},
    ),
    Stage(
        "pictures",
        r"embed_multimodal|get_multimodal_embeddings|_execute_mm_encoder|_process_image_input|_process_video_input"
        r"|embed_images|self\.visual\(",
        "while a picture was encoded",
        "Cap the pictures at 1,024 tokens and forbid video: the encoder's peak grows with the largest "
        "picture.",
        {"mm_processor_kwargs": _CAP, "limit_mm_per_prompt": {"image": 1, "video": 0}, "max_num_seqs": 4},
    ),
    Stage(
        "weights",
        r"load_model|initialize_model|_initialize_model|create_weights|process_weights_after_loading",
        "while the weights were loaded",
        "The weights alone are too large. {smaller}",
    ),
    Stage(
        "pass",
        r"profile_run|_dummy_run|determine_available_memory|determine_num_available_blocks",
        "during the trial run before the start",
        "Take fewer tokens and requests in one step.",
        {"max_num_batched_tokens": 1024, "max_num_seqs": 4},
    ),
    Stage(
        "requests",
        r"execute_model|engine_step|run_busy_loop|worker_busy_loop|_merge_multimodal_embeddings",
        "while a request was answered",
        "Its growth beyond the budget found no room: leave more of the GPU free, cap the pictures, take "
        "fewer requests.",
        {"mm_processor_kwargs": _CAP, "max_num_seqs": 4},
    ),
)
_TRANSFORMERS = (
    (r"transformers/.{0,80}?vision|modeling_qwen\w*vl", "while transformers ran the model"),
    (r"from_pretrained|load_checkpoint|_load_state_dict", "while transformers loaded the weights"),
    (r"transformers/generation|\.generate\(", "while transformers wrote an answer"),
)


def _of_vllm(case: Case) -> bool:
    return "vllm" in case.found.before or case.facts.version is not None or bool(case.facts.arguments)


def _alone(case: Case) -> str:
    """A sentence if the log says that the weights alone are more than the card holds, else ""."""
    weights = case.facts.weights_gib
    total = case.gpu.total / 2**30 if case.gpu else case.facts.total_gib
    if weights is None or total is None or weights <= total:
        return ""
    return (
        f" The model alone takes {weights:.2f} GiB, more than the {total:.2f} GiB of the card: under "
        f"Windows and "
        "WSL2 the driver spills the rest into RAM until that ends, too."
    )


def _smaller(case: Case) -> tuple[str, str]:
    """What to load instead, in words, and the name for a command ("" if none is known)."""
    model = case.facts.model or ""
    if size_of(model) is not None and not is_quantized(model):
        return f"Take the FP8 checkpoint, {fp8_name(model)}.", fp8_name(model)
    return "Take a smaller model, or weights of fewer bits.", ""


def _out_of_memory(case: Case) -> Values:
    groups, before = case.found.groups, case.found.before
    numbers = ""
    if groups.get("total"):
        free = groups.get("free") or groups.get("free_old")
        numbers = f", of which {free} were free" if free else ""
        numbers = f" on a GPU of {groups['total']}{numbers}"
    values = {"numbers": numbers}
    values |= {"alone": _alone(case)}
    is_vllm = _of_vllm(case)
    at = next((stage for stage in VLLM_STAGES if re.search(stage.functions, before)), None)
    when = at.when if at is not None else ""
    values |= {"stage": at.name if at is not None else ""}
    most = case.facts.whole("max_model_len", _LONGEST)
    if is_vllm and (start := planned_start(case, min(most, _LONGEST))) is not None:
        return values | {"when": f" {when}" if when else "", "advice": start["advice"], "run": start["run"]}
    planned, run = own_plan(case.machine, size_of(case.facts.model))
    if is_vllm and values["alone"]:
        words, name = _smaller(case)
        again = serve(case.facts, model=name) if name else run
        return values | {"when": f" {when}" if when else "", "advice": words + _UNCHECKED, "run": again}
    for functions, when in _TRANSFORMERS:
        if "vllm" not in before and re.search(functions, before):
            return values | {"when": f" {when}", "advice": _TRANSFORMERS_ADVICE + planned, "run": run}
    for stage in VLLM_STAGES:
        if "vllm" in before and re.search(stage.functions, before):
            words, name = _smaller(case)
            advice = stage.remedy.replace("{smaller}", words) + without_model(case.facts)
            known = stage.changes or name
            if known:
                command = serve(case.facts, stage.changes, model=name or None)
                return values | {"when": f" {stage.when}", "advice": advice + _UNCHECKED, "run": command}
            return values | {"when": f" {stage.when}", "advice": advice + planned, "run": run}
    return values | {"when": "", "advice": _NO_STAGE + planned, "run": run}


_UNCHECKED = " The log does not hold what would prove that this is enough."
_TRANSFORMERS_ADVICE = (
    "transformers makes no plan: it loads all weights in one format and takes pictures at full size. Take "
    "weights of fewer bits or smaller pictures; `vlfit plan` shows which fit this GPU."
)
_NO_STAGE = (
    "The lines above the error, which say at what it failed, are missing. `vlfit plan` shows what fits this "
    "GPU; paste the whole traceback for more."
)


def _graphs(case: Case) -> Values:
    changes = {"enforce_eager": True}
    return {"run": serve(case.facts, changes), "model": without_model(case.facts)}


def _illegal(case: Case) -> Values:
    if not (case.facts.model and _of_vllm(case)):
        advice = (
            "Where it happened is only known if each kernel is waited for: run it once more with "
            "CUDA_LAUNCH_BLOCKING=1. The kernel's log says whether the card itself reported a fault (Xid)."
        )
        return {"advice": advice, "run": "sudo dmesg -T | grep -i xid | vlfit doctor --log -"}
    advice = (
        "Start it without compiled graphs, waiting for each kernel (slow): if that cures it, leave only "
        "--enforce-eager; if not, its traceback now names the kernel to report. That it helps is unchecked."
    )
    variables = {"CUDA_LAUNCH_BLOCKING": "1"}
    return {"advice": advice, "run": serve(case.facts, {"enforce_eager": True}, environment=variables)}


_INDEX = re.compile(r"srcIndex < srcSelectDimSize|index out of bounds|ind(?:ex)? >= 0 && ind")


def _assertion(case: Case) -> Values:
    said = re.findall(r"Assertion [`']?(.{1,120}?)[`']? failed", case.found.before)
    which = f" ({said[-1]})" if said else ""
    if said and _INDEX.search(said[-1]):
        meaning = (
            "a number that counts places was too large: most often a token that the model's vocabulary "
            "lacks, from "
            "a tokenizer or processor of another model, or a text longer than the model's positions"
        )
    else:
        meaning = "a value was not what a kernel expects"
    return {"which": which, "meaning": meaning}


TORCH = (
    Rule(
        id="cuda.illegal_access",
        words=("an illegal memory access was encountered",),
        pattern=r"CUDA error: an illegal memory access was encountered",
        cause=(
            "A kernel read or wrote GPU memory that is not its own: a fault of the program (an extension "
            "that does "
            "not fit this card or PyTorch, more often than the card), not a lack of memory. Lines above "
            "may name "
            "the wrong place, as kernels are waited for later."
        ),
        remedy="{advice}",
        command="{run}",
        compute=_illegal,
    ),
    Rule(
        id="cuda.device_assert",
        words=("device-side assert triggered",),
        pattern=r"device-side assert triggered",
        cause="A check inside a kernel failed{which}: {meaning}. Every later call in this process fails.",
        remedy=(
            "Take model, tokenizer and processor from one folder. The same on the processor "
            "(device_map='cpu'), or "
            "with this variable set, names the place."
        ),
        command="export CUDA_LAUNCH_BLOCKING=1",
        compute=_assertion,
    ),
    Rule(
        id="cuda.graph_oom",
        words=("CUDA error: out of memory",),
        pattern=(
            r"(?:capture_end\(\)|capture_begin\([^)]{0,80}\)) "
            r"{1,4}(?:torch\.AcceleratorError|RuntimeError): CUDA error: out of memory"
        ),
        cause=(
            "The memory left beside weights and KV cache was too little to capture CUDA graphs (0.3 to 0.7 "
            "GiB by default)."
        ),
        remedy=(
            "Start without CUDA graphs (slower), or capture few: --cudagraph-capture-sizes 1 2 4 (vLLM "
            "0.12).{model}"
        ),
        command="{run}",
        compute=_graphs,
        hides=("cuda.oom", "torch.oom"),
    ),
    Rule(
        id="torch.oom",
        words=("out of memory. Tried to allocate",),
        pattern=(
            rf"(?:CUDA|HIP) out of memory\. Tried to allocate (?P<wanted>{_SIZE})\b\.?"
            rf"(?: GPU \d+ has a total capac(?:i)?ty of (?P<total>{_SIZE}) of which (?P<free>{_SIZE}) is free"
            rf"| \(GPU \d+; (?P<total_old>{_SIZE}) total capacity; {_SIZE} already allocated; "
            rf"(?P<free_old>{_SIZE}) free)?"
        ),
        cause="GPU memory ran out{when}: {wanted} more were asked for{numbers}.{alone}",
        remedy="{advice}",
        command="{run}",
        compute=lambda case: _out_of_memory(_with_total(case)),
    ),
    Rule(
        id="cuda.oom",
        words=("CUDA error: out of memory",),
        pattern=r"(?:RuntimeError|AcceleratorError): CUDA error: out of memory",
        cause="The driver had no GPU memory left, for a CUDA context or for what PyTorch does not count.",
        remedy="See who holds the GPU (under WSL2 no names are shown), close it, and leave a larger reserve.",
        command="nvidia-smi",
    ),
    Rule(
        id="transformers.dispatched",
        words=("Some modules are dispatched on the CPU or the disk",),
        pattern=r"Some modules are dispatched on the CPU or the disk",
        cause=(
            "The quantized weights do not fit the GPU memory that is free, so transformers wanted to put "
            "some of them into RAM, where bitsandbytes cannot use them."
        ),
        remedy=(
            "Free GPU memory, or take a smaller model; `vlfit plan` shows which fit. How much is missing is "
            "not said."
        ),
        command="vlfit plan",
    ),
    Rule(
        id="transformers.architecture",
        words=("Transformers does not recognize this architecture",),
        pattern=r"model type `(?P<kind>[\w.-]{1,60})` but Transformers does not recognize this architecture",
        cause="The installed transformers is older than the model ({kind}). Qwen3-VL came with 4.57.0.",
        remedy="Update it in the environment that runs the model.",
        command='pip install --upgrade "transformers>=4.57"',
    ),
)


def _with_total(case: Case) -> Case:
    """The old form of the message has the same numbers under other names."""
    groups = dict(case.found.groups)
    groups["total"] = groups.get("total") or groups.get("total_old") or ""
    found = case.found
    return Case(type(found)(found.start, groups, found.evidence, found.before), case.facts, case.machine)
