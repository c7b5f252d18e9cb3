"""Open a checkpoint by any of its names: ``mini`` (bundled), a folder, the store, the catalog, the hub."""

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from vlfit.api.progress import ByteProgress
from vlfit.checkpoint import cache, hub, store
from vlfit.checkpoint.cache import LocalModel
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.gguf import places, repository
from vlfit.checkpoint.gguf.file_names import (
    is_gguf_name,
    is_mmproj_name,
    is_model_name,
    names_of_parts,
    split_mmproj,
    split_parts,
    stem_of,
)
from vlfit.checkpoint.gguf.gguf_folder import GGUFKind, is_gguf_folder
from vlfit.checkpoint.headers import TensorInfo, read_headers
from vlfit.checkpoint.pooling_files import without_missing_head
from vlfit.checkpoint.special_files import describe_special
from vlfit.checkpoint.tensors import check_tensors, count_parameters, normalize_gptq_awq, weights_format
from vlfit.errors import HubModelNotFound, MissingFile, NotACheckpoint, NotDownloaded, UsageError
from vlfit.models.registry import read_config

if TYPE_CHECKING:
    from vlfit.checkpoint.catalog import CatalogEntry

MINI = "mini"


def is_mini(name: str) -> bool:
    """Whether ``name`` is mini, or a copy of it that convert made: mini-FP8, mini-INT4."""
    return f"{name}-".startswith(f"{MINI}-")


_NAMES_HINT = "vlfit models lists what is here (mini always is), vlfit plan what fits; or name a folder."
_CHECKPOINT_SUFFIXES = (".json", ".safetensors", ".jinja", ".txt", ".model")
_FILE_SUFFIXES = (".json", ".safetensors", ".gguf")  # of no model on the hub
_GGUF_MAGIC = b"GGUF"  # Ollama's blobs have no suffix
_SIZE = re.compile(r"(?<![\w.])\d+(?:\.\d+)?b(?![^\W_])", re.IGNORECASE)  # parameters, in billions
_WORD = re.compile(r"[A-Za-z0-9][\w.-]*")
_WINDOWS_PATH = re.compile(r"[A-Za-z]:[\\/]")
_PATH = re.compile(rf"/|\.\.?(/|$)|~|{_WINDOWS_PATH.pattern}")  # how what can only be a path begins
_MAX_SHOWN = 80  # characters of a name in an error
_MAX_NAMES = 8  # of files in an error


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Config and tensor headers of a checkpoint, checked against each other; no weights are in memory.

    AWQ and GPTQ checkpoints have ``config`` and ``tensors`` in the terms of compressed-tensors
    (``normalize_gptq_awq``). ``tensors``: by name. ``gguf``: None unless the model is of GGUF files.
    """

    name: str
    folder: Path
    config: ModelConfig
    tensors: dict[str, TensorInfo]
    gguf: GGUFKind | None = None

    @property
    def model_type(self) -> str:
        """The ``model_type`` of config.json, which names the model family."""
        return self.config.model_type

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(info.bytes for info in self.tensors.values())

    @property
    def parameter_count(self) -> int:
        """Number of weights, not counting scales and zero points."""
        return count_parameters(self.tensors, self.config.quantization)

    @property
    def weights_format(self) -> str:
        """Weights format: ``int4``, ``fp8``, ``int8``, ``bf16``, ``fp16`` or ``fp32``; see ``tensors.py``."""
        return weights_format(self.tensors, self.config.quantization)

    @property
    def stored_format(self) -> str:
        """The format as people call it: ``weights_format``, of GGUF models their type (``Q8_0``)."""
        return self.gguf.type if self.gguf is not None else self.weights_format


def open_checkpoint(model: str | Path, progress: ByteProgress | None = None) -> Checkpoint:
    """Open ``model``: any name that ``resolve_name`` takes.

    A hub model that is not in the cache is downloaded. ``progress``: called with bytes done and in total;
    None: they are printed on stderr. Raises the errors of ``locate_or_download``, and ``CheckpointError`` for
    invalid files.
    """
    name, folder = locate_or_download(model, progress)
    return read_checkpoint(name, folder)


def read_checkpoint(name: str, folder: Path) -> Checkpoint:
    """Read config.json and tensor headers in ``folder``, and check them against each other.

    The config and tensors of an AWQ or GPTQ checkpoint are converted to the terms of compressed-tensors
    (``normalize_gptq_awq``). ``folder`` may stand for a GGUF model (``prepare_gguf``), or be its file.
    ``name``: becomes ``Checkpoint.name``. Raises ``CheckpointError``.
    """
    if folder.is_file():
        from vlfit.checkpoint.gguf.gguf_checkpoint import prepare_gguf

        folder = prepare_gguf(folder)
    if is_gguf_folder(folder):
        from vlfit.checkpoint.gguf.gguf_checkpoint import read_gguf_checkpoint  # imports numpy

        return Checkpoint(name, folder, *read_gguf_checkpoint(folder))
    config, tensors = normalize_gptq_awq(read_config(folder), read_headers(folder))
    config = without_missing_head(config, folder, name, tensors)
    check_tensors(config, tensors)
    return Checkpoint(name, folder, config, tensors)


# --- from a name to a checkpoint ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The checkpoint that a typed name means.

    ``name``: as ``vlfit models`` lists it and ``--model`` takes it. ``folder``: where it is, for mini, a
    typed folder or a model in vlfit's store; None for a hub model, downloaded or not, and for one that
    ``vlfit convert`` would have to make. Of a GGUF model that is here, its file (the first part), and
    ``mmproj`` the file with its vision tower; None: the one beside it that fits, if any. ``mmproj_named``:
    whether a person named that file; one that a program has with the model is left out if it does not fit.
    ``entry``: its entry in the catalog; None if the name did not lead through the catalog.
    """

    name: str
    folder: Path | None = None
    entry: "CatalogEntry | None" = None
    mmproj: Path | None = None
    mmproj_named: bool = False

    @property
    def on_hub(self) -> bool:
        """Whether the checkpoint is one of the hub, downloaded or not; a downloaded GGUF file is not."""
        return self.folder is None and (hub.is_hub_name(self.name) or self.is_gguf)

    @property
    def is_gguf(self) -> bool:
        """Whether the model is of GGUF files, here or, by the type in its name, on the hub."""
        if self.folder is not None:
            return self.folder.is_file()
        return repository.parse_name(self.name) is not None

    def local_folder(self, files: hub.FileSelection = hub.NATIVE) -> Path | None:
        """The checkpoint's folder or GGUF file on this computer; None if it is not here.

        A hub model is here if the cache has all ``files``.
        """
        if not self.on_hub or self.is_gguf:
            return self.folder
        return hub.cached_folder(self.name, files)


