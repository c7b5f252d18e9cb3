"""``plan``: from a machine, a model and wishes to a plan. What is fixed stays so, the rest is chosen."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from vlfit.machine.cards import card
from vlfit.machine.desktop import advice
from vlfit.machine.model import Gpu, Machine
from vlfit.plan import calibration
from vlfit.plan.assembly import fitting_plan, refused_plan
from vlfit.plan.backends import check_wishes, cost_model
from vlfit.plan.changes import can_be_freed
from vlfit.plan.gpus import emptiest
from vlfit.plan.ledger import held_by_others
from vlfit.plan.plans import Plan
from vlfit.plan.shapes import Model
from vlfit.plan.wishes import Wishes
from vlfit.units import GIB, format_bytes

# Common cards of other sizes.
_CARDS = (("12 GB card", "RTX 3060 12GB"), ("16 GB card", "RTX 5060 Ti 16GB"), ("24 GB card", "RTX 3090"))


def plan(
    models: list[Model],
    machine: Machine,
    wishes: Wishes,
    others: Callable[[], list[Model]] = list,
    makers: Sequence[Callable[[], Model]] = (),
) -> Plan:
    """The best plan for one of ``models`` (one model in several formats); it may not fit, and then says why.

    ``makers`` make what is converted at the cost of exactness, the mildest first; they are called only where
    nothing else fits. ``others`` gives models that may be proposed instead; it is called if the plan does not
    fit. Raises ``DeviceError`` where there is no GPU and the backend needs one, and ``UsageError`` for wishes
    that this model or backend cannot have.
    """
    costs = cost_model(check_wishes(wishes).backend)
    placement = costs.place(models, machine, wishes, makers if costs.runs_rounded else ())
    if placement.choice.headroom < 0:
        return refused_plan(placement, machine, costs, cost_model(None), tuple(others()))
    return fitting_plan(placement, machine, costs)


def variants(machine: Machine) -> Iterator[tuple[str, Machine]]:
    """Other machines, each with a description: a browser closed, no desktop, no WSL2, larger cards."""
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
