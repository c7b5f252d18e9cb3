"""What is planned for: from a name (folder, catalog entry, family, hub id) to models with exact sizes.

Knows: in which order a name is looked up, and that a bf16 checkpoint can be converted. Does not know:
machines. Nothing is downloaded here but headers, and those only of a hub model that is neither in the catalog
nor on disk.
"""

from functools import lru_cache
from pathlib import Path

from vlfit.checkpoint import catalog
from vlfit.checkpoint.catalog import BF16, FORMATS, CatalogEntry
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.source import MINI, Checkpoint, mini_folder, read_checkpoint
from vlfit.errors import NotACheckpoint, UsageError
from vlfit.plan.model import Model, model_of

_HINT = "Give a folder, a name on the hub (org/name), mini, or one of the catalog: vlfit plan lists it."


def subjects(name: str, weights: str | None = None) -> list[Model]:
    """The models that ``name`` may mean, the most exact weights first; one, unless it leaves the format open.

    ``weights`` asks for a format. A checkpoint in bf16 is then planned as ``vlfit convert`` would write it.
    Raises ``CheckpointError`` and ``HubError`` for what cannot be read, ``UsageError`` for a format that this
    checkpoint cannot be brought into.
    """
    if name == MINI:
        return [_in_wanted_format(read_checkpoint(MINI, mini_folder()), weights)]
    folder = Path(name).expanduser()
    if folder.is_dir():
        return [_in_wanted_format(read_checkpoint(folder.resolve().name, folder), weights, str(folder))]
    if folder.is_file():
        raise _a_file(name, folder)
    entry = catalog.find(name)
    if entry is not None:
        return [of_entry(_sibling(entry, weights))]
    members = catalog.family(name)
    if members:
        return [of_entry(member) for member in members if weights in (None, member.weights)]
    if name.lower().endswith(".gguf"):
        raise _a_file(name, folder)
    return [_in_wanted_format(_from_the_hub(name), weights)]


def everything(weights: str | None = None, *, edition: str = "Instruct") -> list[Model]:
    """Each model of the catalog in every format, best first; both editions of Qwen3-VL have one size."""
    return [
        of_entry(entry)
        for entry in catalog.entries()
        if entry.edition in ("", edition) and weights in (None, entry.weights)
    ]


@lru_cache(maxsize=64)
def of_entry(entry: CatalogEntry) -> Model:
    """The model of a catalog entry."""
    return model_of(
        entry.name,
        entry.config,
        entry.tensors,
        "counted from the shapes of its config (built-in catalog)",
        family=entry.family,
        converted_from=entry.converted_from,
    )


def _sibling(entry: CatalogEntry, weights: str | None) -> CatalogEntry:
    if weights in (None, entry.weights):
        return entry
    for other in catalog.entries():
        if (other.family, other.edition, other.weights) == (entry.family, entry.edition, weights):
            return other
    raise UsageError(
        f"the catalog has {entry.name} in {entry.weights} only, not in {weights}", "leave out --weights"
    )


def _in_wanted_format(checkpoint: Checkpoint, weights: str | None, place: str = "") -> Model:
    """``place``: the folder that was named, "" for a name. A conversion of it will lie beside it."""
    stored = checkpoint.weights_format
    if weights is None or weights == stored or (weights == BF16 and stored in ("fp16", "fp32")):
        known_by = "read from its headers"
        return model_of(checkpoint.name, checkpoint.config, checkpoint.tensors, known_by, place=place)
    if checkpoint.config.quantization is not None or weights == BF16:
        raise UsageError(
            f"{checkpoint.name} is in {stored}; it cannot be made {weights} from that",
            "Name the original checkpoint in bf16, or leave out --weights.",
        )
    config = catalog.in_format(checkpoint.config, weights)
    _check_groups(checkpoint.config, weights, checkpoint.name)
    name = f"{checkpoint.name}-{weights.upper()}"
    return model_of(
        name,
        config,
        catalog.tensors_of(config),
        "counted for what vlfit convert would write",
        family=checkpoint.name,
        converted_from=place or checkpoint.name,
        place=str(Path(place).resolve().parent / name) if place else name.rpartition("/")[2],
    )


def _check_groups(config: ModelConfig, weights: str, name: str) -> None:
    """int4 has no partial groups: layers that 32 does not divide would stay in 16 bits."""
    text = config.text
    widths = (text.hidden_size, text.intermediate_size, text.num_attention_heads * text.head_dim)
    if weights == FORMATS[-1] and any(width % catalog.GROUP_SIZE for width in widths):
        raise UsageError(
            f"layers of {name} have inputs in no whole groups of {catalog.GROUP_SIZE}: no plan for {weights}",
            "Plan for fp8, or convert it (vlfit convert) and plan for the new folder.",
        )


def _from_the_hub(name: str) -> Checkpoint:
    from vlfit.checkpoint import hub

    if not hub.is_hub_name(name):
        raise NotACheckpoint(
            f"{name!r} is neither a folder, nor in the catalog, nor a name on the hub", _HINT
        )
    cached = hub.cached_folder(name)
    if cached is not None:
        return read_checkpoint(name, cached)
    from vlfit.checkpoint.remote import read_remote

    return read_remote(name)


def _a_file(name: str, path: Path) -> NotACheckpoint:
    if path.suffix.lower() == ".gguf":
        return NotACheckpoint(
            f"{name!r} is a GGUF file, which vlfit does not read",
            "Name the model that it was made of, e.g. vlfit plan Qwen/Qwen3-VL-4B-Instruct --weights int4.",
        )
    return NotACheckpoint(f"{name!r} is a file; a checkpoint is a folder with config.json", _HINT)