def resolve_name(model: str | Path) -> tuple[ResolvedModel, ...]:
    """The checkpoints that ``model`` means: one, or one per weights format if the name leaves that open.

    The first of these that matches: ``mini``; a folder, a file in it, or a GGUF file; ``ollama:NAME``,
    ``lmstudio:NAME`` or ``llama.cpp:NAME``, a GGUF model of that program; a model in vlfit's store; a model
    of the catalog, by its hub name or address or by a short name (``4B``, ``qwen3-vl:4b-fp8``); any other hub
    name or address, of GGUF files with their type (``org/name:Q4_K_M``); the second half of a downloaded
    ``org/name``. A GGUF model may be followed by ``+`` and the file of its vision tower
    (``file_names.with_mmproj``). Case matters in paths only. Uses no network, so a hub name may not exist.
    Raises ``NotACheckpoint`` with the nearest names if nothing matches.
    """
    text = str(model)
    if text == MINI:
        return (ResolvedModel(MINI, mini_folder()),)
    folder = _as_folder(model)
    if folder is not None:
        return (_at_path(folder),)
    head, mmproj = split_mmproj(text)
    if mmproj is not None:
        return _with_mmproj(resolve_name(head), mmproj)
    named = places.program_of_name(text.strip())
    if named is not None:
        return (_of_program(*named),)
    if isinstance(model, Path) or _PATH.match(text) or _is_missing_file(text):
        raise _no_folder_error(text)
    text = text.strip().rstrip("/")  # as pasted, or completed by a shell
    if not text:
        raise NotACheckpoint("the name of the model is empty", _NAMES_HINT)
    if text.lower() == MINI:
        return (ResolvedModel(MINI, mini_folder()),)
    stored = store.find_folder(text)
    if stored is not None:
        return (replace(_at_path(stored), name=stored.name),)  # a checkpoint, or GGUF files
    found = _in_catalog(text) or _gguf_on_hub(text)
    if found:
        return found
    return (ResolvedModel(_hub_name(text)),)


