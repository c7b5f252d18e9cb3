"""The native engine's cost model."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vlfit.checkpoint.catalog import BF16
from vlfit.checkpoint.quantization import FP8
from vlfit.machine.cards import KERNEL_CAPABILITY
from vlfit.machine.model import Gpu, Machine
from vlfit.models.cache_spec import snapshot_ram_bytes
from vlfit.plan import calibration
from vlfit.plan.candidates import (
    Candidate,
    best_choice,
    best_smaller_variant,
    candidates,
    choice_of,
    headroom_beyond_margin,
    preference_tiers,
)
from vlfit.plan.cost_model import CostModel, SettingsOf
from vlfit.plan.gpus import check_kernel_capability, command_on_gpu, emptiest_gpu
from vlfit.plan.ledger import TYPICAL_REQUEST, Line, PlanSettings
from vlfit.plan.native import gpu_cost, verified
from vlfit.plan.native import lines as ledger
from vlfit.plan.native.cost import TIGHT_REQUEST, kv_tokens, longest_captured_prompt, pool_tokens
from vlfit.plan.native.ram import (
    check_ram,
    copy_seconds,
    holds_table,
    num_layers_to_free,
    offload_counts,
    offload_of,
    table_bytes_in_ram,
)
from vlfit.plan.needs import Needs, needs_of
from vlfit.plan.plans import Choice, Command, Placement, Plan, Remark
from vlfit.plan.preference import SEQUENCES, keeps_floors, safety_margin
from vlfit.plan.shapes import Model, kv_bytes_per_token
from vlfit.plan.speed import (
    NO_TIME,
    TEXT_TOKENS,
    FittedSeconds,
    Speed,
    StepCosts,
    bytes_per_step,
    predict_speed,
)
from vlfit.plan.wishes import AUTO, Wishes
from vlfit.units import MIB

CHUNKS = (1024, 512, 256, 128)  # prefill chunks, in tokens
SERVE_CHUNK = 1024  # of `vlfit serve` without --chunk


def serve_words(plan: Plan) -> list[str]:
    """``vlfit serve``, the model and the sizes of ``plan``: how every command of the native engine begins."""
    settings = plan.settings
    words = ["vlfit", "serve", plan.model.source, "--context", str(settings.context)]
    words += ["--sequences", str(settings.sequences)]
    return words + (["--image-tokens", str(settings.image_tokens)] if settings.image_tokens else [])


class NativeCosts:
    """Cost model of vlfit's own engine, the default backend, on one GPU; ``CostModel`` has the protocol."""

    name = "native"
    title = "the native engine"
    options: Mapping[str, str] = {
        "offload": "--offload lets layers of the native engine wait in RAM",
        "speculate": "--speculate is for drafts of the native engine",
    }
    sequences = SEQUENCES
    is_calibrated = True
    runs_quantized_parts = True

    def __init__(self, *, table_in_ram: bool = True) -> None:
        """``table_in_ram``: as in ``PlanSettings``, for all plans."""
        self._table_in_ram = table_in_ram

    def check_wishes(self, wishes: Wishes) -> None:
        """Accept all wishes: what a model cannot meet, ``place`` refuses."""

    def place(
        self,
        models: list[Model],
        machine: Machine,
        wishes: Wishes,
        smaller_variants: Sequence[Callable[[], Model]],
    ) -> Placement:
        """The best choice on the emptiest GPU that the kernels run on.

        If nothing fits, or only below the floors: the best of ``smaller_variants``, if one does better. If
        none fits and ``wishes.offload`` is auto: as few layers in RAM as make ``models`` or else the variants
        fit. Raises ``DoesNotFit`` if the offloaded layers do not fit the RAM, ``DeviceError`` without a GPU
        that torch supports, ``UsageError`` for wishes that no model can meet.
        """
        gpu = emptiest_gpu(machine, KERNEL_CAPABILITY)
        check_kernel_capability(gpu)
        # Of a card that is not here, the RAM beside it is not known.
        tables = max(model.table_bytes for model in models) if gpu.driver else 0
        if self._table_in_ram and not holds_table(tables, machine.host):
            return NativeCosts(table_in_ram=False).place(models, machine, wishes, smaller_variants)
        choice = best_choice(models, wishes, gpu, self)
        if smaller_variants and not (choice.headroom >= 0 and _keeps_floors(choice, wishes)):
            variant = best_smaller_variant(smaller_variants, wishes, gpu, self)
            # A refusal is of what keeps its exactness.
            if variant is not None and (choice.headroom < 0 or _keeps_floors(variant, wishes)):
                choice = variant
        if choice.headroom < 0 and wishes.offload == AUTO:
            rounded = [make() for make in smaller_variants]
            choice = (
                self._fewest_offloaded(models, wishes, gpu)
                or self._fewest_offloaded(rounded, wishes, gpu)
                or choice
            )
            if wishes.speculate is None:
                with_drafts = choice_with_drafts(choice, gpu, self)
                choice = choice if headroom_beyond_margin(with_drafts) < 0 else with_drafts
        notes = drafts_remarks(choice, wishes, gpu, self)
        if choice.headroom < 0 or not choice.settings.offloaded_layers:
            return Placement(choice, gpu, remarks=notes)
        offloaded = offload_of(choice.model, choice.settings.offloaded_layers)
        check_ram(offloaded, machine.host, table_bytes_in_ram(choice.model, choice.settings))
        remark = (
            f"{offloaded.description} and are copied to the card for every pass; the card holds "
            f"{offloaded.freed_bytes / MIB:,.0f} MiB less for it."
        )
        return Placement(choice, gpu, remarks=(Remark(remark, "layers_in_ram"), *notes))

    def candidates(self, model: Model, wishes: Wishes) -> SettingsOf:
        """As in ``CostModel``. All prefill chunks are tried before a smaller KV cache, and both before the
        draft model is left out.
        """
        wish = wishes.offload
        offload = 0 if wish is None or wish == AUTO else num_layers_to_free(model, wish)
        kv_dtype = wishes.kv_dtype or BF16
        drafts = (True, False) if wishes.speculate is None else (wishes.speculate,)
        draft_model = drafts if model.draft_cache else (False,)

        def settings(context: int, image_tokens: int, sequences: int) -> Sequence[PlanSettings]:
            roomy, tight = (kv_tokens(context, sequences, each) for each in (TYPICAL_REQUEST, TIGHT_REQUEST))
            return [
                PlanSettings(
                    model.weights,
                    context,
                    image_tokens,
                    sequences,
                    chunk,
                    offloaded_layers=offload,
                    tight_kv_cache=is_tight,
                    kv_dtype=kv_dtype,
                    table_in_ram=self._table_in_ram,
                    speculate=wishes.speculate is not False,
                    draft_model=drafted,
                )
                for drafted in draft_model
                for is_tight in ((False, True) if tight < roomy else (False,))
                for chunk in CHUNKS
            ]

        return settings

    def lines(self, model: Model, gpu: Gpu, settings: PlanSettings) -> tuple[Line, ...]:
        """The native engine's ledger of ``model`` on ``gpu``, in the order in which the memory is taken."""
        return ledger.native_lines(model, gpu, settings)

    def pool_tokens(self, settings: PlanSettings) -> int:
        """How many tokens the KV cache has with ``settings``, in whole blocks."""
        return pool_tokens(settings)

    def speed(self, model: Model, gpu: Gpu, settings: PlanSettings, deficit: int = 0) -> Speed | None:
        """As in ``CostModel``; None also if layers are offloaded and the link's bandwidth is not known."""
        constants = calibration.constants_for(gpu)
        launch_low, launch = constants.launch_low.value, constants.launch.value
        copies = NO_TIME
        if settings.offloaded_layers:
            seconds = copy_seconds(offload_of(model, settings.offloaded_layers), gpu, constants)
            if seconds is None:
                return None
            copies = seconds
        else:  # a decode step is one CUDA graph; a prompt's kernels are launched one by one
            launch_low = min(launch_low, calibration.STEP_OF_GRAPH_LOW.value)
            launch = min(launch, calibration.STEP_OF_GRAPH.value)
        kv_bytes = kv_bytes_per_token(model.cache_spec, settings.kv_dtype)
        states = model.state_bytes_per_step
        costs = StepCosts(constants, launch_low, launch, kv_bytes, offload_copies=copies, state_bytes=states)
        if gpu_cost.is_known(gpu):
            costs = replace(costs, fitted=self._fitted(model, gpu, settings, costs))
        return predict_speed(model, gpu, settings, costs, deficit)

    def _fitted(self, model: Model, gpu: Gpu, settings: PlanSettings, costs: StepCosts) -> FittedSeconds:
        moved = bytes_per_step(model, settings, costs)
        step = gpu_cost.step_seconds(model, gpu, costs.constants, moved)
        if settings.offloaded_layers:  # no CUDA graph
            step = max(step, model.text.num_hidden_layers * costs.launch)
        captured = (
            ledger.dequant_config_on(gpu).captures_prompts
            and not settings.offloaded_layers
            and settings.image_tokens + TEXT_TOKENS <= longest_captured_prompt(settings.chunk)
        )
        prompt = gpu_cost.prompt_seconds(
            model,
            gpu,
            costs.constants,
            settings.image_tokens,
            TEXT_TOKENS,
            settings.chunk,
            captured=captured,
        )
        return FittedSeconds(step, gpu_cost.least_seconds(gpu, moved), prompt.text, prompt.tower)

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
        if settings.tight_kv_cache:
            words += ["--kv", str(pool_tokens(settings))]
        if settings.kv_dtype != BF16:
            words += ["--kv-dtype", settings.kv_dtype]
        if settings.chunk != SERVE_CHUNK:
            words += ["--chunk", str(settings.chunk)]
        if settings.offloaded_layers:
            frees = offload_of(plan.model, settings.offloaded_layers).freed_bytes
            # Whole MiB below what leaves the card: as many layers are needed for it.
            words += ["--offload", f"{frees // MIB}MiB" if frees >= MIB else f"{frees}B"]
        if not settings.speculate:
            words.append("--no-speculate")
        elif settings.uses_draft_model and plan.headroom < safety_margin(plan.ledger):
            words.append("--speculate")  # without it the engine would keep the margin
        return command_on_gpu(words, plan.gpu, machine)

    def smaller_settings(self, settings: PlanSettings) -> Iterator[tuple[str, PlanSettings]]:
        """No draft model, and a KV cache in FP8, which every card supports."""
        if settings.uses_draft_model:
            yield "no multi-token prediction (leave out --speculate)", replace(settings, draft_model=False)
        if settings.kv_dtype != FP8:
            what = f"KV cache {settings.kv_dtype} -> {FP8} (--kv-dtype {FP8})"
            yield what, replace(settings, kv_dtype=FP8)

    def as_native_settings(self, settings: PlanSettings) -> None:
        """Always None: these are the native engine's settings."""

    def is_quick(self, model: Model, speed: Speed | None) -> bool:
        """Always True."""
        return True

    def needs(self, choice: Choice) -> Needs:
        """As in ``CostModel``."""
        return needs_of(choice.model, self.offloaded_bytes(choice.model, choice.settings))

    def offloaded_bytes(self, model: Model, settings: PlanSettings) -> int:
        """Bytes of RAM that offloaded layers, a table of tokens and snapshots of states take; 0 without."""
        layers = offload_of(model, settings.offloaded_layers)
        return layers.ram_bytes + table_bytes_in_ram(model, settings) + snapshot_ram_bytes(model.cache_spec)

    def settings_json_fields(self, settings: PlanSettings) -> dict[str, Any]:
        """``speculate``, and ``draft_model``: whether layers of the checkpoint draft tokens, too."""
        return {"speculate": settings.speculate, "draft_model": settings.uses_draft_model}

    def json_fields(self, plan: Plan) -> dict[str, Any]:
        """``offload`` with ``layers`` (indices), ``ram`` and ``frees`` (bytes), only with offload.

        ``table_in_ram``: bytes of a table of tokens in RAM; missing if it is on the card.
        """
        table = table_bytes_in_ram(plan.model, plan.settings)
        in_ram = {"table_in_ram": table} if table else {}
        if not plan.settings.offloaded_layers:
            return in_ram
        offloaded = offload_of(plan.model, plan.settings.offloaded_layers)
        return {
            "offload": {
                "layers": list(offloaded.layers),
                "ram": offloaded.ram_bytes,
                "frees": offloaded.freed_bytes,
            },
            **in_ram,
        }

    def _fewest_offloaded(self, models: list[Model], wishes: Wishes, gpu: Gpu) -> Choice | None:
        """The choice with the fewest bytes of layers in RAM, at the smallest settings above the floors.

        Where none makes room for those, at the smallest of all; None where nothing fits.
        """
        if not models:
            return None
        for tier in preference_tiers(candidates(models, wishes, self), wishes):
            smallest: dict[str, Candidate] = {}
            for settings, model in tier:
                kept = smallest.get(model.name)
                # The first of these has the largest prefill chunk: each pass copies all offloaded layers.
                if kept is None or kept[0] != replace(settings, chunk=kept[0].chunk):
                    smallest[model.name] = settings, model
            choices = [self._with_fewest_offloaded(gpu, *each) for each in smallest.values()]
            fitting = [choice for choice in choices if choice.headroom >= 0]
            if fitting:
                return min(
                    fitting,
                    key=lambda choice: offload_of(choice.model, choice.settings.offloaded_layers).ram_bytes,
                )
        return None

    def _with_fewest_offloaded(self, gpu: Gpu, settings: PlanSettings, model: Model) -> Choice:
        """With the fewest layers in RAM that make it fit with the safety margin, or all of them."""

        def choice(count: int) -> Choice:
            return choice_of(gpu, self, replace(settings, offloaded_layers=count), model)

        steps = offload_counts(model)
        if not steps:
            return choice(0)
        fewest = bisect_left(steps, 0, key=lambda count: headroom_beyond_margin(choice(count)))
        return choice(steps[min(fewest, len(steps) - 1)])


