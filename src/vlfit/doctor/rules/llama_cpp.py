"""llama.cpp and Ollama: where an allocation failed, and whether it was the model or the picture encoder.

Lines of ggml's CUDA backend and of Ollama's scheduler, and llama.cpp's flags of 2026. Free memory is known
only where a machine is named. The command is written by ``vlfit.doctor.logs``.
"""

import re

from vlfit.doctor.logs import ENCODER, MODEL, Changes
from vlfit.doctor.remedies import size_of
from vlfit.doctor.rule import Case, Rule, Values
from vlfit.units import MIB

_PICTURE = ("warmup with image size", "clip_model_loader", "clip_ctx", "mtmd_", "alloc_compute_meta")
_OLLAMA = ("ollama", "source=server.go", "source=runner.go", "source=sched.go", "llama runner")
_OLLAMA_SHORT = "OLLAMA_CONTEXT_LENGTH=4096 ollama serve"
_WISHED, _LEAST = 4096, 2048
_STEP = 256  # llama.cpp rounds a context up to these
# What llama.cpp's own fitting leaves free on a GPU (--fit-target); here for its CUDA context and workspaces,
# which were not measured.
_MARGIN_MIB = 1024


def _failed(case: Case, mib: float) -> Values:
    before = case.found.before[-4000:]
    values = {"size": f"{mib:,.0f} MiB"}
    if any(word in before for word in _OLLAMA):
        what = "the model's layers, its KV cache or their workspace"
        advice = (
            f"Give it a shorter context, of which Ollama reserves every token at once. {_unchecked(case)}"
        )
        return {**values, "what": what, "advice": advice, "run": _OLLAMA_SHORT}
    if "kv cache" in case.found.groups.get("later", ""):
        return values | _too_long(case, mib)
    if any(word in before for word in _PICTURE):
        encoder = case.facts.llama.value("--mmproj") or ENCODER
        changes: Changes = {"--mmproj": encoder, "--image-max-tokens": "1024", "--no-mmproj-offload": ""}
        advice = (
            "Its workspace grows with the picture: cap the picture's tokens, and leave the encoder in RAM "
            f"(slower).{_placeholders(case, encoder)} {_unchecked(case)}"
        )
        what = "the picture encoder (mmproj) or its workspace"
        return {**values, "what": what, "advice": advice, "run": case.facts.llama.again(changes)}
    what = "the model's layers, its KV cache or their workspace"
    if "compute" in case.found.groups.get("later", ""):
        what = "the workspace of a pass (compute buffers)"
    return {**values, "what": what, "advice": f"{_fitted(case)} {_unchecked(case)}", "run": _fit(case)}


def _too_long(case: Case, mib: float) -> Values:
    """The context was to have more tokens than there is memory for their keys and values."""
    run, free = case.facts.llama, case.gpu.free / MIB if case.gpu else None
    what = "the KV cache, which is reserved for every token of the context at once"
    if run.context is None:
        return {"what": what, "advice": f"{_fitted(case)} {_unchecked(case)}", "run": _fit(case)}
    per_token = mib * 1024 / run.context
    what = f"the KV cache: {run.context:,} tokens x {per_token:.4g} KiB, all reserved at once"
    if free is None or run.weights_mib is None:
        unknown = (
            _unchecked(case)
            if free is None
            else "The log lacks the model's size, so that it fits is unchecked."
        )
        return {"what": what, "advice": f"{_fitted(case)} {unknown}", "run": _fit(case)}
    encoder = _encoder_mib(case)
    left = free - run.weights_mib - (encoder or 0) - _MARGIN_MIB
    fits = int(max(left, 0) * 1024 / per_token) // _STEP * _STEP
    sums = (
        f"Of {free:,.0f} MiB free the model takes {run.weights_mib:,.0f}"
        + (f", the picture encoder {encoder:,.0f}" if encoder else "")
        + f", CUDA and workspaces {_MARGIN_MIB:,} (a margin, not measured)"
    )
    if encoder is None:
        sums += "; the picture encoder's size is not known here and not counted"
    if fits < _LEAST:
        advice = f"{sums}: too little is left for a context of {_LEAST:,} tokens. {_fitted(case)}"
        return {"what": what, "advice": advice, "run": _fit(case)}
    fits = min(fits, run.context)
    held = f"{fits:,} tokens need {fits * per_token / 1024:,.0f} MiB"
    advice = f"{sums}: {left:,.0f} MiB are left, and {held}. Ask for that context.{_placeholders(case)}"
    return {"what": what, "advice": advice, "run": run.again({"--ctx-size": str(fits)})}


