"""Which flags of ``vllm serve`` came and went with which version: one table for the planner and the doctor.

Knows: versions as their sources have them (0.8.5 to 0.33.0; where some between were not read the first one
that was and had the flag counts, so that the true one may be a release or two earlier), and what became of
flags that guides still name. Does not know what a plan sets (``command.py``).
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from vlfit.errors import UsageError
from vlfit.plan.shapes import Model

Number = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Life:
    """From the first version that has a flag to the ``last``; None: it is there still."""

    first: Number
    last: Number | None = None

    def covers(self, version: Number) -> bool:
        """Whether ``version`` has the flag; later fixes of the last version that was read count as it."""
        return version >= self.first and (self.last is None or version[:2] <= self.last[:2])


_EVER = Life((0, 8, 5))
LIVES: Mapping[str, Life] = {
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
    "--api-server-count": Life((0, 9, 2)),
    "--kv-cache-memory-bytes": Life((0, 11)),
    "--mm-processor-cache-gb": Life((0, 11)),
    "--mm-encoder-tp-mode": Life((0, 11)),
    "--structured-outputs-config": Life((0, 11)),
    "--cudagraph-capture-sizes": Life((0, 12)),
    "--max-cudagraph-capture-size": Life((0, 12)),
    "--kv-offloading-size": Life((0, 12)),
    "--language-model-only": Life((0, 19, 1)),
    "--device-memory-utilization": Life((0, 31)),
    "--trust-request-mm-kwargs": Life((0, 31)),
    "--max-seq-len-to-capture": Life((0, 8, 5), (0, 9, 2)),
    "--cuda-graph-sizes": Life((0, 8, 5), (0, 12, 0)),
    "--disable-mm-preprocessor-cache": Life((0, 8, 5), (0, 12, 0)),
    "--swap-space": Life((0, 8, 5), (0, 16, 0)),
    "--disable-log-requests": Life((0, 8, 5), (0, 16, 0)),
    "--calculate-kv-scales": Life((0, 8, 5), (0, 27, 1)),
}
# What became of flags that guides still name, in words; "it" is the flag.
GONE: Mapping[str, str] = {
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


def has(version: Number, flag: str) -> bool:
    """Whether ``version`` has ``flag``; one that is not in the table is taken to be there."""
    life = LIVES.get(flag)
    return life is None or life.covers(version)


# Which vLLM a plan is for: the one that was named, the one that is installed here, else the newest known.
#
# Knows: the versions whose sources were read, and what changed between them that a plan must respect. Does
# not import vLLM: the installed one is asked of its package's metadata.


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


# The words of a ``vllm serve`` command: flags with their values, as vLLM itself reads them.
#
# Knows: underscores for hyphens, ``--flag=value``, ``--flag.key value``, and that 8k is 8000 but 8K is
# 8192. Does not know what any flag means (``legacy.py``).


_MOST = 2**50  # no number of vLLM's comes near
_SUFFIXES = {"k": 1000, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
# Switches without a value, so that a stray word is not taken for one.
_SWITCHES = {
    *("--enforce-eager", "--disable-v1-engine", "--disable-log-requests", "--disable-mm-preprocessor-cache"),
    *("--calculate-kv-scales", "--use-v2-block-manager", "--worker-use-ray", "--headless"),
}


def flags_of(words: Sequence[str]) -> Iterator[tuple[str, str | None, list[str]]]:
    """Each flag as vLLM spells it, its value (None: a switch), and the words that it was given in.

    Raises ``UsageError`` for a word that belongs to no flag.
    """
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        flag = name.replace("_", "-")
        if not flag.strip("-") or _is_value(word):
            raise UsageError(f"{word!r} is no flag of vllm serve", "after -- come flags of vLLM, with values")
        given, found = [word], value if equals else None
        while not equals and flag not in _SWITCHES and rest and _is_value(rest[0]):
            given.append(rest.pop(0))  # several: --cudagraph-capture-sizes 1 2 4
            found = found if found is not None else given[-1]
        base, dot, keys = flag.partition(".")
        yield (base, _nested(keys, found), given) if dot else (flag, found, given)


def as_json(flag: str, value: str | None) -> dict[str, Any]:
    """A value that is a JSON object. Raises ``UsageError`` for any other."""
    told = _plain(value)
    if not isinstance(told, dict):
        raise UsageError(f"{flag} is {value!r}", "it is JSON, such as '{\"image\": 1}'")
    return told


def whole_number(flag: str, value: str | None) -> int:
    """A whole number as vLLM reads it. Raises ``UsageError`` for what is none, or is absurd."""
    text = (value or "").strip()
    digits, factor = (text[:-1], _SUFFIXES[text[-1]]) if text[-1:] in _SUFFIXES else (text, 1)
    try:
        number = float(digits) if factor > 1 else int(digits)
    except ValueError:
        says = f"{flag} has no value" if value is None else f"{flag} is {value!r}"
        raise UsageError(says, "it takes a whole number") from None
    if not 0 <= number * factor < _MOST:
        raise UsageError(f"{flag} is {value!r}", "it takes a whole number that a machine could have")
    return round(number * factor)


def _nested(keys: str, value: str | None) -> str:
    """``image.count`` and a value as the JSON that they stand for."""
    told: Any = _plain(value)
    for key in reversed(keys.split(".")):
        told = {key.replace("-", "_"): told}
    return json.dumps(told)


def _is_value(word: str) -> bool:
    return not word.startswith("-") or word.lstrip("-").replace(".", "", 1).isdigit()


def _plain(value: str | None) -> Any:
    try:
        return json.loads(value or "null")
    except (ValueError, RecursionError):
        return value


# What only vLLM is told: over how many cards a model goes, and what a failed start taught.
#
# Knows fields and their meaning. Does not know what any of them costs (``costs.py``) or how it is spelt
# (``command.py``).


OLDER_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"  # 0 turns it off: the newer runner needs pinned memory, up to 0.29
# Variables by which workers find another way to each other, where the usual one is barred: NCCL's user guide,
# its issue 1838, and vLLM's environment variables.
OLDER_SHARING = "NCCL_CUMEM_HOST_ENABLE=0"
SOCKETS = "NCCL_SHM_DISABLE=1"
LOOPBACK = "VLLM_HOST_IP=127.0.0.1"
NO_PEERS = "NCCL_P2P_DISABLE=1"
FLOAT32 = "float32"


@dataclass(frozen=True, slots=True)
class OfVllm:
    """``tensor``: cards that share each layer; ``data``: copies of the model, each on ``tensor`` cards.

    ``split_tower``: the vision tower is shared out too; else each card has all of it and takes pictures of
    its own. ``kv_tokens``: of the pool; None: as many as requests need. ``pictures``: most of them in one
    prompt; None: as many as the context holds. ``in_ram``: vLLM's build for processors, which keeps all of
    this in RAM. ``share``: what the check at the start asks for at most, where a plan's own share is not
    free. ``dtype``: of the computation, and with it of weights in 16 bits and of the KV cache; "" leaves it
    to the checkpoint and the card. ``left_out``: flags that this vLLM does not know. ``variables``: of the
    environment, beside those that every plan has, as ``NAME=VALUE``. ``apart``: cards that share layers talk
    through RAM, and do not read each other's memory. ``one_front``: one process takes the requests of all
    copies. ``again``: how often the same was started before. ``version``: of the vLLM that is planned for, as
    its package says it: what its starts here have held is known by it.
    """

    tensor: int = 1
    data: int = 1
    split_tower: bool = False
    kv_tokens: int | None = None
    pictures: int | None = None
    in_ram: bool = False
    share: float | None = None
    dtype: str = ""
    left_out: frozenset[str] = frozenset()
    variables: frozenset[str] = frozenset()
    apart: bool = False
    one_front: bool = False
    again: int = 0
    version: str = ""

    @property
    def cards(self) -> int:
        """How many cards the plan takes."""
        return self.tensor * self.data

    @property
    def value_bytes(self) -> int:
        """Bytes of a number that is computed with."""
        return 4 if self.dtype == FLOAT32 else 2


ALONE = OfVllm()
