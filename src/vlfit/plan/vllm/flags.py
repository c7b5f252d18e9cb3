"""Versions of vLLM, the flags of ``vllm serve`` in each, and how its command line is parsed.

One table for the planner and the doctor, from the sources of 0.8.5 to 0.33.0. Not every release was read: the
first one that was read and has a flag counts, so the true one may be a release or two earlier.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from vlfit.errors import UsageError
from vlfit.plan.shapes import Model

VersionNumber = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VersionRange:
    """The vLLM versions that have a flag: ``first`` to ``last``, both included; None: no last version yet."""

    first: VersionNumber
    last: VersionNumber | None = None

    def covers(self, version: VersionNumber) -> bool:
        """Whether ``version`` is in the range; all patch releases of ``last`` are."""
        return version >= self.first and (self.last is None or version[:2] <= self.last[:2])


_EVER = VersionRange((0, 8, 5))
FLAG_VERSIONS: Mapping[str, VersionRange] = {
    "--max-model-len": _EVER,
    "--gpu-memory-utilization": _EVER,
    "--enforce-eager": _EVER,
    "--max-num-seqs": _EVER,
    "--max-num-batched-tokens": _EVER,
    "--limit-mm-per-prompt": _EVER,
    "--mm-processor-kwargs": _EVER,
    "--cpu-offload-gb": _EVER,
    "--kv-cache-dtype": _EVER,
    "--dtype": _EVER,
    "--tensor-parallel-size": _EVER,
    "--data-parallel-size": _EVER,
    "--num-gpu-blocks-override": _EVER,
    "--disable-custom-all-reduce": _EVER,
    "--compilation-config": _EVER,
    "--api-server-count": VersionRange((0, 9, 2)),
    "--kv-cache-memory-bytes": VersionRange((0, 11)),
    "--mm-processor-cache-gb": VersionRange((0, 11)),
    "--mm-encoder-tp-mode": VersionRange((0, 11)),
    "--structured-outputs-config": VersionRange((0, 11)),
    "--cudagraph-capture-sizes": VersionRange((0, 12)),
    "--max-cudagraph-capture-size": VersionRange((0, 12)),
    "--kv-offloading-size": VersionRange((0, 12)),
    "--language-model-only": VersionRange((0, 19, 1)),
    "--device-memory-utilization": VersionRange((0, 31)),
    "--trust-request-mm-kwargs": VersionRange((0, 31)),
    "--max-seq-len-to-capture": VersionRange((0, 8, 5), (0, 9, 2)),
    "--cuda-graph-sizes": VersionRange((0, 8, 5), (0, 12, 0)),
    "--disable-mm-preprocessor-cache": VersionRange((0, 8, 5), (0, 12, 0)),
    "--swap-space": VersionRange((0, 8, 5), (0, 16, 0)),
    "--disable-log-requests": VersionRange((0, 8, 5), (0, 16, 0)),
    "--calculate-kv-scales": VersionRange((0, 8, 5), (0, 27, 1)),
}
# Fate of flags that guides still name, in words; "it" is the flag.
FLAG_HISTORY: Mapping[str, str] = {
    "--disable-v1-engine": "no version ever had it, and the old engine is gone since 0.11",
    "--swap-space": "it is gone since 0.19",
    "--disable-log-requests": "it is gone since 0.19, and is the default now",
    "--max-seq-len-to-capture": "it is gone since 0.11; --max-cudagraph-capture-size (0.12) is its heir",
    "--cuda-graph-sizes": "it is gone since 0.14; --cudagraph-capture-sizes is its heir",
    "--disable-mm-preprocessor-cache": "it is gone since 0.14; --mm-processor-cache-gb 0 is its heir",
    "--calculate-kv-scales": "it is gone since 0.28",
    "--kv-cache-memory-bytes": "it came with 0.11",
    "--mm-processor-cache-gb": "it came with 0.11",
    "--cudagraph-capture-sizes": "it came with 0.12",
    "--language-model-only": "it came with 0.19.1",
    "--trust-request-mm-kwargs": "it came with 0.31",
}


def has_flag(version: VersionNumber, flag: str) -> bool:
    """Whether ``version`` has ``flag``; True for a flag that is not in ``FLAG_VERSIONS``."""
    life = FLAG_VERSIONS.get(flag)
    return life is None or life.covers(version)


# --- versions -----------------------------------------------------------------------------------------------

# 0.11 is the first that has Qwen3-VL, and the first with --kv-cache-memory-bytes and --mm-processor-cache-gb.
OLDEST, NEWEST = (0, 11, 0), (0, 33, 0)
# Pictures' sizes of one request may overrule those of the server, unless the version refuses it by itself.
SIZES_ARE_FIXED_FROM = (0, 31, 0)
# Under WSL2 a runner that needs pinned memory, which vLLM leaves off there: the start ends with "UVA is not
# available". 0.24 has the variable that turns it on; 0.30 does without.
PINNED_FROM, _PINNED_UNTIL = (0, 24, 0), (0, 30, 0)
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
    """A version of vLLM: ``number``, such as (0, 22, 0), and ``text``, as it was written.

    ``how`` it is known: named by the person, installed here, or assumed.
    """

    number: tuple[int, int, int]
    text: str
    how: str

    @property
    def needs_pinned_memory(self) -> bool:
        """Whether Qwen3-VL starts under WSL2 only with ``VLLM_WSL2_ENABLE_PIN_MEMORY`` (0.24 to 0.29)."""
        return PINNED_FROM <= self.number < _PINNED_UNTIL

    @property
    def has_known_flags(self) -> bool:
        """Whether this version is no newer than ``NEWEST``; a newer one is taken to have the same flags."""
        return self.number[:2] <= NEWEST[:2]


def parse_version(text: str, how: str = NAMED) -> Version:
    """Parse a version of vLLM such as ``0.22``, ``v0.24.1`` or ``0.32.0+cpu``. ``how``: ``Version.how``.

    Raises ``UsageError`` for other text, and for versions without Qwen3-VL.
    """
    found = _VERSION.fullmatch(text.strip())
    if found is None:
        shown = text if len(text) <= 40 else text[:37] + "..."
        raise UsageError(
            f"{shown!r} is not a version of vLLM", "Write it like --vllm-version 0.22.", param="vllm_version"
        )
    number = (int(found[1]), int(found[2]), int(found[3] or 0))
    if number < OLDEST:
        says = f"vLLM {text.strip()}" + (" is installed here, and" if how == INSTALLED else "")
        raise UsageError(
            f"{says} has no Qwen3-VL: 0.11 is the first that does",
            "Update vLLM, or name the version that you will use: --vllm-version 0.33.",
            param="vllm_version",
        )
    return Version(number, text.strip(), how)


def chosen_version(named: str | None) -> Version:
    """The version in the text ``named``; if None, the vLLM installed beside vlfit, else ``NEWEST``.

    Raises ``UsageError`` as ``parse_version`` does.
    """
    if named is not None:
        return parse_version(named)
    try:
        found, package = metadata.version("vllm"), find_spec("vllm")
    except (metadata.PackageNotFoundError, KeyError):
        found, package = "", None
    # Metadata may be without a version, or be left of a package that is gone; a mere folder has no origin.
    if found and package is not None and package.origin:
        return parse_version(found, INSTALLED)
    return Version(NEWEST, ".".join(str(part) for part in NEWEST), ASSUMED)


def check_kernels(model: Model, name: str, capability: tuple[int, int], version: Version) -> None:
    """Raise ``UsageError`` if vLLM ``version`` has no kernels for the weights of ``model`` on a card.

    ``name``, ``capability``: the card's name, for the message, and its compute capability.
    """
    least = _LEAST_CAPABILITY.get(model.weights, _LEAST_CAPABILITY["bf16"])
    if model.weights == "fp8" and version.number < _FP8_ON_TURING_FROM:
        least = (8, 0)
    if capability < least:
        raise UsageError(
            f"vLLM {version.text} runs {model.weights} weights from compute capability {least[0]}.{least[1]} "
            f"on; {name} is {capability[0]}.{capability[1]}",
            "Take other weights, or leave out --backend.",
            param="weights",
        )


# --- the command line, as vLLM parses it: --flag_name, --flag=value, --flag.key value; 8k is 8000, 8K is 8192
# ---

_MOST = 2**50  # more than any value of vLLM's
_SUFFIXES = {"k": 1000, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
# Switches without a value, so that a stray word is not taken for one.
_SWITCHES = {
    *("--enforce-eager", "--disable-v1-engine", "--disable-log-requests", "--disable-mm-preprocessor-cache"),
    *("--calculate-kv-scales", "--use-v2-block-manager", "--worker-use-ray", "--headless"),
}


def iter_flags(words: Sequence[str]) -> Iterator[tuple[str, str | None, list[str]]]:
    """Parse the flags of a ``vllm serve`` command line: yield (name, value, the words as typed) of each.

    The name has hyphens for underscores. The value is None for a switch, the first for several values, and
    JSON for a dotted key such as ``--flag.key value``. Raises ``UsageError`` for a word that belongs to no
    flag.
    """
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        flag = name.replace("_", "-")
        if not flag.strip("-") or _is_value(word):
            raise UsageError(
                f"{word!r} is no flag of vllm serve",
                "Flags of vLLM, with their values, come after --.",
                param=word,
            )
        given, found = [word], value if equals else None
        while not equals and flag not in _SWITCHES and rest and _is_value(rest[0]):
            given.append(rest.pop(0))  # several: --cudagraph-capture-sizes 1 2 4
            found = found if found is not None else given[-1]
        base, dot, keys = flag.partition(".")
        yield (base, _json_of_dotted_key(keys, found), given) if dot else (flag, found, given)


def parse_json_object(flag: str, value: str | None) -> dict[str, Any]:
    """Parse ``value`` as a JSON object. Raises ``UsageError`` naming ``flag`` for anything else."""
    parsed = _json_value(value)
    if not isinstance(parsed, dict):
        raise UsageError(f"{flag} is {value!r}", "It is JSON, such as '{\"image\": 1}'.", param=flag)
    return parsed


def parse_whole_number(flag: str, value: str | None) -> int:
    """Parse ``value`` as an integer by vLLM's rules: 8k is 8000, 8K is 8192, 1.5k is 1500.

    Raises ``UsageError`` naming ``flag`` for None, other text, and numbers below 0 or from 2^50 on.
    """
    text = (value or "").strip()
    digits, factor = (text[:-1], _SUFFIXES[text[-1]]) if text[-1:] in _SUFFIXES else (text, 1)
    try:
        number = float(digits) if factor > 1 else int(digits)
    except ValueError:
        says = f"{flag} has no value" if value is None else f"{flag} is {value!r}"
        raise UsageError(says, "It takes a whole number.", param=flag) from None
    if not 0 <= number * factor < _MOST:
        raise UsageError(
            f"{flag} is {value!r}", "It takes a whole number that a machine could have.", param=flag
        )
    return round(number * factor)


def _json_of_dotted_key(keys: str, value: str | None) -> str:
    """JSON of a dotted key such as ``image.count`` and its value."""
    parsed: Any = _json_value(value)
    for key in reversed(keys.split(".")):
        parsed = {key.replace("-", "_"): parsed}
    return json.dumps(parsed)


def _is_value(word: str) -> bool:
    return not word.startswith("-") or word.lstrip("-").replace(".", "", 1).isdigit()


def _json_value(value: str | None) -> Any:
    try:
        return json.loads(value or "null")
    except (ValueError, RecursionError):
        return value
