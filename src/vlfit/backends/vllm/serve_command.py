"""The ``vllm serve`` command: planned flags, address and key, and the arguments that a user added.

A typed flag replaces a planned one. ``VllmOptions`` has the user's settings besides ``EngineOptions``.
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
    """Where vLLM listens, the model name that it serves, and its API key ("" for none).

    ``direct``: clients of any kind connect, so vLLM adds the checkpoint's own sampling defaults. False: only
    vlfit connects, whose requests have all sampling parameters.
    """

    host: str
    port: int
    model_name: str
    api_key: str = field(default="", repr=False)
    direct: bool = False


@dataclass(frozen=True, slots=True)
class VllmServeCommand:
    """A program with its arguments (``words``), and changes of its environment.

    ``variables``: environment variables to set. ``unset``: names of those to remove. ``overrides``: the
    planned flags, with values, that are missing in ``words`` as the user typed the same flag.
    """

    words: tuple[str, ...]
    variables: Mapping[str, str]
    overrides: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """The child's whole environment: ``base`` without ``VLFIT_*`` and ``unset``, plus ``variables``.

        ``base`` None: this process's environment.
        """
        base = os.environ if base is None else base
        dropped = {name for name in base if name.startswith("VLFIT_") or name in self.unset}
        kept = {name: value for name, value in base.items() if name not in dropped}
        return {**kept, **self.variables}

    @property
    def shell_line(self) -> str:
        """The command as a line for a shell, with ``...`` for the API key."""
        variables = [
            f"{name}={shlex.quote(value) if name != KEY_VARIABLE else '...'}"
            for name, value in self.variables.items()
        ]
        without = ["env", *(f"-u {name}" for name in self.unset)] if self.unset else []
        return " ".join([*without, *variables, shlex.join(self.words)])


def loopback_address(name: str, port: int) -> VllmAddress:
    """127.0.0.1 with ``port`` and a random API key, so that only this process can use vLLM.

    ``name``: the model name to serve.
    """
    return VllmAddress(LOOPBACK, port, name, secrets.token_urlsafe(24))


def build_command(
    plan: "Plan",
    program: Sequence[str],
    address: VllmAddress,
    extra_args: Sequence[str] = (),
    model: str | None = None,
    unset: Sequence[str] = (),
    omitted_flags: frozenset[str] = frozenset(),
    pinned: Mapping[str, str] = _NO_VARIABLES,
) -> VllmServeCommand:
    """The ``vllm serve`` command for ``plan``, which must have a command (``Plan.command``).

    - ``program``: as in ``InstalledVllm``.
    - ``extra_args``: passed to vLLM as they are; they replace planned ones with the same flag.
    - ``model``: the folder to load; None: the model of the plan's command.
    - ``unset``, ``pinned``: environment variables to remove, and to set.
    - ``omitted_flags``: flags to leave out, from ``refused_added_flags``.
    """
    assert plan.command is not None
    typed = {_flag(word) for word in extra_args if word.startswith("-")}
    planned, overrides = _remove_flags(plan.command[3:], typed)
    words = [*program, *plan.command[1:2], model or plan.command[2], *planned]
    words += ["--host", address.host, "--port", str(address.port), "--served-model-name", address.model_name]
    for group in _GROUPS[:1] if address.direct else _GROUPS:
        if not {word for word in group if word.startswith("--")} & (typed | omitted_flags):
            words += group
    added = {"VLLM_NO_USAGE_STATS": "1", **pinned, **plan.environment}
    if address.api_key:
        added[KEY_VARIABLE] = address.api_key
    return VllmServeCommand((*words, *extra_args), added, tuple(overrides), tuple(unset))


def supports_llguidance(words: Sequence[str]) -> bool:
    """Whether a vLLM started with the command ``words`` takes llguidance grammars."""
    indices = [index for index, word in enumerate(words) if word == _STRUCTURED_OUTPUTS]
    return bool(indices) and '"guidance"' in words[indices[-1] + 1]


def refused_added_flags(message: str) -> frozenset[str]:
    """The flags in vLLM's error ``message``; empty unless all are among those that vlfit adds by itself.

    These are not in the plan: flags for tool calls and for the generation config.
    """
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
    """The flag of a word: ``--max-model-len`` of ``--max_model_len=4096``, ``--eager`` of ``--no-eager``."""
    flag = word.partition("=")[0].replace("_", "-")
    return "--" + flag.removeprefix("--no-") if flag.startswith("--no-") else flag


OnDeath: TypeAlias = "Callable[[Plan, Failure], None]"
# Reads a log. Returns the failure, for the next plan, and a diagnosis for a person (None: cause unknown).
DiagnoseLog: TypeAlias = "Callable[[BinaryIO, Machine | None], tuple[Failure, StartDiagnosis | None]]"


class StartDiagnosis(Protocol):
    """The doctor's diagnosis of a failed start (``doctor/rule.py``), as far as backends need it."""

    @property
    def id(self) -> str:
        """The id of the doctor's rule that matched."""
        ...

    @property
    def cause(self) -> str:
        """Why the start failed, in a sentence."""
        ...

    @property
    def evidence(self) -> str:
        """The lines of the log that show the cause."""
        ...

    @property
    def remedy(self) -> str:
        """What the person can do, in sentences."""
        ...

    @property
    def command(self) -> str:
        """A command that carries out the remedy; "" if there is none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """How vLLM is found, planned, and started again after failures.

    - ``python``: the Python that has vLLM, its environment's folder, or the ``vllm`` program; None: as for
      ``find_vllm``.
    - ``words``: arguments for ``vllm serve``; they replace planned ones with the same flag.
    - ``sequences``, ``chunk``: ``max_num_seqs`` and ``max_num_batched_tokens``; None: those of
      ``EngineOptions`` if they differ from the defaults, else the plan chooses.
    - ``weights``: the weights format if the model's name leaves it open; None: the plan chooses.
    - ``tensor_parallel``, ``data_parallel``: numbers of cards; None: the plan chooses.
    - ``retry``: after a failed start try the next cheaper plan.
    - ``diagnose_log``: finds the cause of a failed start; None: no retries.
    - ``on_death``: called from a thread with the plan and the failure if a serving vLLM dies.
    - ``on_status``: gets sentences about plan, failures and changes; None: they are logged as warnings.
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
