"""Results of planning: ``Plan``, and the records that it is made of."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vlfit.checkpoint.catalog import FORMATS
from vlfit.checkpoint.quantization import INT4
from vlfit.machine.model import Gpu
from vlfit.plan.ledger import Line, PlanSettings
from vlfit.plan.needs import NO_NEEDS, Needs
from vlfit.plan.preference import is_ample
from vlfit.plan.shapes import Model
from vlfit.plan.speed import Speed


@dataclass(frozen=True, slots=True)
class Change:
    """A way to free memory: ``what`` to change, bytes that it ``frees``, and whether it is ``enough`` alone.

    ``other_programs``: the memory is that of other programs, so it adds up with any other change.
    """

    what: str
    frees: int
    enough: bool = False
    other_programs: bool = False


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of the backend's command (``value`` "" for a switch), or a variable of its environment.

    ``line``: the ledger line that it changes, "-" if none; ``why``: what it is for.
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
    """A start command: its ``words``, its ``environment``, and what each flag is for.

    ``flags`` is empty where the command needs no explanation.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[Flag, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """A model with settings, and their ledger on one GPU.

    ``headroom``: bytes left; negative: it does not fit.
    """

    model: Model
    settings: PlanSettings
    lines: tuple[Line, ...]
    headroom: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A choice and where it runs: ``gpu`` is the card of its ledger.

    ``gpus``: all cards if it takes several, else empty. ``notes`` come before the plan's other remarks,
    ``remarks`` after them.
    """

    choice: Choice
    gpu: Gpu
    gpus: tuple[Gpu, ...] = ()
    notes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """One model on one machine: settings, ledger, speed, and what to change if it does not fit.

    ``speed``: None where no bandwidth is known. ``command``: None for a plan that does not fit, or whose
    backend cannot run the model. ``gpus``: all cards of a plan over several, else empty; ``gpu`` is the
    fullest of them, and the ledger is for that one.
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
    remarks: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    needs: Needs = NO_NEEDS

    @property
    def total(self) -> int:
        """Bytes of all lines."""
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
        """Sort key, the best plan first.

        By: fits; takes pictures; context and pictures reach the floors; no int4 output head; more parameters;
        larger context, pictures, number of requests; more exact weights.
        """
        settings = self.settings
        sizes = (settings.context, settings.image_tokens, settings.sequences)
        format_rank = FORMATS.index(self.model.weights) if self.model.weights in FORMATS else len(FORMATS)
        return (
            not self.fits,
            self.model.vision is None,
            not is_ample(settings, self.model),
            self.model.head.form == INT4,  # what such rounding costs was never measured
            -self.model.parameters,
            tuple(-size for size in sizes),
            format_rank,
        )
