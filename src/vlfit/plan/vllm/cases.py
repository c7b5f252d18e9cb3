"""A start that failed, and what may be tried after it: words that all answers to it are made of.

Knows: what is known around a failure, and what an answer is. Does not know any (``step_down.py``,
``apart.py``).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from vlfit.machine.model import Machine
from vlfit.plan.ledger import VLLM, Settings, ledger
from vlfit.plan.model import Model
from vlfit.plan.search import Plan, Wishes
from vlfit.plan.vllm import moves
from vlfit.plan.vllm.versions import chosen_version

# Wishes that stay fixed, with what they are called in ``Settings`` or ``OfVllm``.
_FIXED = ("context", "image_tokens", "sequences", "kv_tokens", "chunk", "data_parallel")


@dataclass(frozen=True, slots=True)
class Failure:
    """What ended a start. ``id`` is that of the doctor's rule, "" if nothing was recognised.

    ``values`` are the groups of the rule's pattern, as the log prints them: sizes are in GiB. ``stage``: of
    memory that ran out: pictures, pass, graphs, sampler, weights or requests; "" if not known.
    """

    id: str
    values: Mapping[str, str] = field(default_factory=dict)
    stage: str = ""

    def number(self, name: str) -> float | None:
        """A value as a number; None if the log does not say it."""
        try:
            return float(self.values[name])
        except (KeyError, ValueError):
            return None


@dataclass(frozen=True, slots=True)
class Case:
    """A failure with all that is known around it."""

    failure: Failure
    failed: Plan
    machine: Machine
    wishes: Wishes
    own: tuple[str, ...]

    @property
    def model(self) -> Model:
        return self.failed.model

    @property
    def settings(self) -> Settings:
        return self.failed.settings

    @property
    def fixed(self) -> frozenset[str]:
        fixed = {name for name in _FIXED if getattr(self.wishes, name) is not None}
        return frozenset(fixed | ({"kv_tokens"} if self.wishes.kv_bytes is not None else set()))

    @property
    def version(self) -> tuple[int, int, int]:
        return chosen_version(self.settings.vllm.version or None).number


@dataclass(frozen=True, slots=True)
class Answer:
    """Settings to try, in words."""

    settings: Settings
    words: str
    broken: tuple[str, ...] = ()


Answers = Iterable[Answer]


def answered(case: Case, settings: Settings, why: str = "") -> Answer:
    """``settings`` to try after those that failed, with what that changes, and ``why``."""
    words = moves.in_words(case.settings, settings) + (f" ({why})" if why else "")
    return Answer(settings, words, moves.broken(case.settings, settings, case.fixed))


def with_variable(settings: Settings, variable: str) -> Settings:
    """``variable`` is ``NAME=VALUE``."""
    told = settings.vllm
    return replace(settings, vllm=replace(told, variables=told.variables | {variable}))


def total(case: Case, settings: Settings) -> int:
    """Bytes of what vLLM itself takes."""
    lines = ledger(case.model, case.failed.gpu, VLLM, settings)
    return sum(line.bytes for line in lines if line.line != "desktop")
