"""RAM as the card of vLLM's build for processors, which keeps weights and KV cache there.

Without a size that build takes nine tenths of the RAM for its KV cache: a plan names one.
"""

from vlfit.machine.model import Gpu, Machine

CPU = "CPU"
_CAPABILITY = (99, 0)  # it has bfloat16 and all kernels


def ram_as_gpu(machine: Machine) -> Gpu:
    """RAM as a GPU record: its total, and what is available."""
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