def locate_or_download(
    model: str | Path, progress: ByteProgress | None = None, files: hub.FileSelection | None = None
) -> tuple[str, Path]:
    """Name and folder of ``model`` (see ``resolve_name``); a hub model that is not here is downloaded.

    The folder of a GGUF model is one that stands for it (``prepare_gguf``), made if need be.

    ``files``: what to download; None: what the native engine reads. A name that leaves the weights format
    open means the only format that is on this computer; raises ``UsageError`` if none or several are (let
    ``plan.model_choice.choose_format`` choose one first). Raises ``NotDownloaded`` for a model that ``vlfit
    convert`` has to make, ``NotACheckpoint`` for an unknown name, ``HubError`` if the download fails.
    """
    one = _locate(model, progress, files)
    assert one.folder is not None
    if not one.folder.is_file():
        return one.name, one.folder
    from vlfit.checkpoint.gguf.gguf_checkpoint import prepare_gguf

    program = places.program_of_name(one.name)
    called = program[1] if program is not None and program[0] == places.OLLAMA else ""  # its files have none
    return one.name, prepare_gguf(one.folder, one.mmproj, name=called, named=one.mmproj_named)


def _locate(
    model: str | Path, progress: ByteProgress | None, files: hub.FileSelection | None
) -> ResolvedModel:
    """The one model that ``model`` means, here: its ``folder`` is not None, and may be a GGUF file."""
    found = resolve_name(model)
    if len(found) > 1:
        here = [each for each in found if each.local_folder(files or hub.NATIVE) is not None]
        if len(here) != 1:
            names = ", ".join(each.name for each in here or found)
            raise UsageError(f"{str(model)!r} leaves the weights format open", f"Name one of: {names}.")
        found = (here[0],)
    one = found[0]
    if one.folder is not None:
        return one
    if not one.on_hub:
        assert one.entry is not None  # only the catalog has names of what is nowhere yet
        raise not_converted_error(one.name, one.entry.convert_command)
    with nearest_names_in_hint(one.name):
        if one.is_gguf:
            fetched = repository.download(one.name, progress)
            return replace(one, folder=fetched.path, mmproj=one.mmproj or fetched.mmproj)
        if repository.may_be_gguf(one.name) and one.local_folder(files or hub.NATIVE) is None:
            raise _type_left_open(one.name)
        folder = (
            hub.ensure_downloaded(one.name, progress)
            if files is None
            else hub.ensure_downloaded(one.name, progress, files)
        )
        return replace(one, folder=folder)


def prefer_local_format(model: str | Path) -> str | Path:
    """Folder or name of the only weights format of ``model`` that is on this computer.

    ``model`` itself if it names one format, or if none or several of its formats are here. Raises
    ``NotACheckpoint`` for an unknown name.
    """
    found = resolve_name(model)
    here = [each for each in found if len(found) > 1 and each.local_folder() is not None]
    if len(here) != 1:
        return model
    return here[0].folder or here[0].name


@contextmanager
def nearest_names_in_hint(name: str) -> Iterator[None]:
    """Within the block, add names similar to ``name`` to the hint of a ``HubModelNotFound``.

    Not for ``org/name@revision``, where the revision may be what is wrong.
    """
    try:
        yield
    except HubModelNotFound as error:
        if "@" in name:
            raise
        raise HubModelNotFound(error.message, f"{_did_you_mean(name)}{error.hint}") from error


def not_converted_error(name: str, command: str, why: str = "") -> NotDownloaded:
    """The error for the checkpoint ``name``, which has to be made by ``command`` first.

    ``why``: a sentence that begins the hint; the command follows.
    """
    return NotDownloaded(
        f"{name} is not on this computer, and the hub has no such copy",
        f"{why} Make it with: {command}".lstrip(),
    )


