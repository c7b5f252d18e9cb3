"""The example card of the documents, and plans for it."""

from dataclasses import replace

from vlfit.machine.cards import machine_with_card
from vlfit.machine.model import Machine
from vlfit.plan.model_lookup import alternatives_to, find_models
from vlfit.plan.planner import find_plan
from vlfit.plan.plans import Plan
from vlfit.plan.wishes import Wishes
from vlfit.units import MIB

# 8151 MiB, of which a desktop under Windows holds 951.
EXAMPLE = machine_with_card("RTX 5060", desktop=951 * MIB, wsl2=True)


def planned(name: str, machine: Machine = EXAMPLE, **wishes: int | str | None) -> Plan:
    """The plan that ``vlfit plan`` makes."""
    wish = Wishes(**wishes)  # type: ignore[arg-type]
    found = find_models(name, wish.weights)
    return find_plan(
        found.exact, machine, wish, lambda: alternatives_to(found.exact, name), found.smaller_variants
    )


def with_free(free: int) -> Machine:
    """The example with ``free`` bytes of memory."""
    gpu = EXAMPLE.gpus[0]
    return replace(EXAMPLE, gpus=(replace(gpu, free=free, desktop=gpu.total - free),))