def choice_with_drafts(choice: Choice, gpu: Gpu, costs: CostModel) -> Choice:
    """``choice`` with its model's own draft layers; ``choice`` itself if there are none."""
    if not choice.model.draft_cache:
        return choice
    return choice_of(gpu, costs, replace(choice.settings, speculate=True, draft_model=True), choice.model)


def drafts_remarks(choice: Choice, wishes: Wishes, gpu: Gpu, costs: CostModel) -> tuple[Remark, ...]:
    """A remark that a draft model was left out for want of memory, and how much it would take; or none.

    Missing is what it takes with the smallest prefill chunk and KV cache: those give way to it.
    """
    settings = choice.settings
    if choice.headroom < 0 or wishes.speculate is not None or settings.uses_draft_model:
        return ()
    model = choice.model
    tried = costs.candidates(model, wishes)(settings.context, settings.image_tokens, settings.sequences)
    drafting = [each for each in tried if each.uses_draft_model]
    if not drafting:
        return ()
    with_drafts = choice_with_drafts(choice, gpu, costs)
    smallest = replace(drafting[-1], offloaded_layers=settings.offloaded_layers)
    missing = -headroom_beyond_margin(choice_of(gpu, costs, smallest, model))
    needs = choice.headroom - with_drafts.headroom
    lookup = "; prompt lookup still drafts" if settings.speculate else ""
    text = (
        f"Multi-token prediction is left out: it takes {needs / MIB:,.0f} MiB, "
        f"{missing / MIB:,.0f} MiB more than there is{lookup}. --speculate "
        "keeps it, at the cost of something else."
    )
    return (Remark(text, "drafts_left_out"),)


def _keeps_floors(choice: Choice, wishes: Wishes) -> bool:
    return keeps_floors(choice.settings, choice.model, wishes)
