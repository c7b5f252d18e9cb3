"""``CostModel``: what a backend tells the planner. One implementation stands in each backend's folder."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from vlfit.machine.model import Gpu, Machine
from vlfit.plan.ledger import Line, PlanSettings
from vlfit.plan.plans import Command, Placement, Plan
from vlfit.plan.shapes import Model
from vlfit.plan.speed import Speed
from vlfit.plan.wishes import Wishes

# From context, image tokens and requests at once to the settings to try, the preferred first.
SettingsOf = Callable[[int, int, int], Sequence[PlanSettings]]


class CostModel(Protocol):
    """What a backend takes of memory and time, and how it is started."""

    @property
    def name(self) -> str:
        """As ``--backend`` and the JSON name it."""

    @property
    def title(self) -> str:
        """As sentences name it."""

    @property
    def options(self) -> Mapping[str, str]:
        """Wishes that only this backend knows, by field of ``Wishes``, each with what its option is."""

    @property
    def sequences(self) -> tuple[int, ...]:
        """Numbers of requests at once that are tried, the preferred first."""

    @property
    def is_calibrated(self) -> bool:
        """Whether ``vlfit plan --calibrate`` measures what it holds."""

    @property
    def runs_rounded(self) -> bool:
        """Whether it runs what ``vlfit convert`` rounds beyond the weights format."""

    def check_wishes(self, wishes: Wishes) -> None:
        """Raise ``UsageError`` for wishes that this backend cannot have, whatever the model."""

    def place(
        self,
        models: list[Model],
        machine: Machine,
        wishes: Wishes,
        smaller_variants: Sequence[Callable[[], Model]],
    ) -> Placement:
        """Choose model, settings and cards; with a negative ``headroom`` nothing fits.

        ``smaller_variants``: functions that make a model with fewer bits, the mildest first.
        Raises ``UsageError`` and ``DeviceError``.
        """

    def candidates(self, model: Model, wishes: Wishes) -> SettingsOf:
        """Settings of ``model`` at given sizes; the last of them must take the least memory."""

    def lines(self, model: Model, gpu: Gpu, settings: PlanSettings) -> tuple[Line, ...]:
        """The ledger, in the order in which the memory is taken."""

    def pool_tokens(self, settings: PlanSettings) -> int:
        """Tokens that the KV cache holds."""

    def speed(self, model: Model, gpu: Gpu, settings: PlanSettings, deficit: int = 0) -> Speed | None:
        """The speed of one request; None where the bandwidth is not known. ``deficit``: bytes too much."""

    def command(self, plan: Plan, machine: Machine) -> Command | None:
        """The command that starts ``plan``; None where there is none."""

    def smaller(self, settings: PlanSettings) -> Iterator[tuple[str, PlanSettings]]:
        """Changes only this backend has that take less memory: a description, and the settings after it."""

    def in_own_engine(self, settings: PlanSettings) -> PlanSettings | None:
        """Equivalent settings of vlfit's own engine, if they may take less; None: it is not proposed."""

    def settings_facts(self, settings: PlanSettings) -> dict[str, Any]:
        """JSON fields of ``settings`` that only this backend has."""

    def facts(self, plan: Plan) -> dict[str, Any]:
        """JSON fields of a plan that only this backend has."""
