"""The command that is really run: what was planned, where it listens, and the words that a person added.

Knows: which flags vlfit adds, and that a word that a person typed goes before a planned one. Does not know
what is planned (``plan/vllm/command.py``) or what words mean to a plan (``plan/vllm/legacy.py``).
"""

import os
import re
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO, Protocol, TypeAlias

if TYPE_CHECKING:
    from vlfit.machine.model import Machine
    from vlfit.plan.search import Plan
    from vlfit.plan.vllm.step_down import Failure


KEY_VARIABLE = "VLLM_API_KEY"
LOOPBACK = "127.0.0.1"
# Calls of functions as Qwen writes them.
_TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
_FORMS = "--structured-outputs-config"  # which the plan sets
# Each request brings all that it wishes; what it leaves out is to mean nothing, not the model's own.
_NEUTRAL = ("--generation-config", "vllm")
_GROUPS = (_TOOLS, _NEUTRAL)
_NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Front:
    """Where vLLM listens, the name of its model, and the key that it asks for ("" for none).

    ``direct``: clients speak to it themselves, where somebody runs the command by hand; else a server of ours
    does, which sends every wish itself.
    """

    host: str
    port: int
    name: str
    key: str = field(default="", repr=False)
    direct: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """``words`` to run, the variables that are ``added`` to the environment and taken out of it (``unset``),
    and what a person overrode.
    """

    words: tuple[str, ...]
    added: Mapping[str, str]
    overrides: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()

    def environment(self, ours: Mapping[str, str] | None = None) -> dict[str, str]:
        """The whole environment: ours without what is meant for vlfit alone, and what is added."""
        ours = os.environ if ours is None else ours
        out = {name for name in ours if name.startswith("VLFIT_") or name in self.unset}
        kept = {name: value for name, value in ours.items() if name not in out}
        return {**kept, **self.added}

    @property
    def shell(self) -> str:
        """As it can be pasted into a shell; a key is not shown."""
        variables = [
            f"{name}={shlex.quote(value) if name != KEY_VARIABLE else '...'}"
            for name, value in self.added.items()
        ]
        without = ["env", *(f"-u {name}" for name in self.unset)] if self.unset else []
        return " ".join([*without, *variables, shlex.join(self.words)])


def loopback(name: str, port: int) -> Front:
    """A front that only this process is to use: on this computer, with a key that nobody else knows."""
    return Front(LOOPBACK, port, name, secrets.token_urlsafe(24))


def assemble(
    plan: "Plan",
    program: Sequence[str],
    front: Front,
    own: Sequence[str] = (),
    model: str | None = None,
    unset: Sequence[str] = (),
    left_out: frozenset[str] = frozenset(),
    pinned: Mapping[str, str] = _NOTHING,
) -> Command:
    """The command for ``plan``. ``own``: words that go to vLLM as they are, in place of planned ones with the
    same flag. ``model``: what to load, if it is not the plan's place (its files are here already). ``unset``:
    variables that must not be set; ``pinned``: such as must be. ``left_out``: flags of those that vlfit adds
    which this vLLM refuses.
    """
    assert plan.command is not None
    typed = {_flag(word) for word in own if word.startswith("-")}
    planned, overrides = _without(plan.command[3:], typed)
    words = [*program, *plan.command[1:2], model or plan.command[2], *planned]
    words += ["--host", front.host, "--port", str(front.port), "--served-model-name", front.name]
    for group in _GROUPS[:1] if front.direct else _GROUPS:
        if not {word for word in group if word.startswith("--")} & (typed | left_out):
            words += group
    added = {"VLLM_NO_USAGE_STATS": "1", **pinned, **plan.environment}
    if front.key:
        added[KEY_VARIABLE] = front.key
    return Command((*words, *own), added, tuple(overrides), tuple(unset))


def follows_grammars(words: Sequence[str]) -> bool:
    """Whether a vLLM started with ``words`` follows grammars by llguidance, in its dialect of Lark."""
    places = [number for number, word in enumerate(words) if word == _FORMS]
    return bool(places) and '"guidance"' in words[places[-1] + 1]


def added_among(said: str) -> frozenset[str]:
    """Flags that vlfit adds, of those that vLLM ``said`` it does not take; none if any other is there too."""
    named = set(re.findall(r"--[a-z][\w-]*", said))
    ours = {word for group in _GROUPS for word in group if word.startswith("--")}
    return frozenset(named) if named and named <= ours else frozenset()


def _without(words: Sequence[str], typed: set[str]) -> tuple[list[str], list[str]]:
    """``words`` less the flags of ``typed``, and what those were."""
    kept: list[str] = []
    left_out: list[str] = []
    leaves_out = False
    for word in words:
        if word.startswith("--"):
            leaves_out = _flag(word) in typed
        (left_out if leaves_out else kept).append(word)
    return kept, [f"{flag} {value}".rstrip() for flag, value in _pairs(left_out)]


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for word in words:
        if word.startswith("--"):
            found.append((word, ""))
        else:
            found[-1] = (found[-1][0], word)
    return found


def _flag(word: str) -> str:
    """``--max_model_len=4096`` is ``--max-model-len``, ``--no-enforce-eager`` is ``--enforce-eager``."""
    flag = word.partition("=")[0].replace("_", "-")
    return "--" + flag.removeprefix("--no-") if flag.startswith("--no-") else flag


# What vLLM alone is told when it is started as a backend, beside ``EngineOptions``. Imports nothing slow.


Tell = Callable[[str], None]
Died: TypeAlias = "Callable[[Plan, Failure], None]"
# Reads a log to its end: what failed, for the plan, and the same for a person, None if nothing is known.
ReadFailure: TypeAlias = "Callable[[BinaryIO, Machine | None], tuple[Failure, Diagnosis | None]]"


class Diagnosis(Protocol):
    """What is wrong, where the log says so, and what to do, as the doctor says it (``doctor/rule.py``)."""

    @property
    def id(self) -> str: ...
    @property
    def cause(self) -> str: ...
    @property
    def evidence(self) -> str: ...
    @property
    def remedy(self) -> str: ...
    @property
    def command(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """How a vLLM is found, started, and started again.

    ``python``: the Python that has vLLM, the folder of its environment, or the program itself; None: the one
    beside vlfit, else the one on PATH. ``words``: of vLLM's own command line, handed to it as they are, after
    what was planned. ``sequences``, ``chunk``: as in ``EngineOptions``; None lets the plan choose.
    ``weights``: the format to plan for where a name leaves it open. ``tensor_parallel``, ``data_parallel``:
    over how many cards. ``retry``: whether a start that fails is followed by one with the next cheaper plan.
    ``read_failure``: names the cause of a failed start; without it a start that fails is not tried again.
    ``died`` is told, in a thread, the plan that served and what ended it. ``tell`` is told in words what is
    planned, what failed and what is changed; None: the log of Python.
    """

    python: str | None = None
    words: tuple[str, ...] = ()
    sequences: int | None = None
    chunk: int | None = None
    weights: str | None = None
    tensor_parallel: int | None = None
    data_parallel: int | None = None
    retry: bool = True
    read_failure: "ReadFailure | None" = field(default=None, repr=False)
    died: "Died | None" = field(default=None, repr=False, compare=False)
    tell: Tell | None = field(default=None, repr=False, compare=False)
