"""What ``vlfit models rm`` removes: a downloaded or converted checkpoint, or one type of its GGUF files.

Only in vlfit's store and in the hub's cache: nothing in other programs' folders is ever written.
"""

import os
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vlfit.checkpoint import cache, hub, store
from vlfit.checkpoint.gguf import places, repository
from vlfit.checkpoint.gguf.file_names import is_gguf_name, is_mmproj_name, is_model_name, names_of_parts
from vlfit.checkpoint.gguf.places import FoundModel
from vlfit.checkpoint.source import MINI, resolve_name
from vlfit.errors import NotDownloaded, UsageError, VlfitError

_MAX_NAMES = 8  # in a hint


@dataclass(frozen=True, slots=True)
class Removable:
    """What a name would remove: ``files`` in ``folder``; if there are none, ``folder`` with all in it."""

    folder: Path
    files: tuple[Path, ...] = ()


def remove_model(name: str) -> int:
    """Delete what ``find_removable`` finds; return the bytes freed. Raises its errors."""
    return remove(find_removable(name))


def remove(removable: Removable) -> int:
    """Delete the files or the folder; return the bytes freed.

    Files of the hub's cache that other snapshots share are kept. A folder that loses its last file goes, too.
    Raises ``VlfitError`` for what may not be deleted.
    """
    folder = removable.folder
    in_store = folder.parent == store.models_folder()
    try:
        if removable.files and in_store:
            return _remove_from_store(folder, removable.files)
        if removable.files:
            return _remove_from_cache(folder, removable.files)
        if in_store:
            freed = cache.bytes_on_disk(folder)
            store.remove_folder(folder)
            return freed
        return cache.remove_folder(folder)
    except OSError as error:
        raise VlfitError(
            f"cannot delete {error.filename or folder}: {error.strerror}",
            "Check the permissions of the folder.",
        ) from error


def find_removable(name: str) -> Removable:
    """What ``remove_model`` would delete in vlfit's store or in the hub's cache.

    A name with a type (``org/name:Q4_K_M``), or the path of a file in the store, means that model's parts,
    and the vision towers (mmproj) beside it if it is the last model there.

    Raises ``UsageError`` for mini, for models of other programs, for any other folder or file, and for a name
    that means several checkpoints here; ``NotDownloaded`` for a model that is not here; ``NotACheckpoint``
    for an unknown name.
    """
    stored = store.find_folder(name)
    if stored is not None:
        return Removable(stored)
    downloaded = cache.cached_repository_names()
    if hub.is_hub_name(name) and name.partition("@")[0] in downloaded:
        return Removable(cache.cached_path(name))
    ours = _of_our_file(name)
    if ours is not None:
        return ours
    _refuse_others(name)
    if repository.parse_name(name) is not None:
        return _of_type(name)
    folders: dict[str, Path] = {}
    found = resolve_name(name)
    for each in found:
        if each.folder is not None and each.folder.parent == store.models_folder():
            folders[each.name] = each.folder
        elif each.name.partition("@")[0] in downloaded:
            folders[each.name] = cache.cached_path(each.name)
    if not folders:
        what = found[0].name if len(found) == 1 else f"{name} (in any format)"
        raise NotDownloaded(f"{what} is not on this computer", "Run vlfit models to list what is here.")
    if len(folders) > 1:
        raise UsageError(f"{name!r} means several models", f"Name one of: {', '.join(folders)}.")
    return Removable(next(iter(folders.values())))


def removable_names() -> Iterator[str]:
    """Names of GGUF models that can be removed, as ``vlfit models`` lists them."""
    for program in (places.STORE, places.HUB):
        for model in places.models_of(program):
            yield model.name


# --- one model of several ----------------------------------------------------------------------------------


def _of_type(name: str) -> Removable:
    """The files of ``org/name:TYPE`` in the hub's cache, complete or not."""
    wanted = repository.parse_name(name)
    assert wanted is not None
    here = places.cached_models_of(wanted.repository, wanted.revision)
    found = [each for each in here if repository.has_type(each, wanted.type)]
    if not found and wanted.revision is None:
        elsewhere = places.find_file(wanted.repository, wanted.type)
        if elsewhere is not None:
            raise _not_ours(elsewhere)
    if not found:
        types = ", ".join(sorted(each.name for each in here)[:_MAX_NAMES])
        hint = f"Of it are here: {types}." if types else "Run vlfit models to list what is here."
        raise NotDownloaded(f"{name} is not on this computer", hint)
    if len(found) > 1:
        names = ", ".join(each.name for each in found[:_MAX_NAMES])
        raise UsageError(f"{name!r} means several models", f"Name one of: {names}.")
    return _of_file(found[0].path)


def _of_our_file(name: str) -> Removable | None:
    """The model whose file in the store or the hub's cache has the path ``name``; None for other names."""
    if not is_gguf_name(name):
        return None
    try:
        path = Path(os.path.abspath(Path(name).expanduser()))  # not resolved: files of the cache are links
        is_file = path.is_file()
    except (OSError, RuntimeError, ValueError):
        return None  # ``resolve_name`` says why
    return _of_file(path) if is_file and _root_of(path) is not None else None


