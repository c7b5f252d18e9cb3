"""Which vLLM a plan is for: the one that was named, the one that is installed here, else the newest known.

Knows: the versions whose sources were read, and what changed between them that a plan must respect. Does not
import vLLM: the installed one is asked of its package's metadata.
"""

import re
from dataclasses import dataclass
from importlib import metadata

from vlfit.errors import UsageError
from vlfit.plan.model import Model

# 0.11 is the first that has Qwen3-VL, and the first with --kv-cache-memory-bytes and --mm-processor-cache-gb.
OLDEST, NEWEST = (0, 11, 0), (0, 33, 0)
# Pictures' sizes of one request may overrule those of the server, unless the version refuses it by itself.
SIZES_ARE_FIXED_FROM = (0, 31, 0)
# Under WSL2 a runner that needs pinned memory, which vLLM leaves off there: the start ends with "UVA is not
# available". 0.24 has the variable that turns it on; 0.30 does without.
_PINNED_FROM, _PINNED_UNTIL = (0, 24, 0), (0, 30, 0)
PINNED = "VLLM_WSL2_ENABLE_PIN_MEMORY"
# Compute capabilities from which it has kernels. FP8 on Turing came with 0.14 (0.12 wants 8.0).
_LEAST_CAPABILITY = {"bf16": (7, 0), "fp8": (7, 5), "int4": (7, 5)}
_FP8_ON_TURING_FROM = (0, 14, 0)

NAMED, INSTALLED, ASSUMED = "named", "installed", "assumed"
_VERSION = re.compile(
    r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,6}))?(?:[-.]?(?:a|b|rc|dev|post)\.?\d*)*(?:\+[\w.-]{1,40})?"
)


@dataclass(frozen=True, slots=True)
class Version:
    """``text`` as it was named; ``how``: named, installed or assumed."""

    number: tuple[int, int, int]
    text: str
    how: str

    @property
    def needs_pinned_memory(self) -> bool:
        """Whether it starts Qwen3-VL under WSL2 only with pinned memory turned on."""
        return _PINNED_FROM <= self.number < _PINNED_UNTIL

    @property
    def is_read(self) -> bool:
        """Whether its flags are known: newer ones are taken to have those of the newest that was read."""
        return self.number[:2] <= NEWEST[:2]


def parse_version(text: str, how: str = NAMED) -> Version:
    """The version that ``text`` names: ``0.22``, ``v0.24.1``, ``0.32.0+cpu``.

    Raises ``UsageError`` for what is no version and for one that cannot run Qwen3-VL.
    """
    found = _VERSION.fullmatch(text.strip())
    if found is None:
        shown = text if len(text) <= 40 else text[:37] + "..."
        raise UsageError(f"{shown!r} is not a version of vLLM", "write it like --vllm-version 0.22")
    number = (int(found[1]), int(found[2]), int(found[3] or 0))
    if number < OLDEST:
        says = f"vLLM {text.strip()}" + (" is installed here, and" if how == INSTALLED else "")
        raise UsageError(
            f"{says} has no Qwen3-VL: 0.11 is the first that does",
            "update vLLM, or name the version that you will use: --vllm-version 0.33",
        )
    return Version(number, text.strip(), how)


def chosen_version(named: str | None) -> Version:
    """The version named, else the one installed beside vlfit, else the newest that is known here."""
    if named is not None:
        return parse_version(named)
    try:
        return parse_version(metadata.version("vllm"), INSTALLED)
    except metadata.PackageNotFoundError:
        return Version(NEWEST, ".".join(str(part) for part in NEWEST), ASSUMED)


def check_card(model: Model, name: str, capability: tuple[int, int], version: Version) -> None:
    """Raises ``UsageError`` if this vLLM has no kernels for these weights on a card of that capability."""
    least = _LEAST_CAPABILITY.get(model.weights, _LEAST_CAPABILITY["bf16"])
    if model.weights == "fp8" and version.number < _FP8_ON_TURING_FROM:
        least = (8, 0)
    if capability < least:
        raise UsageError(
            f"vLLM {version.text} runs {model.weights} weights from compute capability {least[0]}.{least[1]} "
            f"on; {name} is {capability[0]}.{capability[1]}",
            "take other weights, or leave out --backend",
        )
