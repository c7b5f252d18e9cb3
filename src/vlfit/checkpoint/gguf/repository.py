"""Repositories of GGUF files on the hub: what they hold, and the download of a quantization and its mmproj.

A name is ``org/name:TYPE``, as llama.cpp and Ollama write it, with ``@revision`` behind it if need be. Files
go into the hub's cache, where other programs find them, too.
"""

from dataclasses import dataclass

from vlfit.api.progress import ByteProgress
from vlfit.checkpoint import hub
from vlfit.checkpoint.gguf.file_names import (
    best_mmproj,
    bits_of_type,
    is_gguf_name,
    is_mmproj_name,
    labels_of_models,
    names_of_parts,
    same_type,
    stem_of,
)
from vlfit.checkpoint.gguf.places import FoundModel, cached_models_of
from vlfit.checkpoint.transfer import StderrProgress, download_blobs, without_hub_progress_bars
from vlfit.errors import HubModelNotFound, NotDownloaded, UsageError, VlfitError

_SHOWN_TYPES = 12  # in an error
_MAX_FILES = 5000


@dataclass(frozen=True, slots=True)
class HubFile:
    """A name of the hub with a type. ``type``: as typed; the stem of a file's name stands for that file."""

    repository: str
    type: str
    revision: str | None = None

    @property
    def name(self) -> str:
        """``org/name:TYPE`` or ``org/name:TYPE@revision``."""
        return f"{self.repository}:{self.type}{f'@{self.revision}' if self.revision else ''}"

    @property
    def repository_name(self) -> str:
        """``org/name`` or ``org/name@revision``."""
        return f"{self.repository}{f'@{self.revision}' if self.revision else ''}"


@dataclass(frozen=True, slots=True)
class Quantization:
    """One model of a repository: a text model's file, or its parts in order.

    ``type``: what stands behind the colon in its name. ``sizes``: bytes of ``files``.
    """

    type: str
    files: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all its files."""
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class GgufRepository:
    """The GGUF files of a repository.

    ``name``: ``org/name`` or ``org/name@revision``. ``quantizations``: the largest first. ``mmprojs``: names
    of files with a vision tower, and their bytes.
    """

    name: str
    quantizations: tuple[Quantization, ...]
    mmprojs: dict[str, int]

    def choose(self, kind: str) -> Quantization:
        """The quantization of the type ``kind``. Raises ``UsageError``, which lists the types."""
        repository, _ = hub.split_name(self.name)
        for each in self.quantizations:
            if same_type(each.type, kind) or stem_of(each.files[0]).lower() == kind.lower():
                return each
        types = [each.type for each in self.quantizations]
        bits = bits_of_type(kind)
        types.sort(key=lambda each: abs(bits_of_type(each) - bits))
        shown = ", ".join(types[:_SHOWN_TYPES])
        raise UsageError(
            f"{repository} has no GGUF file of the type {kind}",
            f"It has {shown}. Write {repository}:{types[0]}.",
        )

    def mmproj_for(self, quantization: Quantization) -> str | None:
        """The file with the vision tower for ``quantization``; None if there is none."""
        return best_mmproj(quantization.files[0], self.mmprojs)

    def files_of(self, quantization: Quantization) -> list[str]:
        """The files to download for ``quantization``, the vision tower's at the end."""
        mmproj = self.mmproj_for(quantization)
        return [*quantization.files, *([mmproj] if mmproj else [])]

    def name_of(self, quantization: Quantization) -> str:
        """``org/name:TYPE`` of ``quantization``, with the repository's revision."""
        repository, revision = hub.split_name(self.name)
        return HubFile(repository, quantization.type, revision).name


def parse_name(text: str) -> HubFile | None:
    """The parts of ``org/name:TYPE`` or ``org/name:TYPE@revision``; None for any other text."""
    head, at, revision = text.partition("@")
    repository, colon, kind = head.partition(":")
    kind = kind.removesuffix(".gguf")
    if not colon or not kind or len(kind) > 200 or not all(each.isalnum() or each in "._-" for each in kind):
        return None
    if not hub.is_hub_name(f"{repository}{at}{revision}"):
        return None
    return HubFile(repository, kind, revision or None)


def may_be_gguf(name: str) -> bool:
    """Whether ``org/name`` is a repository of GGUF files by its name."""
    return "gguf" in name.partition("@")[0].lower()


