"""From a machine, a model and wishes to a plan: what is fixed stays so, the rest is chosen in a stated order.

Knows: which models may be tried, and what is said of the choice. Does not know how it
is made (``candidates.py``), what a line costs (``ledger.py``) or how to get memory back (``changes.py``).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vlfit.checkpoint.catalog import FORMATS
from vlfit.checkpoint.quantization import INT4
from vlfit.errors import DeviceError, UsageError
from vlfit.machine.cards import card
from vlfit.machine.desktop import advice
from vlfit.machine.model import Gpu, Machine
from vlfit.machine.survey import OLDEST
from vlfit.plan import calibration
from vlfit.plan.calibration import with_bandwidth
from vlfit.plan.candidates import (
    CONTEXTS,
    IMAGE_TOKENS,
    SEQUENCES,
    air,
    best,
    coarser,
    fewest_waiting,
    is_ample,
    modelled,
    within_limits,
)
from vlfit.plan.changes import Change, Refused, can_be_freed, cheapest, cost_of, in_words
from vlfit.plan.commands import start_of
from vlfit.plan.ledger import NATIVE, TRANSFORMERS, VLLM, Line, Settings, held_by_others
from vlfit.plan.native.ram import AUTO, check_ram, offload_of
from vlfit.plan.shapes import Model
from vlfit.plan.speed import Speed, predict
from vlfit.plan.vllm import placement as groups
from vlfit.plan.vllm.command import Flag, remarks
from vlfit.plan.vllm.cost import LEAST_PIXELS, pixels_of_token
from vlfit.plan.vllm.flags import FLOAT32, Version, check_card, chosen_version
from vlfit.plan.vllm.placement import Taken, best_of_groups
from vlfit.plan.wishes import Wishes
from vlfit.units import GIB, MIB, format_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """One model on one GPU: settings, ledger, speed, and what to change if it does not fit.

    ``gpus``: all cards of a plan for vLLM; ``gpu`` is the fullest of them, whose ledger it is.
    """

    model: Model
    backend: str
    gpu: Gpu
    wsl2: bool
    settings: Settings
    ledger: tuple[Line, ...]
    speed: Speed | None
    command: tuple[str, ...] | None
    environment: dict[str, str] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    flags: tuple[Flag, ...] = ()
    remarks: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()

    @property
    def total(self) -> int:
        """Bytes of all lines."""
        return sum(line.bytes for line in self.ledger)

    @property
    def headroom(self) -> int:
        """Bytes left over; negative: the deficit."""
        return self.gpu.total - self.total

    @property
    def fits(self) -> bool:
        return self.headroom >= 0

    @property
    def rank(self) -> tuple[Any, ...]:
        """Sorts plans, best first: what fits, sees pictures, keeps to the floors, is exact, knows more..."""
        settings = self.settings
        preference = (settings.context, settings.image_tokens, settings.sequences)
        format_rank = FORMATS.index(self.model.weights) if self.model.weights in FORMATS else len(FORMATS)
        return (
            not self.fits,
            self.model.vision is None,
            not is_ample(settings, self.model),
            self.model.head.form == INT4,  # nobody measured what such rounding costs
            -self.model.parameters,
            tuple(-value for value in preference),
            format_rank,
        )


def plan(
    models: list[Model],
    machine: Machine,
    wishes: Wishes,
    others: Callable[[], list[Model]] = list,
    makers: Sequence[Callable[[], Model]] = (),
) -> Plan:
    """The best plan for one of ``models`` (one model in several formats); it may not fit, and then says why.

    ``makers`` make what is converted at the cost of exactness, the mildest first; they are asked only where
    nothing else fits. ``others`` gives models that may be proposed instead; it is asked if the plan does not
    fit. Where there is no GPU a plan is for vLLM's build for processors; other backends raise
    ``DeviceError``. Raises ``UsageError`` for wishes that this model cannot have.
    """
    if wishes.backend == VLLM and not machine.gpus:
        from vlfit.plan.vllm.cpu import plan_in_ram  # it is made of what stands here

        return plan_in_ram(models, machine, wishes)
    gpu = emptiest(machine)
    if wishes.backend == VLLM:
        return _for_vllm(models, machine, gpu, wishes, others)
    _check_age(gpu)
    runnable = [
        (model, _backend(model, wishes)) for model in able(models, lambda each: _backend(each, wishes))
    ]
    found = best(runnable, wishes, gpu)
    # transformers is planned with bf16 alone.
    rounded = makers if wishes.backend in (None, NATIVE) else ()
    if found.headroom < 0 and rounded:
        found = coarser(rounded, wishes, gpu) or found  # a refusal is of what keeps its exactness
    if found.headroom < 0 and wishes.offload == AUTO:
        further = [(make(), NATIVE) for make in rounded]
        found = fewest_waiting(runnable, wishes, gpu) or fewest_waiting(further, wishes, gpu) or found
    model, backend, settings = found.model, found.backend, found.settings
    if found.headroom >= 0 and settings.offload:
        check_ram(offload_of(model, settings.offload), machine.host)
    if found.headroom < 0:
        instead = tuple(others())
        return unfit(model, backend, machine, gpu, settings, found.lines, None, others=instead)
    return finished(model, backend, machine, gpu, settings, found.lines, None)


def _for_vllm(
    models: list[Model], machine: Machine, gpu: Gpu, wishes: Wishes, others: Callable[[], list[Model]]
) -> Plan:
    """A plan for vLLM, over equal cards where there are several."""
    version = chosen_version(wishes.vllm_version)
    wishes, said = within_limits(models, wishes)
    wishes = replace(wishes, vllm=replace(wishes.vllm, version=version.text))

    def check(model: Model) -> None:
        check_wishes(model, wishes)
        check_card(model, gpu.name, gpu.compute_capability, version)

    taken = best_of_groups([(model, VLLM) for model in able(models, check)], machine, wishes)
    found = taken.choice
    if found.headroom < 0:
        instead = tuple(others())
        made = unfit(
            found.model, VLLM, machine, taken.gpu, found.settings, found.lines, version, taken, others=instead
        )
    else:
        made = finished(found.model, VLLM, machine, taken.gpu, found.settings, found.lines, version, taken)
    return replace(made, remarks=(*said, *made.remarks))


def emptiest(machine: Machine) -> Gpu:
    """The GPU with the most free memory, of those that torch has kernels for if there are any.

    Raises ``DeviceError`` where there is none.
    """
    if not machine.gpus:
        raise DeviceError(
            f"there is no GPU to plan for: {machine.no_gpu_reason}",
            'A plan is for a GPU\'s memory. Name the card: --gpu "RTX 5060" --desktop 951MiB (vlfit machine '
            "--cards lists them), or --machine FILE. Without a GPU everything runs on the processor, with no "
            "plan: vlfit caption PICTURE.",
        )
    usable = [gpu for gpu in machine.gpus if not _is_too_old(gpu)]
    return with_bandwidth(max(usable or machine.gpus, key=lambda gpu: gpu.free))


def _is_too_old(gpu: Gpu) -> bool:
    # (0, 0): the driver does not tell.
    return (0, 0) < gpu.compute_capability < OLDEST


def _check_age(gpu: Gpu) -> None:
    """Raises ``DeviceError`` for a card that torch has no kernels for; vLLM's are checked by its version."""
    if _is_too_old(gpu):
        have, oldest = (".".join(map(str, each)) for each in (gpu.compute_capability, OLDEST))
        raise DeviceError(
            f"{gpu.name} has compute capability {have}; torch has kernels from {oldest} on",
            "Plan for another card: vlfit machine --cards lists them.",
        )