def _of_file(path: Path) -> Removable:
    """The parts of the model in ``path``, and the vision towers there if no other model is left."""
    root = _root_of(path)
    assert root is not None
    files = (each for each in root.rglob("*") if is_gguf_name(each.name) and not each.is_dir())
    inside = {each.relative_to(root).as_posix(): each for each in files}
    own = path.relative_to(root).as_posix()
    try:
        parts = names_of_parts(own)
    except VlfitError:
        parts = [own]
    gone = [part for part in parts if part in inside]
    if not any(is_model_name(each) for each in inside if each not in gone):
        gone += [each for each in sorted(inside) if is_mmproj_name(each) and each not in gone]
    return Removable(root, tuple(inside[each] for each in gone))


def _root_of(path: Path) -> Path | None:
    """The model's folder in the store, or the snapshot in the hub's cache, that ``path`` is in; else None."""
    for place, depth in ((store.models_folder(), 1), (cache.cache_root().absolute(), 3)):
        try:
            parts = path.relative_to(place).parts
        except ValueError:
            continue
        root = place.joinpath(*parts[:depth])
        is_snapshot = depth == 1 or (parts[0].startswith("models--") and parts[1:2] == ("snapshots",))
        # A link in the store leads to a folder that is not vlfit's.
        if len(parts) > depth and is_snapshot and not root.is_symlink():
            return root
    return None


def _remove_from_store(folder: Path, files: tuple[Path, ...]) -> int:
    before = cache.bytes_on_disk(folder)
    for path in files:
        path.unlink()
    _remove_empty_folders(folder)
    return before - (cache.bytes_on_disk(folder) if folder.is_dir() else 0)


def _remove_from_cache(snapshot: Path, files: tuple[Path, ...]) -> int:
    """Delete files of a snapshot, and their blobs unless other snapshots need them."""
    whole = snapshot.parent.parent
    before = cache.bytes_on_disk(whole)
    behind = {Path(os.path.realpath(path)) for path in files}
    for path in files:
        path.unlink()
    _remove_empty_folders(snapshot)
    if not snapshot.is_dir():
        _forget_snapshot(whole, snapshot.name)
    left = [path for path in whole.glob("snapshots/**/*") if path.is_file()]
    if not left and not any(whole.glob("blobs/*.incomplete")):
        cache.remove_folder(whole)
        return before
    blobs = Path(os.path.realpath(whole / "blobs"))
    for blob in behind - {Path(os.path.realpath(path)) for path in left}:
        if blob.parent == blobs:
            blob.unlink(missing_ok=True)
    return before - cache.bytes_on_disk(whole)


def _remove_empty_folders(folder: Path) -> None:
    """Delete the folders below and with ``folder`` in which there is nothing."""
    below = sorted(
        (path for path in folder.rglob("*") if path.is_dir() and not path.is_symlink()), reverse=True
    )
    for each in [*below, folder]:
        if not any(each.iterdir()):
            each.rmdir()


def _forget_snapshot(whole: Path, commit: str) -> None:
    """Delete the branches and tags of a repository in the cache that mean a snapshot which is gone."""
    for path in [path for path in (whole / "refs").rglob("*") if path.is_file()]:
        if path.read_text(encoding="utf-8").strip() == commit:
            path.unlink()
    shutil.rmtree(whole / ".no_exist" / commit, ignore_errors=True)


# --- what is not vlfit's -----------------------------------------------------------------------------------


def _refuse_others(name: str) -> None:
    """Raise ``UsageError`` for mini, paths and other programs' models: vlfit removes only what it made."""
    program = places.program_of_name(name.strip())
    if program is not None:
        found = places.find_models(*program)
        if len(found) != 1:
            resolve_name(name)  # raises: there is none, or there are several
        raise _not_ours(found[0])
    try:
        is_path = bool(name) and Path(name).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        is_path = False  # ``resolve_name`` says why
    if not is_path and name.strip().lower() != MINI:
        return
    owner = _owner_of(Path(name).expanduser()) if is_path else None
    if owner is not None:
        raise _not_ours(owner, name)
    raise UsageError(
        f"{name!r} was neither downloaded nor converted by vlfit, so it is not removed",
        "Name a model as vlfit models lists it; mini is part of vlfit.",
    )


def _owner_of(path: Path) -> FoundModel | None:
    """The model of another program that the file ``path`` is of."""
    wanted = os.path.realpath(path)
    for program in (places.OLLAMA, places.LM_STUDIO, places.LLAMA_CPP):
        for model in places.models_of(program):
            if wanted in (os.path.realpath(each) for each in (model.path, model.mmproj) if each is not None):
                return model
    return None


def _not_ours(model: FoundModel, typed: str = "") -> UsageError:
    """The error for a model of another program: whose it is, and how that program removes it."""
    title = places.TITLES[model.program]
    file = shlex.quote(os.path.realpath(model.path))
    how = {
        places.OLLAMA: f"Ollama removes it: ollama rm {shlex.quote(places.name_in_program(model.name))}",
        places.LM_STUDIO: f"Delete it in LM Studio, under My Models; its file is {file}.",
        places.LLAMA_CPP: f"llama.cpp has no command for that; its file is {file}.",
    }
    return UsageError(
        f"{typed or model.name} is {title}'s, and vlfit changes nothing in other programs' folders",
        how[model.program],
    )
