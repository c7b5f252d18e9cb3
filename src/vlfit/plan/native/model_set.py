"""Several models on one device: what each takes, which fit together, and what sleeps in RAM meanwhile."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.catalog import BF16
from vlfit.checkpoint.quantization import FP8
from vlfit.checkpoint.source import Checkpoint
from vlfit.errors import DoesNotFit, UsageError
from vlfit.machine.model import Gpu, Host, Machine
from vlfit.models.registry import read_image_processor_config
from vlfit.plan.actual import Expectation
from vlfit.plan.ledger import DEFAULT_CONTEXT, TYPICAL_REQUEST, Line, PlanSettings, held_by_others
from vlfit.plan.model_lookup import NamedModels
from vlfit.plan.native.expectation import expect_in_ram, expect_on_gpu
from vlfit.plan.native.ram import RAM_RESERVE
from vlfit.plan.planner import find_plan
from vlfit.plan.plans import Plan
from vlfit.plan.preference import IMAGE_TOKENS, safety_margin
from vlfit.plan.wishes import Wishes
from vlfit.units import format_bytes

SHARED_LINES = ("desktop", "context", "reserve", "image_decoders")  # one for all models of a process


def own_bytes(lines: Sequence[Line]) -> int:
    """Bytes of a ledger that a model takes for itself, without what all models of a process share."""
    return sum(line.bytes for line in lines if line.line not in SHARED_LINES)


def merge_expectations(plans: Sequence[Expectation]) -> Expectation:
    """The plans of models that are in memory together: their ledger lines in one, by name.

    ``SHARED_LINES`` count once, the largest of them. Speeds are those of the first; there are no lines if any
    plan has none.
    """
    if len(plans) == 1:
        return plans[0]
    reason = next((each.no_lines_reason for each in plans if not each.lines), "")
    if reason:
        return Expectation(no_lines_reason=reason)
    lines: dict[str, Line] = {}
    for line in (line for plan in plans for line in plan.lines):
        known = lines.get(line.line)
        if known is None:
            lines[line.line] = line
        elif line.line in SHARED_LINES:
            lines[line.line] = max(known, line, key=lambda each: each.bytes)
        else:
            lines[line.line] = replace(
                known, bytes=known.bytes + line.bytes, note=f"{known.note}; and {line.note}"
            )
    return replace(plans[0], lines=tuple(lines.values()))


# --- vlfit serve: models whose options are given ------------------------------------------------------------


def context_of(checkpoint: Checkpoint, options: EngineOptions) -> int:
    """The context that the engine will run ``checkpoint`` with.

    Raises ``UsageError`` if ``options`` ask for more than the checkpoint has.
    """
    text = checkpoint.config.text
    if options.max_model_len is None:
        return min(DEFAULT_CONTEXT, text.default_context)
    if options.max_model_len > text.max_position_embeddings:
        raise UsageError(
            f"--context {options.max_model_len} is too long: {checkpoint.name} runs with at most "
            f"{text.max_position_embeddings} tokens",
            f"Use --context {text.max_position_embeddings} or less.",
        )
    return options.max_model_len


def plan_on_gpu(
    checkpoint: Checkpoint, gpu: Gpu, options: EngineOptions
) -> tuple[EngineOptions, Expectation]:
    """The plan of ``checkpoint`` alone on ``gpu``, and ``options`` with the image tokens of that plan.

    With these, the model has the same limits whatever else is in memory when it is loaded. If there is no
    plan, the expectation's ``no_lines_reason`` says why. Raises ``DoesNotFit`` with the deficit if even small
    pictures do not fit.
    """
    context = context_of(checkpoint, options)
    processor = read_image_processor_config(checkpoint.config, checkpoint.folder)
    most = min(processor.max_tokens if processor else 0, context - 1)
    steps = (most, *(step for step in IMAGE_TOKENS if step < most))
    if options.image_tokens is not None:
        steps = (min(options.image_tokens, most),)

    def expected(image_tokens: int, *, draft_model: bool) -> Expectation:
        settings = PlanSettings(
            checkpoint.weights_format,
            context,
            image_tokens,
            options.max_num_seqs,
            options.max_num_batched_tokens,
            kv_dtype=FP8 if options.kv_dtype == FP8 else BF16,
            speculate=options.speculate is not False,
            draft_model=draft_model,
        )
        return expect_on_gpu(checkpoint, gpu, settings, 2, _kv_tokens(options, context))

    for image_tokens in steps:
        plan = expected(image_tokens, draft_model=options.speculate is True)
        missing = sum(line.bytes for line in plan.lines) - gpu.total
        if missing <= 0:
            if options.speculate is None:  # as the engine does when it is loaded
                with_drafts = expected(image_tokens, draft_model=True)
                margin = safety_margin(with_drafts.lines)
                if sum(line.bytes for line in with_drafts.lines) + margin <= gpu.total:
                    plan = with_drafts
            return replace(options, image_tokens=image_tokens or options.image_tokens), plan
    raise DoesNotFit(
        f"{checkpoint.name} does not fit on {gpu.name} even alone: {format_bytes(missing)} too few",
        "Leave it out, or try a smaller --context, --sequences or --image-tokens, or --kv-dtype fp8; "
        f"vlfit plan {checkpoint.name} shows what fits.",
    )


def plan_in_ram(
    checkpoint: Checkpoint,
    options: EngineOptions,
    *,
    value_bytes: int,
    cpu_16_bit: bool,
    cpu_stored: bool = False,
    host: Host,
) -> Expectation:
    """The plan of ``checkpoint`` on a CPU: weights and KV cache.

    ``value_bytes``, ``cpu_16_bit``, ``cpu_stored``: as in ``EngineSettings``. Raises ``DoesNotFit`` if that
    is more than all RAM less ``RAM_RESERVE``.
    """
    plan = expect_in_ram(
        checkpoint,
        _kv_tokens(options, context_of(checkpoint, options)),
        value_bytes,
        cpu_16_bit=cpu_16_bit,
        cpu_stored=cpu_stored,
        kv_dtype=FP8 if options.kv_dtype == FP8 else BF16,
        sequences=options.max_num_seqs,
        speculate=options.speculate is not False,
    )
    if own_bytes(plan.lines) + RAM_RESERVE > host.ram_total:
        raise DoesNotFit(
            f"{checkpoint.name} needs {format_bytes(own_bytes(plan.lines))} of RAM, of "
            f"{format_bytes(host.ram_total)} in all",
            "Leave it out, or take a smaller checkpoint.",
        )
    return plan


def _kv_tokens(options: EngineOptions, context: int) -> int:
    """Tokens of the KV cache: as asked, at least one context, in whole blocks; of ``auto`` the least."""
    tokens = options.kv_tokens or options.max_num_seqs * min(context, TYPICAL_REQUEST)
    wanted = context if tokens == "auto" else max(tokens, context)
    return -(-wanted // options.block_size) * options.block_size


# --- vlfit plan: models whose settings are chosen -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SetPlan:
    """The plans of several models, each alone on the card, with the same context and requests at once.

    ``together``: names of those that are in memory at once, in the order named, as many as fit; fewer than
    two: one at a time. ``missing``: bytes of the card that all at once would need beyond what there is; 0 if
    they fit. ``ram``: bytes of weights that wait in RAM at most; ``ram_available``: of the machine.
    """

    plans: tuple[Plan, ...]
    together: tuple[str, ...]
    missing: int
    ram: int
    ram_available: int

    @property
    def fits(self) -> bool:
        """Whether each model fits alone."""
        return all(plan.fits for plan in self.plans)

    @property
    def ram_is_enough(self) -> bool:
        """Whether all sleeping weights fit into RAM; otherwise some are read from files again."""
        return self.ram + RAM_RESERVE <= self.ram_available


def plan_set(named: Sequence[NamedModels], machine: Machine, wishes: Wishes) -> SetPlan:
    """Plan ``named`` models for one server. Raises as ``find_plan``."""

    def plans_for(these: Wishes) -> list[Plan]:
        return [
            find_plan(each.exact, machine, these, smaller_variants=each.smaller_variants) for each in named
        ]

    plans = plans_for(wishes)
    fitting = [plan.settings for plan in plans if plan.fits]
    if fitting:  # one server has one --context and one --sequences
        common = replace(
            wishes,
            context=min(settings.context for settings in fitting),
            sequences=min(settings.sequences for settings in fitting),
        )
        plans = plans_for(common)
    together: list[Plan] = []
    for plan in plans:
        if plan.fits and _missing([*together, plan]) <= 0:
            together.append(plan)
    weights = sorted(plan.model.weight_bytes for plan in plans)
    return SetPlan(
        tuple(plans),
        tuple(plan.model.name for plan in together),
        max(_missing(plans), 0),
        # The least leaves most waiting; those that stay together on the card do not wait.
        0 if len(together) == len(plans) else sum(weights) - weights[0],
        machine.host.ram_available,
    )


def _missing(plans: Sequence[Plan]) -> int:
    """Bytes that ``plans`` at once take beyond the card; negative: what is left."""
    gpu = plans[0].gpu
    merged = merge_expectations([Expectation(plan.ledger) for plan in plans])
    return max(sum(line.bytes for line in merged.lines), held_by_others(gpu)) - gpu.total
