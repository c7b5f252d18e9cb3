"""From a placement to the ``Plan`` that says it: command, speed and remarks, or what would make it fit."""

from dataclasses import replace

from vlfit.machine.model import Gpu, Machine
from vlfit.plan.changes import Refused, cheapest, conversion_cost, conversion_words
from vlfit.plan.cost_model import CostModel
from vlfit.plan.ledger import Line, total_bytes
from vlfit.plan.plans import Choice, Placement, Plan
from vlfit.plan.preference import CONTEXTS, IMAGE_TOKENS, SEQUENCES, modelled_bytes, safety_margin
from vlfit.plan.shapes import Model
from vlfit.units import MIB


def fitting_plan(placement: Placement, machine: Machine, costs: CostModel) -> Plan:
    """The plan of ``placement``, with the command that starts it; whether it fits is not checked."""
    choice = placement.choice
    remarks = (*placement.notes, *_remarks(choice, placement.gpu, costs), *placement.remarks)
    plan = _plan(placement, machine, costs, remarks)
    command = costs.command(plan, machine)
    if command is None:
        return plan
    return replace(plan, command=command.words, environment=dict(command.environment), flags=command.flags)


def refused_plan(
    placement: Placement, machine: Machine, costs: CostModel, own: CostModel, others: tuple[Model, ...]
) -> Plan:
    """The plan of a ``placement`` that does not fit, and the cheapest changes that would make it fit.

    ``own``: vlfit's own engine. ``others``: models that may be proposed instead.
    """
    choice, gpu = placement.choice, placement.gpu
    deficit = -choice.headroom
    refused = Refused(choice.model, gpu, machine.host, costs, own, choice.settings, deficit, others)
    plan = _plan(placement, machine, costs, (*placement.notes, *placement.remarks), deficit)
    return replace(plan, changes=cheapest(refused, CONTEXTS, IMAGE_TOKENS, SEQUENCES))


def _plan(
    placement: Placement, machine: Machine, costs: CostModel, remarks: tuple[str, ...], deficit: int = 0
) -> Plan:
    choice, gpu = placement.choice, placement.gpu
    return Plan(
        model=choice.model,
        backend=costs.name,
        gpu=gpu,
        wsl2=machine.host.wsl2,
        settings=choice.settings,
        ledger=choice.lines,
        speed=costs.speed(choice.model, gpu, choice.settings, deficit),
        command=None,
        remarks=remarks,
        gpus=placement.gpus,
    )


def _remarks(choice: Choice, gpu: Gpu, costs: CostModel) -> tuple[str, ...]:
    """What to know of a plan that fits: that little is left, and what was rounded for it."""
    lines: tuple[Line, ...] = choice.lines
    left, margin = gpu.total - total_bytes(lines), safety_margin(lines)
    remarks = []
    if left < margin:
        measure = "; vlfit plan --calibrate measures the machine" if costs.is_calibrated else ""
        remarks.append(
            f"Little is left: {left / MIB:,.0f} MiB beside the reserve, and the "
            f"{modelled_bytes(lines) / MIB:,.0f} MiB that are modelled may be {margin / MIB:,.0f} MiB more. "
            f"Close what you can{measure}."
        )
    options = choice.model.convert_options
    if options:
        remarks.append(f"Nothing more exact fits: {conversion_words(options)}. {conversion_cost(options)}")
    return tuple(remarks)