def nearest_names(name: str) -> list[str]:
    """Up to three names of models, on this computer or in the catalog, that are spelt similarly to ``name``.

    The closest first.
    """
    from vlfit.checkpoint import catalog

    here = [MINI, *(folder.name for folder in store.model_folders()), *cache.cached_repository_names()]
    here += [each for model in places.found_models() for each in model.names]
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
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise NotACheckpoint(f"{_shown(str(model))} cannot be opened: {reason}", _NAMES_HINT) from error
    if is_file and (is_gguf_name(path.name) or _begins_as_gguf(path)):
        first = path.with_name(names_of_parts(path.name)[0])
        return first if first.is_file() else split_parts(path)[0]  # raises: it is missing
    if is_file and path.suffix in _CHECKPOINT_SUFFIXES and (path.parent / "config.json").is_file():
        return path.parent
    if is_file:
        raise NotACheckpoint(
            f"{str(model)!r} is a file; a checkpoint is a GGUF file, or a folder with config.json and "
            "*.safetensors",
            _NAMES_HINT,
        )
    special = describe_special(path)
    if special is not None:
        raise NotACheckpoint(f"{_shown(str(model))} is {special[0]}", special[1])
    return None


def _begins_as_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC
    except OSError:
        return False


def _at_path(path: Path) -> ResolvedModel:
    """The model at ``path``: a GGUF file, a folder of one, or the folder of a checkpoint."""
    if path.is_file():
        return ResolvedModel(stem_of(path.name), path)
    files = [] if _has_safetensors(path) else _gguf_files_in(path)
    found = [each for each in files if is_model_name(each.name) and each.is_file()]
    if len(found) > 1:
        raise NotACheckpoint(f"{str(path)!r} has {len(found)} GGUF models", _name_one_of(found))
    if found:
        return _at_path(found[0])
    if not (path / "config.json").is_file():
        _refuse_folder_without_model(path, files)
    return ResolvedModel(path.resolve().name, path)


def _has_safetensors(folder: Path) -> bool:
    """Whether ``folder`` is a checkpoint in safetensors; a config.json may lie beside GGUF files, too."""
    return (folder / "config.json").is_file() and next(folder.glob("*.safetensors*"), None) is not None


def _gguf_files_in(folder: Path, pattern: str = "*") -> list[Path]:
    """What is called ``.gguf`` in ``folder``, sorted, whether it is a file or not."""
    try:
        return sorted(path for path in folder.glob(pattern) if is_gguf_name(path.name))
    except OSError:
        return []


def _refuse_folder_without_model(folder: Path, files: list[Path]) -> None:
    """Raise ``NotACheckpoint`` or ``MissingFile`` if there are GGUF files in ``folder``, but no model.

    ``files``: of ``_gguf_files_in``. Folders below it are looked at, too.
    """
    for path in files:
        special = describe_special(path)
        if special is not None and is_model_name(path.name):
            raise NotACheckpoint(f"{path.name} in {str(folder)!r} is {special[0]}", special[1])
    regular = [path for path in files if path.is_file()]
    for path in regular:
        if len(names_of_parts(path.name)) > 1:
            split_parts(path)  # raises: the first part is missing
    names = ", ".join(path.name for path in regular[:_MAX_NAMES])
    if regular and all(is_mmproj_name(path.name) for path in regular):
        raise NotACheckpoint(
            f"{str(folder)!r} has a vision tower ({names}), but no GGUF model to go with it",
            f"Name the model's file, with --mmproj {shlex.quote(str(regular[0]))}.",
        )
    if regular:
        raise NotACheckpoint(
            f"{str(folder)!r} has GGUF files, but no model by their names: {names}", "Name the file itself."
        )
    below = [each for each in _gguf_files_in(folder, "*/*") if is_model_name(each.name) and each.is_file()]
    if below:
        raise NotACheckpoint(
            f"{str(folder)!r} has no model itself, but GGUF models in folders below it: {len(below)}",
            _name_one_of(below),
        )


def _name_one_of(found: list[Path]) -> str:
    more = f" and {len(found) - _MAX_NAMES} more" if len(found) > _MAX_NAMES else ""
    return f"Name one: {', '.join(shlex.quote(str(each)) for each in found[:_MAX_NAMES])}{more}."


