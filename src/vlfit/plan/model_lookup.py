"""From a name (folder, catalog entry, family, hub id) to models with exact sizes; and what ``auto`` means.

Nothing is downloaded but headers, and those only of a hub model that is neither in the catalog nor on disk.
"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from vlfit.checkpoint import catalog
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
from vlfit.checkpoint.source import MINI, Checkpoint, mini_folder, read_checkpoint
from vlfit.errors import HubModelNotFound, MissingFile, NotACheckpoint, UsageError
from vlfit.machine.model import Machine
from vlfit.models.registry import read_image_processing
from vlfit.plan.shapes import Model, model_of
from vlfit.units import GIB, MIB, format_bytes

_HINT = "Give a folder, a name on the hub (org/name), mini, or one of the catalog: vlfit plan lists it."


@dataclass(frozen=True, slots=True)
class NamedModels:
    """The models that a name means, the most exact weights first; one, unless it leaves the format open.

    ``makers`` make conversions with options for fewer bytes, the mildest first.
    """

    exact: list[Model]
    makers: Sequence[Callable[[], Model]] = ()

    def rounded_models(self) -> Iterator[Model]:
        """The models of ``makers``, each made when it is needed (``Model.convert_options``)."""
        return (make() for make in self.makers)


def find_exact_models(name: str, weights: str | None = None) -> list[Model]:
    """The models that ``name`` may mean, without those that are rounded further (``find_models``)."""
    return find_models(name, weights).exact


def find_models(name: str, weights: str | None = None) -> NamedModels:
    """The models that ``name`` means.

    ``weights``: a format; a checkpoint in bf16 is then planned as ``vlfit convert`` would write it. Raises
    ``CheckpointError`` and ``HubError`` for what cannot be read, ``UsageError`` for a format that this
    checkpoint cannot be converted to.
    """
    if name == MINI:
        return _in_wanted_format(read_checkpoint(MINI, mini_folder()), weights)
    folder = _path(name)
    if folder.is_dir():
        return _in_wanted_format(read_checkpoint(folder.resolve().name, folder), weights, str(folder))
    if folder.is_file():
        raise _file_error(name, folder)
    name = catalog.hub_name_of(name)
    entry = catalog.find_entry(name)
    if entry is not None:
        return _named_models([_sibling(entry, weights)], None)
    if name.lower().endswith(".gguf"):
        raise _file_error(name, folder)
    members = catalog.family_entries(name) or catalog.shortened(name)
    if members:
        return _named_models(members, weights)
    return _in_wanted_format(_from_the_hub(name), weights)


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
    folder = mini_folder() if name == MINI else _path(name)
    if not folder.is_dir():
        return alternatives
    checkpoint = read_checkpoint(MINI if name == MINI else folder.resolve().name, folder)
    stored = checkpoint.config.quantization
    if stored is not None and not isinstance(stored, Fp8Format):
        return alternatives
    place = "" if name == MINI else str(folder)
    return alternatives + [make() for form in FORMATS[1:] for make in _conversions(checkpoint, form, place)]


def _named_models(members: list[CatalogEntry], weights: str | None) -> NamedModels:
    """One model in the formats of ``members``, or in ``weights``."""
    chosen = [member for member in members if weights in (None, member.weights)]
    exact = [model_of_entry(entry) for entry in chosen or [_sibling(members[0], weights)]]
    return NamedModels(exact, rounded_makers(exact) if chosen else ())


def rounded_makers(models: list[Model]) -> list[Callable[[], Model]]:
    """Makers of the catalog's models rounded further by ``vlfit convert``, for each the mildest first."""
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


def _sibling(entry: CatalogEntry, weights: str | None) -> CatalogEntry:
    """``entry`` in ``weights``; the catalog has every model in all formats."""
    if weights in (None, entry.weights):
        return entry
    wanted = entry.family, entry.edition, weights
    return next(each for each in catalog.entries() if (each.family, each.edition, each.weights) == wanted)


def _in_wanted_format(checkpoint: Checkpoint, weights: str | None, place: str = "") -> NamedModels:
    """``place``: the folder that was named, "" for a name. A conversion is written beside it."""
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
    makers = _conversions(checkpoint, weights, place)
    if not makers:
        raise UsageError(
            f"layers of {checkpoint.name} have inputs in no whole groups of {GROUP_SIZE}: "
            f"no plan for {weights}",
            "Plan for fp8, or convert it (vlfit convert) and plan for the new folder.",
        )
    return NamedModels([makers[0]()], makers[1:])


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
    return [cache(partial(_converted, checkpoint, weights, each, place)) for each in every]


