"""Which checkpoint to open on this machine: for ``--model auto``, and for a name without a weights format.

Sizes come from headers and from the catalog: nothing here uses the network.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vlfit.api.pooling import ModelKind
from vlfit.checkpoint import catalog, hub, store
from vlfit.checkpoint.cache import LocalModel
from vlfit.checkpoint.catalog import CatalogEntry
from vlfit.checkpoint.catalog_quality import DEFAULT_SERIES
from vlfit.checkpoint.gguf.file_names import bits_of_type
from vlfit.checkpoint.gguf.places import HUB, FoundModel
from vlfit.checkpoint.pooling_files import kind_of_name
from vlfit.checkpoint.quantization import INT4
from vlfit.checkpoint.source import MINI, ResolvedModel, is_mini, not_converted_error
from vlfit.errors import DeviceError, UsageError, VlfitError
from vlfit.machine.model import Machine
from vlfit.plan.ledger import held_by_others
from vlfit.plan.model_lookup import found_gguf_model, model_of_entry, smaller_variants_of
from vlfit.plan.planner import find_plan
from vlfit.plan.plans import Plan
from vlfit.plan.preference import WeightsPreference, is_ample, preferred_weights, weights_preference
from vlfit.plan.processors import MOST_PARAMETERS, is_ram
from vlfit.plan.recommend import recommended, short_name
from vlfit.plan.shapes import Model
from vlfit.plan.speed import decode_bounds
from vlfit.plan.wishes import Wishes
from vlfit.units import GIB, MIB, format_bytes

# What a GPU holds beside the weights: about 0.5 GiB of CUDA context, 1.1 GiB of KV cache for 8192 tokens of
# 4B or 8B, and 0.3 GiB of workspace. For models whose plan is not known.
GPU_MARGIN = 1900 * MIB
# On a CPU: 1.8 GiB of KV cache for 8192 tokens of 2B, 0.4 of Python and torch, and workspaces. For models
# whose plan is not known; their weights stay as they are stored.
CPU_MARGIN = 3 * GIB
_EXACT_BITS = 5  # of a weight in GGUF: fewer are less exact


@dataclass(frozen=True, slots=True)
class RecommendedDownload:
    """A model of the hub to download, as it fits this machine.

    ``verdict``: a phrase that says how it fits ("fits NVIDIA GeForce RTX 5060 with 351 MiB left").
    """

    name: str
    weight_bytes: int
    verdict: str

    @property
    def command(self) -> str:
        """The ``vlfit pull`` command that downloads the model."""
        return f"vlfit pull {short_name(self.name)}"


@dataclass(frozen=True, slots=True)
class AutoChoice:
    """The name of the ``model`` to open, and the ``reason`` as a line for the person.

    If ``model`` is mini: ``obstacle`` says why no other model on this computer is used, "" if there is none;
    ``download`` is a model of the hub that fits, None if none does. Else both are empty.
    """

    model: str
    reason: str
    obstacle: str = ""
    download: RecommendedDownload | None = None


def choose_checkpoint(
    machine: Machine, models: Sequence[LocalModel], kind: ModelKind = "chat", shelf: Sequence[Model] = ()
) -> AutoChoice:
    """Choose the checkpoint of ``models`` with the most parameters that fits ``machine``, else mini.

    Only models that are made for ``kind`` count, by their names. ``shelf``: GGUF models that are here, which
    count as others do; their plans must fit.

    - With a GPU: weights and ``GPU_MARGIN`` must be free on one GPU, or the model's plan must fit; a plan
      below the floors (``is_ample``) counts only if no other model fits.
    - Without a GPU: the model's plan must fit the RAM and be quick enough (``CostModel.is_quick``); if it is
      not of the catalog, its weights as stored and ``CPU_MARGIN``, and it must be small.

    Models without a vision tower and incomplete downloads are left out. With equal parameters, fewer bytes
    win, as FP8 answers as well as bf16; int4, which is less exact, comes last, as do GGUF's types of 4 bits,
    then of 3, then of 2. Without a GPU it is the order of ``preferred_weights``.
    """
    real = [
        model
        for model in models
        if not is_mini(model.name) and model.has_vision and kind_of_name(model.name) == kind
    ]
    complete = ranked_here(machine, real, [each for each in shelf if kind_of_name(each.name) == kind])
    for ample in (True, False):
        for model in complete:
            why = _why_it_fits(machine, model, ample=ample)
            if why:
                return AutoChoice(model.name, f"using {model.name}: {why}")
    partial = [model for model in real if not model.complete]
    begun = [model.name for model in partial]
    download = recommend_download(machine, begun) if kind == "chat" else None
    obstacle = _why_not_larger(machine, complete, partial, download)
    if download is None:
        pull = "" if complete or partial else _why_nothing_fits(machine)
    else:
        pull = f"for {'one that fits' if complete else 'a real one'}: {download.command}"
    why = "; ".join(part for part in (obstacle, pull) if part)
    if download is not None and download.name in begun and not complete:
        why = f"the download of a real one was cut off: {download.command} goes on"
    return AutoChoice(MINI, f"using mini, the small model that ships with vlfit; {why}", obstacle, download)


def ranked_here(
    machine: Machine, models: Sequence[LocalModel], shelf: Sequence[Model]
) -> list[LocalModel | Model]:
    """The models that are here and take pictures, the one to prefer first; whether they fit is not asked.

    Incomplete ones are left out, and so are mini and its copies, which have to be named.
    """
    found: list[LocalModel | Model] = [each for each in models if each.complete and each.has_vision]
    found += [each for each in shelf if each.vision is not None]
    formats = _exact_first if machine.gpus else _fast_first
    real = [each for each in found if not is_mini(each.name)]
    return sorted(real, key=lambda model: (-model.parameters, formats(model), model.name))


def _exact_first(model: LocalModel | Model) -> tuple[int, int]:
    return _coarseness(model), model.weight_bytes


def _fast_first(model: LocalModel | Model) -> WeightsPreference:
    if isinstance(model, Model):
        return weights_preference(model)
    return preferred_weights(model.format, model.weight_bytes)


def _coarseness(model: LocalModel | Model) -> int:
    """0 for more than 4 bits a weight, 1 for 4, 2 for 3, ..."""
    if isinstance(model, LocalModel):
        return int(model.format == INT4)
    return max(_EXACT_BITS - bits_of_type(model.gguf_type), 0)


def recommend_download(machine: Machine, begun: Sequence[str] = ()) -> RecommendedDownload | None:
    """The vision model of the catalog to download for ``machine``; None if none on the hub fits.

    The one that ``vlfit plan`` recommends; of ``begun`` (names of incomplete downloads), if any of these
    fits.
    """
    published = [entry for entry in _vision_entries(every_series=True) if not entry.converted_from]
    plans = _fitting_plans(published, machine)
    best = recommended([plan for plan in plans if plan.model.name in begun]) or recommended(plans)
    if best is None:
        return None
    return RecommendedDownload(best.model.name, best.model.weight_bytes, _verdict(best))


def _verdict(plan: Plan) -> str:
    """How ``plan`` fits, as a phrase; on a CPU also how fast it is."""
    if not is_ram(plan.gpu):
        return f"fits {plan.gpu.name} with {format_bytes(plan.headroom)} left"
    speed = plan.speed
    pace = ""
    if speed is not None:
        pace = f", {'-'.join(decode_bounds(speed.decode.low, speed.decode.high))} tokens/s predicted"
    return f"fits the RAM with {format_bytes(plan.headroom)} left{pace}"


def _vision_entries(*, every_series: bool = False) -> list[CatalogEntry]:
    """Models with a vision tower of the catalog's first series; Thinking ones have the same sizes."""
    return [
        entry
        for entry in catalog.entries()
        if entry.edition in catalog.CHAT_EDITIONS
        and entry.config.vision is not None
        and (every_series or entry.series == DEFAULT_SERIES)
    ]