def _with_mmproj(found: tuple[ResolvedModel, ...], mmproj: str) -> tuple[ResolvedModel, ...]:
    """``found`` with the vision tower in the file ``mmproj``. Raises ``NotACheckpoint``."""
    path = Path(mmproj).expanduser()
    if not path.is_file():
        special = describe_special(path)
        if special is not None:
            raise NotACheckpoint(f"{_shown(mmproj)} is {special[0]}", special[1])
        raise _no_folder_error(mmproj)
    for each in found:
        if not each.is_gguf:
            raise NotACheckpoint(
                f"{each.name} is no GGUF model, so it takes no mmproj", "Leave out --mmproj."
            )
    return tuple(replace(each, mmproj=path, mmproj_named=True) for each in found)


def _of_program(program: str, name: str) -> ResolvedModel:
    """The GGUF model ``name`` of another program. Raises ``NotACheckpoint``, ``MissingFile``."""
    found = places.find_models(program, name)
    title, typed = places.TITLES[program], f"{program}:{name}"
    if not found:
        models = places.models_of(program)
        names = [each.name for each in models if not each.problem] or [each.name for each in models]
        close = get_close_matches(typed, names, 3, cutoff=0.4)
        hint = f"The nearest: {', '.join(close)}. " if close else ""
        raise NotACheckpoint(
            f"{title} has no model {_shown(name)} among its {len(models)} GGUF models here",
            f"{hint}vlfit models lists what is here.",
        )
    if len(found) > 1:
        raise NotACheckpoint(
            f"{_shown(typed)} means several models",
            f"Name one of: {', '.join(sorted(each.name for each in found)[:8])}.",
        )
    one = found[0]
    if one.problem:
        raise MissingFile(
            f"{one.name}: {one.problem}", f"Let {title} download it again, or name another model."
        )
    return ResolvedModel(one.name, one.path, mmproj=one.mmproj)


def _gguf_on_hub(text: str) -> tuple[ResolvedModel, ...]:
    """The GGUF models that ``text`` means on the hub; empty if it is no such name, or leaves the type open.

    They are taken from the folders of LM Studio and llama.cpp, too, so that nothing is downloaded twice. A
    name without a type means all types that are in the hub's cache.
    """
    from vlfit.checkpoint import catalog

    full_name = catalog.hub_name_of(text)
    named = repository.parse_name(full_name) or _gguf_of_address(text, full_name)
    if named is not None:
        here = repository.cached_file(named.name)
        if here is None and named.revision is None:
            here = places.find_file(named.repository, named.type)
        if here is None:
            return (ResolvedModel(named.name),)
        return (ResolvedModel(named.name, here.path, mmproj=here.mmproj),)
    if not hub.is_hub_name(full_name) or not repository.may_be_gguf(full_name):
        return ()
    name, revision = hub.split_name(full_name)
    return tuple(
        ResolvedModel(each.name, each.path, mmproj=each.mmproj)
        for each in places.cached_models_of(name, revision)
        if not each.problem
    )


def _gguf_of_address(text: str, full_name: str) -> "repository.HubFile | None":
    """The GGUF file whose page on the hub is pasted."""
    path = text.strip().partition("?")[0]
    if full_name == text or not is_gguf_name(path) or not hub.is_hub_name(full_name):
        return None
    name, revision = hub.split_name(full_name)
    return repository.HubFile(name, stem_of(path), revision)


def _type_left_open(name: str) -> UsageError:
    """The error for a repository of GGUF files without a type; asks the hub which it has."""
    found = repository.list_repository(name)
    names = [found.name_of(each) for each in found.quantizations]
    return UsageError(
        f"{name} has {len(names)} GGUF models of different types",
        f"Name one, such as {names[len(names) // 2]}; vlfit plan {name} shows which fit.",
    )


def _in_catalog(text: str) -> tuple[ResolvedModel, ...]:
    """The entries of the catalog that ``text`` means, with the folders of those that are in the store."""
    from vlfit.checkpoint import catalog

    name = catalog.hub_name_of(text)
    if "@" in name:
        repository, _, revision = name.partition("@")
        entry = catalog.find_entry(repository)
        published = entry is not None and not entry.converted_from
        return (ResolvedModel(f"{entry.name}@{revision}"),) if entry is not None and published else ()
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


