"""The ``vllm serve`` command: planned flags, address and key, and the arguments a person added.

A typed flag replaces a planned one. ``VllmOptions`` is what a person sets besides ``EngineOptions``.
"""

import os
import re
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO, Protocol, TypeAlias

from vlfit.api.progress import StatusCallback

if TYPE_CHECKING:
    from vlfit.machine.model import Machine
    from vlfit.plan.plans import Plan
    from vlfit.plan.vllm.step_down import Failure


KEY_VARIABLE = "VLLM_API_KEY"
LOOPBACK = "127.0.0.1"
# Qwen's tool-call syntax.
_TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
_STRUCTURED_OUTPUTS = "--structured-outputs-config"  # set by the plan
# Requests carry all their sampling parameters: vLLM must not add the model's own.
_NEUTRAL = ("--generation-config", "vllm")
_GROUPS = (_TOOLS, _NEUTRAL)
_NO_VARIABLES: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class VllmAddress:
    """Where vLLM listens, the name of its model, and its API key ("" for none).

    ``direct``: clients use it directly, as when somebody runs the command by hand; else a vlfit server does.
    """

    host: str
    port: int
    name: str
    key: str = field(default="", repr=False)
    direct: bool = False


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """``words`` to run, environment variables ``added`` and ``unset``, and planned flags that typed ones
    replace (``overrides``).
    """

    words: tuple[str, ...]
    added: Mapping[str, str]
    overrides: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()

    def environment(self, ours: Mapping[str, str] | None = None) -> dict[str, str]:
        """The whole environment: ours without ``VLFIT_*`` and ``unset``, plus ``added``."""
        ours = os.environ if ours is None else ours
        dropped = {name for name in ours if name.startswith("VLFIT_") or name in self.unset}
        kept = {name: value for name, value in ours.items() if name not in dropped}
        return {**kept, **self.added}

    @property
    def shell(self) -> str:
        """As a line for a shell, without the key."""
        variables = [
            f"{name}={shlex.quote(value) if name != KEY_VARIABLE else '...'}"
            for name, value in self.added.items()
        ]
        without = ["env", *(f"-u {name}" for name in self.unset)] if self.unset else []
        return " ".join([*without, *variables, shlex.join(self.words)])


def loopback_address(name: str, port: int) -> VllmAddress:
    """An address on this computer with a random key, for this process alone."""
    return VllmAddress(LOOPBACK, port, name, secrets.token_urlsafe(24))


def build_command(
    plan: "Plan",
    program: Sequence[str],
    address: VllmAddress,
    own: Sequence[str] = (),
    model: str | None = None,
    unset: Sequence[str] = (),
    left_out: frozenset[str] = frozenset(),
    pinned: Mapping[str, str] = _NO_VARIABLES,
) -> ServeCommand:
    """The command for ``plan``.

    ``own``: arguments passed to vLLM as they are; they replace planned ones with the same flag. ``model``:
    what to load if not the plan's ``place`` (its files are here already). ``unset``: variables to remove;
    ``pinned``: variables to set. ``left_out``: flags added by vlfit that this vLLM refuses.
    """
    assert plan.command is not None
    typed = {_flag(word) for word in own if word.startswith("-")}
    planned, overrides = _remove_flags(plan.command[3:], typed)
    words = [*program, *plan.command[1:2], model or plan.command[2], *planned]
    words += ["--host", address.host, "--port", str(address.port), "--served-model-name", address.name]
    for group in _GROUPS[:1] if address.direct else _GROUPS:
        if not {word for word in group if word.startswith("--")} & (typed | left_out):
            words += group
    added = {"VLLM_NO_USAGE_STATS": "1", **pinned, **plan.environment}
    if address.key:
        added[KEY_VARIABLE] = address.key
    return ServeCommand((*words, *own), added, tuple(overrides), tuple(unset))


def supports_grammars(words: Sequence[str]) -> bool:
    """Whether a vLLM started with ``words`` follows llguidance grammars."""
    indices = [index for index, word in enumerate(words) if word == _STRUCTURED_OUTPUTS]
    return bool(indices) and '"guidance"' in words[indices[-1] + 1]


def refused_additions(message: str) -> frozenset[str]:
    """The flags added by vlfit that vLLM's error ``message`` names; none if it refuses other flags too."""
    named = set(re.findall(r"--[a-z][\w-]*", message))
    ours = {word for group in _GROUPS for word in group if word.startswith("--")}
    return frozenset(named) if named and named <= ours else frozenset()


def _remove_flags(words: Sequence[str], typed: set[str]) -> tuple[list[str], list[str]]:
    """``words`` without the flags in ``typed``, and the removed ones with their values."""
    kept: list[str] = []
    removed: list[str] = []
    removing = False
    for word in words:
        if word.startswith("--"):
            removing = _flag(word) in typed
        (removed if removing else kept).append(word)
    return kept, [f"{flag} {value}".rstrip() for flag, value in _pairs(removed)]


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for word in words:
        if word.startswith("--"):
            pairs.append((word, ""))
        else:
            pairs[-1] = (pairs[-1][0], word)
    return pairs


def _flag(word: str) -> str:
    """``--max_model_len=4096`` is ``--max-model-len``, ``--no-enforce-eager`` is ``--enforce-eager``."""
    flag = word.partition("=")[0].replace("_", "-")
    return "--" + flag.removeprefix("--no-") if flag.startswith("--no-") else flag


OnDeath: TypeAlias = "Callable[[Plan, Failure], None]"
# From a log: the failure for the plan, and a diagnosis for a person (None if the cause is unknown).
DiagnoseLog: TypeAlias = "Callable[[BinaryIO, Machine | None], tuple[Failure, Diagnosis | None]]"


class Diagnosis(Protocol):
    """Cause, evidence in the log, and remedy, as the doctor gives them (``doctor/rule.py``)."""

    @property
    def id(self) -> str: ...
    @property
    def cause(self) -> str: ...
    @property
    def evidence(self) -> str:
        """The lines of the log that show the cause."""
        ...

    @property
    def remedy(self) -> str: ...
    @property
    def command(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """How vLLM is found, started, and restarted.

    ``python``: the Python that has vLLM, its environment's folder, or the ``vllm`` program; None: the one
    beside vlfit, else the one on PATH. ``words``: arguments for vLLM's own command line, after the planned
    ones. ``sequences``, ``chunk``: most running requests, and tokens of one step; None: the plan chooses.
    ``weights``: the weight format if the model's name leaves it open. ``tensor_parallel``, ``data_parallel``:
    numbers of cards. ``retry``: after a failed start, try the next cheaper plan. ``diagnose_log``: finds the
    cause of a failed start; without it there is no retry. ``on_death`` is called, in a thread, with the plan
    that served and the failure. ``on_status`` gets sentences about plan, failures and changes; None: Python's
    log.
    """

    python: str | None = None
    words: tuple[str, ...] = ()
    sequences: int | None = None
    chunk: int | None = None
    weights: str | None = None
    tensor_parallel: int | None = None
    data_parallel: int | None = None
    retry: bool = True
    diagnose_log: "DiagnoseLog | None" = field(default=None, repr=False)
    on_death: "OnDeath | None" = field(default=None, repr=False, compare=False)
    on_status: StatusCallback | None = field(default=None, repr=False, compare=False)
