"""vLLM's cost model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vlfit.checkpoint.catalog import BF16, FORMATS
from vlfit.errors import UsageError
from vlfit.machine.model import Gpu, Machine
from vlfit.plan import calibration
from vlfit.plan.candidates import accepted_models, best_choice, check_without_states
from vlfit.plan.cost_model import SettingsOf
from vlfit.plan.gpus import emptiest_gpu
from vlfit.plan.ledger import Line, PlanSettings
from vlfit.plan.needs import Needs, needs_of
from vlfit.plan.plans import Choice, Command, Placement, Plan, Remark
from vlfit.plan.preference import SEQUENCES
from vlfit.plan.processors import is_ram, ram_as_gpu
from vlfit.plan.shapes import HALF, Model
from vlfit.plan.speed import NO_TIME, TEXT_TOKENS, Seconds, Speed, StepCosts, predict_speed
from vlfit.plan.vllm import command, cost
from vlfit.plan.vllm.args import (
    FLOAT32,
    VllmArgs,
    VllmSettings,
    VllmWishes,
    as_vllm_settings,
    as_vllm_wishes,
    vllm_args_of,
)
from vlfit.plan.vllm.flags import Version, check_kernels, chosen_version, parse_version
from vlfit.plan.vllm.lines import vllm_lines
from vlfit.plan.vllm.placement import CardChoice, best_of_groups
from vlfit.plan.vllm.placement import card_remarks as card_remarks
from vlfit.plan.wishes import Wishes, option_name

CHUNKS = (2048, 1024, 512)  # prefill chunks, in tokens
_OWN_CHUNK = 128  # the smallest prefill chunk of the native engine, which is proposed instead


class VllmCosts:
    """Cost model of ``vllm serve``: on one card, over several equal ones, or in RAM with its CPU build.

    ``CostModel`` has the protocol.
    """

    name = "vllm"
    title = "vLLM"
    options: Mapping[str, str] = {
        "vllm_version": "--vllm-version says which vLLM a plan is for",
        **{
            name: f"{option_name(name)} is a setting of vLLM"
            for name in ("kv_tokens", "kv_bytes", "tensor_parallel", "data_parallel", "chunk", "pictures")
        },
        "eager": "--enforce-eager is a setting of vLLM",
    }
    sequences = SEQUENCES
    is_calibrated = False
    runs_quantized_parts = False

    def check_wishes(self, wishes: Wishes) -> None:
        """Raise ``UsageError`` if ``vllm_version`` is no version, or one without Qwen3-VL."""
        if wishes.vllm_version is not None:
            parse_version(wishes.vllm_version)

    def place(
        self,
        models: list[Model],
        machine: Machine,
        wishes: Wishes,
        smaller_variants: Sequence[Callable[[], Model]],
    ) -> Placement:
        """The best choice over one card or several; without a GPU, in RAM. Ignores ``smaller_variants``.

        Image tokens beyond the checkpoints' own limit are lowered to it, with a note. Raises ``UsageError``
        for wishes that no model, or these cards, cannot meet.
        """
        version = chosen_version(wishes.vllm_version)
        models = accepted_models(models, lambda model: check_without_states(model, self.title))
        limited, notes = _within_limits(models, as_vllm_wishes(wishes))
        limited = replace(limited, vllm=replace(limited.vllm, version=version.text))
        place = self._on_cpu if not machine.gpus else self._on_cards
        return replace(place(models, machine, limited, version), notes=notes)

    def candidates(self, model: Model, wishes: Wishes) -> SettingsOf:
        """As in ``CostModel``, errors included. Settings with CUDA graphs come before those without,
        whatever the chunk.
        """
        own_wishes = as_vllm_wishes(wishes)
        args = _args(model, own_wishes)
        kv_dtype = wishes.kv_dtype or BF16
        # A processor captures no graphs.
        captures = (False,) if wishes.eager or args.on_cpu else (True, False)
        chunks = CHUNKS if wishes.chunk is None else (wishes.chunk,)

        def settings(context: int, image_tokens: int, sequences: int) -> Sequence[PlanSettings]:
            return [
                VllmSettings(
                    model.weights,
                    context,
                    image_tokens,
                    sequences,
                    chunk,
                    graphs=graphs,
                    kv_dtype=kv_dtype,
                    vllm=args,
                )
                for graphs in captures
                for chunk in chunks
            ]

        return settings

    def lines(self, model: Model, gpu: Gpu, settings: PlanSettings) -> tuple[Line, ...]:
        """The ledger of ``model`` under vLLM on ``gpu``, which is one of several cards, or stands for
        the RAM.
        """
        return vllm_lines(model, gpu, as_vllm_settings(settings))

    def pool_tokens(self, settings: PlanSettings) -> int:
        """How many tokens vLLM's KV cache gets with ``settings``, in whole blocks."""
        return cost.pool_tokens(as_vllm_settings(settings))

    def speed(self, model: Model, gpu: Gpu, settings: PlanSettings, deficit: int = 0) -> Speed | None:
        """As in ``CostModel``; None also for float32 and on a CPU, where nothing was measured."""
        args = vllm_args_of(settings)
        if args.dtype == FLOAT32 or is_ram(gpu):
            return None
        constants = calibration.with_default_launches(calibration.constants_for(gpu))
        if settings.graphs:
            constants = replace(constants, launch_low=cost.LAUNCH_OF_GRAPHS_LOW, launch=cost.LAUNCH_OF_GRAPHS)
        costs = StepCosts(
            constants,
            constants.launch_low.value,
            constants.launch.value,
            cost.kv_bytes_per_token(model, settings.kv_dtype, args),
            cards=args.tensor,
            tower_cards=args.tensor if args.split_tower else 1,
            decode_all_reduce=_decode_sums(model, args),
            prompt_all_reduce=_prompt_sums(model, gpu, settings, args),
        )
        return predict_speed(model, gpu, settings, costs, deficit)

    def measured(
        self, speed: Speed, model: Model, gpu: Gpu, settings: PlanSettings
    ) -> tuple[Speed, Remark] | None:
        """None: only the native engine's speeds are kept."""
        return None

    def command(self, plan: Plan, machine: Machine) -> Command:
        """The ``vllm serve`` command that starts ``plan``, without host and port, with every flag
        explained.
        """
        settings = as_vllm_settings(plan.settings)
        # A card that is not the first has to be named, too: others may be hidden from this process.
        several = len(machine.gpus) > 1 or plan.gpu.index > 0
        cards = (plan.gpu, *(gpu for gpu in plan.gpus if gpu.index != plan.gpu.index))
        version = chosen_version(settings.vllm.version or None)
        return command.serve_command(
            plan.model, settings, plan.ledger, cards, version, wsl2=plan.wsl2, name_gpus=several
        )

    def smaller_settings(self, settings: PlanSettings) -> Iterator[tuple[str, PlanSettings]]:
        """Always empty."""
        return iter(())

    def as_native_settings(self, settings: PlanSettings) -> PlanSettings:
        """The same sizes and KV dtype, with the native engine's smallest prefill chunk; never None."""
        return PlanSettings(
            settings.weights,
            settings.context,
            settings.image_tokens,
            settings.sequences,
            _OWN_CHUNK,
            kv_dtype=settings.kv_dtype,
        )

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
        """The field ``graphs``: whether vLLM captures CUDA graphs."""
        return {"graphs": settings.graphs}

    def json_fields(self, plan: Plan) -> dict[str, Any]:
        """The fields ``flags`` (with value, ledger line and reason) and, over several cards, ``parallel``."""
        flags = [
            {"flag": flag.flag, "value": flag.value, "line": flag.line, "why": flag.why}
            for flag in plan.flags
        ]
        args = vllm_args_of(plan.settings)
        if args.cards < 2:
            return {"flags": flags}
        parallel = {
            "tensor": args.tensor,
            "data": args.data,
            "tower": "split" if args.split_tower else "whole",
            "gpus": sorted(gpu.index for gpu in plan.gpus),
            "sequences": plan.settings.sequences * args.data,
        }
        return {"flags": flags, "parallel": parallel}

    def _on_cards(
        self, models: list[Model], machine: Machine, wishes: VllmWishes, version: Version
    ) -> Placement:
        gpu = emptiest_gpu(machine)

        def check(model: Model) -> None:
            _check_model(model, wishes)
            check_kernels(model, gpu.name, gpu.compute_capability, version)

        taken = best_of_groups(accepted_models(models, check), machine, wishes, self)
        return placement_on_cards(taken, machine, version)

    def _on_cpu(
        self, models: list[Model], machine: Machine, wishes: VllmWishes, version: Version
    ) -> Placement:
        """Raises ``UsageError`` for several cards."""
        tensor, data = wishes.tensor_parallel or 1, wishes.data_parallel or 1
        if tensor * data > 1:
            raise UsageError(
                f"{tensor} x {data} cards are asked for, and this vLLM runs on the processor",
                "Leave --tensor-parallel and --data-parallel out.",
            )
        gpu = ram_as_gpu(machine)
        on_cpu = replace(wishes, vllm=replace(wishes.vllm, on_cpu=True))
        choice = best_choice(
            accepted_models(models, lambda model: _check_model(model, on_cpu)), on_cpu, gpu, self
        )
        return placement_on_cpu(choice, gpu, version)


