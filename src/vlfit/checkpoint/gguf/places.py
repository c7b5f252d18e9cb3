"""GGUF models in vlfit's store, the hub's cache, and the folders of Ollama, LM Studio and llama.cpp.

Everything here only reads. What is there was written by others, perhaps half, perhaps by a program that is
writing now: a broken manifest, a missing file or a folder that cannot be read costs one entry, never the
list; and a place is left after ``MAX_ENTRIES`` entries or ``MAX_SECONDS`` (``Search``).
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from vlfit.checkpoint import cache, store
from vlfit.checkpoint.gguf.file_names import (
    best_mmproj,
    is_gguf_name,
    is_mmproj_name,
    is_model_name,
    labels_of_models,
    names_of_parts,
    same_type,
    stem_of,
    type_of_name,
)
from vlfit.errors import VlfitError
from vlfit.machine.host import is_wsl2

STORE, OLLAMA, LM_STUDIO, LLAMA_CPP, HUB = "vlfit", "ollama", "lmstudio", "llama.cpp", "hub"
TITLES = {
    STORE: "vlfit",
    OLLAMA: "Ollama",
    LM_STUDIO: "LM Studio",
    LLAMA_CPP: "llama.cpp",
    HUB: "Hugging Face",
}
_PREFIXES = {f"{program}:": program for program in (OLLAMA, LM_STUDIO, LLAMA_CPP)} | {"llamacpp:": LLAMA_CPP}
WINDOWS_USERS = Path("/mnt/c/Users")  # under WSL2
# Ollama's as a service on Linux, as a snap, and as Arch packages it.
OLLAMA_SERVICE = (
    Path("/usr/share/ollama/.ollama/models"),
    Path("/var/snap/ollama/common/models"),
    Path("/var/lib/ollama/models"),
    Path("/var/lib/ollama"),
)
MAX_ENTRIES = 50_000  # of all folders of a place
MAX_SECONDS = 1.0  # for a place; Windows' disks are slow to list from WSL2
_MAX_DEPTH = 5
_MAX_MODELS = 2000
_MAX_JSON_BYTES = 2**20
_MAX_USERS = 20  # of Windows
_DEFAULT_HOST, _DEFAULT_NAMESPACE, _DEFAULT_TAG = "registry.ollama.ai", "library", "latest"
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_NO_USERS = ("All Users", "Default", "Default User", "Public", "desktop.ini")
_UNFINISHED = "its file is not here: the download has not ended, or was removed"


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model of GGUF files on this computer.

    ``name``: as ``--model`` takes it. ``path``: of the file with the text model, the first part of a split
    one. ``mmproj``: of the file with its vision tower; None if that is in ``path``, or nowhere. ``type``: by
    the file's name, "" if that says none. ``program``: ``OLLAMA``, ... ``problem``: why it cannot be opened,
    a phrase; "" if nothing is known against it. ``bytes``: of all its files. ``aliases``: other names of the
    same files, set by ``found_models`` alone.
    """

    name: str
    path: Path
    program: str
    mmproj: Path | None = None
    type: str = ""
    problem: str = ""
    bytes: int = 0
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names by which ``--model`` takes it."""
        return (self.name, *self.aliases)


@dataclass(slots=True)
class Search:
    """The bounds of a search, and what it did not get to.

    ``bounded``: within ``MAX_ENTRIES``, ``MAX_SECONDS`` and ``_MAX_MODELS`` for a place; else to its end.
    ``left``: the places that were left before their end, set by the search.
    """

    bounded: bool = True
    left: list[Path] = field(default_factory=list)

    def leave(self, place: Path) -> None:
        """Note that ``place`` is left before its end."""
        if place not in self.left:
            self.left.append(place)


def found_models(search: Search | None = None) -> list[FoundModel]:
    """The GGUF models in the folders of all programs, sorted by program and name.

    Names of the same files are one model. With another vision tower, or none, it is another model.
    """
    found: dict[tuple[str, str, str], FoundModel] = {}
    for program in TITLES:
        for model in sorted(models_of(program, search), key=lambda each: each.name.lower()):
            tower = "" if model.mmproj is None else os.path.realpath(model.mmproj)
            key = (os.path.realpath(model.path), tower, model.problem)
            first = found.get(key)
            if first is None:
                found[key] = model
            elif model.name not in first.names:
                found[key] = replace(first, aliases=(*first.aliases, model.name))
    return list(found.values())


def models_of(program: str, search: Search | None = None) -> list[FoundModel]:
    """The GGUF models in the folders of one program, in no order; names are distinct."""
    search = search or Search()
    by_name: dict[str, FoundModel] = {}
    for root in _folders(program):
        for model in _LISTERS[program](_Walk(root, search), root):
            if search.bounded and len(by_name) >= _MAX_MODELS:
                search.leave(root)
                break
            if model.name in by_name:  # two files of one type: their paths are their names
                if by_name[model.name].path != model.path:
                    by_name[str(model.path)] = replace(model, name=str(model.path))
            else:
                by_name[model.name] = model
    return list(by_name.values())


def program_of_name(name: str) -> tuple[str, str] | None:
    """The program that a name such as ``ollama:qwen3-vl:4b`` begins with, and the rest; None without one."""
    for prefix, program in _PREFIXES.items():
        if name.lower().startswith(prefix):
            return program, name[len(prefix) :]
    return None


def name_in_program(name: str) -> str:
    """``name`` without its program: ``qwen3-vl:4b`` for ``ollama:qwen3-vl:4b``; any other name as it is."""
    named = program_of_name(name)
    return name if named is None else named[1]


def find_models(program: str, name: str) -> list[FoundModel]:
    """The models of ``program`` that ``name`` (without its prefix) means, in any case; empty if none.

    A name may leave out the tag (Ollama's ``latest``), the owner, or the type: several may be meant then.
    Files of which one is a split or other form of the name come with it.
    """
    models = models_of(program)
    wanted = name.strip("/").lower()
    keys = [wanted, f"{wanted}:{_DEFAULT_TAG}"] if program == OLLAMA else [wanted]
    for key in keys:
        exact = [each for each in models if name_in_program(each.name).lower() == key]
        if exact:
            return exact
    without_owner = [
        each for each in models if name_in_program(each.name).lower().rpartition("/")[2] == wanted
    ]
    if len(without_owner) == 1:
        return without_owner
    repository, _, kind = wanted.partition(":")
    alike = []
    for each in models:
        plain = name_in_program(each.name).lower()
        stem = stem_of(each.path.name).lower() if program != OLLAMA else ""
        head = plain.partition(":")[0]
        if repository in (head, head.rpartition("/")[2], stem, each.path.name.lower()) and (
            not kind or same_type(kind, each.type or plain.partition(":")[2])
        ):
            alike.append(each)
    return alike


def cached_models_of(repository: str, revision: str | None = None) -> list[FoundModel]:
    """The GGUF models of the repository ``org/name`` in the hub's cache.

    ``revision``: a branch, tag or commit; None: ``main``, else the only one that is there. Names of models
    that are not of ``main`` end with ``@`` and the commit.
    """
    folder = cache.cache_root() / f"models--{repository.replace('/', '--', 1)}"
    found = list(_of_hub_folder(_Walk(folder, Search()), folder))
    name = revision or "main"
    commit = _read_text(folder / "refs" / name, 100).strip() or name
    of_commit = [each for each in found if f"/snapshots/{commit}/" in each.path.as_posix()]
    commits = {each.name.partition("@")[2] for each in found}
    return of_commit if of_commit or revision or len(commits) > 1 else found


def find_file(repository: str, kind: str) -> FoundModel | None:
    """The model ``repository`` (org/name) in the type ``kind`` in the folders of LM Studio or llama.cpp."""
    for program in (LM_STUDIO, LLAMA_CPP):
        wanted = f"{program}:{repository}:{kind}".lower()
        for each in models_of(program):
            if each.name.lower() == wanted and not each.problem:
                return each
    return None


# --- folders -----------------------------------------------------------------------------------------------


def _folders(program: str) -> list[Path]:
    """The folders of a program that exist, each once."""
    seen: dict[str, Path] = {}
    for path in _CANDIDATES[program]():
        try:
            if path.is_dir():
                seen.setdefault(os.path.realpath(path), path)
        except OSError:
            continue
    return list(seen.values())


def _store_folders() -> Iterator[Path]:
    yield store.models_folder()


def _ollama_folders() -> Iterator[Path]:
    typed = _variable("OLLAMA_MODELS")
    if typed:
        yield typed
    for home in _homes():
        yield home / ".ollama" / "models"
    yield from OLLAMA_SERVICE


def _lm_studio_folders() -> Iterator[Path]:
    for home in _homes():
        bases = [home / ".lmstudio", home / ".cache" / "lm-studio"]
        pointer = _read_text(home / ".lmstudio-home-pointer", 4096).strip()
        if pointer:
            bases.insert(0, _unix_path(pointer))
        for base in bases:
            settings = _read_json(base / "settings.json")
            chosen = settings.get("downloadsFolder") if isinstance(settings, dict) else None
            if isinstance(chosen, str) and chosen:
                yield _unix_path(chosen)
            yield base / "models"


def _llama_cpp_folders() -> Iterator[Path]:
    typed = _variable("LLAMA_CACHE")
    if typed:
        yield typed
    yield (_variable("XDG_CACHE_HOME") or Path.home() / ".cache") / "llama.cpp"
    for home in _windows_homes():
        yield home / "AppData" / "Local" / "llama.cpp"


def _hub_folders() -> Iterator[Path]:
    yield cache.cache_root()


def _homes() -> Iterator[Path]:
    yield Path.home()
    yield from _windows_homes()


def _windows_homes() -> list[Path]:
    """Homes of the users of Windows, under WSL2."""
    if not is_wsl2():
        return []
    try:
        with os.scandir(WINDOWS_USERS) as entries:
            names = [entry.name for _, entry in zip(range(200), entries, strict=False)]
    except OSError:
        return []
    return [WINDOWS_USERS / name for name in sorted(names) if name not in _NO_USERS][:_MAX_USERS]


def _variable(name: str) -> Path | None:
    text = os.environ.get(name, "").strip("\"' ")
    return Path(text).expanduser() if text else None


def _unix_path(text: str) -> Path:
    """A path of a settings file, which under WSL2 may be one of Windows."""
    if re.match(r"[A-Za-z]:[\\/]", text):
        return Path(f"/mnt/{text[0].lower()}{text[2:].replace(chr(92), '/')}")
    return Path(text).expanduser()


_CANDIDATES: dict[str, Callable[[], Iterator[Path]]] = {
    STORE: _store_folders,
    OLLAMA: _ollama_folders,
    LM_STUDIO: _lm_studio_folders,
    LLAMA_CPP: _llama_cpp_folders,
    HUB: _hub_folders,
}


# --- what lies in them -------------------------------------------------------------------------------------


class _Walk:
    """Lists files below ``place``, within the bounds of a search. Follows links, but into no folder twice."""

    def __init__(self, place: Path, search: Search) -> None:
        self._place, self._search = place, search
        self._entries = MAX_ENTRIES if search.bounded else inf
        self._until = time.monotonic() + (MAX_SECONDS if search.bounded else inf)
        self._visited: set[tuple[int, int]] = set()

    def files(self, root: Path, depth: int = _MAX_DEPTH) -> Iterator[tuple[str, Path]]:
        """Relative names with slashes, and paths, of the files at most ``depth`` folders below ``root``."""
        pending = [(root, "", depth)]
        while pending:
            folder, prefix, left = pending.pop()
            for entry in self._scan(folder):
                name = f"{prefix}{entry.name}"
                try:
                    if entry.is_dir():
                        if left > 0:
                            pending.append((Path(entry.path), f"{name}/", left - 1))
                    elif entry.is_file():
                        yield name, Path(entry.path)
                except OSError:  # a loop of links
                    continue

    def again(self) -> "_Walk":
        """Another walk through the same place: folders may be visited once more."""
        return _Walk(self._place, self._search)

    def folders(self, root: Path) -> Iterator[Path]:
        """The folders in ``root``."""
        for entry in self._scan(root):
            try:
                if entry.is_dir():
                    yield Path(entry.path)
            except OSError:
                continue

    def _scan(self, folder: Path) -> list["os.DirEntry[str]"]:
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in self._visited:
                return []
            self._visited.add((status.st_dev, status.st_ino))
            found = []
            with os.scandir(folder) as entries:
                for entry in entries:
                    if self._entries <= 0 or time.monotonic() > self._until:
                        self._search.leave(self._place)
                        break
                    self._entries -= 1
                    found.append(entry)
        except OSError:
            return []
        return sorted(found, key=lambda entry: entry.name)


def _list_store(walk: _Walk, _root: Path) -> Iterator[FoundModel]:
    """A folder with one model has its name; the models of a folder with several are named by their paths."""
    for folder in store.model_folders():
        if (folder / "config.json").is_file():
            continue  # a checkpoint, which ``source.local_models`` lists
        files = {name: path for name, path in walk.files(folder, 0) if is_gguf_name(name)}
        found = list(_of_repository(STORE, files, "", "", ""))
        for each in found:
            yield replace(each, name=folder.name if len(found) == 1 else str(each.path))


def _list_ollama(walk: _Walk, root: Path) -> Iterator[FoundModel]:
    for name, manifest in walk.files(root / "manifests", 4):
        parts = name.split("/")
        if len(parts) < 4 or parts[-1].startswith("."):
            continue
        *owner, model, tag = parts
        if owner == [_DEFAULT_HOST, _DEFAULT_NAMESPACE]:
            owner = []
        elif owner[0] == _DEFAULT_HOST:
            owner = owner[1:]
        shown = f"{OLLAMA}:{'/'.join([*owner, model])}:{tag}"
        found = _of_manifest(shown, manifest, root / "blobs")
        if found is not None:
            yield found


def _of_manifest(name: str, manifest: Path, blobs: Path) -> FoundModel | None:
    """The model of a manifest of Ollama's; None for one without weights here (of the cloud, or in MLX)."""
    content = _read_json(manifest)
    layers = content.get("layers") if isinstance(content, dict) else None
    if not isinstance(layers, list):
        return FoundModel(name, manifest, OLLAMA, problem="its manifest cannot be read")
    files = {kind: _blob(layers, f"application/vnd.ollama.image.{kind}") for kind in ("model", "projector")}
    if any(file is not None and not file[0] for file in files.values()):
        return FoundModel(name, manifest, OLLAMA, problem="a digest in its manifest is not one of SHA-256")
    if files["model"] is None:
        return None
    digest, said = files["model"]
    path = blobs / f"sha256-{digest}"
    size = _size(path)
    problem = _UNFINISHED if size < 0 else ""
    if not problem and said and size != said:
        problem = f"its file has {size:,} of {said:,} bytes"
    mmproj = None
    if files["projector"] is not None:
        mmproj = blobs / f"sha256-{files['projector'][0]}"
        if _size(mmproj) < 0:
            problem = problem or "the file of its vision tower is not here"
    total = max(size, 0) + (max(_size(mmproj), 0) if mmproj else 0)
    return FoundModel(name, path, OLLAMA, mmproj, type_of_name(name.rpartition(":")[2]), problem, total)


def _blob(layers: list[Any], media_type: str) -> tuple[str, int] | None:
    """Digest and bytes of the layer of a media type; None if there is none. A broken digest is ""."""
    for layer in layers[:1000]:
        if isinstance(layer, dict) and layer.get("mediaType") == media_type:
            digest = _DIGEST.fullmatch(str(layer.get("digest", "")))
            size = layer.get("size")
            return digest[1] if digest else "", size if type(size) is int and size > 0 else 0
    return None


def _list_lm_studio(walk: _Walk, root: Path) -> Iterator[FoundModel]:
    yield from _of_repositories(LM_STUDIO, dict(walk.files(root)), f"{LM_STUDIO}:")


def _list_llama_cpp(walk: _Walk, root: Path) -> Iterator[FoundModel]:
    files = dict(walk.files(root, 0))
    taken: set[str] = set()
    for name, path in files.items():
        if not (name.startswith("manifest=") and name.endswith(".json")):
            continue
        _, owner, repository, *_ = [*name.removesuffix(".json").split("="), "", "", ""]
        content = _read_json(path)
        model = _cached_name(owner, repository, content, "ggufFile")
        if model is None or model not in files:
            continue
        mmproj = _cached_name(owner, repository, content, "mmprojFile")
        kind = type_of_name(model)
        shown = f"{LLAMA_CPP}:{owner}/{repository}:{kind or stem_of(model)}"
        found = _of_files(shown, LLAMA_CPP, model, files, files.get(mmproj or ""), kind)
        taken.add(model)
        yield found
    for name in files:
        if is_model_name(name) and name not in taken:
            yield _of_files(f"{LLAMA_CPP}:{stem_of(name)}", LLAMA_CPP, name, files, None, type_of_name(name))
    # Since March 2026 llama.cpp keeps downloads as the hub's cache does.
    yield from (
        replace(each, name=f"{LLAMA_CPP}:{each.name}", program=LLAMA_CPP)
        for each in _list_hub(walk.again(), root)
    )


def _cached_name(owner: str, repository: str, manifest: Any, field: str) -> str | None:
    """The name in llama.cpp's flat cache of a file that its manifest names."""
    entry = manifest.get(field) if isinstance(manifest, dict) else None
    name = entry.get("rfilename") if isinstance(entry, dict) else None
    return f"{owner}_{repository}_{name.replace('/', '_')}" if isinstance(name, str) and name else None


def _list_hub(walk: _Walk, root: Path) -> Iterator[FoundModel]:
    for folder in walk.folders(root):
        if folder.name.startswith("models--"):
            yield from _of_hub_folder(walk, folder)


def _of_hub_folder(walk: _Walk, folder: Path) -> Iterator[FoundModel]:
    """The models of all snapshots of one repository in the hub's cache."""
    repository = folder.name.removeprefix("models--").replace("--", "/", 1)
    main = _read_text(folder / "refs" / "main", 100).strip()
    for snapshot in walk.folders(folder / "snapshots"):
        revision = "" if snapshot.name == main else f"@{snapshot.name}"
        files = {name: path for name, path in walk.files(snapshot) if is_gguf_name(name)}
        yield from _of_repository(HUB, files, repository, "", revision)


def _of_repositories(program: str, files: dict[str, Path], prefix: str) -> Iterator[FoundModel]:
    """Models of files below ``publisher/model/``; those that lie higher are named by their files."""
    by_repository: dict[str, dict[str, Path]] = {}
    for name, path in files.items():
        if is_gguf_name(name):
            parts = name.split("/")
            repository = "/".join(parts[:2]) if len(parts) > 2 else "/".join(parts[:-1])
            by_repository.setdefault(repository, {})[name] = path
    for repository, own in by_repository.items():
        yield from _of_repository(program, own, repository, prefix, "")


def _of_repository(
    program: str, files: dict[str, Path], repository: str, prefix: str, revision: str
) -> Iterator[FoundModel]:
    for name, label in labels_of_models(files).items():
        shown = f"{prefix}{repository}:{label}{revision}" if repository else f"{prefix}{label}"
        mmproj = best_mmproj(name, [each for each in files if is_mmproj_name(each)])
        yield _of_files(shown, program, name, files, files[mmproj] if mmproj else None, type_of_name(name))


def _of_files(
    shown: str, program: str, name: str, files: dict[str, Path], mmproj: Path | None, kind: str
) -> FoundModel:
    try:
        parts = names_of_parts(name)
    except VlfitError:
        parts = [name]
    missing = [part for part in parts if part not in files]
    problem = f"{len(missing)} of its {len(parts)} parts are not here" if missing else ""
    sizes = [_size(files[part]) for part in parts if part in files]
    if mmproj is not None:
        sizes.append(_size(mmproj))
    return FoundModel(shown, files[name], program, mmproj, kind, problem, sum(max(each, 0) for each in sizes))


_LISTERS: dict[str, Callable[[_Walk, Path], Iterator[FoundModel]]] = {
    STORE: _list_store,
    OLLAMA: _list_ollama,
    LM_STUDIO: _list_lm_studio,
    LLAMA_CPP: _list_llama_cpp,
    HUB: _list_hub,
}


def _size(path: Path) -> int:
    """Bytes of a file; -1 if there is none."""
    try:
        return path.stat().st_size if path.is_file() else -1
    except OSError:
        return -1


def _read_text(path: Path, most: int) -> str:
    """The text of a regular file of at most ``most`` bytes; "" for any other."""
    try:
        if not path.is_file() or path.stat().st_size > most:  # a pipe would not end
            return ""
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_json(path: Path) -> Any:
    """The JSON in a small file; None if there is none."""
    try:
        return json.loads(_read_text(path, _MAX_JSON_BYTES))
    except (ValueError, RecursionError):
        return None
