"""Open a checkpoint by any of its names: ``mini`` (bundled), a folder, the store, the catalog, the hub."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from vlfit.api.progress import ByteProgress
from vlfit.checkpoint import cache, hub, store
from vlfit.checkpoint.cache import LocalModel
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.headers import TensorInfo, read_headers
from vlfit.checkpoint.tensors import check_tensors, count_parameters, normalize_gptq_awq, weights_format
from vlfit.errors import HubModelNotFound, NotACheckpoint, NotDownloaded, UsageError
from vlfit.models.registry import read_config

if TYPE_CHECKING:
    from vlfit.checkpoint.catalog import CatalogEntry

MINI = "mini"
_NAMES_HINT = "vlfit models lists what is here (mini always is), vlfit plan what fits; or name a folder."
_CHECKPOINT_SUFFIXES = (".json", ".safetensors", ".jinja", ".txt", ".model")
_WORD = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint: its config and its headers, checked against each other. No weights are in memory."""

    name: str
    folder: Path
    config: ModelConfig
    tensors: dict[str, TensorInfo]

    @property
    def model_type(self) -> str:
        return self.config.model_type

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(info.bytes for info in self.tensors.values())

    @property
    def parameter_count(self) -> int:
        """Number of weights."""
        return count_parameters(self.tensors, self.config.quantization)

    @property
    def weights_format(self) -> str:
        """Format of the text layers: ``fp8``, ``int8``, ``int4``, ``bf16``, ``fp16`` or ``fp32``."""
        return weights_format(self.tensors, self.config.quantization)


def open_checkpoint(model: str | Path, progress: ByteProgress | None = None) -> Checkpoint:
    """Open ``model``: any name that ``resolve_name`` takes.

    A hub name that is not in the cache is downloaded: ``progress`` gets bytes done and in total; without it
    they are printed on stderr. Raises ``CheckpointError`` for invalid files, ``HubError`` if the download
    fails.
    """
    name, folder = locate(model, progress)
    return read_checkpoint(name, folder)


def read_checkpoint(name: str, folder: Path) -> Checkpoint:
    """Config and headers of ``folder``, checked against each other."""
    config, tensors = normalize_gptq_awq(read_config(folder), read_headers(folder))
    check_tensors(config, tensors)
    return Checkpoint(name, folder, config, tensors)


# --- from a name to a checkpoint ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelName:
    """One checkpoint that a name means.

    ``name``: as ``vlfit models`` lists it and ``--model`` takes it. ``folder``: where it is; None for one of
    the hub, whether downloaded or not, and for one that ``vlfit convert`` would make. ``entry``: of the
    catalog, if it is known there.
    """

    name: str
    folder: Path | None = None
    entry: "CatalogEntry | None" = None

    @property
    def on_hub(self) -> bool:
        """Whether it can be downloaded (or is downloaded already)."""
        return self.folder is None and hub.is_hub_name(self.name)

    def local_folder(self, files: hub.FileSelection = hub.NATIVE) -> Path | None:
        """Its folder on this computer, if it is complete there."""
        return hub.cached_folder(self.name, files) if self.on_hub else self.folder


def resolve_name(model: str | Path) -> tuple[ModelName, ...]:
    """The checkpoints that ``model`` means: one, or one per weights format if the name leaves that open.

    In this order: a folder, or a file in it; ``mini``; a copy in vlfit's store; a name or address on the hub;
    a short name of the catalog (``4B``, ``qwen3-vl:4b-fp8``); the second half of a downloaded ``org/name``.
    Case does not matter but for folders. Uses no network. Raises ``NotACheckpoint`` with the nearest names.
    """
    text = str(model)
    if text == MINI:
        return (ModelName(MINI, mini_folder()),)
    folder = _as_folder(model)
    if folder is not None:
        return (ModelName(folder.resolve().name, folder),)
    if isinstance(model, Path) or text.startswith(("/", "./", "../", "~")) or not text.strip():
        raise _unknown_error(text)
    if text.lower() == MINI:
        return (ModelName(MINI, mini_folder()),)
    stored = store.find(text)
    if stored is not None:
        return (ModelName(stored.name, stored),)
    found = _in_catalog(text)
    if found:
        return found
    name = _hub_name(text)
    if name is None:
        raise _unknown_error(text)
    return (ModelName(name),)


