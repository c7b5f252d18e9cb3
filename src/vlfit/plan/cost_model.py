"""``CostModel``: a backend's memory, speed and start command, implemented once in each backend's folder."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from vlfit.machine.model import Gpu, Machine
from vlfit.plan.ledger import Line, PlanSettings
from vlfit.plan.needs import Needs
from vlfit.plan.plans import Choice, Command, Placement, Plan, Remark
from vlfit.plan.shapes import Model
from vlfit.plan.speed import Speed
from vlfit.plan.wishes import Wishes

# From context, image tokens and requests at once to the settings to try, the preferred first.
SettingsOf = Callable[[int, int, int], Sequence[PlanSettings]]


class CostModel(Protocol):
    """Memory and time that a backend takes, and the command that starts it.

    ``find_plan`` calls ``check_wishes``, then ``place``, which chooses among ``candidates`` by their
    ``lines``. The other methods describe the plan that results, or what to change if it does not fit.
    """

    @property
    def name(self) -> str:
        """The backend's name in ``--backend`` and in JSON."""

    @property
    def title(self) -> str:
        """The backend's name in sentences."""

    @property
    def options(self) -> Mapping[str, str]:
        """Wishes that only this backend has: field of ``Wishes`` to the error message for other backends."""

    @property
    def sequences(self) -> tuple[int, ...]:
        """Numbers of concurrent requests to try, the preferred first."""

    @property
    def is_calibrated(self) -> bool:
        """Whether ``vlfit plan --calibrate`` measures this backend's memory."""

    @property
    def runs_quantized_parts(self) -> bool:
        """Whether the backend runs checkpoints whose embedding, head or tower ``vlfit convert`` has
        quantized.
        """

    def check_wishes(self, wishes: Wishes) -> None:
        """Check what can be checked of ``wishes`` before a model is known.

        Raises ``UsageError`` for a wish that this backend cannot meet with any model. What one model
        cannot meet is found by ``place``.
        """

    def place(
        self,
        models: list[Model],
        machine: Machine,
        wishes: Wishes,
        smaller_variants: Sequence[Callable[[], Model]],
    ) -> Placement:
        """Choose one of ``models``, its settings and cards. If nothing fits, ``choice.headroom`` is negative.

        ``smaller_variants``: functions that make a model with more parts quantized, the largest first;
        tried only if none of ``models`` fits and the backend ``runs_quantized_parts``. Raises
        ``UsageError`` for wishes that no model can meet, ``DeviceError`` without a suitable GPU,
        ``DoesNotFit`` if offloaded layers do not fit the RAM.
        """

    def candidates(self, model: Model, wishes: Wishes) -> SettingsOf:
        """A function from (context, image tokens, concurrent requests) to the settings to try for ``model``.

        The preferred settings come first; the last must take the least memory. Raises ``UsageError`` for a
        wish that ``model`` cannot meet.
        """

    def lines(self, model: Model, gpu: Gpu, settings: PlanSettings) -> tuple[Line, ...]:
        """The ledger lines of ``model`` on ``gpu``, in the order in which the memory is taken."""

    def pool_tokens(self, settings: PlanSettings) -> int:
        """How many tokens the KV cache holds with ``settings``."""

    def speed(self, model: Model, gpu: Gpu, settings: PlanSettings, deficit: int = 0) -> Speed | None:
        """The predicted speed of one request alone; None if ``gpu``'s bandwidth is not known.

        ``deficit``: bytes by which the ledger is too large; used for ``Speed.offload_tokens_per_s`` alone.
        """

    def measured(
        self, speed: Speed, model: Model, gpu: Gpu, settings: PlanSettings
    ) -> tuple[Speed, Remark] | None:
        """``speed`` by what `vlfit verify` measured on ``gpu``, and a remark on it; None if nothing was."""

    def command(self, plan: Plan, machine: Machine) -> Command | None:
        """The command that starts ``plan``; None if this backend cannot run its model."""

    def smaller_settings(self, settings: PlanSettings) -> Iterator[tuple[str, PlanSettings]]:
        """Changes to propose that only this backend has: (description, ``settings`` with less memory)."""

    def as_native_settings(self, settings: PlanSettings) -> PlanSettings | None:
        """Equivalent settings to propose with the native engine, if nothing fits; None: do not propose it."""

    def is_quick(self, model: Model, speed: Speed | None) -> bool:
        """Whether ``model`` is fast enough to be recommended. Always, except on a CPU."""

    def needs(self, choice: Choice) -> Needs:
        """Download, disk, RAM and time that ``choice`` needs before it can start."""

    def offloaded_bytes(self, model: Model, settings: PlanSettings) -> int:
        """Bytes of RAM that the layers offloaded by ``settings`` take; 0 without offload."""

    def settings_json_fields(self, settings: PlanSettings) -> dict[str, Any]:
        """Fields of a plan's JSON ``settings`` that only this backend has."""

    def json_fields(self, plan: Plan) -> dict[str, Any]:
        """Top-level fields of a plan's JSON that only this backend has."""
