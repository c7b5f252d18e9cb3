"""One look at this computer: its GPUs, its RAM, its kind. Takes milliseconds and changes nothing."""

from vlfit.machine.gpu import read_gpus
from vlfit.machine.host import read_host
from vlfit.machine.model import Machine
from vlfit.machine.problems import Surroundings
from vlfit.machine.remarks import remarks

__all__ = ["Machine", "survey"]


def survey() -> Machine:
    """Look at the machine. Never fails: what cannot be found out is left out, and the notes say why."""
    host = read_host()
    gpus, problems = read_gpus(around=Surroundings(host.wsl2, host.container))
    return Machine(gpus, host, (*(problem.sentences for problem in problems), *remarks(gpus, host)))
