"""Download of checkpoints from the model hub into its local cache, and the errors of that.

huggingface_hub does HTTP, tokens and the cache (``HF_HOME``, ``HF_ENDPOINT``, ``HF_TOKEN``,
``HF_HUB_OFFLINE``); it is imported only when a hub name is used.
"""

import errno
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from vlfit.api.progress import ByteProgress
from vlfit.checkpoint import pooling_files
from vlfit.checkpoint.headers import INDEX_FILE, shard_names
from vlfit.checkpoint.transfer import (
    FREE_DISK_HINT,
    StderrProgress,
    check_free_bytes,
    download_blobs,
    without_hub_progress_bars,
)
from vlfit.errors import (
    HubAccessDenied,
    HubError,
    HubModelNotFound,
    HubUnreachable,
    NotDownloaded,
    UsageError,
    VlfitError,
)
from vlfit.models.registry import read_config
from vlfit.units import KIB

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
    "chat_template.jinja",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    *pooling_files.FILES,
    "LICENSE",
    INDEX_FILE,
)
_PYTHON_FILES = "*.py"
# Files that may hold a tokenizer; the native engine reads only the first kind.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


@dataclass(frozen=True, slots=True)
class FileSelection:
    """What to download of a repository beside its safetensors weights.

    ``small_files``: names or glob patterns. ``tokenizer_files``: names, of which a complete download has at
    least one. ``check``: called with the folder before any weights are downloaded; it must raise for a model
    that the backend does not run. Its result is ignored.
    """

    small_files: tuple[str, ...] = SMALL_FILES
    tokenizer_files: tuple[str, ...] = TOKENIZERS[:1]
    check: Callable[[Path], object] = read_config


NATIVE = FileSelection()


def transformers_files(check: Callable[[Path], object], *, code: bool = False) -> FileSelection:
    """The files to download for transformers. ``check``: as in ``FileSelection``.

    ``code``: also the model's own Python files (for ``trust_remote_code``).
    """
    small = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE")
    return FileSelection((*small, _PYTHON_FILES) if code else small, TOKENIZERS, check)


_MAX_NAME_LENGTH = 96
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")
_RESUMES = "Run the command again: it resumes the download."
_LEAST_BYTES = 256 * KIB  # for what the library itself notes down, and a config
_PATIENCE_S = 10.0  # for the first answer of the hub, where a person waits for a question


def is_hub_name(text: str) -> bool:
    """Whether ``text`` is ``org/name`` or ``org/name@revision`` by the hub's rules, existing or not."""
    name = text.partition("@")[0]
    return (
        _HUB_NAME.fullmatch(text) is not None
        and ".." not in text
        and "--" not in name
        and not name.endswith((".git", ".", "-"))
        and len(name) <= _MAX_NAME_LENGTH
    )


def split_name(name: str) -> tuple[str, str | None]:
    """``org/name`` and the revision of ``org/name@revision``, None without one.

    Raises ``UsageError`` for any other form.
    """
    if not is_hub_name(name):
        raise UsageError(f"{name!r} is not the name of a model on the hub", "Names look like org/name.")
    repository, _, revision = name.partition("@")
    return repository, revision or None


