"""What vLLM alone is told when it is started as a backend, beside ``EngineOptions``. Imports nothing slow."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO, Protocol, TypeAlias

if TYPE_CHECKING:
    from vlfit.machine.model import Machine
    from vlfit.plan.search import Plan
    from vlfit.plan.vllm.cases import Failure

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
