"""Findings of `vlfit verify`: what was measured, what differs, and which part it names.

Plain dataclasses without torch: the checks on floor 2 make them, the command on floor 5 prints them.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Literal

from vlfit.api.engine_options import KERNEL_GROUPS, KernelGroup

Level = Literal["quick", "normal", "full"]
LEVELS: tuple[Level, ...] = ("quick", "normal", "full")


class Component(StrEnum):
    """The part of an engine or of a checkpoint that a finding names; values are those of ``--json``."""

    FILE = "file"
    TOKENIZER = "tokenizer"
    TEMPLATE = "template"
    PICTURES = "pictures"
    POSITIONS = "positions"
    TOWER = "tower"
    MERGER = "merger"
    DEEPSTACK = "deepstack"
    EMBEDDING = "embedding"
    ATTENTION = "attention"
    DELTA_NET = "delta_net"
    MLP = "mlp"
    NORM = "norm"
    ROPE = "rope"
    HEAD = "head"
    KV_CACHE = "kv_cache"
    PREFIX_CACHE = "prefix_cache"
    SCHEDULER = "scheduler"
    SPECULATION = "speculation"
    CUDA_GRAPHS = "cuda_graphs"
    SLEEP = "sleep"
    SAMPLER = "sampler"
    STOP = "stop"
    BOXES = "boxes"
    MEMORY = "memory"
    SPEED = "speed"
    DEVICE = "device"


class Likely(StrEnum):
    """What is most likely at fault."""

    KERNEL = "kernel"
    FILE = "file"
    DRIVER = "driver"
    MEMORY = "memory"
    TEMPLATE = "template"
    TOKENIZER = "tokenizer"
    PROCESSOR = "processor"  # of images: resizing, normalising, patches
    ENGINE = "engine"  # a defect of vlfit itself: to be reported
    BACKEND = "backend"  # transformers or a server: other files or a wrong result, which answers do not tell


@dataclass(frozen=True)
class Finding:
    """One thing that differs by more than its tolerance.

    ``code`` is stable (``hidden_states_differ``); ``stage`` is a name of a trace (``layer.7.attention``)
    or of a part that was checked (``model-00001-of-00002.safetensors``), ``condition`` what the engine was
    doing (``prefill``, ``chunked prefill``, ``after sleep``). ``measured`` and ``tolerance`` are in ``unit``;
    None where the check is exact: equal or not. ``way_around`` is what a person can do now, None if nothing.
    """

    code: str
    component: Component
    stage: str
    condition: str
    likely: Likely
    note: str
    measured: float | None = None
    tolerance: float | None = None
    unit: str = ""
    way_around: str | None = None

    def as_json(self) -> dict[str, object]:
        """As of ``--json``; a number that is NaN or infinite, which JSON has none of, is null."""
        values = asdict(self) | {"measured": finite(self.measured), "tolerance": finite(self.tolerance)}
        return {key: str(value) if isinstance(value, StrEnum) else value for key, value in values.items()}


@dataclass(frozen=True)
class Measured:
    """One comparison that was made, within its tolerance or not.

    ``largest`` is the largest difference of a stage, ``tolerance`` the one stated beforehand.
    Both are in ``unit``.
    """

    stage: str
    condition: str
    largest: float
    tolerance: float
    unit: str = ""

    @property
    def share(self) -> float:
        """The difference as a share of its tolerance; above 1.0 it is a finding."""
        if self.tolerance > 0.0:
            return self.largest / self.tolerance
        return 0.0 if self.largest == 0.0 else float("inf")

    def as_json(self) -> dict[str, object]:
        return asdict(self) | {"largest": finite(self.largest), "tolerance": finite(self.tolerance)}


def finite(value: float | None) -> float | None:
    """``value``; None if it is NaN or infinite."""
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class SkippedCheck:
    """A check that does not apply here or was left out, and why."""

    check: str
    why: str


@dataclass
class CheckReport:
    """All that one run of the checks found; ``findings`` in the order of the way of a request.

    ``seconds`` by name of a check, ``facts`` what a report shows beside them (``prompt_tokens``: 212).
    """

    level: Level
    findings: list[Finding] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    skipped: list[SkippedCheck] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    facts: dict[str, bool | int | float | str | None] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def verdict(self) -> Finding | None:
        """The first finding, which is the one to look at; None if everything agrees."""
        return self.findings[0] if self.findings else None

    def extend(self, other: "CheckReport") -> None:
        """Take over what another run of checks found."""
        self.findings.extend(other.findings)
        self.measured.extend(other.measured)
        self.skipped.extend(other.skipped)
        self.seconds.update(other.seconds)
        self.facts.update(other.facts)

    def as_json(self) -> dict[str, object]:
        return {
            "level": self.level,
            "ok": self.ok,
            "findings": [finding.as_json() for finding in self.findings],
            "measured": [each.as_json() for each in self.measured],
            "skipped": [asdict(each) for each in self.skipped],
            "seconds": {name: round(seconds, 3) for name, seconds in self.seconds.items()},
            "facts": dict(self.facts),
        }


@dataclass(frozen=True)
class CheckProgress:
    """How far the checks are: ``name`` of the one that begins, ``done`` of ``total``."""

    name: str
    done: int
    total: int


ProgressOfChecks = Callable[[CheckProgress], None]

# Groups of kernels that compute a component, those that do so alone.
GROUPS_AT_FAULT: Mapping[Component, tuple[KernelGroup, ...]] = {
    **dict.fromkeys((Component.ATTENTION, Component.KV_CACHE), ("attention",)),
    Component.ROPE: ("attention", "rows"),
    Component.NORM: ("attention", "rows"),
    Component.DELTA_NET: ("delta_net",),
    Component.MLP: ("linear", "rows"),
    Component.HEAD: ("linear",),
    Component.EMBEDDING: ("rows",),
    **dict.fromkeys((Component.TOWER, Component.MERGER, Component.DEEPSTACK), ("tower",)),
    Component.SAMPLER: ("sampler",),
}
_PLAIN = "add --kernels plain, which is slower; else --backend transformers"
_WITHOUT_KERNELS = "add --backend transformers"
# What helps now, by component: a setting that takes the part in question out of the way, where there is one.
WAYS_AROUND: Mapping[Component, str] = {
    Component.PREFIX_CACHE: "add --no-prefix-cache",
    Component.SPECULATION: "add --no-speculate",
    Component.SLEEP: "stop and start in place of sleeping (vlfit stop, then serve again)",
    Component.CUDA_GRAPHS: "update the driver; in Python, EngineOptions(cuda_graphs=False)",
    Component.KV_CACHE: "without --kv-dtype fp8, if you gave it; else add --kernels plain:attention",
    Component.TEMPLATE: "download chat_template.json and tokenizer_config.json again (vlfit pull)",
    Component.TOKENIZER: "download tokenizer.json again (vlfit pull)",
    Component.PICTURES: "download preprocessor_config.json again (vlfit pull)",
    Component.STOP: "give stop_token_ids with requests; download generation_config.json again",
    Component.FILE: "download the file again: delete it, then `vlfit pull MODEL`",
    Component.BOXES: "download the checkpoint again (vlfit pull); --full compares hashes of its files",
    Component.MEMORY: "close other programs, and verify again; else add --backend transformers",
    **dict.fromkeys((Component.POSITIONS, Component.SCHEDULER, Component.DEVICE), _PLAIN),
    **{
        component: f"add --kernels plain:{','.join(groups)}; if that is not enough, --kernels plain"
        for component, groups in GROUPS_AT_FAULT.items()
        if component != Component.KV_CACHE
    },
}


# The same for GGUF models, which are one file or two.
_WAYS_OF_GGUF: Mapping[Component, str] = {
    Component.TEMPLATE: "get another GGUF file of the model: tokenizer.chat_template is not the model's",
    Component.TOKENIZER: "get another GGUF file of the model: its vocabulary is not the model's",
    Component.PICTURES: "get another mmproj file of the model: its clip.vision.* are not the model's",
    Component.STOP: "give stop_token_ids with requests; get another GGUF file of the model",
}


def for_gguf(finding: Finding) -> Finding:
    """``finding`` about a GGUF model: its way around names no file that only safetensors come with."""
    if finding.way_around != WAYS_AROUND.get(finding.component):
        return finding
    return replace(finding, way_around=_WAYS_OF_GGUF.get(finding.component, finding.way_around))


def with_way_around(finding: Finding) -> Finding:
    """``finding``; without a way around it gets the one known for its component."""
    return replace(finding, way_around=finding.way_around or WAYS_AROUND.get(finding.component))


def seen_without(finding: Finding, plain: Collection[KernelGroup]) -> Finding:
    """``finding`` of an engine that computed the groups ``plain`` in PyTorch: other ways around are left."""
    way = finding.way_around
    if not way or "--kernels plain" not in way:
        return finding
    if len(plain) == len(KERNEL_GROUPS):
        return replace(finding, way_around=_WITHOUT_KERNELS)
    tried = set(GROUPS_AT_FAULT.get(finding.component, ())) <= set(plain)
    return replace(finding, way_around=_PLAIN) if tried else finding
