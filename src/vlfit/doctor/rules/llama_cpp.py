"""llama.cpp and Ollama: memory for the model or the picture encoder, old builds, no GPU.

Messages of ggml's CUDA backend and Ollama's scheduler, and flags of llama.cpp, of 2026.
"""

import re

from vlfit.doctor.logs import GGUF_PLACEHOLDER, MMPROJ_PLACEHOLDER, LlamaFlagChanges
from vlfit.doctor.remedies import qwen3_vl_size
from vlfit.doctor.rule import Finding, Rule, TemplateValues
from vlfit.units import MIB

_PICTURE = ("warmup with image size", "clip_model_loader", "clip_ctx", "mtmd_", "alloc_compute_meta")
_OLLAMA = ("ollama", "source=server.go", "source=runner.go", "source=sched.go", "llama runner")
_OLLAMA_SHORT = "OLLAMA_CONTEXT_LENGTH=4096 ollama serve"
_DEFAULT_CONTEXT, _MIN_CONTEXT = 4096, 2048
_CONTEXT_STEP = 256  # llama.cpp rounds contexts up to multiples
# llama.cpp's own default for --fit-target; here for its CUDA context and workspaces, which were not measured.
_MARGIN_MIB = 1024


def _failed_allocation(finding: Finding, mib: float) -> TemplateValues:
    """Of what an allocation of ``mib`` was a part, by the lines around it, and what to change."""
    above, run = finding.match.lines_above[-4000:], finding.facts.llama
    later = finding.match.groups.get("later", "")
    values = {"size": f"{mib:,.0f} MiB"}
    what = "the model's layers, its KV cache or their workspace"
    if any(word in above for word in _OLLAMA):
        advice = f"Set a shorter context: Ollama allocates all of it at the start. {_unchecked(finding)}"
        return {**values, "what": what, "advice": advice, "run": _OLLAMA_SHORT}
    if "kv cache" in later:
        return values | _kv_cache(finding, mib)
    if any(word in above for word in _PICTURE):
        encoder = run.flag_value("--mmproj") or MMPROJ_PLACEHOLDER
        changes: LlamaFlagChanges = {
            "--mmproj": encoder,
            "--image-max-tokens": "1024",
            "--no-mmproj-offload": "",
        }
        advice = (
            "Its workspace grows with the picture: limit the picture's tokens, and keep the encoder in RAM "
            f"(slower).{_placeholders(finding, encoder)} {_unchecked(finding)}"
        )
        what = "the picture encoder (mmproj) or its workspace"
        return {**values, "what": what, "advice": advice, "run": run.command_with(changes)}
    if "compute" in later:
        what = "the workspace of a forward pass (compute buffers)"
    advice = f"{_fit_advice(finding)} {_unchecked(finding)}"
    return {**values, "what": what, "advice": advice, "run": _fit_command(finding)}


def _kv_cache(finding: Finding, mib: float) -> TemplateValues:
    """The context is too long for the memory: find one that fits."""
    run, free = finding.facts.llama, finding.gpu.free / MIB if finding.gpu else None
    values = {"what": "the KV cache, allocated for the whole context at once", "run": _fit_command(finding)}
    if run.context is None:
        return {**values, "advice": f"{_fit_advice(finding)} {_unchecked(finding)}"}
    kib_per_token = mib * 1024 / run.context
    values["what"] = f"the KV cache: {run.context:,} tokens x {kib_per_token:.4g} KiB, all allocated at once"
    if free is None:
        return {**values, "advice": f"{_fit_advice(finding)} {_unchecked(finding)}"}
    if run.weights_mib is None:
        unchecked = "That it fits is unchecked: the log does not have the model's size."
        return {**values, "advice": f"{_fit_advice(finding)} {unchecked}"}
    encoder = _encoder_mib(finding)
    left = free - run.weights_mib - (encoder or 0) - _MARGIN_MIB
    fits = int(max(left, 0) * 1024 / kib_per_token) // _CONTEXT_STEP * _CONTEXT_STEP
    uses = (
        f"Of {free:,.0f} MiB free the model takes {run.weights_mib:,.0f}"
        + (f", the picture encoder {encoder:,.0f}" if encoder else "")
        + f", CUDA and workspaces {_MARGIN_MIB:,} (a margin, not measured)"
    )
    if encoder is None:
        uses += "; the picture encoder's size is unknown and not counted"
    if fits < _MIN_CONTEXT:
        advice = (
            f"{uses}: too little is left for a context of {_MIN_CONTEXT:,} tokens. {_fit_advice(finding)}"
        )
        return {**values, "advice": advice}
    fits = min(fits, run.context)
    needed = f"{fits:,} tokens need {fits * kib_per_token / 1024:,.0f} MiB"
    return {
        **values,
        "advice": (
            f"{uses}: {left:,.0f} MiB are left, and {needed}. Set that context.{_placeholders(finding)}"
        ),
        "run": run.command_with({"--ctx-size": str(fits)}),
    }


