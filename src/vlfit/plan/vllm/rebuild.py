"""A plan for vLLM with other settings, on the same cards, as the machine is now.

Knows: which cards a plan had. Does not know why its settings change (``step_down.py``).
"""

from dataclasses import replace

from vlfit.machine.model import Machine
from vlfit.plan.calibration import with_bandwidth
from vlfit.plan.ledger import VLLM, Settings, ledger
from vlfit.plan.pick import Choice
from vlfit.plan.search import Plan, finished
from vlfit.plan.vllm.groups import Group
from vlfit.plan.vllm.in_ram import ram_as_gpu
from vlfit.plan.vllm.over_cards import Taken
from vlfit.plan.vllm.versions import chosen_version


def again_with(plan: Plan, settings: Settings, machine: Machine) -> Plan:
    """``plan`` with ``settings``; its cards as they are on ``machine`` now, or as they were."""
    model, version = plan.model, chosen_version(settings.vllm.version or None)
    if settings.vllm.in_ram:
        gpu = ram_as_gpu(machine)
        lines = ledger(model, gpu, VLLM, settings)
        return finished(model, VLLM, replace(machine, gpus=(gpu,)), gpu, settings, lines, version)
    had = plan.gpus or (plan.gpu,)
    wanted = {gpu.index for gpu in had}
    now = [with_bandwidth(gpu) for gpu in machine.gpus if gpu.index in wanted]
    group = Group(tuple(sorted(now or had, key=lambda gpu: -gpu.free)))
    gpus = group.taken(settings.vllm.cards)
    lines = ledger(model, gpus[0], VLLM, settings)
    headroom = gpus[0].total - sum(line.bytes for line in lines)
    taken = Taken(Choice(model, VLLM, settings, lines, headroom), group, gpus)
    return finished(model, VLLM, machine, gpus[0], settings, lines, version, taken)