def locate(
    model: str | Path, progress: ByteProgress | None = None, files: hub.FileSelection | None = None
) -> tuple[str, Path]:
    """Name and folder of ``model`` (see ``resolve_name``); one of the hub is downloaded if it is not here.

    ``files``: what to download, if not what the native engine reads. Of several formats the one that is here
    counts; raises ``UsageError`` if there is none, or more (``plan.model_lookup.choose_format`` decides).
    """
    found = resolve_name(model)
    if len(found) > 1:
        here = [each for each in found if each.local_folder(files or hub.NATIVE) is not None]
        if len(here) != 1:
            names = ", ".join(each.name for each in here or found)
            raise UsageError(f"{str(model)!r} leaves the weights format open", f"Name one of: {names}.")
        found = (here[0],)
    one = found[0]
    if one.folder is not None:
        return one.name, one.folder
    if not one.on_hub:
        assert one.entry is not None  # only the catalog has names of what is nowhere yet
        raise not_converted(one.name, one.entry.convert_command)
    with nearest_names_in_hint(one.name):
        return one.name, (
            hub.fetch(one.name, progress) if files is None else hub.fetch(one.name, progress, files)
        )


def name_here(model: str | Path) -> str | Path:
    """``model``, or if it leaves the weights format open the name of the only one that is here."""
    found = resolve_name(model)
    here = [each for each in found if len(found) > 1 and each.local_folder() is not None]
    if len(here) != 1:
        return model
    return here[0].folder or here[0].name


@contextmanager
def nearest_names_in_hint(name: str) -> Iterator[None]:
    """Names that look like ``name`` in the hint of a hub that has no such model."""
    try:
        yield
    except HubModelNotFound as error:
        raise HubModelNotFound(error.message, f"{_did_you_mean(name)}{error.hint}") from error


def not_converted(name: str, command: str, why: str = "") -> NotDownloaded:
    """The error for a checkpoint that ``command`` has to make first; ``why`` no other will do."""
    return NotDownloaded(
        f"{name} is not on this computer, and the hub has no such copy",
        f"{why} Make it with: {command}".lstrip(),
    )


def nearest_names(name: str) -> list[str]:
    """Up to three names that look like ``name``, the closest first: of this computer and of the catalog."""
    from vlfit.checkpoint import catalog

    here = [MINI, *(folder.name for folder in store.folders()), *cache.repository_names()]
    return catalog.similar_names(name, here)


def _as_folder(model: str | Path) -> Path | None:
    """The folder that ``model`` is or that the file ``model`` is part of; None if there is no such path.

    Raises ``NotACheckpoint`` for any other file, and for what cannot be a path.
    """
    # An existing folder wins over any name: tab completion gives it, and nothing is downloaded by surprise.
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return path if str(model) else None
        is_file = path.is_file()
    except (OSError, RuntimeError, ValueError) as error:
        raise NotACheckpoint(
            f"{str(model)[:80]!r} cannot be a path: {type(error).__name__}", _NAMES_HINT
        ) from error
    if path.suffix.lower() == ".gguf":
        raise NotACheckpoint(
            f"{str(model)!r} is a GGUF file, which vlfit does not read",
            "Name the model that it was made of: 4B, or Qwen/Qwen3-VL-4B-Instruct.",
        )
    if is_file and path.suffix in _CHECKPOINT_SUFFIXES and (path.parent / "config.json").is_file():
        return path.parent
    if is_file:
        raise NotACheckpoint(
            f"{str(model)!r} is a file; a checkpoint is a folder with config.json and *.safetensors",
            _NAMES_HINT,
        )
    return None


def _in_catalog(text: str) -> tuple[ModelName, ...]:
    """The entries of the catalog that ``text`` means, with the folders of those that are in the store."""
    from vlfit.checkpoint import catalog

    name = catalog.hub_name_of(text)
    if "@" in name:
        repository, _, revision = name.partition("@")
        entry = catalog.find_entry(repository)
        published = entry is not None and not entry.converted_from
        return (ModelName(f"{entry.name}@{revision}"),) if entry is not None and published else ()
    entry = catalog.find_entry(name)
    if entry is not None:
        return (_of_entry(entry),)
    members = catalog.family_entries(name) or catalog.entries_of_short_name(name)
    found = [_of_entry(each) for each in members]
    if len({each.weights for each in members}) > 1:
        kinds = {(each.family, each.edition) for each in members}
        variants = [_of_entry(each) for each in catalog.variants() if (each.family, each.edition) in kinds]
        found += [each for each in variants if each.folder is not None]
    return tuple(found)