COSTS = VllmCosts()


def placement_on_cards(taken: CardChoice, machine: Machine, version: Version) -> Placement:
    """``taken`` as a ``Placement``, with remarks about the cards of ``machine`` and vLLM ``version``."""
    settings = as_vllm_settings(taken.choice.settings)
    cards = card_remarks(machine, taken.group, settings) if len(machine.gpus) > 1 else ()
    remarks = (*cards, *command.version_remarks(version, settings, taken.gpu))
    return Placement(taken.choice, taken.gpu, taken.gpus, remarks=remarks)


def placement_on_cpu(choice: Choice, gpu: Gpu, version: Version) -> Placement:
    """``choice`` for vLLM's CPU build as a ``Placement``; ``gpu``: the RAM (``ram_as_gpu``)."""
    remarks = tuple(command.version_remarks(version, as_vllm_settings(choice.settings), gpu))
    return Placement(choice, gpu, remarks=remarks)


def _within_limits(models: list[Model], wishes: VllmWishes) -> tuple[VllmWishes, tuple[Remark, ...]]:
    """``wishes`` with pictures no larger than any of these checkpoints makes them, and a remark if they were.

    vLLM would make them larger than the checkpoint was trained on; the native engine keeps to the limit.
    """
    known = [model.max_image_tokens for model in models if model.vision is not None]
    most = max((each for each in known if each is not None), default=None)
    if None in known or most is None or (wishes.image_tokens or 0) <= most:
        return wishes, ()
    remark = (
        f"--image-tokens {wishes.image_tokens} is {most}: the checkpoint itself makes pictures no larger."
    )
    return replace(wishes, image_tokens=most), (Remark(remark, "image_tokens_limited"),)


