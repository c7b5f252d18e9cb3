"""Advice on plans: which of several to take, what to type for it, and which other contexts would fit."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vlfit.checkpoint import catalog, store
from vlfit.checkpoint.catalog import BF16
from vlfit.checkpoint.catalog_quality import DEFAULT_SERIES, GOOD_FOR, series_of
from vlfit.checkpoint.quantization import FP8
from vlfit.errors import UsageError
from vlfit.machine.model import Machine
from vlfit.plan.model_lookup import catalog_models, smaller_variants_of
from vlfit.plan.planner import find_plan
from vlfit.plan.plans import Plan
from vlfit.plan.preference import is_ample, keeps_floors, safety_margin
from vlfit.plan.wishes import CPU, Wishes

_PROGRAM = "vlfit"
_CONTEXT_STEPS = (
    *range(3072, 16385, 1024),
    *range(20480, 65537, 4096),
    *range(81920, 262145, 16384),
)


@dataclass(frozen=True, slots=True)
class Advice:
    """What to tell a person beside a plan.

    - ``machine``: the machine of the plan. ``elsewhere``: it is not this computer.
    - ``longer``: ``longer_contexts`` of the plan; ``longer_fp8``: the same with a KV cache in FP8.
    - ``shorter``: ``contexts_that_fit``, for a plan whose fixed context does not.
    - ``ready``: if the plan's checkpoint must be converted, the best plan that fits for a ready-made one of
      the same model; else None.
    - ``other_series``: a line that proposes a model of another series (``describe_other_series``), or "".
    - ``cpu_wanted``: the processor was asked for, so nobody misses a GPU.
    """

    machine: Machine
    elsewhere: bool = False
    longer: tuple[Plan, ...] = ()
    longer_fp8: tuple[Plan, ...] = ()
    shorter: tuple[Plan, ...] = ()
    ready: Plan | None = None
    other_series: str = ""
    cpu_wanted: bool = False


def advice_for(
    plan: Plan, machine: Machine, wishes: Wishes, others: Sequence[Plan] = (), *, elsewhere: bool = False
) -> Advice:
    """Find the advice for ``plan``, which was made for ``machine`` and ``wishes``.

    Makes many other plans, which takes a moment. ``others``: plans for other weights formats of the same
    model, best first. ``elsewhere``: ``machine`` is not this computer.
    """
    fp8 = longer_contexts(plan, machine, replace(wishes, kv_dtype=FP8)) if wishes.kv_dtype is None else []
    ready = [] if is_ready_made(plan) else [each for each in others if each.fits and is_ready_made(each)]
    return Advice(
        machine,
        elsewhere,
        tuple(longer_contexts(plan, machine, wishes)),
        tuple(fp8),
        tuple(contexts_that_fit(plan, machine, wishes)),
        ready[0] if ready else None,
        cpu_wanted=wishes.device == CPU,
    )


def catalog_plans(machine: Machine, wishes: Wishes) -> list[Plan]:
    """Plans for all models of the catalog that support the wishes, best first."""
    plans = []
    for model in catalog_models(wishes.weights):
        try:
            plans.append(find_plan([model], machine, wishes, smaller_variants=smaller_variants_of([model])))
        except UsageError:
            continue  # a wish this model does not support, e.g. image tokens for a text-only one
    return sorted(plans, key=lambda each: each.rank)


def is_ready_made(plan: Plan) -> bool:
    """Whether the plan's checkpoint exists: on the hub, in a folder, or converted in vlfit's store."""
    return not plan.model.converted_from or store.find_folder(plan.model.name) is not None


def recommended(plans: Sequence[Plan]) -> Plan | None:
    """The plan to take of ``plans`` (best first); None if none fits.

    The first that fits, but models that take pictures come before text-only ones, then those that are quick
    enough before others (of which only the fastest is taken), then plans that reach both
    floors (``is_ample``) before others, then, of those, ready-made checkpoints before ones to convert, and
    last the catalog's first series, and GGUF models, before others.
    """
    fitting = [plan for plan in plans if plan.fits]
    seeing = [plan for plan in fitting if plan.model.vision is not None] or fitting
    quick = [plan for plan in seeing if plan.is_quick]
    if seeing and not quick:
        quick = [max(seeing, key=lambda plan: plan.speed.decode.expected if plan.speed else 0.0)]
    ample = [plan for plan in quick if is_ample(plan.settings, plan.model)]
    ready = [plan for plan in ample if is_ready_made(plan)]
    found = ready or ample or quick
    first = [plan for plan in found if plan.model.gguf_type or series_of(plan.model.family) == DEFAULT_SERIES]
    return next(iter((*first, *found)), None)


def other_series(plans: Sequence[Plan], taken: Plan) -> Plan | None:
    """The plan to take of ``plans`` (best first) of another series of the catalog than that of ``taken``.

    None if none reaches both floors (``is_ample``), or if ``taken`` is outside the catalog.
    """
    series = series_of(taken.model.family)
    others = [
        plan
        for plan in plans
        if series_of(plan.model.family) in GOOD_FOR.keys() - {series} and is_ample(plan.settings, plan.model)
    ]
    return recommended(others) if series in GOOD_FOR else None


def describe_other_series(taken: Plan, other: Plan) -> str:
    """A line that proposes ``other`` beside ``taken``, and says what each series is good for."""
    mine, theirs = series_of(taken.model.family), series_of(other.model.family)
    made = "" if is_ready_made(other) else ", which vlfit convert makes"
    name = short_name(other.model.name)
    return (
        f"{name}{made}, context {other.settings.context} (vlfit plan {name}): {theirs} is for "
        f"{GOOD_FOR[theirs]}, {mine} for {GOOD_FOR[mine]}"
    )


def longer_contexts(plan: Plan, machine: Machine, wishes: Wishes) -> list[Plan]:
    """Plans of the same model with longer contexts that fit as well, the shortest first.

    They may have smaller pictures, down to the floor, or fewer concurrent requests. Empty if ``wishes`` fix
    the context, if ``plan`` does not fit, and with offload (any context fits if more layers are offloaded).
    """
    if wishes.context is not None or wishes.offload is not None or not plan.fits:
        return []
    return _growing(plan, machine, wishes, plan.settings.context)


def contexts_that_fit(plan: Plan, machine: Machine, wishes: Wishes) -> list[Plan]:
    """Plans of the same model with contexts below ``wishes.context`` that fit, the shortest first.

    Empty if ``wishes`` do not fix the context, or if ``plan`` fits.
    """
    if wishes.context is None or plan.fits:
        return []
    return [each for each in _growing(plan, machine, wishes, 0) if each.settings.context < wishes.context]


def _growing(plan: Plan, machine: Machine, wishes: Wishes, above: int) -> list[Plan]:
    found: list[Plan] = []
    most = plan.model.text.max_position_embeddings
    for context in _CONTEXT_STEPS:
        if not above < context <= most:
            continue
        try:
            longer = find_plan([plan.model], machine, replace(wishes, context=context))
        except UsageError:  # no room for the picture that was asked for
            continue
        kept = keeps_floors(longer.settings, longer.model, replace(wishes, context=context))
        has_margin = longer.headroom >= min(safety_margin(longer.ledger), max(plan.headroom, 0))
        if not (longer.fits and kept and has_margin):
            break
        found.append(longer)
    return found


# --- what to type ------------------------------------------------------------------------------------------


def commands_to_type(plan: Plan, *, ready: bool) -> list[list[str]]:
    """The commands that a person types to start ``plan``, each as shell-quoted words.

    ``ready``: the checkpoint exists; else a ``vlfit convert`` command comes first. The next is
    ``plan.command``, for vLLM ``vlfit serve --backend vllm`` in its place; it is left out if
    ``plan.command`` is None. Models have the shortest names that mean them.
    """
    commands = []
    model = plan.model
    is_own = plan.command is None or plan.command[0] == _PROGRAM
    name = short_name(model.name) if model.source == model.name else model.source
    if not ready:
        convert = shlex.split(model.convert_command)
        convert[2] = _open_name(model.converted_from) or convert[2]
        if not is_own:
            # vLLM does not look into vlfit's store of models: there the copy goes into the current folder.
            convert += ["--out", model.source]
        commands.append([shlex.quote(word) for word in convert])
        name = model.source
    if plan.command is None:
        return commands
    words = [_PROGRAM, "serve", name]
    if not is_own:  # that command is long, and vlfit makes it from the settings
        settings = plan.settings
        words += ["--backend", plan.backend, "--context", str(settings.context)]
        words += ["--sequences", str(settings.sequences)]
        if settings.image_tokens:
            words += ["--image-tokens", str(settings.image_tokens)]
        if settings.kv_dtype != BF16:
            words += ["--kv-dtype", settings.kv_dtype]
        return [*commands, [shlex.quote(word) for word in words]]
    variables = [f"{variable}={shlex.quote(value)}" for variable, value in plan.environment.items()]
    return [*commands, [*variables, *(shlex.quote(word) for word in (*words, *plan.command[3:]))]]


def short_name(name: str) -> str:
    """The shortest name that commands take for the checkpoint ``name``.

    For a quantized checkpoint of the catalog: size and format, such as ``4B-FP8``, if that means no other.
    For one in bf16 (``4B`` alone leaves the format open), or if the short name means several: the hub name
    without its owner. For a name outside the catalog: ``name`` itself.
    """
    entry = catalog.find_entry(name)
    if entry is None:
        return name
    if entry.weights == BF16:
        return entry.name.rpartition("/")[2]
    short = f"{short_family(entry.family)}-{entry.weights.upper()}"
    if [each.name for each in catalog.entries_of_short_name(short)] == [entry.name]:
        return short
    return entry.name.rpartition("/")[2]


def short_family(family: str) -> str:
    """The last part of a family's name, such as ``4B`` of ``Qwen3-VL-4B``, if it means no other family.

    Else ``family`` itself.
    """
    short = family.rpartition("-")[2]
    found = {entry.family for entry in catalog.family_entries(short)}
    return short if found == {family} else family


def _open_name(name: str) -> str:
    """``4B`` for the bf16 checkpoint that ``vlfit convert 4B`` takes; "" for others."""
    entry = catalog.find_entry(name)
    if entry is None or entry.weights != BF16 or entry.edition in ("Thinking", *catalog.POOLED_EDITIONS):
        return ""
    short = short_family(entry.family)
    return short if short != entry.family else ""