def _converted(checkpoint: Checkpoint, weights: str, rounding: FormatOptions, place: str) -> Model:
    config = with_weights_format(checkpoint.config, weights, rounding)
    ending = "" if checkpoint.weights_format == weights else f"-{weights.upper()}"
    name = f"{checkpoint.name}{ending}{rounding.name_suffix}"
    out = str(Path(place).resolve().parent / name) if place else name.rpartition("/")[2]
    options = rounding.cli_options(tied=config.tie_word_embeddings)
    return model_of(
        name,
        config,
        catalog.tensor_groups_of(config),
        "counted for what vlfit convert would write",
        family=checkpoint.name,
        converted_from=place or checkpoint.name,
        source=out,
        convert_options=f"{options} --out {shlex.quote(out)}" if options else "",
        max_image_tokens=_most_image_tokens(checkpoint),
    )


def _from_the_hub(name: str) -> Checkpoint:
    from vlfit.checkpoint import hub

    if not hub.is_hub_name(name):
        raise NotACheckpoint(
            f"{name!r} is neither a folder, nor in the catalog, nor a name on the hub",
            f"{_did_you_mean(name)}{_HINT}",
        )
    cached = hub.cached_folder(name)
    if cached is not None:
        return read_checkpoint(name, cached)
    from vlfit.checkpoint.remote_headers import read_remote

    try:
        return read_remote(name)
    except HubModelNotFound as error:
        raise HubModelNotFound(error.message, f"{_did_you_mean(name)}{error.hint}") from error


def _did_you_mean(name: str) -> str:
    similar = catalog.similar_names(name)
    return f"Did you mean {' or '.join(similar)}? " if similar else ""


def _path(name: str) -> Path:
    """``name`` as a path, which may not exist. Raises ``NotACheckpoint`` for what cannot be a path."""
    try:
        path = Path(name).expanduser()
        path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        raise NotACheckpoint(f"{name[:80]!r} cannot be a path: {type(error).__name__}", _HINT) from error
    return path


def _file_error(name: str, path: Path) -> NotACheckpoint:
    if path.suffix.lower() == ".gguf":
        return NotACheckpoint(
            f"{name!r} is a GGUF file, which vlfit does not read",
            "Name the model that it was made of, e.g. vlfit plan Qwen/Qwen3-VL-4B-Instruct --weights int4.",
        )
    return NotACheckpoint(f"{name!r} is a file; a checkpoint is a folder with config.json", _HINT)


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
    real = [model for model in models if model.name != MINI and model.has_vision]
    whole = sorted(
        (model for model in real if model.complete),
        key=lambda model: (-model.parameters, model.format == INT4, model.weight_bytes, model.name),
    )
    for model in whole:
        if _needed(machine, model) <= _available(machine) and not _too_slow(machine, model):
            return AutoChoice(model.name, f"using {model.name}: {_why_it_fits(machine, model)}")
    return AutoChoice(
        MINI, f"using mini, the small model that ships with vlfit; {_why_not_larger(machine, real, whole)}"
    )


def _available(machine: Machine) -> int:
    return max((gpu.free for gpu in machine.gpus), default=machine.host.ram_available)


def _needed(machine: Machine, model: LocalModel) -> int:
    if machine.gpus:
        return model.weight_bytes + GPU_MARGIN
    return model.parameters * CPU_BYTES_PER_PARAMETER + CPU_MARGIN


def _too_slow(machine: Machine, model: LocalModel) -> bool:
    return not machine.gpus and model.parameters > CPU_MAX_PARAMETERS


def _why_it_fits(machine: Machine, model: LocalModel) -> str:
    need, room = format_bytes(_needed(machine, model)), format_bytes(_available(machine))
    if machine.gpus:
        return f"needs about {need} and {room} of the GPU are free"
    return f"needs about {need} and {room} of RAM are free; without a GPU it is slow"


def _why_not_larger(machine: Machine, real: Sequence[LocalModel], whole: Sequence[LocalModel]) -> str:
    """Why none of the real models was chosen, and what to do."""
    if whole:
        smallest = min(whole, key=lambda model: _needed(machine, model))
        if _too_slow(machine, smallest):
            return (
                f"{smallest.name} is here but too slow without a GPU (--model {smallest.name} runs it anyway)"
            )
        need, room = format_bytes(_needed(machine, smallest)), format_bytes(_available(machine))
        where = "on the GPU" if machine.gpus else "of RAM"
        return f"{smallest.name} is here but needs about {need}; {room} {where} are free"
    if real:
        return f"{real[0].name} is only partly downloaded: vlfit pull {real[0].name} goes on"
    return f"for a real one: vlfit pull {SUGGESTION}"