def able(models: list[Model], check: Callable[[Model], object]) -> list[Model]:
    """Those that ``check`` does not refuse. Raises its first ``UsageError`` if it refuses all."""
    found, refusals = [], []
    for model in models:
        try:
            check(model)
            found.append(model)
        except UsageError as error:
            refusals.append(error)
    if refusals and not found:
        raise refusals[0]
    return found


def _backend(model: Model, wishes: Wishes) -> str:
    backend = wishes.backend or NATIVE
    if backend == TRANSFORMERS and model.weights != FORMATS[0]:
        raise UsageError(
            f"{model.name} is in {model.weights}; transformers is planned for with bf16 weights only",
            "leave out --backend, or add --weights bf16",
        )
    return backend


def check_wishes(model: Model, wishes: Wishes) -> None:
    """Raises ``UsageError`` for what vLLM does not do with ``model``: weights of few bits computed with in
    float32, and pictures smaller than its processor makes them.
    """
    if wishes.vllm.dtype == FLOAT32 and model.weights != FORMATS[0]:
        raise UsageError(
            f"{model.name} is in {model.weights}, which vLLM does not compute with in float32",
            "leave out --dtype, or add --weights bf16",
            param="dtype",
        )
    if model.vision is None or wishes.image_tokens is None:
        return
    least = LEAST_PIXELS // pixels_of_token(model.vision)
    if wishes.image_tokens < least:
        raise UsageError(
            f"--image-tokens is {wishes.image_tokens}; vLLM enlarges pictures of fewer than {least} tokens",
            f"use --image-tokens {least} or more",
            param="image_tokens",
        )


def finished(
    model: Model,
    backend: str,
    machine: Machine,
    gpu: Gpu,
    settings: Settings,
    lines: tuple[Line, ...],
    version: Version | None,
    taken: Taken | None = None,
) -> Plan:
    """The plan with these settings, its command, speed and remarks; it is not asked whether it fits."""
    gpus = () if taken is None else taken.gpus
    start = start_of(model, backend, settings, lines, machine, gpu, version, gpus)
    return Plan(
        model=model,
        backend=backend,
        gpu=gpu,
        wsl2=machine.host.wsl2,
        settings=settings,
        ledger=lines,
        speed=predict(model, gpu, backend, settings),
        command=None if start is None else start.words,
        environment={} if start is None else start.environment,
        flags=() if start is None else start.flags,
        remarks=(
            *_about(model, backend, lines, gpu),
            *_in_ram(model, settings),
            *_cards(machine, settings, taken),
            *_remarks(version, settings, gpu),
        ),
        gpus=gpus,
    )


