"""llama.cpp and Ollama: where an allocation failed, and whether it was the model or the picture encoder.

Knows: the lines of ggml's CUDA backend and of Ollama's scheduler, and llama.cpp's flags of 2026. Does not
know GGUF files, nor what is free.
"""

import shlex

from vlfit.doctor.rule import Case, Rule, Values

_PICTURE = ("warmup with image size", "clip_model_loader", "clip_ctx", "mtmd_", "alloc_compute_meta")
_OLLAMA = ("ollama", "source=server.go", "source=runner.go", "source=sched.go", "llama runner")
_OLLAMA_SHORT = "OLLAMA_CONTEXT_LENGTH=4096 ollama serve"


def _server(case: Case, flags: str) -> str:
    """``llama-server`` for the model that the log names."""
    return f"llama-server -m {shlex.quote(case.facts.gguf or 'MODEL.gguf')} {flags}"


def _named(case: Case) -> str:
    return "" if case.facts.gguf else " Put your file where MODEL.gguf stands."


def _failed(case: Case, mib: float) -> Values:
    before = case.found.before[-4000:]
    size = f"{mib:,.0f} MiB"
    if any(word in before for word in _PICTURE):
        return {
            "size": size,
            "what": "the picture encoder (mmproj) or its workspace",
            "advice": (
                "Its workspace grows with the picture: cap the picture's tokens, and leave the encoder in "
                "RAM "
                "(slower). MMPROJ.gguf is your file of the encoder." + _named(case)
            ),
            "run": _server(case, "--mmproj MMPROJ.gguf --image-max-tokens 1024 --no-mmproj-offload"),
        }
    what = "the model's layers, its KV cache or their workspace"
    if any(word in before for word in _OLLAMA):
        advice = "Give it a shorter context, of which Ollama reserves every token at once."
        return {"size": size, "what": what, "advice": advice, "run": _OLLAMA_SHORT}
    advice = (
        "Let llama.cpp fit layers to what is free (its default), with a context of 4,096 tokens."
        + _named(case)
    )
    return {"size": size, "what": what, "advice": advice, "run": _server(case, "--fit on --ctx-size 4096")}


def _failed_allocation(case: Case) -> Values:
    return _failed(case, case.found.number("mib"))


def _failed_buffer(case: Case) -> Values:
    return _failed(case, case.found.number("bytes") / 2**20)


def _ran_out(case: Case) -> Values:
    return {"run": _server(case, "--fit on --fit-target 2048 --ctx-size 4096"), "named": _named(case)}


def _ram_short(case: Case) -> Values:
    missing = case.found.number("needed") - case.found.number("available")
    return {"missing": f"{missing:.1f}"}


LLAMA = (
    Rule(
        id="ggml.cuda_malloc",
        words=("cudaMalloc failed: out of memory",),
        pattern=(
            r"allocating (?P<mib>\d+(?:\.\d+)?) MiB on device (?P<device>\d+): cudaMalloc failed: out of "
            r"memory"
        ),
        cause="GPU {device} had no {size} in one piece for {what}.",
        remedy="{advice} What is free is not in the log, so that it fits is unchecked.",
        command="{run}",
        compute=_failed_allocation,
        hides=("ggml.buffer", "ggml.cuda_oom"),
    ),
    Rule(
        id="ggml.buffer",
        words=("failed to allocate CUDA", "failed to allocate ROCm"),
        pattern=r"failed to allocate (?P<device>(?:CUDA|ROCm)\d+) buffer of size (?P<bytes>\d{1,18})\b",
        cause="{device} had no {size} in one piece for {what}.",
        remedy="{advice} What is free is not in the log, so that it fits is unchecked.",
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