def cached_folder(name: str, files: FileSelection = NATIVE) -> Path | None:
    """The snapshot folder of ``name`` in the hub's cache; None unless it has all ``files``. Uses no network.

    ``name``: ``org/name`` or ``org/name@revision``; raises ``UsageError`` for any other form.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    repository, revision = split_name(name)
    try:
        # Only resolves the revision; ``is_complete`` tells which files are needed.
        folder = Path(
            snapshot_download(
                repository, revision=revision, local_files_only=True, allow_patterns=["config.json"]
            )
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return folder if is_complete(folder, files) else None


def is_complete(folder: Path, files: FileSelection = NATIVE) -> bool:
    """Whether ``folder`` has config.json, a tokenizer file and every shard of its index.

    With Python files in ``files``: also some of them, if the config names any. Does not read the weights.
    """
    if not (folder / "config.json").is_file():
        return False
    if not any((folder / name).is_file() for name in files.tokenizer_files):
        return False
    if _PYTHON_FILES in files.small_files and _lacks_python_files(folder):
        return False
    try:
        return all((folder / name).is_file() for name in shard_names(folder))
    except VlfitError:
        return False


def _lacks_python_files(folder: Path) -> bool:
    """Whether its config names Python files but none is there."""
    named = b'"auto_map"' in (folder / "config.json").read_bytes()
    return named and next(folder.glob(_PYTHON_FILES), None) is None


def ensure_downloaded(name: str, progress: ByteProgress | None = None, files: FileSelection = NATIVE) -> Path:
    """The folder of ``name`` in the hub's cache, downloaded if it is not complete there.

    ``progress`` and ``files``: as for ``download``, which is called, and whose errors are raised, only
    then.
    """
    return cached_folder(name, files) or download(name, progress, files)


def download(name: str, progress: ByteProgress | None = None, files: FileSelection = NATIVE) -> Path:
    """Download the missing files of ``name`` at its revision's newest commit; return the snapshot folder.

    Small files come first, so that no weights of an unsupported model are fetched. ``progress``: called with
    bytes done and in total; None: they are printed on stderr. With ``HF_HUB_OFFLINE`` nothing is downloaded:
    returns the folder if it is complete, else raises ``NotDownloaded``. Also raises ``HubError`` or a
    subclass, and the errors of ``files.check``.
    """
    from huggingface_hub import constants, snapshot_download

    repository, revision = split_name(name)
    if constants.HF_HUB_OFFLINE:
        cached = cached_folder(name, files)
        if cached is None:
            raise offline_error(name)
        return cached
    check_endpoint(constants.ENDPOINT)
    if cached_folder(name, files) is None:
        _check_cache(name)
    line = StderrProgress(name)
    if progress is None:
        print(f"{name}: downloading from {constants.ENDPOINT}", file=sys.stderr, flush=True)
    try:
        with without_hub_progress_bars():
            folder = Path(
                snapshot_download(repository, revision=revision, allow_patterns=list(files.small_files))
            )
            files.check(folder)
            shards = shard_names(folder)
            # The weights of the same commit, whatever is pushed meanwhile.
            download_blobs(repository, folder.name, shards, progress or line)
            snapshot_download(repository, revision=folder.name, allow_patterns=shards)
    except VlfitError:
        raise
    except Exception as error:
        raise hub_error(error, name) from error
    finally:
        line.close()
    return folder


def _check_cache(name: str) -> None:
    """Raise ``HubError`` unless the cache can be written and its disk has room for a small file.

    ``name``: what is downloaded, for the message. Else the library would print warnings of its own first.
    """
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if not os.access(cache, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise hub_error(error, name) from error
    check_disk_space(_LEAST_BYTES)


def download_size(name: str, files: FileSelection = NATIVE) -> tuple[int, int]:
    """Bytes of all files that ``download`` needs, and how many of these bytes are in the cache already.

    Partial files count. Asks the hub for the list of files. Raises ``HubError`` or a subclass, and
    ``UsageError`` if ``name`` is not ``org/name`` or ``org/name@revision``.
    """
    from fnmatch import fnmatch

    from huggingface_hub import constants

    repository, _ = split_name(name)
    entries = list_files(name)
    patterns = (*files.small_files, "model*.safetensors")
    chosen = [entry for entry in entries if any(fnmatch(entry.path, pattern) for pattern in patterns)]
    blobs = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}" / "blobs"
    here = 0
    for entry in chosen:
        blob = blobs / (entry.lfs.sha256 if entry.lfs else entry.blob_id)
        part = blob if blob.is_file() else blob.with_name(f"{blob.name}.incomplete")
        here += part.stat().st_size if part.is_file() else 0
    return sum(entry.size for entry in chosen), here


def list_files(name: str) -> "list[RepoFile]":
    """The files of ``org/name`` or ``org/name@revision``, as the hub lists them.

    Fails at once if the hub cannot be reached, and after ten seconds if it does not answer. Raises
    ``HubError`` or a subclass.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.hf_api import RepoFile

    repository, revision = split_name(name)
    check_endpoint(constants.ENDPOINT)
    try:
        # A person waits: without a network, the library would try for 23 seconds to list the files.
        commit = HfApi().model_info(repository, revision=revision, timeout=_PATIENCE_S).sha
        entries = HfApi().list_repo_tree(repository, revision=commit or revision, recursive=True)
        return [entry for entry in entries if isinstance(entry, RepoFile)]
    except Exception as error:
        raise hub_error(error, name, resumes=False) from error


def cached_bytes(name: str) -> int:
    """Bytes that the repository of ``name`` takes in the cache: all revisions, partial files too.

    Uses no network. Raises ``UsageError`` if ``name`` is not ``org/name`` or ``org/name@revision``.
    """
    from huggingface_hub import constants

    repository, _ = split_name(name)
    blobs = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}" / "blobs"
    return sum(path.stat().st_size for path in blobs.glob("*") if path.is_file())


def partial_bytes(repository: str, most: int) -> int:
    """Bytes of unfinished downloads of ``org/name`` in the cache, at most ``most``."""
    from huggingface_hub import constants

    blobs = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}" / "blobs"
    partial = sum(path.stat().st_size for path in blobs.glob("*.incomplete") if path.is_file())
    return min(partial, most)


def free_disk_bytes() -> int:
    """Free bytes of the disk that the cache is on, or will be once it is created."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE).absolute()
    folder = next(path for path in (cache, *cache.parents) if path.exists())
    return shutil.disk_usage(folder).free


def check_disk_space(needed: int) -> None:
    """Raise ``HubError`` unless ``needed`` bytes are free on the disk of the hub's cache."""
    from huggingface_hub import constants

    check_free_bytes(needed, free_disk_bytes(), constants.HF_HUB_CACHE)


