"""The GGUF models on this computer, and which run and fit: for ``vlfit models``, and to choose from."""

import logging
import time
from dataclasses import dataclass
from math import inf
from typing import Any

from vlfit.checkpoint.gguf.places import FoundModel, Search, found_models
from vlfit.checkpoint.source import is_mini
from vlfit.errors import DeviceError, UsageError, VlfitError
from vlfit.machine.model import Machine
from vlfit.plan.model_lookup import found_gguf_model
from vlfit.plan.planner import find_plan
from vlfit.plan.processors import LEAST_TOKENS_PER_S, ram_as_gpu
from vlfit.plan.shapes import Model
from vlfit.plan.wishes import Wishes

logger = logging.getLogger(__name__)

MAX_SECONDS = 5.0  # for all models; one of Qwen3-VL-4B's size takes 60 ms
CHOICE_SECONDS = 1.0  # for a choice among them, at the start of a command


@dataclass(frozen=True, slots=True)
class ShelvedModel:
    """A GGUF model here, as far as its header says.

    ``architecture``: "" if it cannot be read. ``model``: None if vlfit does not run it; ``problem`` then says
    why. ``headroom``: bytes that its plan leaves free on this computer's GPU, negative if it does not fit;
    None without a GPU or a model. ``looked_at``: False if time was over before its header was read.
    """

    found: FoundModel
    architecture: str = ""
    model: Model | None = None
    problem: str = ""
    headroom: int | None = None
    looked_at: bool = True

    @property
    def type(self) -> str:
        """Its type by the file's name, else the one that most weights have; "" if neither is known."""
        return self.found.type or (self.model.gguf_type if self.model is not None else "")

    @property
    def has_vision(self) -> bool | None:
        """Whether it takes pictures, as vlfit runs it; None if that is unknown, or vlfit does not run it."""
        return None if self.model is None else self.model.vision is not None


def shelved_models(machine: Machine, search: Search | None = None) -> list[ShelvedModel]:
    """The GGUF models in the folders of all programs, as they fit ``machine``. Never raises.

    If ``search`` is bounded (the default), headers are read for ``MAX_SECONDS``; the rest is listed by name.
    """
    search = search or Search()
    found = found_models(search)
    until = time.monotonic() + (MAX_SECONDS if search.bounded else inf)
    return [
        _describe(each, machine)
        if each.problem or time.monotonic() < until
        else ShelvedModel(each, looked_at=False)
        for each in found
    ]


@dataclass(frozen=True, slots=True)
class Shelf:
    """The GGUF models here that vlfit runs, as far as there was time to read their headers.

    ``left``: how many were not looked at.
    """

    models: tuple[Model, ...] = ()
    left: int = 0


def read_shelf(machine: Machine, seconds: float = CHOICE_SECONDS) -> Shelf:
    """The GGUF models in the folders of all programs that vlfit runs, for a choice. Never raises.

    Mini's copies in vlfit's store, which have to be named, are left out. Headers are read for ``seconds``:
    of files that are not too large for ``machine`` before others, of those with a vision tower beside them
    before others, and then of the largest first.
    """
    found = [each for each in found_models() if not each.problem and not is_mini(each.name)]
    most = _most_bytes(machine)
    found.sort(key=lambda each: (each.bytes > most, each.mmproj is None, -each.bytes))
    until = time.monotonic() + seconds
    models: list[Model] = []
    for number, each in enumerate(found):
        if time.monotonic() > until:
            return Shelf(tuple(models), len(found) - number)
        try:
            models.append(found_gguf_model(each))
        except Exception as error:  # a file by whoever: ``vlfit models`` says what is wrong with it
            logger.debug("%s is no choice: %s", each.name, error)
    return Shelf(tuple(models))


def _most_bytes(machine: Machine) -> float:
    """Bytes of files beyond which a model surely does not fit, or without a GPU is too slow."""
    if machine.gpus:
        return max(gpu.free for gpu in machine.gpus)
    ram = ram_as_gpu(machine)
    # Each token reads all weights once.
    return min(ram.free, inf if ram.bandwidth is None else ram.bandwidth / LEAST_TOKENS_PER_S)


def _describe(found: FoundModel, machine: Machine) -> ShelvedModel:
    if found.problem:
        return ShelvedModel(found, problem=found.problem)
    from vlfit.checkpoint.gguf.skim import skim_file  # imports numpy

    architecture = ""
    try:
        architecture = skim_file(found.path).header.architecture
        model = found_gguf_model(found)
    except VlfitError as error:
        return ShelvedModel(found, architecture, problem=error.message)
    except Exception as error:  # a file by whoever: it must not hide all others
        problem = f"reading it fails ({type(error).__name__}: {error})"
        return ShelvedModel(found, architecture, problem=" ".join(problem.split()))
    try:
        headroom = find_plan([model], machine, Wishes()).headroom
    except (DeviceError, UsageError):
        headroom = None
    return ShelvedModel(found, architecture, model, headroom=headroom)


def shelved_to_json(each: ShelvedModel) -> dict[str, Any]:
    """A model as ``vlfit models --json`` prints it: the fields of other checkpoints, and ``gguf``."""
    model = each.model
    return {
        "name": each.found.name,
        "folder": str(each.found.path),
        "bytes": each.found.bytes,
        "format": each.type or "unknown",
        "complete": not each.found.problem,
        "weight_bytes": model.file_bytes if model is not None else 0,
        "parameters": model.parameters if model is not None else 0,
        "sees": each.has_vision,
        "gguf": {
            "program": each.found.program,
            "names": list(each.found.names),
            "architecture": each.architecture or None,
            "mmproj": str(each.found.mmproj) if each.found.mmproj is not None else None,
            "problem": each.problem or None,
            "looked_at": each.looked_at,
            "without_tower": (each.model.without_tower or None) if each.model is not None else None,
            "headroom": each.headroom,
        },
    }