def _of_entry(entry: "CatalogEntry") -> ResolvedModel:
    return ResolvedModel(entry.name, store.find_folder(entry.name) if entry.converted_from else None, entry)


def _hub_name(text: str) -> str:
    """``text`` as a name on the hub, spelt as in the cache if it is there. Raises ``NotACheckpoint``."""
    from vlfit.checkpoint import catalog

    full_name = catalog.hub_name_of(text)
    name, at, revision = full_name.partition("@")
    if "://" in full_name:
        raise NotACheckpoint(
            f"{_shown(text)} is not the page of a model on huggingface.co",
            "Copy the address of a model's page, https://huggingface.co/org/name, or type a name: 4B.",
        )
    if not hub.is_hub_name(full_name) and not _WORD.fullmatch(name):
        raise _unknown_error(text)
    known = cache.cached_repository_names()
    if name in known:
        return full_name
    wanted = name.lower()
    alike = [each for each in known if wanted in (each.lower(), each.lower().partition("/")[2])]
    if len(alike) == 1:
        return f"{alike[0]}{at}{revision}"
    if "/" in name:
        return full_name
    alike += [folder.name for folder in store.model_folders() if folder.name.lower() == wanted]
    if alike:
        raise NotACheckpoint(f"{_shown(text)} means several models", f"Name one of: {', '.join(alike)}.")
    raise _unknown_error(text)


def _did_you_mean(name: str) -> str:
    from vlfit.checkpoint import catalog

    similar, sizes = nearest_names(name), catalog.vision_sizes()
    size = _SIZE.search(name)
    if size is not None:  # another size is not what was meant
        typed = size[0].upper()
        similar = [each for each in similar if typed in _SIZE.findall(each.upper())]
        if not similar and typed not in sizes:
            return f"The catalog has no {typed}, but {', '.join(sizes[:-1])} and {sizes[-1]}. "
    if not similar:
        return ""
    *others, last = similar
    return f"Did you mean {', '.join(others)}{' or ' if others else ''}{last}? "


def _unknown_error(text: str) -> NotACheckpoint:
    return NotACheckpoint(
        f"{_shown(text)} is neither a folder, nor a known model, nor a name on the hub (org/name)",
        f"{_did_you_mean(text[:_MAX_SHOWN])}{_NAMES_HINT}",
    )


def _is_missing_file(text: str) -> bool:
    """Whether ``text``, which is no path here, names a file and not the hub's page of one."""
    from vlfit.checkpoint import catalog

    return text.endswith(_FILE_SUFFIXES) and catalog.hub_name_of(text) == text


def _no_folder_error(text: str) -> NotACheckpoint:
    """The error for a path where nothing is."""
    hint = f"Check the path. {_NAMES_HINT}"
    if _WINDOWS_PATH.match(text):
        drive, rest = text[0].lower(), text[2:].replace("\\", "/")
        hint = f"That is a path of Windows; under WSL2 it is /mnt/{drive}{rest}."
    kind = "file" if text.endswith(_FILE_SUFFIXES) else "folder"
    return NotACheckpoint(f"there is no {kind} {_shown(text)}", hint)


def _shown(text: str) -> str:
    """``text`` in quotes, shortened."""
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")


def mini_folder() -> Path:
    """Folder of mini, the bundled checkpoint. Raises ``NotACheckpoint`` if this installation has none."""
    folder = Path(str(resources.files("vlfit") / "mini"))
    if not (folder / "config.json").is_file():
        raise NotACheckpoint(
            f"this installation of vlfit has no bundled checkpoint in {folder}",
            "Install vlfit again, or name another checkpoint with --model.",
        )
    return folder


def local_models() -> list[LocalModel]:
    """The checkpoints on this computer that the native engine runs.

    Those in the hub's cache (incomplete ones too), then those in vlfit's store, then mini.
    """
    models = cache.cached_models()
    models += [
        model
        for each in store.model_folders()
        if (model := cache.read_local_model(each.name, each)) is not None
    ]
    try:
        mini = cache.read_local_model(MINI, mini_folder())
    except NotACheckpoint:
        return models
    return [*models, mini] if mini is not None else models
