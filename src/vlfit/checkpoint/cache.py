"""Checkpoints in the local cache of the model hub: which are there, how large, how to remove one.

The layout is huggingface_hub's (``models--org--name`` with blobs, snapshots and refs).
"""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from vlfit.checkpoint import hub
from vlfit.checkpoint.gptq_awq import ByInputs
from vlfit.checkpoint.headers import TensorInfo, read_headers
from vlfit.checkpoint.quantization import FP8, INT4, INT8, CompressedFormat, Quantization
from vlfit.checkpoint.tensors import (
    PACKED_SUFFIX,
    TensorGroup,
    codes_per_word,
    group_tensors,
    is_quantization_metadata,
    normalize_gptq_awq,
)
from vlfit.errors import NotDownloaded, VlfitError
from vlfit.models.registry import read_config


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A checkpoint that is on this disk, whole or in part.

    ``name`` is what ``--model`` takes. ``bytes`` is disk space; ``weight_bytes`` and ``parameters`` are read
    from the headers, and 0 while the checkpoint is not complete. ``format`` is ``bf16``, ``fp8``, ... or
    ``unknown``. ``sees``: it has a vision tower.
    """

    name: str
    folder: Path
    bytes: int
    format: str
    complete: bool
    weight_bytes: int = 0
    parameters: int = 0
    sees: bool = True


def describe(name: str, folder: Path) -> LocalModel | None:
    """What ``folder`` holds, or None when vlfit does not run it."""
    try:
        config = read_config(folder)
    except VlfitError:
        return None
    size = _size(folder)
    form = _promised(config.quantization)
    sees = config.vision is not None
    unfinished = LocalModel(name, folder, size, form, complete=False, sees=sees)
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


def _promised(quantization: Quantization | None) -> str:
    """What a checkpoint that is not all here will be in, as far as its config tells."""
    if quantization is None:
        return "unknown"
    if isinstance(quantization, CompressedFormat):
        forms = {scheme.form for scheme in quantization.schemes}
        return next(form for form in (INT4, FP8, INT8) if form in forms)
    if isinstance(quantization, ByInputs):
        return INT4 if quantization.most.bits == 4 else INT8
    return FP8


def weights_format(tensors: dict[str, TensorInfo], quantization: Quantization | None) -> str:
    """What the text layers are in: ``int4``, ``fp8`` or ``int8`` if any is, else what most bytes are in.

    That is ``bf16``, ``fp16`` or ``fp32``; or ``int8``, if the embedding is most of the checkpoint.
    """
    return format_of(group_tensors(tensors, quantization))


def format_of(kinds: Iterable[TensorGroup]) -> str:
    """``weights_format`` of a model that has these kinds of tensors."""
    sizes: dict[str, int] = {}
    in_layers: set[str] = set()
    names = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
    for kind in kinds:
        info = kind.one
        form = kind.form or names.get(info.dtype, info.dtype.lower())
        sizes[form] = sizes.get(form, 0) + len(kind.names) * info.bytes
        if ".layers." in info.name:
            in_layers.add(form)
    narrow = next((form for form in (INT4, FP8, INT8) if form in in_layers), None)
    return narrow or max(sizes, key=lambda form: sizes[form], default="unknown")


def count_parameters(tensors: dict[str, TensorInfo], quantization: Quantization | None) -> int:
    """Number of weights; scales and zero points of quantized layers are not weights."""
    return parameters_of(group_tensors(tensors, quantization), quantization)


def parameters_of(kinds: Iterable[TensorGroup], quantization: Quantization | None) -> int:
    """``count_parameters`` of a model that has these kinds of tensors."""
    return sum(len(kind.names) * count_weights(kind.one, quantization) for kind in kinds)


def count_weights(info: TensorInfo, quantization: Quantization | None) -> int:
    """How many weights one tensor holds: several in each word of a packed one, none in a scale."""
    if is_quantization_metadata(info.name):
        return 0
    packed = info.name.endswith(PACKED_SUFFIX)
    return info.count * (codes_per_word(info.name, quantization) if packed else 1)


def cached_models() -> list[LocalModel]:
    """Every checkpoint in the cache that vlfit runs, by name. Older commits are named ``org/name@commit``."""
    models: list[LocalModel] = []
    for repository in cache_root().glob("models--*--*"):
        name = repository.name.removeprefix("models--").replace("--", "/", 1)
        blobs = repository / "blobs"
        partial = sum(path.stat().st_size for path in blobs.glob("*.incomplete") if path.is_file())
        for snapshot in (path for path in repository.glob("snapshots/*") if path.is_dir()):
            revision = _revisions(repository, snapshot.name)[0]
            model = describe(name if revision == "main" else f"{name}@{revision}", snapshot)
            if model is not None and not model.complete:
                # A cut-off download keeps what it has in blobs that belong to no snapshot yet.
                model = replace(model, bytes=model.bytes + partial)
            if model is not None:
                models.append(model)
    return sorted(models, key=lambda model: model.name)


def remove(name: str) -> int:
    """Delete ``org/name`` (all of it) or ``org/name@revision`` from the cache; the bytes that this freed.

    Raises ``NotDownloaded`` when it is not there.
    """
    folder = find(name)
    if folder.parent.name == "snapshots":
        from huggingface_hub import scan_cache_dir

        # Files that other revisions share must stay, which huggingface_hub knows how to tell.
        repository = folder.parent.parent
        before = _size(repository)
        scan_cache_dir(cache_root()).delete_revisions(folder.name).execute()
        return before - (_size(repository) if repository.is_dir() else 0)
    before = _size(folder)
    shutil.rmtree(folder)
    shutil.rmtree(folder.parent / ".locks" / folder.name, ignore_errors=True)
    return before


def find(name: str) -> Path:
    """What ``remove`` would delete: the folder of a repository, or of one snapshot of it.

    Raises ``NotDownloaded`` when it is not there.
    """
    repository, revision = hub.split_name(name)
    folder = cache_root() / f"models--{repository.replace('/', '--')}"
    if revision:
        snapshots = [path for path in folder.glob("snapshots/*") if path.is_dir()]
        folder = next((path for path in snapshots if revision in _revisions(folder, path.name)), folder / "-")
    if not folder.is_dir():
        raise NotDownloaded(f"{name} is not in {cache_root()}", "vlfit models lists what is there.")
    return folder


def cache_root() -> Path:
    """Where huggingface_hub keeps what it downloads (``HF_HUB_CACHE``, or ``hub`` in ``HF_HOME``)."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _revisions(repository: Path, commit: str) -> list[str]:
    """What ``commit`` may be called, best name first: ``main``, other branches and tags, the commit."""
    refs = repository / "refs"
    names = [
        path.relative_to(refs).as_posix()
        for path in sorted(refs.rglob("*"))
        if path.is_file() and path.read_text(encoding="utf-8").strip() == commit
    ]
    return [*sorted(names, key=lambda name: name != "main"), commit]


def _size(folder: Path) -> int:
    """Bytes of the files under ``folder``, each blob counted once however many links lead to it."""
    files = {path.resolve() for path in folder.rglob("*") if path.is_file()}
    return sum(path.stat().st_size for path in files)
