"""One look at this computer: its GPUs, its RAM, its kind. Takes milliseconds and changes nothing."""

from dataclasses import dataclass

from vlfit.machine.gpu import Gpu, read_gpus
from vlfit.machine.host import Host, read_host


@dataclass(frozen=True, slots=True)
class Machine:
    """What this computer has now. ``no_gpu_reason`` says why ``gpus`` is empty; it is "" when it is not."""

    host: Host
    gpus: tuple[Gpu, ...]
    no_gpu_reason: str


def survey() -> Machine:
    """Look at the machine. Never fails: what cannot be found out is left out."""
    gpus, reason = read_gpus()
    return Machine(read_host(), gpus, reason)
