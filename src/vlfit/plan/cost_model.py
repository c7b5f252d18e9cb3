"""``CostModel``: a backend's memory, speed and start command, implemented once in each backend's folder."""

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
    """Memory and time that a backend takes, and the command that starts it."""

    @property
    def name(self) -> str:
        """The backend's name in ``--backend`` and in JSON."""

    @property
    def title(self) -> str:
        """The backend's name in sentences."""

    @property
    def options(self) -> Mapping[str, str]:
        """Wishes that only this backend has: field of ``Wishes`` to a sentence about its option."""

    @property
    def sequences(self) -> tuple[int, ...]:
        """Numbers of concurrent requests to try, the preferred first."""

    @property
    def is_calibrated(self) -> bool:
        """Whether ``vlfit plan --calibrate`` measures this backend's memory."""

    @property
    def runs_rounded(self) -> bool:
        """Whether it runs models whose embedding, head or tower ``vlfit convert`` rounded, too."""

    def check_wishes(self, wishes: Wishes) -> None:
        """Raise ``UsageError`` for wishes that this backend cannot have, whatever the model."""

    def place(
        self,
        models: list[Model],
        machine: Machine,
        wishes: Wishes,
        smaller_variants: Sequence[Callable[[], Model]],
    ) -> Placement:
        """Choose model, settings and cards; a negative ``choice.headroom`` means that nothing fits.

        ``smaller_variants``: functions that make a model with fewer bits, the mildest rounding first. Raises
        ``UsageError``, ``DeviceError`` and ``DoesNotFit``.
        """

    def candidates(self, model: Model, wishes: Wishes) -> SettingsOf:
        """A function that lists settings of ``model`` at given sizes; the last must take the least memory."""

    def lines(self, model: Model, gpu: Gpu, settings: PlanSettings) -> tuple[Line, ...]:
        """The ledger, in the order in which the memory is taken."""

    def pool_tokens(self, settings: PlanSettings) -> int:
        """Tokens that the KV cache holds."""

    def speed(self, model: Model, gpu: Gpu, settings: PlanSettings, deficit: int = 0) -> Speed | None:
        """The predicted speed of one request; None where the bandwidth is not known.

        ``deficit``: bytes by which the ledger is too large, for an estimate with weights in RAM.
        """

    def command(self, plan: Plan, machine: Machine) -> Command | None:
        """The command that starts ``plan``; None if this backend cannot run its model."""

    def smaller_settings(self, settings: PlanSettings) -> Iterator[tuple[str, PlanSettings]]:
        """Changes of this backend's own that take less memory: a description, and the settings after it."""

    def as_native_settings(self, settings: PlanSettings) -> PlanSettings | None:
        """Equivalent settings of the native engine to propose instead; None: nothing is proposed."""

    def offloaded_bytes(self, model: Model, settings: PlanSettings) -> int:
        """Bytes of RAM for weights that wait there; 0 if none do."""

    def settings_json_fields(self, settings: PlanSettings) -> dict[str, Any]:
        """Fields of a plan's JSON ``settings`` that only this backend has."""

    def json_fields(self, plan: Plan) -> dict[str, Any]:
        """Top-level fields of a plan's JSON that only this backend has."""
