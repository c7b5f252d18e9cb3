"""From a model's name to sizes: names of the catalog, folders, the hub, and a weights format.

Nothing is downloaded but headers, and those only of a hub model that is neither in the catalog nor on disk.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from vlfit.checkpoint import catalog, hub
from vlfit.checkpoint.catalog import BF16, FORMATS, CatalogEntry
from vlfit.checkpoint.conversions import (
    DEFAULT_OPTIONS,
    GROUP_SIZE,
    FormatOptions,
    group_size_divides,
    size_saving_options,
    with_weights_format,
)
from vlfit.checkpoint.gguf.file_names import type_of_name, with_mmproj
from vlfit.checkpoint.gguf.places import FoundModel
from vlfit.checkpoint.gguf.repository import (
    GgufRepository,
    Quantization,
    list_repository,
    may_be_gguf,
    parse_name,
)
from vlfit.checkpoint.quantization import FP8, INT4, Fp8Format
from vlfit.checkpoint.source import (
    MINI,
    Checkpoint,
    ResolvedModel,
    nearest_names_in_hint,
    read_checkpoint,
    resolve_name,
)
from vlfit.errors import MissingFile, UsageError, VlfitError
from vlfit.models.registry import read_image_processor_config
from vlfit.plan.shapes import FROM_HEADERS, Model, model_of

_HEADERS = hub.FileSelection(tokenizer_files=("config.json",))  # all that a plan reads: no tokenizer


@dataclass(frozen=True, slots=True)
class NamedModels:
    """What a person's name for a model means to the planner.

    ``exact``: the model, once per weights format if the name leaves that open, bf16 first.
    ``smaller_variants``: functions that make the model with more parts (embedding, head, tower) quantized,
    the largest first, for ``find_plan`` to call if none of ``exact`` fits.
    """

    exact: list[Model]
    smaller_variants: Sequence[Callable[[], Model]] = ()

    def make_smaller_variants(self) -> Iterator[Model]:
        """Yield the models of ``smaller_variants``, each made only when it is asked for."""
        return (make() for make in self.smaller_variants)


def find_exact_models(name: str, weights: str | None = None) -> list[Model]:
    """``find_models(name, weights).exact``. Raises as ``find_models``."""
    return find_models(name, weights).exact


def find_models(name: str, weights: str | None = None) -> NamedModels:
    """Find the models that ``name`` means (``checkpoint.source.resolve_name``).

    ``weights``: a format; a bf16 checkpoint then becomes what ``vlfit convert`` would write; None: every
    format that the name means. Reads headers from the hub if they are neither in the catalog nor on disk.
    Raises ``CheckpointError`` and ``HubError`` if these cannot be read, ``UsageError`` for a format that the
    checkpoint cannot be converted to.
    """
    found = resolve_name(name)
    one = found[0]
    if one.is_gguf or (one.folder is None and may_be_gguf(one.name) and not _is_cached(one.name)):
        return NamedModels(gguf_models(found, weights))
    if one.entry is None:
        if one.folder is None:
            return _in_wanted_format(_from_the_hub(one.name), weights)
        place = "" if one.name == MINI else str(one.folder)
        return _in_wanted_format(read_checkpoint(one.name, one.folder), weights, place)
    if len(found) == 1:
        return _named_models([_entry_in_format(one.entry, weights)], None)
    members = [each.entry for each in found if each.entry is not None and not each.entry.convert_options]
    return _named_models(members, weights)


def gguf_models(found: Sequence[ResolvedModel], weights: str | None = None) -> list[Model]:
    """The GGUF models that a name means, the most exact first: files here, or one of the hub, or all of it.

    ``weights``: must be None. Raises ``UsageError`` for a format, and the errors of ``read_unopened`` and
    ``read_quantizations``, if no model can be read.
    """
    if weights is not None:
        raise UsageError(
            f"{found[0].name} is a GGUF model, whose weights stay as they are",
            "Leave out --weights, or name another type: org/name-GGUF:Q4_K_M.",
            param="weights",
        )
    read: list[Model | VlfitError]
    if found[0].folder is not None:
        read = [_local_gguf(each) for each in found]
    else:
        with nearest_names_in_hint(found[0].name):
            wanted = parse_name(found[0].name)
            repository = list_repository(found[0].name if wanted is None else wanted.repository_name)
            chosen = repository.quantizations if wanted is None else [repository.choose(wanted.type)]
            read = [model for _, model in read_gguf_repository(repository, chosen)]
    models = [each for each in read if isinstance(each, Model)]
    if not models:
        raise next(each for each in read if isinstance(each, VlfitError))
    return sorted(models, key=lambda each: -each.file_bytes)


def read_gguf_repository(
    repository: GgufRepository, chosen: Sequence[Quantization]
) -> list[tuple[Quantization, Model | VlfitError]]:
    """Each of ``chosen`` with its model, or why it cannot be run. Reads headers from the hub.

    Raises ``HubError`` or a subclass if the hub does not answer.
    """
    from vlfit.checkpoint.gguf.unopened import read_quantizations

    found = read_quantizations(repository, chosen)
    return [
        (each, checkpoint if isinstance(checkpoint, VlfitError) else _gguf_model(checkpoint, each.type))
        for each, checkpoint in zip(chosen, found, strict=True)
    ]


def _local_gguf(one: ResolvedModel) -> Model | VlfitError:
    from vlfit.checkpoint.gguf.unopened import read_unopened

    assert one.folder is not None
    try:
        checkpoint = read_unopened(one.name, one.folder, one.mmproj, named=one.mmproj_named)
    except VlfitError as error:
        return error
    named = one.mmproj if one.mmproj_named else None
    source = one.name if ":" in one.name else with_mmproj(str(one.folder), named)
    return _gguf_model(checkpoint, type_of_name(one.folder.name), source=source)


def found_gguf_model(found: FoundModel) -> Model:
    """The model of GGUF files on this computer. Raises ``CheckpointError``, ``UsageError``."""
    model = _local_gguf(ResolvedModel(found.name, found.path, mmproj=found.mmproj))
    if isinstance(model, VlfitError):
        raise model
    return model


def _gguf_model(checkpoint: Checkpoint, kind: str, source: str = "") -> Model:
    """``kind``: its type by its name, "" for the one that its metadata or most of its weights have."""
    from vlfit.checkpoint.gguf.unopened import widened_types

    assert checkpoint.gguf is not None
    widened = ", ".join(widened_types(checkpoint.tensors))
    model = model_of(
        checkpoint.name,
        checkpoint.config,
        checkpoint.tensors,
        f"{FROM_HEADERS}; in 16 bits: {widened}" if widened else FROM_HEADERS,
        source=source,
        gguf_type=kind or checkpoint.gguf.file_type,
        max_image_tokens=checkpoint.gguf.max_image_tokens,
    )
    return replace(model, without_tower=checkpoint.gguf.without_tower)


def _is_cached(name: str) -> bool:
    return hub.is_hub_name(name) and hub.cached_folder(name) is not None


def alternatives_to(models: list[Model], name: str) -> list[Model]:
    """Models to propose if ``models``, found by ``name``, do not fit; some may be among ``models``.

    These are all models of the catalog of the same edition (Instruct, Thinking, ...), and of the same family
    also those with more parts quantized. If ``name`` is a folder outside the catalog, what ``vlfit
    convert`` can make of it is added.
    """
    edition = _edition_of(models[0].name)
    family = models[0].family
    alternatives = catalog_models(edition=edition)
    alternatives += [
        model_of_entry(each)
        for each in catalog.variants()
        if (each.family, each.edition) == (family, edition)
    ]
    one = resolve_name(name)[0]
    if one.folder is None or one.entry is not None or one.is_gguf:
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
    """Functions that make the catalog's ``models`` with more parts (embedding, head, tower) quantized.

    In the order of ``models``, for each the largest variant first; none for models outside the catalog.
    """
    return [
        partial(model_of_entry, entry)
        for model in models
        for entry in catalog.variants()
        if entry.weights == model.weights and entry.name.startswith(f"{model.name.rpartition('/')[2]}-")
    ]


def catalog_models(weights: str | None = None, *, edition: str = "Instruct") -> list[Model]:
    """The catalog's models of one ``edition`` in every weights format, or only in ``weights``, best first.

    Instruct and Thinking have the same sizes; models without editions, which chat, are included with these.
    """
    editions = (edition,) if edition in catalog.POOLED_EDITIONS else ("", edition)
    return [
        model_of_entry(entry)
        for entry in catalog.entries()
        if entry.edition in editions and weights in (None, entry.weights)
    ]


def _edition_of(name: str) -> str:
    """The edition of the model ``name``; Instruct if it says none."""
    editions = ("Thinking", *catalog.POOLED_EDITIONS)
    return next((each for each in editions if f"-{each.lower()}" in name.lower()), "Instruct")


@cache
def model_of_entry(entry: CatalogEntry) -> Model:
    """The ``Model`` of a catalog entry; cached."""
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
            FROM_HEADERS,
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
        processing = read_image_processor_config(checkpoint.config, checkpoint.folder)
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
    every = (*first, *size_saving_options(config, weights))
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
    cached = hub.cached_folder(name, _HEADERS)
    if cached is not None:
        return read_checkpoint(name, cached)
    from vlfit.checkpoint.remote_headers import read_remote_checkpoint

    with nearest_names_in_hint(name):
        return read_remote_checkpoint(name)