def list_repository(name: str) -> GgufRepository:
    """The GGUF files of ``org/name`` or ``org/name@revision``; asks the hub.

    Raises ``HubModelNotFound`` if there are none, ``NotDownloaded`` with ``HF_HUB_OFFLINE``, and other errors
    of ``HubError``.
    """
    from huggingface_hub import constants

    repository, _ = hub.split_name(name)
    if constants.HF_HUB_OFFLINE:
        raise NotDownloaded(
            f"what {name} holds is not known here, and HF_HUB_OFFLINE forbids asking the hub",
            "Unset HF_HUB_OFFLINE, or name a file that is here (vlfit models lists them).",
        )
    sizes: dict[str, int] = {}
    for entry in hub.list_files(name):
        if is_gguf_name(entry.path) and len(sizes) < _MAX_FILES:
            sizes[entry.path] = entry.size
    found = _quantizations(sizes)
    if not found:
        raise hub.no_file_error(repository, "no GGUF file of a whole model")
    return GgufRepository(name, found, {path: size for path, size in sizes.items() if is_mmproj_name(path)})


def _quantizations(sizes: dict[str, int]) -> tuple[Quantization, ...]:
    """The models among a repository's files; those that lack a part are left out."""
    found = []
    for name, label in labels_of_models(sizes).items():
        try:
            parts = names_of_parts(name)
        except VlfitError:
            continue
        if all(part in sizes for part in parts):
            found.append(Quantization(label, tuple(parts), tuple(sizes[part] for part in parts)))
    return tuple(sorted(found, key=lambda each: (-each.bytes, each.type)))


def cached_file(name: str) -> FoundModel | None:
    """The model ``org/name:TYPE`` in the hub's cache, complete; None if it is not there. No network."""
    wanted = parse_name(name)
    if wanted is None:
        return None
    for each in cached_models_of(wanted.repository, wanted.revision):
        if not each.problem and has_type(each, wanted.type):
            return each
    return None


def has_type(model: FoundModel, kind: str) -> bool:
    """Whether ``kind``, in a name, means this model of the hub's cache: its type, or its file's stem."""
    label = model.name.partition(":")[2].partition("@")[0]
    return same_type(label, kind) or stem_of(model.path.name).lower() == kind.lower()


def download(name: str, progress: ByteProgress | None = None) -> FoundModel:
    """Download ``org/name:TYPE`` with its mmproj into the hub's cache, and return where it is.

    Files that are there are kept, partial ones resumed, and all are checked against the hub's SHA-256.
    ``progress``: called with bytes done and in total; None: they are printed on stderr. With
    ``HF_HUB_OFFLINE`` nothing is downloaded: raises ``NotDownloaded`` if it is not here. Also raises
    ``HubError`` or a subclass.
    """
    from huggingface_hub import HfApi, constants, snapshot_download

    wanted = _parsed(name)
    if constants.HF_HUB_OFFLINE:
        cached = cached_file(name)
        if cached is None:
            raise NotDownloaded(
                f"{name} is not on this computer, and HF_HUB_OFFLINE forbids downloading it",
                "Unset HF_HUB_OFFLINE, or name a file that is here (vlfit models lists them).",
            )
        return cached
    repository = list_repository(wanted.repository_name)
    chosen = repository.choose(wanted.type)
    files = repository.files_of(chosen)
    line = StderrProgress(name)
    try:
        with without_hub_progress_bars():
            commit = HfApi().model_info(wanted.repository, revision=wanted.revision).sha
            download_blobs(wanted.repository, commit or "main", files, progress or line)
            # Only links them, unless the repository has changed meanwhile.
            snapshot_download(wanted.repository, revision=wanted.revision, allow_patterns=files)
    except VlfitError:
        raise
    except Exception as error:
        raise hub.hub_error(error, wanted.repository_name) from error
    finally:
        line.close()
    found = cached_file(repository.name_of(chosen))
    if found is None:
        raise HubModelNotFound(
            f"{name} was downloaded, but is not whole in {constants.HF_HUB_CACHE}", "Run the command again."
        )
    return found


def download_size(name: str) -> tuple[int, int]:
    """Bytes of all files of ``org/name:TYPE`` and its mmproj, and how many of these are in the cache already.

    Asks the hub. Raises the errors of ``list_repository``.
    """
    wanted = _parsed(name)
    repository = list_repository(wanted.repository_name)
    chosen = repository.choose(wanted.type)
    total = chosen.bytes + repository.mmprojs.get(repository.mmproj_for(chosen) or "", 0)
    found = cached_file(name)
    return total, min(found.bytes, total) if found else hub.partial_bytes(wanted.repository, total)


def _parsed(name: str) -> HubFile:
    wanted = parse_name(name)
    if wanted is None:
        raise UsageError(
            f"{name!r} is not the name of a GGUF file on the hub", "Names look like org/name:Q4_K_M."
        )
    return wanted
