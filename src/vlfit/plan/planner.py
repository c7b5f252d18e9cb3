"""``find_plan``: the best plan for a machine, a model and wishes. Wishes are kept, all else is chosen."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from vlfit.machine.cards import KERNEL_CAPABILITY, machine_with_card
from vlfit.machine.desktop import memory_advice
from vlfit.machine.model import Gpu, Machine
from vlfit.plan import calibration
from vlfit.plan.backends import CPU, cost_model, cost_model_on
from vlfit.plan.changes import (
    RefusedChoice,
    cheapest_changes,
    describe_accuracy_loss,
    describe_conversion,
    freeable_bytes,
)
from vlfit.plan.cost_model import CostModel
from vlfit.plan.gpus import emptiest_gpu
from vlfit.plan.ledger import Line, held_by_others, total_bytes
from vlfit.plan.plans import Choice, Placement, Plan, Remark
from vlfit.plan.preference import CONTEXTS, IMAGE_TOKENS, SEQUENCES, modelled_bytes, safety_margin
from vlfit.plan.shapes import Model
from vlfit.plan.wishes import Wishes
from vlfit.units import GIB, MIB, format_bytes

# Common cards of other sizes.
_CARDS = (("12 GB card", "RTX 3060 12GB"), ("16 GB card", "RTX 5060 Ti 16GB"), ("24 GB card", "RTX 3090"))


def find_plan(
    models: list[Model],
    machine: Machine,
    wishes: Wishes,
    others: Callable[[], list[Model]] = list,
    smaller_variants: Sequence[Callable[[], Model]] = (),
) -> Plan:
    """The best plan for one of ``models``: the same model in several formats. It may not fit: ``Plan.fits``.

    ``smaller_variants``: functions that make the model with more parts quantized, the largest first;
    called only if none of ``models`` fits, and ignored by vLLM and transformers. ``others``: returns
    models to propose instead; called only if the plan does not fit. Raises ``UsageError`` for wishes that
    no model or the backend cannot meet, ``DeviceError`` without a GPU (the native engine and vLLM plan
    for RAM then), ``DoesNotFit`` if offloaded layers do not fit the RAM.
    """
    costs = cost_model_on(wishes, machine)
    placement = costs.place(models, machine, wishes, smaller_variants if costs.runs_quantized_parts else ())
    if placement.choice.headroom < 0:
        native = costs if costs is CPU else cost_model(None)
        return refused_plan(placement, machine, costs, native, tuple(others()))
    return fitting_plan(placement, machine, costs)


def fitting_plan(placement: Placement, machine: Machine, costs: CostModel) -> Plan:
    """The plan of a ``placement`` that fits, with command and remarks. Whether it fits is not checked."""
    choice = placement.choice
    remarks = (*placement.notes, *_remarks(choice, placement.gpu, costs), *placement.remarks)
    plan = _plan(placement, machine, costs, remarks)
    command = costs.command(plan, machine)
    if command is None:
        return plan
    return replace(plan, command=command.words, environment=dict(command.environment), flags=command.flags)


def refused_plan(
    placement: Placement, machine: Machine, costs: CostModel, native: CostModel, others: tuple[Model, ...]
) -> Plan:
    """The plan of a ``placement`` that does not fit, with the cheapest changes and no command.

    ``costs``: cost model of its backend; ``native``: of the native engine, which may be proposed instead, as
    may be ``others``: other models and other formats.
    """
    choice, gpu = placement.choice, placement.gpu
    deficit = -choice.headroom
    refused = RefusedChoice(choice.model, gpu, machine.host, costs, native, choice.settings, deficit, others)
    remarks = (*placement.notes, *_tower_remarks(choice.model), *placement.remarks)
    plan = _plan(placement, machine, costs, remarks, deficit)
    return replace(plan, changes=cheapest_changes(refused, CONTEXTS, IMAGE_TOKENS, SEQUENCES))


def _plan(
    placement: Placement, machine: Machine, costs: CostModel, remarks: tuple[Remark, ...], deficit: int = 0
) -> Plan:
    choice, gpu = placement.choice, placement.gpu
    speed = costs.speed(choice.model, gpu, choice.settings, deficit)
    if speed is not None and not deficit:
        measured = costs.measured(speed, choice.model, gpu, choice.settings)
        if measured is not None:
            speed, remarks = measured[0], (*remarks, measured[1])
    return Plan(
        model=choice.model,
        backend=costs.name,
        gpu=gpu,
        wsl2=machine.host.wsl2,
        settings=choice.settings,
        ledger=choice.lines,
        speed=speed,
        command=None,
        remarks=remarks,
        gpus=placement.gpus,
        needs=costs.needs(choice),
        is_quick=costs.is_quick(choice.model, speed),
    )


def _remarks(choice: Choice, gpu: Gpu, costs: CostModel) -> tuple[Remark, ...]:
    """Remarks on a plan that fits: no vision tower, little memory left, which weights were rounded."""
    lines: tuple[Line, ...] = choice.lines
    left, margin = gpu.total - total_bytes(lines), safety_margin(lines)
    remarks = list(_tower_remarks(choice.model))
    if left < margin:
        measure = "; vlfit plan --calibrate measures the machine" if costs.is_calibrated else ""
        text = (
            f"Little is left: {left / MIB:,.0f} MiB beside the reserve, and the "
            f"{modelled_bytes(lines) / MIB:,.0f} MiB that are modelled may be {margin / MIB:,.0f} MiB more. "
            f"Close what you can{measure}."
        )
        remarks.append(Remark(text, "little_is_left"))
    options = choice.model.convert_options
    if options:
        text = (
            f"Nothing more exact fits with such a context and pictures: {describe_conversion(options)}. "
            f"{describe_accuracy_loss(options)}"
        )
        remarks.append(Remark(text, "weights_rounded"))
    return tuple(remarks)


def _tower_remarks(model: Model) -> tuple[Remark, ...]:
    """Why a GGUF model takes no pictures, if a vision tower beside it was left out."""
    if not model.without_tower:
        return ()
    return (Remark(f"It reads text only, as {model.without_tower}.", "without_tower"),)


def what_if_machines(machine: Machine, gpu: Gpu | None = None) -> Iterator[tuple[str, Machine]]:
    """(description, machine) of variants of ``machine``: browser closed, no WSL2, no desktop, larger cards.

    Each has one GPU: ``gpu`` with more memory free, or a larger card. ``gpu`` None: the one that the native
    engine is planned on. Variants that free nothing are left out, and so are cards that are not over 1 GiB
    larger. Raises ``DeviceError`` without a GPU.
    """
    gpu = gpu or emptiest_gpu(machine, KERNEL_CAPABILITY)
    for tip in memory_advice(gpu, machine.host):
        if tip.kind == "browser" and tip.freed_bytes is not None:
            yield (
                f"browser closed (frees {format_bytes(tip.freed_bytes)})",
                _machine_with_freed(machine, gpu, tip.freed_bytes),
            )
    held = held_by_others(gpu)
    if machine.host.wsl2:
        freed = min(held, calibration.WSL2_HIDES.bytes)
        linux = _machine_with_freed(machine, gpu, freed)
        host = replace(machine.host, wsl2=False, display="x11")
        what = f"native Linux instead of WSL2 (frees about {format_bytes(freed)})"
        yield what, replace(linux, host=host)
    freed = freeable_bytes(gpu, machine.host)
    if freed:
        how = "Windows on another GPU" if machine.host.wsl2 else "no desktop on this card"
        yield f"headless: {how} (frees {format_bytes(freed)})", _machine_with_freed(machine, gpu, freed)
    for size, name in _CARDS:
        larger = machine_with_card(name, held, machine.host.wsl2)
        if larger.gpus[0].total > gpu.total + GIB:
            yield f"{size} ({name}), as much held", replace(larger, host=machine.host)


def _machine_with_freed(machine: Machine, gpu: Gpu, freed: int) -> Machine:
    """``machine`` with ``freed`` bytes more on ``gpu``, and no other GPU."""
    held = held_by_others(gpu) - freed
    emptier = replace(gpu, free=gpu.total - held, desktop=held, processes=())
    return replace(machine, gpus=(emptier,))
