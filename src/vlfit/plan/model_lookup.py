"""From a name to models with exact sizes; which weights format a name means here; and what ``auto`` means.

Nothing is downloaded but headers, and those only of a hub model that is neither in the catalog nor on disk.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

from vlfit.checkpoint import catalog, hub
from vlfit.checkpoint.cache import LocalModel
from vlfit.checkpoint.catalog import BF16, FORMATS, CatalogEntry
from vlfit.checkpoint.conversions import (
    DEFAULT_OPTIONS,
    GROUP_SIZE,
    FormatOptions,
    group_size_divides,
    smaller_formats,
    with_weights_format,
)
from vlfit.checkpoint.quantization import FP8, INT4, Fp8Format
from vlfit.checkpoint.source import (
    MINI,
    Checkpoint,
    ModelName,
    nearest_names_in_hint,
    not_converted,
    read_checkpoint,
    resolve_name,
)
from vlfit.errors import DeviceError, MissingFile, UsageError
from vlfit.machine.model import Machine
from vlfit.models.registry import read_image_processing
from vlfit.plan.shapes import Model, model_of
from vlfit.plan.wishes import Wishes
from vlfit.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from vlfit.plan.plans import Plan


@dataclass(frozen=True, slots=True)
class NamedModels:
    """The models that a name means, the most exact weights first; one, unless it leaves the format open.

    ``smaller_variants``: functions that make the model with fewer bits, the mildest first.
    """

    exact: list[Model]
    smaller_variants: Sequence[Callable[[], Model]] = ()

    def rounded_models(self) -> Iterator[Model]:
        """The models of ``smaller_variants``, each made when it is needed (``Model.convert_options``)."""
        return (make() for make in self.smaller_variants)


def find_exact_models(name: str, weights: str | None = None) -> list[Model]:
    """The models that ``name`` may mean, without those that are rounded further (``find_models``)."""
    return find_models(name, weights).exact


def find_models(name: str, weights: str | None = None) -> NamedModels:
    """The models that ``name`` means (``checkpoint.source.resolve_name``).

    ``weights``: a format; a checkpoint in bf16 is then planned as ``vlfit convert`` would write it. Raises
    ``CheckpointError`` and ``HubError`` for what cannot be read, ``UsageError`` for a format that this
    checkpoint cannot be converted to.
    """
    found = resolve_name(name)
    one = found[0]
    if one.entry is None:
        if one.folder is None:
            return _in_wanted_format(_from_the_hub(one.name), weights)
        place = "" if one.name == MINI else str(one.folder)
        return _in_wanted_format(read_checkpoint(one.name, one.folder), weights, place)
    if len(found) == 1:
        return _named_models([_entry_in_format(one.entry, weights)], None)
    members = [each.entry for each in found if each.entry is not None and not each.entry.convert_options]
    return _named_models(members, weights)


def choose_format(
    found: Sequence[ModelName],
    machine: Machine,
    wishes: Wishes | None = None,
    files: hub.FileSelection = hub.NATIVE,
) -> ModelName:
    """The checkpoint that a name means here which leaves the weights format open, as ``4B`` does.

    The one that is on this computer; of several, or else of those that the hub has, the one that the plan
    for ``machine`` ranks first. Where nothing can be planned, as without a GPU: the one of fewest bytes.
    Raises ``NotDownloaded``, with the command, if only a format fits that has to be converted first.
    """
    if len(found) == 1:
        return found[0]
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
        raise not_converted(
            best.name, best.convert_command, f"No plan for this computer has room for {others}."
        )
    return _smallest_model(here or [each for each in found if each.on_hub])


def _rank(found: Sequence[ModelName], machine: Machine, wishes: Wishes) -> "list[tuple[ModelName, Plan]]":
    """``found`` with their plans, best first; empty where no plan can be made."""
    from vlfit.plan.search import find_plan

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


def _smallest_model(found: Sequence[ModelName]) -> ModelName:
    return min(found, key=lambda each: model_of_entry(each.entry).weight_bytes if each.entry else 0)


def alternatives_to(models: list[Model], name: str) -> list[Model]:
    """Alternatives where ``models``, which ``name`` means, do not fit: other formats, other models."""
    edition = "Thinking" if "-thinking" in models[0].name.lower() else "Instruct"
    family = models[0].family
    alternatives = catalog_models(edition=edition)
    alternatives += [
        model_of_entry(each)
        for each in catalog.variants()
        if (each.family, each.edition) == (family, edition)
    ]
    one = resolve_name(name)[0]
    if one.folder is None or one.entry is not None:
        return alternatives
    checkpoint = read_checkpoint(one.name, one.folder)
    stored = checkpoint.config.quantization
    if stored is not None and not isinstance(stored, Fp8Format):
        return alternatives
    place = "" if one.name == MINI else str(one.folder)
    return alternatives + [make() for form in FORMATS[1:] for make in _conversions(checkpoint, form, place)]


def _named_models(members: list[CatalogEntry], weights: str | None) -> NamedModels:
    """One model in the formats of ``members``, or in ``weights``."""
    chosen = [member for member in members if weights in (None, member.weights)]
    exact = [model_of_entry(entry) for entry in chosen or [_entry_in_format(members[0], weights)]]
    return NamedModels(exact, smaller_variants_of(exact) if chosen else ())


def smaller_variants_of(models: list[Model]) -> list[Callable[[], Model]]:
    """Functions that make ``models`` as ``vlfit convert`` rounds them further, for each the mildest first."""
    return [
        partial(model_of_entry, entry)
        for model in models
        for entry in catalog.variants()
        if entry.weights == model.weights and entry.name.startswith(f"{model.name.rpartition('/')[2]}-")
    ]


def catalog_models(weights: str | None = None, *, edition: str = "Instruct") -> list[Model]:
    """Each model of the catalog in every format, best first, in one edition: both have the same sizes."""
    return [
        model_of_entry(entry)
        for entry in catalog.entries()
        if entry.edition in ("", edition) and weights in (None, entry.weights)
    ]


@cache
def model_of_entry(entry: CatalogEntry) -> Model:
    """The model of a catalog entry."""
    return model_of(
        entry.name,
        entry.config,
        entry.tensor_groups,
        "counted from the shapes of its config (built-in catalog)",
        family=entry.family,
        converted_from=entry.converted_from,
        convert_options=entry.convert_options,
    )


def _entry_in_format(entry: CatalogEntry, weights: str | None) -> CatalogEntry:
    """``entry`` in ``weights``; the catalog has every model in all formats."""
    if weights in (None, entry.weights):
        return entry
    wanted = entry.family, entry.edition, weights
    return next(each for each in catalog.entries() if (each.family, each.edition, each.weights) == wanted)


def _in_wanted_format(checkpoint: Checkpoint, weights: str | None, place: str = "") -> NamedModels:
    """``place``: its folder, "" for mini and the hub."""
    stored = checkpoint.weights_format
    if weights is None or weights == stored or (weights == BF16 and stored in ("fp16", "fp32")):
        exact = model_of(
            checkpoint.name,
            checkpoint.config,
            checkpoint.tensors,
            "read from its headers",
            source=place,
            max_image_tokens=_most_image_tokens(checkpoint),
        )
        return NamedModels(
            [exact], _conversions(checkpoint, stored, place) if _is_official_fp8(checkpoint) else ()
        )
    if weights == BF16 or not (checkpoint.config.quantization is None or _is_official_fp8(checkpoint)):
        raise UsageError(
            f"{checkpoint.name} is in {stored}; it cannot be made {weights} from that",
            "Name the original checkpoint in bf16, or leave out --weights.",
        )
    variants = _conversions(checkpoint, weights, place)
    if not variants:
        raise UsageError(
            f"layers of {checkpoint.name} have inputs in no whole groups of {GROUP_SIZE}: "
            f"no plan for {weights}",
            "Plan for fp8, or convert it (vlfit convert) and plan for the new folder.",
        )
    return NamedModels([variants[0]()], variants[1:])


def _most_image_tokens(checkpoint: Checkpoint) -> int | None:
    """Most tokens of a picture by preprocessor_config.json; None without one, or for a text-only model."""
    try:
        processing = read_image_processing(checkpoint.config, checkpoint.folder)
    except MissingFile:
        return None  # it is not fetched for a model on the hub
    return processing.max_tokens if processing is not None else None


def _is_official_fp8(checkpoint: Checkpoint) -> bool:
    """Whether it is in the format of the official FP8 checkpoints, which can be rounded further."""
    return isinstance(checkpoint.config.quantization, Fp8Format)


def _conversions(checkpoint: Checkpoint, weights: str, place: str) -> list[Callable[[], Model]]:
    """What ``vlfit convert`` would write: plain, then with options that save bytes at the cost of exactness.

    Nothing where layers would stay in 16 bits, as int4 has no partial groups.
    """
    config = checkpoint.config
    if weights == INT4 and not group_size_divides(config, GROUP_SIZE):
        return []
    # A checkpoint in FP8 is converted only to round other parts too.
    first = [] if weights == FP8 and _is_official_fp8(checkpoint) else [DEFAULT_OPTIONS]
    every = (*first, *smaller_formats(config, weights))
    return [cache(partial(_converted_model, checkpoint, weights, each, place)) for each in every]


def _converted_model(checkpoint: Checkpoint, weights: str, rounding: FormatOptions, place: str) -> Model:
    config = with_weights_format(checkpoint.config, weights, rounding)
    ending = "" if checkpoint.weights_format == weights else f"-{weights.upper()}"
    name = f"{checkpoint.name}{ending}{rounding.name_suffix}"
    return model_of(
        name,
        config,
        catalog.tensor_groups_of(config),
        "counted for what vlfit convert would write",
        family=checkpoint.name,
        converted_from=place or checkpoint.name,
        source=name.rpartition("/")[2],
        convert_options=rounding.cli_options(tied=config.tie_word_embeddings),
        max_image_tokens=_most_image_tokens(checkpoint),
    )


def _from_the_hub(name: str) -> Checkpoint:
    cached = hub.cached_folder(name)
    if cached is not None:
        return read_checkpoint(name, cached)
    from vlfit.checkpoint.remote_headers import read_remote

    with nearest_names_in_hint(name):
        return read_remote(name)


# --- ``--model auto``: the best checkpoint that is already here and fits this machine, else mini ------------

SUGGESTION = "Qwen/Qwen3-VL-2B-Instruct-FP8"

# What a GPU holds beside the weights: about 0.5 GiB of CUDA context, 1.1 GiB of KV cache for 8192 tokens of
# 4B or 8B, and 0.3 GiB of workspace.
GPU_MARGIN = 1900 * MIB
# On a CPU a weight takes at most 4 bytes (large matrices 2, where the CPU can multiply with them); the margin
# is for the system.
CPU_BYTES_PER_PARAMETER = 4
CPU_MARGIN = 2 * GIB
# Each token reads every weight. Above the 2B model (2.13 G) that takes a desktop CPU seconds per token.
CPU_MAX_PARAMETERS = 2_500_000_000


@dataclass(frozen=True, slots=True)
class AutoChoice:
    """The ``model`` to open, and the ``reason`` in one line for the person."""

    model: str
    reason: str


def choose_checkpoint(machine: Machine, models: Sequence[LocalModel]) -> AutoChoice:
    """The checkpoint of ``models`` with the most parameters that fits ``machine``, else mini.

    On a GPU, weights and ``GPU_MARGIN`` must be free on one GPU. Without one, weights in float32 and
    ``CPU_MARGIN`` must be available RAM, and the model must be of a size that a CPU answers with.
    Of equals the smaller file wins: FP8 answers as well as bf16, faster, and leaves room. Only int4, which is
    less exact, comes after all others.
    """
    # Copies of mini that convert made are named mini-FP8 and mini-INT4.
    real = [model for model in models if not f"{model.name}-".startswith(f"{MINI}-") and model.has_vision]
    whole = sorted(
        (model for model in real if model.complete),
        key=lambda model: (-model.parameters, model.format == INT4, model.weight_bytes, model.name),
    )
    for model in whole:
        if _needed_bytes(machine, model) <= _available(machine) and not _too_slow(machine, model):
            return AutoChoice(model.name, f"using {model.name}: {_why_it_fits(machine, model)}")
    return AutoChoice(
        MINI, f"using mini, the small model that ships with vlfit; {_why_not_larger(machine, real, whole)}"
    )


def _available(machine: Machine) -> int:
    return max((gpu.free for gpu in machine.gpus), default=machine.host.ram_available)


def _needed_bytes(machine: Machine, model: LocalModel) -> int:
    if machine.gpus:
        return model.weight_bytes + GPU_MARGIN
    return model.parameters * CPU_BYTES_PER_PARAMETER + CPU_MARGIN


def _too_slow(machine: Machine, model: LocalModel) -> bool:
    return not machine.gpus and model.parameters > CPU_MAX_PARAMETERS


def _why_it_fits(machine: Machine, model: LocalModel) -> str:
    need, room = format_bytes(_needed_bytes(machine, model)), format_bytes(_available(machine))
    if machine.gpus:
        return f"needs about {need} and {room} of the GPU are free"
    return f"needs about {need} and {room} of RAM are free; without a GPU it is slow"


def _why_not_larger(machine: Machine, real: Sequence[LocalModel], whole: Sequence[LocalModel]) -> str:
    """Why none of the real models was chosen, and what to do."""
    if whole:
        smallest = min(whole, key=lambda model: _needed_bytes(machine, model))
        if _too_slow(machine, smallest):
            return (
                f"{smallest.name} is here but too slow without a GPU (--model {smallest.name} runs it anyway)"
            )
        need, room = format_bytes(_needed_bytes(machine, smallest)), format_bytes(_available(machine))
        where = "on the GPU" if machine.gpus else "of RAM"
        return f"{smallest.name} is here but needs about {need}; {room} {where} are free"
    if real:
        return f"{real[0].name} is only partly downloaded: vlfit pull {real[0].name} goes on"
    return f"for a real one: vlfit pull {SUGGESTION}"
