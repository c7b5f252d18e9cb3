"""Checkpoints on the model hub: fetched once, resumed when cut off, found again with no network.

HTTP, tokens and the cache are huggingface_hub's, which obeys ``HF_HOME``, ``HF_ENDPOINT``, ``HF_TOKEN`` and
``HF_HUB_OFFLINE`` and is imported only when a hub name is used. Which files are needed, and what each failure
means, is decided here.
"""

import errno
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vlfit.api.progress import ByteProgress
from vlfit.checkpoint.headers import INDEX_FILE, shard_names
from vlfit.checkpoint.transfer import StderrProgress, no_other_bars, transfer
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
    "LICENSE",
    INDEX_FILE,
)
_CODE = "*.py"
# A tokenizer is in one of these; only the first is read by the native engine.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


@dataclass(frozen=True, slots=True)
class Files:
    """What is fetched of a repository beside its weights: ``small`` are names or patterns, and one of
    ``tokenizers`` must be there. ``check`` is given the folder before any weights are fetched, and raises for
    a model that nobody here runs.
    """

    small: tuple[str, ...] = SMALL_FILES
    tokenizers: tuple[str, ...] = TOKENIZERS[:1]
    check: Callable[[Path], object] = read_config


NATIVE = Files()


def any_model(check: Callable[[Path], object], *, code: bool = False) -> Files:
    """Of a model that transformers runs; ``code``: with the Python files that come with it."""
    small = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE")
    return Files((*small, _CODE) if code else small, TOKENIZERS, check)


_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")
_GO_ON = "Run the command again: a download that was cut off goes on where it stopped."


def is_hub_name(text: str) -> bool:
    """Whether ``text`` has the form ``org/name`` or ``org/name@revision``."""
    return _NAME.fullmatch(text) is not None and ".." not in text


def split_name(name: str) -> tuple[str, str | None]:
    """``org/name@revision`` as its two parts. Raises ``UsageError`` for another form."""
    if not is_hub_name(name):
        raise UsageError(f"{name!r} is not the name of a model on the hub", "Names look like org/name.")
    repository, _, revision = name.partition("@")
    return repository, revision or None


