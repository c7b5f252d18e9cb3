"""Triton: it cannot build what launches a kernel, or its assembler does not know the card.

Knows: the messages of Triton's build step, of C compilers and of ptxas. Whether this computer has what Triton
needs is in ``vlfit.doctor.compiler``.
"""

from vlfit.doctor.compiler import INSTALL
from vlfit.doctor.rule import Case, Rule, Values
from vlfit.doctor.rules.driver import build_for

# Architectures that the ptxas of CUDA 12.8 does not know yet, by NVIDIA's notes on PTX; it knows 12.0.
_KNOWN_SINCE = {(10, 3): "12.9", (12, 1): "12.9", (11, 0): "13.0"}


def _headers(case: Case) -> Values:
    python = case.found.groups.get("python")
    return {"run": INSTALL.replace("python3-", f"python{python}-") if python else INSTALL}


def _assembler(case: Case) -> Values:
    digits = case.found.groups["capability"]
    capability = (int(digits[:-1]), int(digits[-1]))
    needed = _KNOWN_SINCE.get(capability, "12.8")
    values = {"card": f"{capability[0]}.{capability[1]}", "needed": needed}
    if capability in _KNOWN_SINCE:
        advice = (
            f"Let it use the ptxas of an installed CUDA {needed} or newer, whose folder may be another than "
            "this one."
        )
        run = "export TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas"
        return {**values, "advice": advice, "run": run}
    build = build_for(case, capability)
    vllm = " vLLM brings a PyTorch of its own: update vLLM instead." if case.facts.version else ""
    return {
        **values,
        "advice": f"{build['advice']} It brings a Triton that knows the card.{vllm}",
        "run": build["run"],
    }


TRITON = (
    Rule(
        id="triton.no_compiler",
        words=("Failed to find C compiler",),
        pattern=r"Failed to find C compiler\. Please specify via CC",
        cause=(
            "Triton found no C compiler: it compiles a few lines of C when it launches its first kernel, in "
            "vLLM as in vlfit's own engine."
        ),
        remedy="Install one, and Python's headers, which are asked for next. A fresh Ubuntu has neither.",
        command=INSTALL,
    ),
    Rule(
        id="triton.no_headers",
        words=("Python.h",),
        pattern=(
            r"(?:fatal )?error: '?Python\.h'?:? (?:No such file or directory|file not found)"
            r"(?:.{0,1500}?-I/usr/include/python(?P<python>3\.\d{1,2})\b)?"
        ),
        cause="Python's headers are missing: what Triton compiles to launch its first kernel includes them.",
        remedy=(
            "Install them for the Python that runs the program: python3-dev is for the system's own, another "
            "needs its number, like python3.12-dev."
        ),
        command="{run}",
        compute=_headers,
    ),
    Rule(
        id="triton.ptxas",
        words=("is not defined for option",),
        pattern=r"Value 'sm_(?P<capability>\d{2,3})[af]?' is not defined for option 'gpu-name'",
        cause=(
            "Triton's assembler, ptxas, is older than this card (compute capability {card}), which it knows "
            "from CUDA {needed} on."
        ),
        remedy="{advice}",
        command="{run}",
        compute=_assembler,
        hides=("cuda.no_kernel_image",),
    ),
)