def _check_model(model: Model, wishes: VllmWishes) -> None:
    """Raise ``UsageError`` for what vLLM does not do with ``model``.

    It does not compute with quantized weights in float32, and its processor enlarges small pictures. How it
    holds GGUF files is not known here.
    """
    if model.gguf_type:
        raise UsageError(
            f"{model.name} is a GGUF model, for which vLLM is not planned",
            "Leave out --backend vllm, or name the original checkpoint.",
            param="backend",
        )
    if wishes.vllm.dtype == FLOAT32 and model.weights != FORMATS[0]:
        raise UsageError(
            f"{model.name} is in {model.weights}, which vLLM does not compute with in float32",
            "Leave out --dtype, or add --weights bf16.",
            param="dtype",
        )
    if model.vision is None or wishes.image_tokens is None:
        return
    least = cost.min_image_tokens(model.vision)
    if wishes.image_tokens < least:
        raise UsageError(
            f"--image-tokens is {wishes.image_tokens}; vLLM enlarges pictures of fewer than {least} tokens",
            f"Use --image-tokens {least} or more.",
            param="image_tokens",
        )


def _args(model: Model, wishes: VllmWishes) -> VllmArgs:
    """vLLM's arguments, with its KV cache and pictures in tokens of this model."""
    tokens = wishes.kv_tokens
    if tokens is None and wishes.kv_bytes is not None:
        tokens = _whole_blocks(
            wishes.kv_bytes, cost.kv_bytes_per_token(model, wishes.kv_dtype or BF16, wishes.vllm)
        )
    return replace(wishes.vllm, kv_tokens=tokens, pictures=wishes.pictures)


def _whole_blocks(size: int, token_bytes: int) -> int:
    """Tokens of a KV cache of at most ``size`` bytes. Raises ``UsageError`` where these hold no block."""
    block = token_bytes * cost.LARGEST_BLOCK
    if size < block:
        raise UsageError(
            f"--kv-cache-memory-bytes is {size}; a block of {cost.LARGEST_BLOCK} tokens takes {block} bytes",
            f"Give at least {block}, or leave it out: the plan chooses.",
            param="kv_bytes",
        )
    return size // block * cost.LARGEST_BLOCK


def _decode_sums(model: Model, args: VllmArgs) -> Seconds:
    """Seconds in which cards add up their parts for one token: little to send, so each sum takes its time."""
    if args.tensor == 1:
        return NO_TIME
    sums = cost.num_all_reduces(model)
    return (
        sums * cost.ALL_REDUCE_LOW.value,
        sums * cost.ALL_REDUCE_SECONDS.value,
        sums * cost.ALL_REDUCE_HIGH.value,
    )


def _prompt_sums(model: Model, gpu: Gpu, settings: PlanSettings, args: VllmArgs) -> Seconds:
    """Seconds in which cards add up their parts for a prompt, whose rows go over the link.

    Once there and once back, less a card's own part; nothing at best, as no driver tells of fast links.
    """
    cards = args.tensor
    if cards == 1 or not gpu.pcie_bandwidth:
        return NO_TIME
    tokens = settings.image_tokens + TEXT_TOKENS
    sent = cost.num_all_reduces(model) * tokens * model.text.hidden_size * HALF * 2 * (cards - 1) / cards
    return 0.0, sent / gpu.pcie_bandwidth, 2 * sent / gpu.pcie_bandwidth