def check_endpoint(endpoint: str) -> None:
    """Raise ``HubError`` for an ``HF_ENDPOINT`` that is not a URL; it would look like a network failure."""
    try:
        parts = urlsplit(endpoint)
        good = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        good = False
    if not good:
        raise endpoint_error(endpoint)


def hub_error(error: Exception, name: str, *, resumes: bool = True) -> HubError:
    """The ``HubError`` for ``error``, which was raised while ``name`` was downloaded.

    ``resumes``: running the command again resumes a download.
    """
    from huggingface_hub import constants, errors

    repository, revision = split_name(name)
    again = f" {_RESUMES}" if resumes else ""
    # "Not in the cache" is the failure of the last resort; the reason is its cause.
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, errors.OfflineModeIsEnabled):
        return offline_error(name)
    if isinstance(error, errors.GatedRepoError):
        return gated_error(repository, constants.ENDPOINT)
    if isinstance(error, errors.RepositoryNotFoundError):
        return no_model_error(repository, constants.ENDPOINT)
    if isinstance(error, errors.RevisionNotFoundError):
        return no_revision_error(repository, revision)
    if isinstance(error, errors.EntryNotFoundError) and isinstance(error, errors.HfHubHTTPError):
        return no_file_error(repository, "no safetensors weights, or not all that its index names")
    if isinstance(error, errors.HfHubHTTPError):
        return status_error(getattr(error.response, "status_code", 0), name, f"Try again later.{again}")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return HubError(
            f"the disk is full: {constants.HF_HUB_CACHE} has no room for {name}",
            f"{FREE_DISK_HINT} {_RESUMES}",
        )
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS, errno.EDQUOT):
        return HubError(
            f"cannot write to {constants.HF_HUB_CACHE}: {error.strerror}",
            "Set HF_HOME to a writable folder.",
        )
    if isinstance(error, NotADirectoryError | FileExistsError):
        return HubError(
            f"the folder {constants.HF_HUB_CACHE} cannot be made: {error.strerror}",
            "Set HF_HOME to a folder that exists or can be made.",
        )
    what = f"the download of {name}" if resumes else f"asking for the files of {name}"
    return HubUnreachable(
        f"{what} from {constants.ENDPOINT} failed: {type(error).__name__}: {error}",
        f"Check the network.{again}",
    )


def endpoint_error(endpoint: str) -> HubError:
    """The error to raise if ``HF_ENDPOINT`` is no URL. ``endpoint``: its value."""
    return HubError(
        f"HF_ENDPOINT is {endpoint!r}, which is not a URL",
        "Unset HF_ENDPOINT, or set a whole address: HF_ENDPOINT=https://huggingface.co.",
    )


def gated_error(repository: str, endpoint: str) -> HubError:
    """The error to raise if ``repository`` is gated. ``endpoint``: the hub's URL, for the hint."""
    return HubAccessDenied(
        f"{repository} is gated: its authors want their terms accepted first",
        f"Accept them at {endpoint}/{repository}, then set HF_TOKEN to your account's token.",
    )


def no_model_error(repository: str, endpoint: str) -> HubError:
    """The error to raise if the hub has no ``repository``, or hides it. ``endpoint``: the hub's URL."""
    return HubModelNotFound(
        f"{endpoint} has no model {repository}, or it is private",
        "Check the spelling (org/name); for a private model set HF_TOKEN.",
    )


def no_revision_error(repository: str, revision: str | None) -> HubError:
    """The error to raise if the hub has ``repository``, but not at this ``revision``."""
    return HubModelNotFound(
        f"{repository} has no revision {revision}", "Leave @revision out for the newest one."
    )


def no_file_error(repository: str, problem: str) -> HubError:
    """The error for a repository without the needed files.

    ``problem``: completes "REPOSITORY has", such as "no safetensors weights".
    """
    return HubModelNotFound(
        f"{repository} has {problem}",
        "Look for another upload of the model: vlfit reads safetensors, and GGUF files by their type "
        "(org/name:Q4_K_M).",
    )


def status_error(status: int, name: str, hint: str) -> HubError:
    """The error for a reply of the hub with HTTP ``status``, on a request for ``name``.

    ``hint``: how to help; ignored for 401 and 403, which are about ``HF_TOKEN``.
    """
    if status in (401, 403):
        return HubAccessDenied(
            f"the hub refused access to {name} (HTTP {status})",
            "Set HF_TOKEN to a token that may read this model, or unset it.",
        )
    return HubUnreachable(f"the hub answered HTTP {status} for {name}", hint)


def offline_error(name: str) -> NotDownloaded:
    """The error for ``name``, which is not complete in the cache while ``HF_HUB_OFFLINE`` is set."""
    return NotDownloaded(
        f"{name} is not complete in the local cache, and HF_HUB_OFFLINE forbids downloading it",
        f"Unset HF_HUB_OFFLINE and run vlfit pull {name}, or use --model mini.",
    )