def _encoder_mib(case: Case) -> float | None:
    """The picture encoder on the GPU, in 16 bits: 0 if there is none, None if its size is not known."""
    run = case.facts.llama
    if run.value("--mmproj") is None or "--no-mmproj-offload" in run.command:
        return 0
    size = size_of(run.value("-m") or run.file)
    if size is None:
        return None
    from vlfit.plan.subjects import subjects

    return subjects(size)[0].vision_bytes / MIB


def _fitted(case: Case) -> str:
    layers = ", so the number of layers is left to it" if case.facts.llama.value("--gpu-layers") else ""
    return (
        "Let llama.cpp put on the GPU what fits there, and the rest into RAM (slower; its default from "
        "December "
        f"2025 on){layers}, with a context of at most {_WISHED:,} tokens.{_placeholders(case)}"
    )


def _fit(case: Case, **changes: str) -> str:
    length = min(case.facts.llama.context or _WISHED, _WISHED)
    named = {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    return case.facts.llama.again({"--gpu-layers": None, "--fit": "on", **named, "--ctx-size": str(length)})


def _unchecked(case: Case) -> str:
    if case.gpu is None:
        return "What is free is not in the log, so that it fits is unchecked."
    return f"That this fits the {case.gpu.free / MIB:,.0f} MiB that are free on the named GPU is unchecked."


def _placeholders(case: Case, encoder: str = "") -> str:
    """What to add to a remedy whose command has names that the log does not say."""
    named = (
        [] if case.facts.llama.command or case.facts.llama.file else [f"Put your file where {MODEL} stands."]
    )
    named += [f"{ENCODER} is your file of the encoder."] if encoder == ENCODER else []
    return "".join(f" {each}" for each in named)


def _failed_allocation(case: Case) -> Values:
    return _failed(case, case.found.number("mib"))


def _failed_buffer(case: Case) -> Values:
    return _failed(case, case.found.number("bytes") / 2**20)


def _ran_out(case: Case) -> Values:
    return {"run": _fit(case, fit_target="2048"), "named": _placeholders(case)}


def _ram_short(case: Case) -> Values:
    missing = case.found.number("needed") - case.found.number("available")
    return {"missing": f"{missing:.1f}"}


def _architecture(case: Case) -> Values:
    kind = case.found.groups["kind"]
    if any(word in case.found.before for word in _OLLAMA):
        advice = (
            "Update Ollama, or take the model from its own library: files from elsewhere are run by its "
            "copy of "
            "llama.cpp, which is behind."
        )
        return {
            "advice": advice,
            "run": "ollama pull qwen3-vl:4b" if kind == "qwen3vl" else "ollama --version",
        }
    since = " Qwen3-VL came at the end of October 2025." if kind.startswith("qwen3vl") else ""
    return {
        "advice": f"Update llama.cpp; this shows which build is there.{since}",
        "run": "llama-server --version",
    }


def _no_gpu(case: Case) -> Values:
    if re.search(r"found [1-9]\d* (?:CUDA|ROCm|Vulkan) devices", case.found.before):
        return {
            "why": "Further up it found one: a server that only hands requests on says this, too, and its "
            "workers "
            "run on the GPU",
            "advice": "See whether the GPU is used while it answers. If it is not, look at the devices it "
            "lists.",
            "run": "nvidia-smi",
        }
    if "failed to initialize CUDA" in case.found.before:
        return {
            "why": "CUDA was there and could not start, so the driver is at fault, or CUDA_VISIBLE_DEVICES "
            "hides "
            "the GPU",
            "advice": "Let the doctor look at the driver.",
            "run": "vlfit doctor",
        }
    return {
        "why": "Most often it is a build without CUDA; else the driver does not answer",
        "advice": "If this lists no CUDA device, take a build for CUDA; `vlfit doctor` looks at the driver.",
        "run": "llama-server --list-devices",
    }


# What llama.cpp says next: what the memory was for.
_LATER = r"(?:.{0,600}?(?P<later>failed to allocate (?:buffer for kv cache|compute (?:pp |pg )?buffers)))?"

LLAMA = (
    Rule(
        id="llama.architecture",
        words=("unknown model architecture",),
        pattern=r"unknown model architecture: '(?P<kind>[\w.-]{1,60})'",
        cause="This llama.cpp is older than the model: it does not know the kind {kind}.",
        remedy="{advice}",
        command="{run}",
        compute=_architecture,
        hides=("ollama.wrapper",),
    ),
    Rule(
        id="llama.no_gpu",
        words=("no usable GPU found",),
        pattern=r"no usable GPU found, --gpu-layers option will be ignored",
        cause="llama.cpp found no GPU and runs on the processor, many times slower. {why}.",
        remedy="{advice}",
        command="{run}",
        compute=_no_gpu,
    ),
    Rule(
        id="ggml.cuda_malloc",
        words=("cudaMalloc failed: out of memory",),
        pattern=(
            r"allocating (?P<mib>\d+(?:\.\d+)?) MiB on device (?P<device>\d+): cudaMalloc failed: out of "
            r"memory"
            rf"{_LATER}"
        ),
        cause="GPU {device} had no {size} in one piece for {what}.",
        remedy="{advice}",
        command="{run}",
        compute=_failed_allocation,
        hides=("ggml.buffer", "ggml.cuda_oom"),
    ),
    Rule(
        id="ggml.buffer",
        words=("failed to allocate CUDA", "failed to allocate ROCm"),
        pattern=(
            r"failed to allocate (?P<device>(?:CUDA|ROCm)\d+) buffer of size (?P<bytes>\d{1,18})\b" + _LATER
        ),
        cause="{device} had no {size} in one piece for {what}.",
        remedy="{advice}",
        command="{run}",
        compute=_failed_buffer,
        hides=("ggml.cuda_oom",),
    ),
    Rule(
        id="ggml.cuda_oom",
        words=("CUDA error: out of memory", "CUDA error 2 at"),
        pattern=(
            r"(?:CUDA error: out of memory {1,3}(?:\S+ E )?current device: \d+, in function \w+"
            r"|CUDA error 2 at \S*ggml-cuda\S*: out of memory)"
        ),
        cause=(
            "llama.cpp ran out of GPU memory while it worked, not while it loaded: its own growth found no "
            "room."
        ),
        remedy=(
            "Leave more free: fewer layers on the GPU, a shorter context, or a larger margin for its fitting "
            "(--fit-target, in MiB; 1024 is the default). That this is enough is unchecked.{named}"
        ),
        command="{run}",
        compute=_ran_out,
        hides=("cuda.oom",),
    ),
    Rule(
        id="ollama.system_memory",
        words=("model requires more system memory",),
        pattern=(
            r"model requires more system memory \((?P<needed>\d+(?:\.\d+)?) GiB\) than is available "
            r"\((?P<available>\d+(?:\.\d+)?) GiB\)"
        ),
        cause=(
            "Ollama means to hold the model in RAM: it wants {needed} GiB and {available} GiB are free, "
            "{missing} GiB too few. That it looks at RAM at all means that it did not count on the GPU for "
            "all of it."
        ),
        remedy=(
            "Shorten the context, of which Ollama reserves every token at once, and see in the first lines "
            "of its log whether it found the GPU. That 4,096 tokens are few enough is unchecked."
        ),
        command=_OLLAMA_SHORT,
        compute=_ram_short,
    ),
    Rule(
        id="ollama.layout",
        words=("memory layout cannot be allocated",),
        pattern=r"memory layout cannot be allocated with num_gpu = (?P<layers>\d+)",
        cause="num_gpu says that {layers} layers go on the GPU, and they do not fit there.",
        remedy="Take num_gpu out of the Modelfile or the request: Ollama then counts the layers itself.",
        command="ollama ps",
    ),
)