def _fitting_plans(entries: Sequence[CatalogEntry], machine: Machine, *, rounded: bool = False) -> list[Plan]:
    """The plans that fit, best first; ``rounded``: also with more parts rounded than the entries have."""
    plans = [_plan_of(entry, machine, rounded=rounded) for entry in entries]
    return sorted((plan for plan in plans if plan is not None and plan.fits), key=lambda plan: plan.rank)


def _plan_of(entry: CatalogEntry | Model, machine: Machine, *, rounded: bool = False) -> Plan | None:
    """The plan of ``entry`` on the emptiest GPU; None if none can be made."""
    model = entry if isinstance(entry, Model) else model_of_entry(entry)
    try:
        return find_plan(
            [model], machine, Wishes(), smaller_variants=smaller_variants_of([model]) if rounded else ()
        )
    except VlfitError:
        return None


def _available(machine: Machine) -> int:
    return max((gpu.free for gpu in machine.gpus), default=machine.host.ram_available)


def _planned(model: LocalModel | Model) -> CatalogEntry | Model | None:
    """What can be planned of a model that is here; None if only its size is known."""
    return model if isinstance(model, Model) and model.gguf_type else catalog.find_entry(model.name)


def _needed_bytes(machine: Machine, model: LocalModel | Model) -> int:
    if machine.gpus:
        return model.weight_bytes + GPU_MARGIN
    entry = _planned(model)
    plan = _plan_of(entry, machine) if entry is not None else None
    if plan is not None:
        return plan.total - held_by_others(plan.gpu)
    return model.weight_bytes + CPU_MARGIN