def _of_entry(entry: "CatalogEntry") -> ModelName:
    return ModelName(entry.name, store.find(entry.name) if entry.converted_from else None, entry)


def _hub_name(text: str) -> str | None:
    """``text`` as a name on the hub, spelt as in the cache if it is there; None if it cannot be one."""
    from vlfit.checkpoint import catalog

    name, at, revision = catalog.hub_name_of(text).partition("@")
    if not hub.is_hub_name(f"{name}{at}{revision}") and not _WORD.fullmatch(name):
        return None
    known = cache.repository_names()
    if name in known:
        return f"{name}{at}{revision}"
    wanted = name.lower()
    alike = [each for each in known if wanted in (each.lower(), each.lower().partition("/")[2])]
    if len(alike) == 1:
        return f"{alike[0]}{at}{revision}"
    return f"{name}{at}{revision}" if "/" in name else None


def _did_you_mean(name: str) -> str:
    similar = nearest_names(name)
    if not similar:
        return ""
    *others, last = similar
    return f"Did you mean {', '.join(others)}{' or ' if others else ''}{last}? "


def _unknown_error(text: str) -> NotACheckpoint:
    text = text[:80]
    return NotACheckpoint(
        f"{text!r} is neither a folder, nor a known model, nor a name on the hub (org/name)",
        f"{_did_you_mean(text)}{_NAMES_HINT}",
    )


def mini_folder() -> Path:
    """Folder of the bundled checkpoint. Raises ``NotACheckpoint`` if this installation has none."""
    folder = Path(str(resources.files("vlfit") / "mini"))
    if not (folder / "config.json").is_file():
        raise NotACheckpoint(
            f"this installation of vlfit has no bundled checkpoint in {folder}",
            "Install vlfit again, or name another checkpoint with --model.",
        )
    return folder


def local_models() -> list[LocalModel]:
    """Checkpoints that need no download: those in the hub's cache and in vlfit's store, then mini."""
    models = cache.cached_models()
    models += [model for each in store.folders() if (model := cache.local_model(each.name, each)) is not None]
    try:
        mini = cache.local_model(MINI, mini_folder())
    except NotACheckpoint:
        return models
    return [*models, mini] if mini is not None else models


def remove_model(name: str) -> int:
    """Delete a downloaded or converted checkpoint; return the bytes freed. Raises as ``check_removable``."""
    folder = check_removable(name)
    if folder.parent == store.models_folder():
        freed = cache.bytes_on_disk(folder)
        store.remove(folder)
        return freed
    return cache.remove(_cached_name(name))


def check_removable(name: str) -> Path:
    """The folder that ``remove_model`` would delete: in vlfit's store, or in the hub's cache.

    Raises ``UsageError`` for mini, other folders, and names that mean several; ``NotDownloaded`` for what is
    not here.
    """
    stored = store.find(name)
    if stored is not None:
        return stored
    return cache.cached_path(_cached_name(name))


def _cached_name(name: str) -> str:
    """The name in the hub's cache that ``name`` means. Raises as ``check_removable``."""
    refused = UsageError(
        f"{name!r} was neither downloaded nor converted by vlfit, so it is not removed",
        "Name a model as vlfit models lists it; mini is part of vlfit.",
    )
    if hub.is_hub_name(name) and name.partition("@")[0] in cache.repository_names():
        return name
    try:
        path = Path(name).expanduser()
        if path.exists() or name.lower() == MINI:
            raise refused
        found = resolve_name(name)
    except NotACheckpoint as error:
        raise refused from error
    here = [each for each in found if each.on_hub and each.local_folder() is not None] or list(found)
    if len(here) > 1:
        raise UsageError(
            f"{name!r} means several models", f"Name one of: {', '.join(each.name for each in here)}."
        )
    if not here[0].on_hub:
        raise NotDownloaded(f"{here[0].name} is not here", "Run vlfit models to list what is there.")
    return here[0].name
