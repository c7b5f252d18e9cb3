"""Cost model of the transformers backend: bf16 weights, one request at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vlfit.checkpoint.catalog import BF16, FORMATS
from vlfit.checkpoint.quantization import FP8
from vlfit.errors import UsageError
from vlfit.machine.model import Gpu, Machine
from vlfit.plan import calibration
from vlfit.plan.candidates import accepted_models, best_choice, check_without_states
from vlfit.plan.cost_model import SettingsOf
from vlfit.plan.gpus import check_capability, command_on_gpu, emptiest_gpu
from vlfit.plan.ledger import Line, PlanSettings
from vlfit.plan.needs import Needs, needs_of
from vlfit.plan.plans import Choice, Command, Placement, Plan, Remark
from vlfit.plan.shapes import Model, kv_bytes_per_token
from vlfit.plan.speed import Speed, StepCosts, predict_speed
from vlfit.plan.transformers import lines as ledger
from vlfit.plan.wishes import Wishes


def check_single_request(sequences: int) -> None:
    """Raise ``UsageError`` if ``sequences`` is above 1: transformers runs one request at a time."""
    if sequences > 1:
        raise UsageError(
            f"--sequences {sequences} is more than transformers runs: its requests go one after the other",
            "Leave it out: others wait in the queue. The native engine and vLLM run several at once.",
            param="sequences",
        )


class TransformersCosts:
    """Cost model of the transformers library on one GPU; ``CostModel`` has the protocol."""

    name = "transformers"
    title = "transformers"
    options: Mapping[str, str] = {}
    sequences = (1,)
    is_calibrated = True
    runs_quantized_parts = False

    def check_wishes(self, wishes: Wishes) -> None:
        """Raise ``UsageError`` for an FP8 KV cache, or more than one concurrent request."""
        if wishes.kv_dtype == FP8:
            raise UsageError(
                "transformers keeps its KV cache in the dtype of the computation",
                "Leave out --kv-dtype, or --backend.",
                param="kv_dtype",
            )
        if wishes.sequences is not None:
            check_single_request(wishes.sequences)

    def place(
        self,
        models: list[Model],
        machine: Machine,
        wishes: Wishes,
        smaller_variants: Sequence[Callable[[], Model]],
    ) -> Placement:
        """The best choice on the emptiest GPU; ``smaller_variants`` are ignored.

        Only models in bf16 are considered. Raises ``UsageError`` if none of ``models`` is, or for wishes that
        none can meet, ``DeviceError`` without a GPU that torch supports.
        """
        gpu = emptiest_gpu(machine)
        check_capability(gpu)
        plain = accepted_models(models, lambda model: check_without_states(model, self.title))
        return Placement(best_choice(accepted_models(plain, _check_format), wishes, gpu, self), gpu)

    def candidates(self, model: Model, wishes: Wishes) -> SettingsOf:
        """As in ``CostModel``. One candidate for each size, with prompts up to the context in one pass."""
        kv_dtype = wishes.kv_dtype or BF16

        def settings(context: int, image_tokens: int, sequences: int) -> Sequence[PlanSettings]:
            return [PlanSettings(model.weights, context, image_tokens, sequences, context, kv_dtype=kv_dtype)]

        return settings

    def lines(self, model: Model, gpu: Gpu, settings: PlanSettings) -> tuple[Line, ...]:
        """The ledger of ``model`` under transformers on ``gpu``, in the order in which the memory is
        taken.
        """
        return ledger.transformers_lines(model, gpu, settings)

    def pool_tokens(self, settings: PlanSettings) -> int:
        """How many tokens the KV cache holds: one whole context."""
        return ledger.pool_tokens(settings)

    def speed(self, model: Model, gpu: Gpu, settings: PlanSettings, deficit: int = 0) -> Speed | None:
        """As in ``CostModel``, None included; launch times are built in, as measured ones are of the
        native engine.
        """
        constants = calibration.with_default_launches(calibration.constants_for(gpu))
        kv_bytes = kv_bytes_per_token(model.cache_spec, settings.kv_dtype)
        launch_low, launch = constants.launch_low.value, constants.launch.value
        return predict_speed(
            model, gpu, settings, StepCosts(constants, launch_low, launch, kv_bytes), deficit
        )

    def measured(
        self, speed: Speed, model: Model, gpu: Gpu, settings: PlanSettings
    ) -> tuple[Speed, Remark] | None:
        """None: only the native engine's speeds are kept."""
        return None

    def command(self, plan: Plan, machine: Machine) -> Command | None:
        """As in ``CostModel``; None for a text-only model, which the backend does not load."""
        if plan.model.vision is None:
            return None
        words = ["vlfit", "serve", plan.model.source, "--backend", self.name]
        words += ["--context", str(plan.settings.context), "--image-tokens", str(plan.settings.image_tokens)]
        return command_on_gpu(words, plan.gpu, machine)

    def smaller_settings(self, settings: PlanSettings) -> Iterator[tuple[str, PlanSettings]]:
        """Always empty."""
        return iter(())

    def as_native_settings(self, settings: PlanSettings) -> None:
        """Always None: the native engine is not proposed."""

    def is_quick(self, model: Model, speed: Speed | None) -> bool:
        """Always True."""
        return True

    def needs(self, choice: Choice) -> Needs:
        """As in ``CostModel``."""
        return needs_of(choice.model, self.offloaded_bytes(choice.model, choice.settings))

    def offloaded_bytes(self, model: Model, settings: PlanSettings) -> int:
        """Always 0."""
        return 0

    def settings_json_fields(self, settings: PlanSettings) -> dict[str, Any]:
        """Always empty."""
        return {}

    def json_fields(self, plan: Plan) -> dict[str, Any]:
        """Always empty."""
        return {}


def _check_format(model: Model) -> None:
    if model.gguf_type:
        raise UsageError(
            f"{model.name} is a GGUF model, which the transformers backend does not run",
            "Leave out --backend transformers, or name the original checkpoint.",
            param="backend",
        )
    if model.weights != FORMATS[0]:
        raise UsageError(
            f"{model.name} is in {model.weights}; transformers is planned for with bf16 weights only",
            "Leave out --backend, or add --weights bf16.",
            param="weights",
        )