def _too_slow(machine: Machine, model: LocalModel | Model) -> bool:
    if machine.gpus:
        return False
    entry = _planned(model)
    plan = _plan_of(entry, machine) if entry is not None else None
    return not plan.is_quick if plan is not None else model.parameters > MOST_PARAMETERS


def _why_it_fits(machine: Machine, model: LocalModel | Model, *, ample: bool) -> str:
    """Why ``model`` fits, "" if it does not; ``ample``: a plan needs the usual context and pictures too."""
    if _too_slow(machine, model):
        return ""
    entry = _planned(model)
    if (
        not isinstance(entry, Model)
        and (machine.gpus or entry is None)
        and _needed_bytes(machine, model) <= _available(machine)
    ):
        need, room = format_bytes(_needed_bytes(machine, model)), format_bytes(_available(machine))
        if not machine.gpus:
            return f"needs about {need} of the {room} of RAM that are free"
        return f"needs about {need} of the {room} that are free on the GPU"
    plan = _plan_of(entry, machine) if entry is not None else None
    if plan is None or not plan.fits or (ample and not is_ample(plan.settings, plan.model)):
        return ""
    return _verdict(plan)


def _why_not_larger(
    machine: Machine,
    complete: Sequence[LocalModel | Model],
    partial: Sequence[LocalModel],
    download: RecommendedDownload | None,
) -> str:
    """Why none of the models that are here was chosen; "" if there is none."""
    if complete:
        smallest = min(complete, key=lambda model: _needed_bytes(machine, model))
        if _too_slow(machine, smallest):
            return (
                f"{smallest.name} is here but too slow without a GPU (--model {smallest.name} runs it anyway)"
            )
        need, room = format_bytes(_needed_bytes(machine, smallest)), format_bytes(_available(machine))
        where = "on the GPU" if machine.gpus else "of RAM"
        return f"{smallest.name} is here but needs about {need}; {room} {where} are free"
    if partial:
        if download is not None and download.name in [model.name for model in partial]:
            return f"{download.name} is only partly downloaded"
        command = store.convert_command(partial[0].folder)
        if command:
            return f"{partial[0].name} is incomplete: {command} makes it again"
        return f"{partial[0].name} is only partly downloaded: vlfit pull {partial[0].name} goes on"
    return ""