def _encoder_mib(finding: Finding) -> float | None:
    """The picture encoder on the GPU in 16 bits: 0 if it is not there, None if its size is unknown."""
    run = finding.facts.llama
    if run.flag_value("--mmproj") is None or "--no-mmproj-offload" in run.command:
        return 0
    size = qwen3_vl_size(run.flag_value("-m") or run.model_file)
    if size is None:
        return None
    from vlfit.plan.model_lookup import find_exact_models

    return find_exact_models(size)[0].vision_bytes / MIB


def _fit_advice(finding: Finding) -> str:
    layers = ", without --gpu-layers" if finding.facts.llama.flag_value("--gpu-layers") else ""
    return (
        "Let llama.cpp put on the GPU what fits there, and the rest into RAM (slower; its default since "
        f"December 2025){layers}, with a context of at most {_DEFAULT_CONTEXT:,} "
        f"tokens.{_placeholders(finding)}"
    )


def _fit_command(finding: Finding, **changes: str) -> str:
    run = finding.facts.llama
    context = min(run.context or _DEFAULT_CONTEXT, _DEFAULT_CONTEXT)
    flags = {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    return run.command_with({"--gpu-layers": None, "--fit": "on", **flags, "--ctx-size": str(context)})


def _unchecked(finding: Finding) -> str:
    if finding.gpu is None:
        return "That it fits is unchecked: the log does not say what is free."
    return (
        f"That it fits the {finding.gpu.free / MIB:,.0f} MiB that are free on the described GPU is unchecked."
    )


def _placeholders(finding: Finding, encoder: str = "") -> str:
    """What to add to a remedy whose command has placeholders."""
    run = finding.facts.llama
    notes = [] if run.command or run.model_file else [f" Put your file in place of {GGUF_PLACEHOLDER}."]
    notes += [f" Put the encoder's file in place of {encoder}."] if encoder == MMPROJ_PLACEHOLDER else []
    return "".join(notes)


def _ram_missing(finding: Finding) -> TemplateValues:
    missing = finding.match.number("needed") - finding.match.number("available")
    return {"missing": f"{missing:.1f}"}


def _architecture(finding: Finding) -> TemplateValues:
    kind = finding.match.groups["kind"]
    if any(word in finding.match.lines_above for word in _OLLAMA):
        return {
            "advice": (
                "Update Ollama, or use the model from its own library: it runs other files with its copy of "
                "llama.cpp, which is older."
            ),
            "run": "ollama pull qwen3-vl:4b" if kind == "qwen3vl" else "ollama --version",
        }
    since = " Qwen3-VL was added at the end of October 2025." if kind.startswith("qwen3vl") else ""
    return {
        "advice": f"Update llama.cpp; this shows the installed build.{since}",
        "run": "llama-server --version",
    }


def _no_gpu(finding: Finding) -> TemplateValues:
    above = finding.match.lines_above
    if re.search(r"found [1-9]\d* (?:CUDA|ROCm|Vulkan) devices", above):
        return {
            "why": (
                "Further up it found one: a server that only forwards requests prints this, too, while its "
                "workers run on the GPU"
            ),
            "advice": (
                "Check that the GPU is busy while it answers. If not, check the devices that llama.cpp lists."
            ),
            "run": "nvidia-smi",
        }
    if "failed to initialize CUDA" in above:
        return {
            "why": "CUDA could not start: the driver is at fault, or CUDA_VISIBLE_DEVICES hides the GPU",
            "advice": "Let the doctor check the driver.",
            "run": "vlfit doctor",
        }
    return {
        "why": "Most often it is a build without CUDA; else the driver does not answer",
        "advice": "If this lists no CUDA device, use a build for CUDA; `vlfit doctor` checks the driver.",
        "run": "llama-server --list-devices",
    }


# The next line of llama.cpp says what the memory was for.
_LATER = r"(?:.{0,600}?(?P<later>failed to allocate (?:buffer for kv cache|compute (?:pp |pg )?buffers)))?"

LLAMA_CPP = (
    Rule(
        id="llama.architecture",
        keywords=("unknown model architecture",),
        pattern=r"unknown model architecture: '(?P<kind>[\w.-]{1,60})'",
        cause="This llama.cpp is older than the model: it does not support the architecture {kind}.",
        compute=_architecture,
        hides=("ollama.wrapper",),
    ),
    Rule(
        id="llama.no_gpu",
        keywords=("no usable GPU found",),
        pattern=r"no usable GPU found, --gpu-layers option will be ignored",
        cause="llama.cpp found no GPU and runs on the CPU, many times slower. {why}.",
        compute=_no_gpu,
    ),
    Rule(
        id="ggml.cuda_malloc",
        keywords=("cudaMalloc failed: out of memory",),
        pattern=(
            r"allocating (?P<mib>\d+(?:\.\d+)?) MiB on device (?P<device>\d+): cudaMalloc failed: out of "
            r"memory"
            rf"{_LATER}"
        ),
        cause="GPU {device} could not allocate {size} in one piece for {what}.",
        compute=lambda finding: _failed_allocation(finding, finding.match.number("mib")),
        hides=("ggml.buffer", "ggml.cuda_oom"),
    ),
    Rule(
        id="ggml.buffer",
        keywords=("failed to allocate CUDA", "failed to allocate ROCm"),
        pattern=(
            r"failed to allocate (?P<device>(?:CUDA|ROCm)\d+) buffer of size (?P<bytes>\d{1,18})\b" + _LATER
        ),
        cause="{device} could not allocate {size} in one piece for {what}.",
        compute=lambda finding: _failed_allocation(finding, finding.match.number("bytes") / MIB),
        hides=("ggml.cuda_oom",),
    ),
    Rule(
        id="ggml.cuda_oom",
        keywords=("CUDA error: out of memory", "CUDA error 2 at"),
        pattern=(
            r"(?:CUDA error: out of memory {1,3}(?:\S+ E )?current device: \d+, in function \w+"
            r"|CUDA error 2 at \S*ggml-cuda\S*: out of memory)"
        ),
        cause=(
            "llama.cpp ran out of GPU memory while running, not while loading: too little was free for its "
            "growth."
        ),
        remedy=(
            "Leave more free: fewer layers on the GPU, a shorter context, or a larger margin (--fit-target, "
            "in MiB; the default is 1024). That this is enough is unchecked.{placeholders}"
        ),
        compute=lambda finding: {
            "run": _fit_command(finding, fit_target="2048"),
            "placeholders": _placeholders(finding),
        },
        hides=("cuda.oom",),
    ),
    Rule(
        id="ollama.system_memory",
        keywords=("model requires more system memory",),
        pattern=(
            r"model requires more system memory \((?P<needed>\d+(?:\.\d+)?) GiB\) than is available "
            r"\((?P<available>\d+(?:\.\d+)?) GiB\)"
        ),
        cause=(
            "Ollama wants to load the model into RAM: it needs {needed} GiB and {available} GiB are free, "
            "{missing} GiB too few. So it does not expect all of it to fit the GPU."
        ),
        remedy=(
            "Set a shorter context, all of which Ollama allocates at the start, and check in the first lines "
            "of its log that it found the GPU. That 4,096 tokens are few enough is unchecked."
        ),
        command=_OLLAMA_SHORT,
        compute=_ram_missing,
    ),
    Rule(
        id="ollama.layout",
        keywords=("memory layout cannot be allocated",),
        pattern=r"memory layout cannot be allocated with num_gpu = (?P<layers>\d+)",
        cause="num_gpu puts {layers} layers on the GPU, and they do not fit.",
        remedy="Remove num_gpu from the Modelfile or the request: Ollama then chooses the number itself.",
        command="ollama ps",
    ),
)