def cached_folder(name: str, files: Files = NATIVE) -> Path | None:
    """The folder of ``name`` in the cache when every file that it needs is there. Uses no network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    repository, revision = split_name(name)
    try:
        # Only to resolve the revision: which files have to be there is decided below, by the checkpoint.
        folder = Path(
            snapshot_download(
                repository, revision=revision, local_files_only=True, allow_patterns=["config.json"]
            )
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return folder if is_complete(folder, files) else None


def is_complete(folder: Path, files: Files = NATIVE) -> bool:
    """Whether ``folder`` holds config, tokenizer and every shard. Their contents are not looked at."""
    if not (folder / "config.json").is_file():
        return False
    if not any((folder / name).is_file() for name in files.tokenizers):
        return False
    if _CODE in files.small and _lacks_code(folder):
        return False
    try:
        return all((folder / name).is_file() for name in shard_names(folder))
    except VlfitError:
        return False


def _lacks_code(folder: Path) -> bool:
    """Whether its config names Python files, and none came with it."""
    named = b'"auto_map"' in (folder / "config.json").read_bytes()
    return named and next(folder.glob(_CODE), None) is None


def fetch(name: str, progress: ByteProgress | None = None, files: Files = NATIVE) -> Path:
    """The folder of ``name``: from the cache when complete there, else by ``download``."""
    return cached_folder(name, files) or download(name, progress, files)


def download(name: str, progress: ByteProgress | None = None, files: Files = NATIVE) -> Path:
    """Download what is missing of ``name`` and return its folder in the cache. Asks the hub for the newest.

    The small files come first: weights of a model that vlfit does not run are never fetched. ``progress`` is
    called with bytes done and bytes in all; without it, both are printed on stderr. Raises ``HubError`` or
    one of its kinds, and what ``files.check`` raises, by default ``CheckpointError`` for no Qwen3-VL.
    """
    from huggingface_hub import constants, snapshot_download

    repository, revision = split_name(name)
    if constants.HF_HUB_OFFLINE:
        cached = cached_folder(name, files)
        if cached is None:
            raise _offline(name)
        return cached
    _check_endpoint(constants.ENDPOINT)
    line = StderrProgress(name)
    if progress is None:
        print(f"{name}: downloading from {constants.ENDPOINT}", file=sys.stderr, flush=True)
    try:
        with no_other_bars():
            folder = Path(snapshot_download(repository, revision=revision, allow_patterns=list(files.small)))
            files.check(folder)
            shards = shard_names(folder)
            # The same commit for the weights, whatever is pushed meanwhile.
            transfer(repository, folder.name, shards, progress or line)
            snapshot_download(repository, revision=folder.name, allow_patterns=shards)
    except VlfitError:
        raise
    except Exception as error:
        raise translate(error, name) from error
    finally:
        line.close()
    return folder


def _check_endpoint(endpoint: str) -> None:
    """Without this, a slip in the variable looks like a network that is down."""
    try:
        parts = urlsplit(endpoint)
        good = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        good = False
    if not good:
        raise HubError(
            f"HF_ENDPOINT is {endpoint!r}, which is no URL",
            "Unset HF_ENDPOINT, or write a whole address: HF_ENDPOINT=https://huggingface.co",
        )


def translate(error: Exception, name: str) -> HubError:
    """What ``error``, raised by huggingface_hub while fetching ``name``, means to a person."""
    from huggingface_hub import constants, errors

    repository, revision = split_name(name)
    # "Not in the cache" only says why the last resort failed; the reason is what it was raised from.
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, errors.OfflineModeIsEnabled):
        return _offline(name)
    if isinstance(error, errors.GatedRepoError):
        return HubAccessDenied(
            f"{repository} is gated: its makers want their terms accepted first",
            f"Accept them at {constants.ENDPOINT}/{repository}, then set HF_TOKEN to your account's token.",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return HubModelNotFound(
            f"{constants.ENDPOINT} has no model {repository}, or it is private",
            "Check the spelling (org/name); for a private model set HF_TOKEN.",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return HubModelNotFound(
            f"{repository} has no revision {revision}", "Leave @revision out for the newest."
        )
    if isinstance(error, errors.EntryNotFoundError) and isinstance(error, errors.HfHubHTTPError):
        return HubModelNotFound(
            f"{repository} has no safetensors weights, or not all that its index names",
            "vlfit reads safetensors only (no .bin, no .gguf): look for another upload of the model.",
        )
    if isinstance(error, errors.HfHubHTTPError):
        return _refused(error, name)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return HubError(
            f"the disk is full: {constants.HF_HUB_CACHE} has no room for {name}",
            "Free some space (vlfit models rm NAME), or set HF_HOME to a larger disk. " + _GO_ON,
        )
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS, errno.EDQUOT):
        return HubError(
            f"cannot write to {constants.HF_HUB_CACHE}: {error.strerror}",
            "Set HF_HOME to a folder that you may write to.",
        )
    return HubUnreachable(
        f"the download of {name} from {constants.ENDPOINT} failed: {type(error).__name__}: {error}",
        "Check the network. " + _GO_ON,
    )


def _refused(error: Any, name: str) -> HubError:
    status = getattr(error.response, "status_code", 0)
    if status in (401, 403):
        return HubAccessDenied(
            f"the hub refused access to {name} (HTTP {status})",
            "The token is wrong or may not read this model: set HF_TOKEN to a valid one, or unset it.",
        )
    return HubUnreachable(f"the hub answered HTTP {status} for {name}", "Try again later. " + _GO_ON)


def _offline(name: str) -> NotDownloaded:
    return NotDownloaded(
        f"{name} is not complete in the local cache, and HF_HUB_OFFLINE forbids downloading it",
        f"Unset HF_HUB_OFFLINE and run vlfit pull {name}, or use --model mini.",
    )