def _why_nothing_fits(machine: Machine) -> str:
    """Why no model of the hub fits, and the copy that would, if ``vlfit convert`` can make one."""
    every = _vision_entries(every_series=True)
    converted = [entry for entry in every if entry.converted_from]
    plans = _fitting_plans(converted, machine, rounded=True)
    if plans:
        model = plans[0].model
        return f"{model.name.rpartition('/')[2]} would fit: {model.convert_command} makes it"
    models = [model_of_entry(entry) for entry in every if not entry.converted_from]
    smallest = min(models, key=lambda model: model.weight_bytes)
    need, room = format_bytes(_needed_bytes(machine, smallest)), format_bytes(_available(machine))
    where = "of the GPU" if machine.gpus else "of RAM"
    return f"the smallest real one, {smallest.name}, needs about {need} and {room} {where} are free"


# --- a weights format for a name that leaves it open, such as ``4B`` ---------------------------------------


# Why a type was taken by ``type_rank``.
WITHOUT_GPU = "the usual one that fits, or the fewest bits from 4 up: without a GPU fewer bytes are faster"


def type_rank(plan: Plan) -> tuple[Any, ...]:
    """Sort key of a GGUF model's types by their plans, the one to take first.

    With a GPU by the plan's rank, and more bytes of two alike; without one by what fits, then
    ``weights_preference``.
    """
    if is_ram(plan.gpu):
        return (not plan.fits, *weights_preference(plan.model))
    return (*plan.rank, -plan.model.file_bytes)


def choose_format(
    found: Sequence[ResolvedModel],
    machine: Machine,
    wishes: Wishes | None = None,
    files: hub.FileSelection = hub.NATIVE,
) -> ResolvedModel:
    """Choose one of ``found``: what a name that leaves the weights format open, such as ``4B``, resolves to.

    A checkpoint on this computer (complete with respect to ``files``) comes before those on the hub. Of
    several on this computer, or if there is none, of all on the hub, the one whose plan for ``machine``
    and ``wishes`` ranks first is chosen.

    Raises ``NotDownloaded``, with the command to type, if the only format that fits has to be made by
    ``vlfit convert`` first.
    """
    if len(found) == 1:
        return found[0]
    if found[0].is_gguf:
        return _choose_gguf(found, machine, wishes or Wishes())
    here = [each for each in found if each.local_folder(files) is not None]
    if len(here) == 1:
        return here[0]
    ranked = _rank(here or found, machine, wishes or Wishes())
    ready = [(each, made) for each, made in ranked if here or not made.model.converted_from]
    if ready and (ready[0][1].fits or not ranked[0][1].fits):
        return ready[0][0]
    if ranked and ranked[0][1].fits:
        best = ranked[0][1].model
        others = " or ".join(each.name for each in found if each.on_hub)
        raise not_converted_error(
            best.name, best.convert_command, f"No plan for this computer has room for {others}."
        )
    return _smallest_model(here or [each for each in found if each.on_hub])


def _choose_gguf(found: Sequence[ResolvedModel], machine: Machine, wishes: Wishes) -> ResolvedModel:
    """Choose one of several GGUF files of a model that are here, by ``type_rank``."""
    ranked = []
    for each in found:
        assert each.folder is not None
        model = found_gguf_model(FoundModel(each.name, each.folder, HUB, each.mmproj))
        ranked.append((type_rank(find_plan([model], machine, wishes)), each.name, each))
    return min(ranked, key=lambda each: each[:2])[-1]


def _rank(
    found: Sequence[ResolvedModel], machine: Machine, wishes: Wishes
) -> list[tuple[ResolvedModel, Plan]]:
    """``found`` with their plans, best first; empty where no plan can be made."""
    ranked = []
    for each in found:
        assert each.entry is not None  # a name that means several is of the catalog
        try:
            model = model_of_entry(each.entry)
            variants = smaller_variants_of([model]) if each.local_folder() is None else ()
            made = find_plan([model], machine, wishes, smaller_variants=variants)
        except (DeviceError, UsageError):
            continue
        ranked.append((each, made))
    return sorted(ranked, key=lambda pair: pair[1].rank)


def _smallest_model(found: Sequence[ResolvedModel]) -> ResolvedModel:
    return min(found, key=lambda each: model_of_entry(each.entry).weight_bytes if each.entry else 0)
