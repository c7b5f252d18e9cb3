"""``vlfit serve`` with several models: from their names to a backend of all, the first of them loaded."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from vlfit.errors import DoesNotFit, UsageError, VlfitError

if TYPE_CHECKING:
    from vlfit.api.engine_options import EngineOptions
    from vlfit.api.progress import LoadProgress
    from vlfit.backends.base import Backend
    from vlfit.checkpoint.source import Checkpoint
    from vlfit.cli.printing import Printer
    from vlfit.machine.model import Gpu
    from vlfit.plan.actual import Expectation
    from vlfit.server.models.all_models import AllModels
    from vlfit.server.models.on_demand import OnDemandModel
    from vlfit.settings import Settings

ALL_HERE = "all-here"
MAX_MODELS = 64


@dataclass(frozen=True, slots=True)
class ModelNames:
    """Models to serve by name, the first by default.

    ``optional``: those that do not fit are left out (``all-here``). ``pull``: requests may download others.
    """

    names: tuple[str, ...]
    optional: bool = False
    pull: bool = False


log = logging.getLogger("vlfit.server")


def split_names(arguments: Sequence[str], models: str | None) -> list[str]:
    """The names of the models to serve, each once: the arguments, then those of ``--models``.

    ``models``: names with commas between them; ``all-here`` stays as it is. Raises ``UsageError`` for an
    empty name and for more than ``MAX_MODELS``.
    """
    names = [*arguments, *(models.split(",") if models is not None else ())]
    if not all(name.strip() for name in names):
        raise UsageError(f"--models {models} has an empty name", "Write --models 4B-FP8,2B-FP8 or all-here.")
    names = list(dict.fromkeys(name.strip() for name in names))
    if len(names) > MAX_MODELS:
        raise UsageError(f"{len(names)} models are named", f"Name at most {MAX_MODELS}.")
    return names


def check_backend(settings: "Settings", names: Sequence[str]) -> None:
    """Raise ``UsageError`` if the backend cannot serve several models, or the options are for one alone."""
    what = f"{len(names)} models" if len(names) > 1 else "--pull" if settings.pull else "--models"
    if settings.backend in ("vllm", "transformers", "remote"):
        why = {
            "vllm": "vLLM is a process of one model",
            "transformers": "its models cannot sleep",
            "remote": "that server has its models already",
        }[settings.backend]
        raise UsageError(
            f"--backend {settings.backend} does not go with {what}: {why}",
            "Name one model, or leave --backend out.",
        )
    if settings.offload is not None:
        raise UsageError(
            f"--offload does not go with {what}: layers in RAM are planned for one model",
            "Leave --offload out: of several models those that do not fit sleep in RAM.",
        )


def names_here(names: Sequence[str], printer: "Printer", device: str | None = None) -> list[str]:
    """``names`` with the models on this computer in place of ``all-here``, the best that fits first.

    Left out: text-only models, incomplete downloads, and mini with its copies, which have to be named. If
    nothing is left: ``auto``, which refuses mini.
    """
    if ALL_HERE not in names:
        return list(names)
    from vlfit.checkpoint.source import local_models
    from vlfit.plan.gguf_shelf import MAX_SECONDS, read_shelf
    from vlfit.plan.model_choice import choose_checkpoint, ranked_here
    from vlfit.plan.processors import this_computer

    machine = this_computer(device)
    found, shelf = local_models(), read_shelf(machine, MAX_SECONDS)
    best = choose_checkpoint(machine, found, shelf=shelf.models).model
    here = [each.name for each in ranked_here(machine, found, shelf.models)]
    here.sort(key=lambda name: name != best)
    left = f"; {shelf.left} GGUF models were not looked at" if shelf.left else ""
    printer.note(f"on this computer: {', '.join(here) or 'no model but mini'}{left}")
    named = [name for each in names for name in (here if each == ALL_HERE else [each])]
    return list(dict.fromkeys(named))[:MAX_MODELS] or ["auto"]


def load_models(
    settings: "Settings",
    named: ModelNames,
    options: "EngineOptions",
    gpus: "tuple[Gpu, ...]",
    load_first: "Callable[[str, EngineOptions], Backend]",
    *,
    takes_media: bool = False,
) -> "AllModels":
    """Plan all models, load the first with ``load_first``, and return the backend of all.

    ``gpus``: as before any model is loaded. ``takes_media``: the server takes documents or videos. Raises
    ``DoesNotFit`` for a model that does not fit even alone, on a GPU before any is loaded, unless such models
    are ``optional``: then it warns. Also raises ``UsageError`` if two names mean models of one name, and what
    opening a checkpoint raises.
    """
    from vlfit.server.models.all_models import AllModels
    from vlfit.server.models.on_demand import OnDemandBackend
    from vlfit.server.models.pulls import Pulls
    from vlfit.server.models.served_models import ServedModel
    from vlfit.server.models.switched_models import SwitchedModels, free_bytes

    factory = ModelFactory(options, gpus, takes_media=takes_media)
    planned: list[tuple[str, OnDemandModel]] = []
    for name in named.names:
        try:
            planned.append((name, factory.plan(name)))
        except VlfitError as error:
            if not named.optional:
                raise
            log.warning("warning: %s is left out: %s", name, error.message)
    if not planned:
        raise DoesNotFit("no model on this computer fits", "vlfit plan shows what would.")
    _check_names_differ([model.checkpoint.name for _, model in planned])
    first_name, first = planned[0]
    loaded = load_first(first_name, first.options)
    factory.learn_from(loaded)
    backends: list[tuple[ServedModel, OnDemandBackend]] = []
    for name, model in planned:
        backend = OnDemandBackend(factory.in_ram(model), loaded.device)
        backends.append((ServedModel(backend, (name,), backend.context), backend))
    backends[0][1].adopt(loaded)
    uuid = loaded.account().settings.gpu_uuid
    models = SwitchedModels(
        backends, partial(free_bytes, loaded.device, uuid), idle_sleep=settings.idle_sleep
    )

    def serve(name: str) -> None:
        backend = OnDemandBackend(factory.plan(name), loaded.device)
        models.add(ServedModel(backend, (), backend.context), backend)

    if named.pull:
        models.pulls = Pulls(serve)
    return AllModels(models)


class ModelFactory:
    """Makes ``OnDemandModel`` of names, with the options of the command line.

    ``options``: as for one model, but without ``idle_sleep``: the line puts models to sleep. ``gpus``: as
    before any model was loaded; empty on a CPU. ``takes_media``: as for ``load_models``.
    """

    def __init__(
        self, options: "EngineOptions", gpus: "tuple[Gpu, ...]", *, takes_media: bool = False
    ) -> None:
        self._takes_media = takes_media
        self._options = replace(options, idle_sleep=None)
        self._gpus = gpus
        self._value_bytes, self._cpu_16_bit, self._cpu_stored = 4, False, False
        self._on_cpu = options.device == "cpu" or not gpus

    def learn_from(self, loaded: "Backend") -> None:
        """Take from the first loaded model how numbers are computed here, which plans in RAM depend on."""
        running = loaded.account().settings
        self._value_bytes, self._cpu_16_bit = running.value_bytes, running.cpu_16_bit
        self._cpu_stored = running.cpu_stored
        self._on_cpu = running.device == "cpu"

    def plan(self, name: str) -> "OnDemandModel":
        """The model ``name``, which is on this computer, with its plan. Reads headers alone.

        Raises ``DoesNotFit`` if it would not fit even alone.
        """
        from vlfit.checkpoint.source import open_checkpoint
        from vlfit.machine.gpu import gpu_of_device
        from vlfit.plan.native.model_set import own_bytes, plan_on_gpu
        from vlfit.server.models.on_demand import OnDemandModel

        checkpoint, options, planned = open_checkpoint(name), self._options, 0
        gpu = None if self._on_cpu else gpu_of_device(self._gpus, "", options.device)
        if gpu is not None:
            options, plan = plan_on_gpu(checkpoint, gpu, options)
            planned = own_bytes(plan.lines)
        model = OnDemandModel(
            checkpoint, options, planned, partial(_open, checkpoint, options), self._expectation
        )
        return self.in_ram(model)

    def in_ram(self, model: "OnDemandModel") -> "OnDemandModel":
        """``model`` with its plan in RAM, on a CPU; elsewhere ``model`` itself. Raises as ``plan``."""
        from vlfit.machine.host import read_host
        from vlfit.plan.native.model_set import own_bytes, plan_in_ram

        if not self._on_cpu:
            return model
        plan = plan_in_ram(
            model.checkpoint,
            model.options,
            value_bytes=self._value_bytes,
            cpu_16_bit=self._cpu_16_bit,
            cpu_stored=self._cpu_stored,
            host=read_host(),
        )
        return replace(model, planned_bytes=own_bytes(plan.lines))

    def _expectation(self, loaded: "Backend") -> "Expectation":
        from vlfit.backends.held_memory import expected_memory

        return expected_memory(loaded, self._gpus, takes_media=self._takes_media)


def _open(checkpoint: "Checkpoint", options: "EngineOptions", progress: "LoadProgress") -> "Backend":
    from vlfit.backends.opening import BackendSpec, open_backend
    from vlfit.loading.preload import read_ahead

    read_ahead(checkpoint.folder)
    return open_backend(BackendSpec(model=checkpoint, options=options), progress)


def _check_names_differ(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"{names.count(name)} of the models are called {name}, by which requests would name them",
                "Name it once, or rename the folder of one.",
            )
