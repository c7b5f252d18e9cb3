"""Results of planning: ``Plan``, and the records that it is made of."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from vlfit.checkpoint.catalog import FORMATS
from vlfit.checkpoint.quantization import INT4
from vlfit.machine.model import Gpu
from vlfit.plan.ledger import Line, PlanSettings
from vlfit.plan.needs import NO_NEEDS, Needs
from vlfit.plan.preference import is_ample, weights_preference
from vlfit.plan.processors import is_ram
from vlfit.plan.shapes import Model
from vlfit.plan.speed import Speed


@dataclass(frozen=True, slots=True)
class Change:
    """A way to free memory: ``what`` to change, in words, and the bytes that it ``frees``.

    ``enough``: the plan fits with this change alone. ``other_programs``: it frees memory of other programs,
    so its bytes add up with those of a change of settings.
    """

    what: str
    frees: int
    enough: bool = False
    other_programs: bool = False


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of the backend's command, or an environment variable, explained.

    ``value``: "" for a switch. ``line``: the ledger line that the flag changes, "-" if none. ``why``: what
    the flag is for.
    """

    flag: str
    value: str
    line: str
    why: str

    @property
    def words(self) -> list[str]:
        """The flag as words of a command line."""
        return [self.flag, self.value] if self.value else [self.flag]


@dataclass(frozen=True, slots=True)
class Command:
    """A start command: its ``words``, and the variables to set in its ``environment``.

    ``flags``: an explanation of each flag and variable; only vLLM's command has them, else empty.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[Flag, ...] = ()


class Remark(str):
    """A sentence about a plan, for the person who reads it. ``code`` identifies it whatever its wording."""

    code: str

    def __new__(cls, text: str, code: str = "") -> Self:
        remark = super().__new__(cls, text)
        remark.code = code
        return remark


@dataclass(frozen=True, slots=True)
class Choice:
    """A model with settings, and their ledger (``lines``) on one GPU.

    ``headroom``: bytes of the GPU that no line takes; negative: the choice does not fit.
    """

    model: Model
    settings: PlanSettings
    lines: tuple[Line, ...]
    headroom: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A choice and where it runs: ``gpu`` is the card that ``choice.lines`` are for.

    ``gpus``: all cards if the choice takes several, else empty. ``notes`` and ``remarks`` become the first
    and the last of ``Plan.remarks``.
    """

    choice: Choice
    gpu: Gpu
    gpus: tuple[Gpu, ...] = ()
    notes: tuple[Remark, ...] = ()
    remarks: tuple[Remark, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """One model on one machine: settings, ledger, speed, and what to change if it does not fit.

    - ``gpu``: the card that the ledger is for: of several the fullest, for vLLM on a CPU the RAM.
    - ``gpus``: all cards of a plan over several, else empty.
    - ``speed``: None if no bandwidth is known.
    - ``command``: None if the plan does not fit, or the backend cannot run the model; ``environment`` and
      ``flags`` (as in ``Command``) are empty then.
    - ``is_quick``: fast enough to be recommended (``CostModel.is_quick``).
    - ``changes``: the cheapest changes if the plan does not fit, else empty.
    """

    model: Model
    backend: str
    gpu: Gpu
    wsl2: bool
    settings: PlanSettings
    ledger: tuple[Line, ...]
    speed: Speed | None
    command: tuple[str, ...] | None
    environment: dict[str, str] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    flags: tuple[Flag, ...] = ()
    remarks: tuple[Remark, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    needs: Needs = NO_NEEDS
    is_quick: bool = True

    @property
    def total(self) -> int:
        """Bytes of all lines of the ledger."""
        return sum(line.bytes for line in self.ledger)

    @property
    def headroom(self) -> int:
        """Bytes of the card that no line of the ledger takes; negative: the deficit."""
        return self.gpu.total - self.total

    @property
    def fits(self) -> bool:
        return self.headroom >= 0

    @property
    def rank(self) -> tuple[Any, ...]:
        """Sort key that puts the best plan first.

        In order of weight: fits; takes pictures; is quick enough; reaches both floors (``is_ample``); no
        int4 output head; more parameters; larger context, then image tokens, then number of requests; more
        exact weights, on a CPU as ``preferred_weights`` has them.
        """
        settings = self.settings
        sizes = (settings.context, settings.image_tokens, settings.sequences)
        format_rank = FORMATS.index(self.model.weights) if self.model.weights in FORMATS else len(FORMATS)
        return (
            not self.fits,
            self.model.vision is None,
            not self.is_quick,
            not is_ample(settings, self.model),
            self.model.head.form == INT4,  # what such rounding costs was never measured
            -self.model.parameters,
            tuple(-size for size in sizes),
            weights_preference(self.model) if is_ram(self.gpu) else (format_rank,),
        )
