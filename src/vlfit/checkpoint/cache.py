"""Checkpoints in the model hub's local cache: list and delete them.

The layout is huggingface_hub's: ``models--org--name`` with blobs, snapshots and refs.
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from vlfit.checkpoint import hub
from vlfit.checkpoint.gptq_awq import GptqAwqFormat
from vlfit.checkpoint.headers import read_headers
from vlfit.checkpoint.quantization import FP8, INT4, INT8, CompressedFormat, Quantization
from vlfit.checkpoint.tensors import count_parameters, normalize_gptq_awq, weights_format
from vlfit.errors import NotDownloaded, VlfitError
from vlfit.models.registry import read_config


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A checkpoint on disk, whole or in part.

    ``name``: as ``--model`` takes it. ``bytes``: disk space, of an interrupted download too.
    ``weight_bytes``, ``parameters`` (a count): from the headers; 0 for an incomplete checkpoint. ``format``:
    weights format, ``bf16``, ``fp8``, ... or ``unknown``. ``has_vision``: the model has a vision tower (in
    ``--json``: ``sees``).
    """

    name: str
    folder: Path
    bytes: int
    format: str
    complete: bool
    weight_bytes: int = 0
    parameters: int = 0
    has_vision: bool = True


def read_local_model(name: str, folder: Path) -> LocalModel | None:
    """Describe the checkpoint in ``folder`` from its config and headers; ``name`` is only stored.

    None if the config is missing, invalid or of a model that the native engine does not run. A checkpoint
    with missing files or broken headers counts as incomplete.
    """
    try:
        config = read_config(folder)
    except VlfitError:
        return None
    size = bytes_on_disk(folder)
    form = _declared_format(config.quantization)
    sees = config.vision is not None
    unfinished = LocalModel(name, folder, size, form, complete=False, has_vision=sees)
    if not hub.is_complete(folder):
        return unfinished
    try:
        config, tensors = normalize_gptq_awq(config, read_headers(folder))
    except VlfitError:
        return unfinished
    weights = sum(info.bytes for info in tensors.values())
    count = count_parameters(tensors, config.quantization)
    form = weights_format(tensors, config.quantization)
    return LocalModel(name, folder, size, form, True, weights, count, sees)


def _declared_format(quantization: Quantization | None) -> str:
    """Weights format of an incomplete checkpoint, from its config."""
    if quantization is None:
        return "unknown"
    if isinstance(quantization, CompressedFormat):
        forms = {scheme.format for scheme in quantization.schemes}
        return next(form for form in (INT4, FP8, INT8) if form in forms)
    if isinstance(quantization, GptqAwqFormat):
        return INT4 if quantization.default.bits == 4 else INT8
    return FP8


def cached_models() -> list[LocalModel]:
    """The checkpoints in the hub's cache that the native engine runs, sorted by name; incomplete ones too.

    One for each snapshot of a repository: ``org/name`` for ``main``, ``org/name@revision`` for any other.
    """
    models: list[LocalModel] = []
    for repository in cache_root().glob("models--*--*"):
        name = repository.name.removeprefix("models--").replace("--", "/", 1)
        blobs = repository / "blobs"
        partial = sum(path.stat().st_size for path in blobs.glob("*.incomplete") if path.is_file())
        for snapshot in (path for path in repository.glob("snapshots/*") if path.is_dir()):
            revision = _revision_names(repository, snapshot.name)[0]
            model = read_local_model(name if revision == "main" else f"{name}@{revision}", snapshot)
            if model is not None and not model.complete:
                # Blobs of an interrupted download belong to no snapshot yet.
                model = replace(model, bytes=model.bytes + partial)
            if model is not None:
                models.append(model)
    return sorted(models, key=lambda model: model.name)


def cached_repository_names() -> list[str]:
    """``org/name`` of every model repository in the hub's cache, sorted, whether vlfit runs it or not."""
    try:
        folders = [path.name for path in cache_root().glob("models--*--*")]
    except OSError:
        return []
    return sorted(name.removeprefix("models--").replace("--", "/", 1) for name in folders)


def remove_folder(folder: Path) -> int:
    """Delete a repository or snapshot of the hub's cache; return the bytes freed.

    ``folder``: from ``cached_path``. Files that other snapshots share are kept.
    """
    if folder.parent.name == "snapshots":
        from huggingface_hub import scan_cache_dir

        # huggingface_hub keeps the files that other revisions share.
        repository = folder.parent.parent
        before = bytes_on_disk(repository)
        scan_cache_dir(cache_root()).delete_revisions(folder.name).execute()
        return before - (bytes_on_disk(repository) if repository.is_dir() else 0)
    before = bytes_on_disk(folder)
    shutil.rmtree(folder)
    shutil.rmtree(folder.parent / ".locks" / folder.name, ignore_errors=True)
    return before


def cached_path(name: str) -> Path:
    """The folder of the repository ``org/name`` in the hub's cache; of a snapshot for ``org/name@revision``.

    Raises ``NotDownloaded`` if the cache does not have it, ``UsageError`` for any other form of ``name``.
    """
    repository, revision = hub.split_name(name)
    folder = cache_root() / f"models--{repository.replace('/', '--')}"
    if revision:
        snapshots = [path for path in folder.glob("snapshots/*") if path.is_dir()]
        folder = next(
            (path for path in snapshots if revision in _revision_names(folder, path.name)), folder / "-"
        )
    if not folder.is_dir():
        raise NotDownloaded(f"{name} is not in {cache_root()}", "Run vlfit models to list what is there.")
    return folder


def cache_root() -> Path:
    """huggingface_hub's cache: ``HF_HUB_CACHE``, or ``hub`` in ``HF_HOME``."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _revision_names(repository: Path, commit: str) -> list[str]:
    """Names of ``commit``, best first: ``main``, other branches and tags, the commit itself."""
    refs = repository / "refs"
    names = [
        path.relative_to(refs).as_posix()
        for path in sorted(refs.rglob("*"))
        if path.is_file() and path.read_text(encoding="utf-8").strip() == commit
    ]
    return [*sorted(names, key=lambda name: name != "main"), commit]


def bytes_on_disk(folder: Path) -> int:
    """Bytes of all files under ``folder``; a file that several symbolic links point to counts once."""
    files = {path.resolve() for path in folder.rglob("*") if path.is_file()}
    return sum(path.stat().st_size for path in files)
