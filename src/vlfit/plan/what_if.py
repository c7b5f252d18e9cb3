"""What would fit if the machine were another: a browser closed, no desktop, no WSL2, a larger card.

Knows: which differences are worth a row, and how many bytes each is. Does not know plans.
"""

from collections.abc import Iterator
from dataclasses import replace

from vlfit.machine.cards import card
from vlfit.machine.desktop import advice
from vlfit.machine.model import Gpu, Machine
from vlfit.plan import calibration
from vlfit.plan.changes import can_be_freed
from vlfit.plan.ledger import held_by_others
from vlfit.plan.search import emptiest
from vlfit.units import GIB, format_bytes

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
