"""The native engine's cost model on a CPU."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vlfit.checkpoint.catalog import BF16
from vlfit.checkpoint.quantization import FP8
from vlfit.errors import UsageError
from vlfit.machine.model import Gpu, Machine, record_to_json
from vlfit.plan.candidates import best_choice, best_smaller_variant
from vlfit.plan.cost_model import SettingsOf
from vlfit.plan.ledger import Line, PlanSettings
from vlfit.plan.native import cpu_cost, verified
from vlfit.plan.native.cost_model import drafts_remarks, serve_words
from vlfit.plan.needs import Needs, needs_of
from vlfit.plan.plans import Choice, Command, Placement, Plan, Remark
from vlfit.plan.preference import AMPLE_IMAGE_TOKENS, weights_preference
from vlfit.plan.processors import LEAST_TOKENS_PER_S, MOST_PARAMETERS, Ram, ram_as_gpu
from vlfit.plan.shapes import Model
from vlfit.plan.speed import Speed, rounded, rounded_bounds
from vlfit.plan.wishes import CPU, Wishes
from vlfit.units import MIB

# A longer context or a larger picture takes a CPU minutes, and is planned if it is asked for.
LONGEST_CONTEXT = 8192
# A model is recommended that writes as fast as one reads (``LEAST_TOKENS_PER_S``), and begins to answer about
# a picture of 512x512 pixels before one gives up: a choice.
MOST_PICTURE_SECONDS = 10.0


class CpuCosts:
    """Cost model of vlfit's own engine on a CPU, in float32; ``CostModel`` has the protocol.

    Its ``gpu`` is the RAM with the processor (``ram_as_gpu``).
    """

    name = "native"
    title = "the native engine on a CPU"
    options: Mapping[str, str] = {}
    sequences = (4, 2, 1)
    is_calibrated = False
    runs_quantized_parts = True

    def check_wishes(self, wishes: Wishes) -> None:
        """Raise ``UsageError`` for offload, for which there is no card."""
        if wishes.offload is not None:
            raise UsageError(
                "--offload keeps layers in RAM for a GPU; on a CPU all weights are in RAM already",
                "Leave it out, or name a card with --gpu.",
                param="offload",
            )

    def place(
        self,
        models: list[Model],
        machine: Machine,
        wishes: Wishes,
        smaller_variants: Sequence[Callable[[], Model]],
    ) -> Placement:
        """The best choice in the RAM of ``machine``; of ``smaller_variants`` only if nothing else fits."""
        self.check_wishes(wishes)
        ram = ram_as_gpu(machine)
        models = sorted(models, key=weights_preference)
        choice = best_choice(models, wishes, ram, self)
        if choice.headroom < 0 and smaller_variants:
            choice = best_smaller_variant(smaller_variants, wishes, ram, self) or choice
        notes = drafts_remarks(choice, wishes, ram, self)
        return Placement(choice, ram, remarks=(*_remarks(choice.model, ram), *notes))

    def candidates(self, model: Model, wishes: Wishes) -> SettingsOf:
        """As in ``CostModel``, but contexts beyond ``LONGEST_CONTEXT`` and pictures beyond
        ``AMPLE_IMAGE_TOKENS`` only if ``wishes`` ask for them: a CPU is too slow for them.
        """
        kv_dtype = wishes.kv_dtype or BF16
        # Without room for a draft model there are no drafts at all: the engine, which knows less of the RAM
        # than this plan, would load it.
        left_out = wishes.speculate is None and bool(model.draft_cache)
        drafts = (True, False) if left_out else (wishes.speculate is not False,)

        def settings(context: int, image_tokens: int, sequences: int) -> Sequence[PlanSettings]:
            is_long = context > LONGEST_CONTEXT and wishes.context is None
            is_large = image_tokens > AMPLE_IMAGE_TOKENS and wishes.image_tokens is None
            if is_long or is_large:
                return []
            return [
                PlanSettings(
                    model.weights,
                    context,
                    image_tokens,
                    sequences,
                    cpu_cost.CHUNK,
                    kv_dtype=kv_dtype,
                    speculate=speculate,
                    draft_model=speculate and bool(model.draft_cache),
                )
                for speculate in drafts
            ]

        return settings

    def lines(self, model: Model, gpu: Gpu, settings: PlanSettings) -> tuple[Line, ...]:
        """The ledger of ``model`` in RAM, in the order in which the memory is taken."""
        return cpu_cost.lines_in_ram(model, _ram(gpu), settings)

    def pool_tokens(self, settings: PlanSettings) -> int:
        """How many tokens the KV cache has with ``settings``, in whole blocks."""
        return cpu_cost.pool_tokens(settings)

    def speed(self, model: Model, gpu: Gpu, settings: PlanSettings, deficit: int = 0) -> Speed | None:
        """As in ``CostModel``; None if the processor was not measured."""
        return cpu_cost.predict_cpu_speed(model, _ram(gpu), settings)

    def measured(
        self, speed: Speed, model: Model, gpu: Gpu, settings: PlanSettings
    ) -> tuple[Speed, Remark] | None:
        """As in ``CostModel``; None also if layers are offloaded."""
        if settings.offloaded_layers:
            return None
        return verified.measured_here(
            speed,
            verified.measured_on(gpu, model.name, model.weights),
            lambda tokens: self.speed(model, gpu, replace(settings, image_tokens=tokens)),
        )

    def command(self, plan: Plan, machine: Machine) -> Command:
        """The ``vlfit serve`` command that starts ``plan``; never None."""
        settings, words = plan.settings, serve_words(plan)
        if settings.kv_dtype != BF16:
            words += ["--kv-dtype", settings.kv_dtype]
        if machine.gpus:
            words += ["--device", CPU]
        if not settings.speculate:
            words.append("--no-speculate")
        return Command(tuple(words))

    def smaller_settings(self, settings: PlanSettings) -> Iterator[tuple[str, PlanSettings]]:
        """No draft model, and a KV cache in FP8, a quarter of float32."""
        if settings.uses_draft_model:
            yield "no multi-token prediction (leave out --speculate)", replace(settings, draft_model=False)
        if settings.kv_dtype != FP8:
            yield f"KV cache float32 -> {FP8} (--kv-dtype {FP8})", replace(settings, kv_dtype=FP8)

    def as_native_settings(self, settings: PlanSettings) -> None:
        """Always None: these are the native engine's settings."""

    def is_quick(self, model: Model, speed: Speed | None) -> bool:
        """Whether there are 6 tokens per second or more, and a picture of 512x512 takes 10 s at most.

        If the processor was not measured (``speed`` None): whether it has up to 2.5 billion parameters.
        """
        if speed is None:
            return model.parameters <= MOST_PARAMETERS
        picture = speed.small_picture
        return speed.decode.expected >= LEAST_TOKENS_PER_S and (
            picture is None or picture.expected <= MOST_PICTURE_SECONDS
        )

    def needs(self, choice: Choice) -> Needs:
        """As in ``CostModel``; its RAM is the ledger without the lines ``desktop`` and ``reserve``."""
        ours = sum(line.bytes for line in choice.lines if line.line not in ("desktop", "reserve"))
        return replace(needs_of(choice.model), ram=ours)

    def offloaded_bytes(self, model: Model, settings: PlanSettings) -> int:
        """Always 0: all weights are on ledger lines."""
        return 0

    def settings_json_fields(self, settings: PlanSettings) -> dict[str, Any]:
        """The same fields as for a plan on a GPU; see ``CostModel``."""
        return {"speculate": settings.speculate, "draft_model": settings.uses_draft_model}

    def json_fields(self, plan: Plan) -> dict[str, Any]:
        """The field ``ram``: bytes of ``pages`` of the files, and of the rest of the computing ``process``.


        ``processor``: as in a machine file. ``small_picture_s``, ``small_picture_s_range``: seconds to the
        first token of a picture of 512x512 pixels; only if they are known.
        """
        ram = _ram(plan.gpu)
        picture = plan.speed.small_picture if plan.speed is not None else None
        seconds = (
            {}
            if picture is None
            else {
                "small_picture_s": rounded(picture.expected),
                "small_picture_s_range": list(rounded_bounds(picture.low, picture.high)),
            }
        )
        return {
            "ram": {
                "pages": cpu_cost.mapped_bytes(plan.model, ram.processor),
                "process": cpu_cost.anonymous_bytes(plan.model, ram.processor, plan.ledger),
            },
            "processor": record_to_json(ram.processor),
            **seconds,
        }


def _ram(gpu: Gpu) -> Ram:
    if not isinstance(gpu, Ram):
        raise TypeError(f"{gpu.name} is no RAM")
    return gpu


def _remarks(model: Model, ram: Ram) -> tuple[Remark, ...]:
    """What an owner should know of how ``model`` is computed there."""
    processor, remarks = ram.processor, []
    weights = cpu_cost.weights_of(model, processor)
    pages = sum(each.mapped for each in weights.values())
    if pages:
        text = (
            f"{pages / MIB:,.0f} MiB of the weights are pages of the files: the system takes them back if "
            "other programs need RAM, and reads them again."
        )
        remarks.append(Remark(text, "weights_mapped"))
    if not processor.compiles:
        widened = "16 bits" if cpu_cost.keeps_16_bit(processor) else "32 bits"
        text = (
            f"Weights are widened to {widened} when they are loaded, as there is no C compiler (gcc or "
            "clang) or VLFIT_CPU_KERNELS is 0. With one they stay as stored, which takes less RAM and is "
            "faster."
        )
        remarks.append(Remark(text, "weights_widened"))
    return tuple(remarks)