def _about(model: Model, backend: str, lines: tuple[Line, ...], gpu: Gpu) -> tuple[str, ...]:
    """What to know of a plan that fits: that it leaves next to nothing, what is rounded for it."""
    left, wanted = gpu.total - sum(line.bytes for line in lines), air(lines)
    remarks = []
    if left < wanted:
        remarks.append(
            f"Little is left: {left / MIB:,.0f} MiB beside the reserve, and the {modelled(lines) / MIB:,.0f} "
            f"MiB that are modelled may be {wanted / MIB:,.0f} MiB more. Close what you can"
            f"{'' if backend == VLLM else '; vlfit plan --calibrate measures the machine'}."
        )
    if model.convert_options:
        remarks.append(
            f"Nothing more exact fits: {in_words(model.convert_options)}. {cost_of(model.convert_options)}"
        )
    return tuple(remarks)


def _in_ram(model: Model, settings: Settings) -> tuple[str, ...]:
    """What it means that layers wait in RAM."""
    if not settings.offload:
        return ()
    apart = offload_of(model, settings.offload)
    return (
        f"{apart.words} and are copied to the card for every pass; the card holds "
        f"{apart.frees / MIB:,.0f} MiB less for it.",
    )


def unfit(
    model: Model,
    backend: str,
    machine: Machine,
    gpu: Gpu,
    settings: Settings,
    lines: tuple[Line, ...],
    version: Version | None,
    taken: Taken | None = None,
    *,
    others: tuple[Model, ...] = (),
) -> Plan:
    """A plan that does not fit, and what would make it fit; ``others`` may be taken instead."""
    deficit = sum(line.bytes for line in lines) - gpu.total
    refused = Refused(model, gpu, machine.host, backend, settings, deficit, others)
    return Plan(
        model=model,
        backend=backend,
        gpu=gpu,
        wsl2=machine.host.wsl2,
        settings=settings,
        ledger=lines,
        speed=predict(model, gpu, backend, settings, deficit),
        command=None,
        changes=cheapest(refused, CONTEXTS, IMAGE_TOKENS, SEQUENCES),
        remarks=(*_cards(machine, settings, taken), *_remarks(version, settings, gpu)),
        gpus=() if taken is None else taken.gpus,
    )


def _cards(machine: Machine, settings: Settings, taken: Taken | None) -> tuple[str, ...]:
    """Which cards are taken, and which are not, where there are several."""
    if taken is None or len(machine.gpus) < 2:
        return ()
    return tuple(groups.remarks(machine, taken.group, settings))


def _remarks(version: Version | None, settings: Settings, gpu: Gpu) -> tuple[str, ...]:
    return () if version is None else tuple(remarks(version, settings, capability=gpu.compute_capability))


# What would fit if the machine were another: a browser closed, no desktop, no WSL2, a larger card.
#
# Knows: which differences are worth a row, and how many bytes each is. Does not know plans.


# Common cards of other sizes.
_CARDS = (("12 GB card", "RTX 3060 12GB"), ("16 GB card", "RTX 5060 Ti 16GB"), ("24 GB card", "RTX 3090"))


def variants(machine: Machine) -> Iterator[tuple[str, Machine]]:
    """Descriptions and machines. What frees an amount that the driver does not tell has no row."""
    gpu = emptiest(machine)
    for tip in advice(gpu, machine.host):
        if tip.kind == "browser" and tip.frees is not None:
            yield f"browser closed (frees {format_bytes(tip.frees)})", _with(machine, gpu, tip.frees)
    held = held_by_others(gpu)
    if machine.host.wsl2:
        freed = min(held, calibration.WSL2_HIDES.bytes)
        linux = _with(machine, gpu, freed)
        host = replace(machine.host, wsl2=False, display="x11")
        what = f"native Linux instead of WSL2 (frees about {format_bytes(freed)})"
        yield what, replace(linux, host=host)
    freed = can_be_freed(gpu, machine.host)
    if freed:
        how = "Windows on another GPU" if machine.host.wsl2 else "no desktop on this card"
        yield f"headless: {how} (frees {format_bytes(freed)})", _with(machine, gpu, freed)
    for size, name in _CARDS:
        larger = card(name, held, machine.host.wsl2)
        if larger.gpus[0].total > gpu.total + GIB:
            yield f"{size} ({name}), as much held", replace(larger, host=machine.host)


def _with(machine: Machine, gpu: Gpu, freed: int) -> Machine:
    """``machine`` with ``freed`` bytes more on ``gpu``, and no other GPU."""
    held = held_by_others(gpu) - freed
    emptier = replace(gpu, free=gpu.total - held, desktop=held, processes=())
    return replace(machine, gpus=(emptier,))
