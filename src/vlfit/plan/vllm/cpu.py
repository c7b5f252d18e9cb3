"""Plans for vLLM's build for processors, which keeps weights and KV cache in RAM.

Knows: that the RAM stands in for a card there, and which flags matter. Does not know what its processes hold
(``lines.py``). Without a size that build takes nine tenths of the RAM for its KV cache: a plan names one.
"""

from dataclasses import replace

from vlfit.errors import UsageError
from vlfit.machine.model import Gpu, Machine
from vlfit.plan.candidates import best, within_limits
from vlfit.plan.ledger import VLLM
from vlfit.plan.search import Plan, able, check_wishes, finished, unfit
from vlfit.plan.shapes import Model
from vlfit.plan.vllm.flags import chosen_version
from vlfit.plan.wishes import Wishes

CPU = "CPU"
_CAPABILITY = (99, 0)  # it has bfloat16 and lacks no kernel that a card's age would tell of


def ram_as_gpu(machine: Machine) -> Gpu:
    """The RAM as a card: all of it, and what is available."""
    host = machine.host
    return Gpu(
        index=0,
        name=CPU,
        total=host.ram_total,
        free=host.ram_available,
        desktop=host.ram_total - host.ram_available,
        processes=(),
        driver="",
        cuda="",
        compute_capability=_CAPABILITY,
        bandwidth=None,
        bandwidth_how="unknown",
        pcie_bandwidth=None,
    )


def plan_in_ram(models: list[Model], machine: Machine, wishes: Wishes) -> Plan:
    """The best plan for one of ``models`` in this computer's RAM; it may not fit, and then says why.

    Raises ``UsageError`` for wishes that make no sense there.
    """
    tensor, data = wishes.tensor_parallel or 1, wishes.data_parallel or 1
    if tensor * data > 1:
        raise UsageError(
            f"{tensor} x {data} cards are asked for, and this vLLM runs on the processor",
            "leave --tensor-parallel and --data-parallel out",
        )
    version = chosen_version(wishes.vllm_version)
    gpu = ram_as_gpu(machine)
    wishes, said = within_limits(models, wishes)
    asked = replace(wishes, vllm=replace(wishes.vllm, in_ram=True, version=version.text))
    fitting = able(models, lambda model: check_wishes(model, asked))
    found = best([(model, VLLM) for model in fitting], asked, gpu)
    alone = replace(machine, gpus=(gpu,))
    make = finished if found.headroom >= 0 else unfit
    made = make(found.model, VLLM, alone, gpu, found.settings, found.lines, version)
    return replace(made, remarks=(*said, *made.remarks))
