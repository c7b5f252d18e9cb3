"""What a machine of the cluster has: vlfit, the model's files, the pictures. Asked before a model is loaded.

Knows files and versions. Does not know how the question travels to a machine (``cluster.py``).
"""

import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path

from vlfit._version import __version__
from vlfit.backends.opening import Wanted
from vlfit.checkpoint import hub
from vlfit.checkpoint.config import ModelConfig, no_eyes
from vlfit.checkpoint.source import MINI, Checkpoint, locate
from vlfit.errors import ClusterError, VlfitError
from vlfit.tasks.batch.item import Item

_SAMPLES = 3  # pictures that a machine is asked for
_LOOKED_AT = 64  # items at most among which readable ones are sought


@dataclass(frozen=True, slots=True)
class Sample:
    """A picture and what its bytes are where the batch was started. None: they need not be the same, as of an
    address on the network.
    """

    item: Item
    digest: bytes | None


@dataclass(frozen=True, slots=True)
class Sight:
    """What a machine answered. ``lacking``: why the model cannot be opened there, if so. ``unread``: the key
    of a sample that it has not, or has otherwise.
    """

    node: str
    version: str
    lacking: VlfitError | None
    unread: str | None


def samples_of(items: Iterable[Item]) -> tuple[Sample, ...] | None:
    """The first pictures that can be read here; there may be none among the first of many. None: no items."""
    found: list[Sample] = []
    first = list(islice(items, _LOOKED_AT))
    if not first:
        return None
    for item in first:
        with suppress(VlfitError):
            data = item.read()
            found.append(Sample(item, _digest(data) if item.path is not None else None))
        if len(found) == _SAMPLES:
            break
    return tuple(found)


def look(wanted: Wanted, samples: tuple[Sample, ...], folder: str) -> Sight:
    """Answer for the machine that this runs on."""
    with suppress(OSError):
        os.chdir(folder)
    unread = next((sample.item.key for sample in samples if not _has(sample)), None)
    return Sight(platform.node(), __version__, missing_model(wanted), unread)


def missing_model(wanted: Wanted) -> VlfitError | None:
    """Why this machine cannot open the model; None if nothing says so yet. Fetches nothing: that a hundred
    machines each download the same gigabytes is nobody's wish.
    """
    if wanted.kind == "remote":
        return None
    name = str(wanted.model)
    if hub.is_hub_name(name) and not Path(name).expanduser().is_dir():
        # A backend may want other files than ours; the config is there if any of them are.
        folder = hub.cached_folder(name, hub.any_model(lambda folder: folder))
        if folder is None:
            return ClusterError(
                f"{platform.node()} does not have {name}",
                f"run there: vlfit pull {name}; or give a folder that all machines see",
            )
    else:
        try:
            _, folder = locate(name)
        except VlfitError as error:
            return ClusterError(
                f"{platform.node()} cannot open the model: {error.message}",
                "give a folder that all machines see, or the name of a model that each has pulled",
            )
    return _without_eyes(name, folder) if wanted.kind == "native" else None


def _without_eyes(name: str, folder: Path) -> VlfitError | None:
    try:
        return no_eyes(name) if ModelConfig.read(folder).vision is None else None
    except VlfitError as error:
        return error


def other_version(node: str, theirs: str, ours: str) -> ClusterError:
    """Records of two versions may differ: all machines need the same."""
    return ClusterError(
        f"{node} has vlfit {theirs}, and the batch was started by {ours}",
        f"install the same there: pip install vlfit=={ours}",
    )


def for_elsewhere(wanted: Wanted) -> Wanted:
    """``wanted`` as other machines take it: its folder by the absolute path, as a relative one means another
    place there; and nobody in this process to tell things to.
    """
    if wanted.kind == "remote" or wanted.model is None:
        return wanted
    model = wanted.model
    if isinstance(model, Checkpoint):
        everywhere = model.name == MINI or hub.is_hub_name(model.name)
        model = model.name if everywhere else model.folder
    path = Path(model).expanduser()
    vllm = None if wanted.vllm is None else replace(wanted.vllm, tell=None)
    return replace(wanted, model=str(path.resolve()) if path.is_dir() else str(model), vllm=vllm)


def _has(sample: Sample) -> bool:
    try:
        data = sample.item.read()
    except VlfitError:
        return False
    return sample.digest is None or _digest(data) == sample.digest


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()
