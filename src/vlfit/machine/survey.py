"""One look at this computer: its GPUs, its RAM, its kind. Takes milliseconds and changes nothing."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from vlfit.machine.gpu import read_gpus
from vlfit.machine.host import read_host
from vlfit.machine.model import Gpu, Host, Machine
from vlfit.machine.problems import Problem, Surroundings
from vlfit.units import format_bytes

# What a person should know about this machine, in plain sentences: WSL2, a container, memory that is short.


# Turing. Older GPUs lack what the engine and current builds of torch need.
OLDEST = (7, 5)
# Ampere. What is older computes in float16 instead.
BFLOAT16_FROM = (8, 0)


def remarks(gpus: Sequence[Gpu], host: Host) -> tuple[str, ...]:
    """Sentences about ``gpus`` in ``host``; empty where there is nothing to say."""
    return (
        *_about_wsl2(gpus, host),
        *_about_limits(host),
        *(note for gpu in gpus for note in _about_gpu(gpu)),
    )


def _about_wsl2(gpus: Sequence[Gpu], host: Host) -> list[str]:
    if not host.wsl2:
        return []
    notes = [
        f"WSL2 has {format_bytes(host.ram_total)} of the computer's RAM: half of it, unless memory= in"
        r" %UserProfile%\.wslconfig says otherwise (then `wsl --shutdown`)."
    ]
    if gpus:
        notes.append(
            "WSL2 does not tell which Windows programs hold GPU memory: Task Manager in Windows shows it"
            " (Details, column Dedicated GPU memory)."
        )
        notes.append(
            "Under WSL2 memory beyond the card's spills into RAM without an error, and everything becomes"
            " several times slower: starting is no proof of fitting."
        )
    return notes


def _about_limits(host: Host) -> list[str]:
    if host.memory_limit is None:
        return []
    limit = format_bytes(host.memory_limit)
    return [f"A control group limits RAM to {limit}; beyond it the kernel ends the process."]


def _about_gpu(gpu: Gpu) -> list[str]:
    notes = []
    if gpu.compute_capability < OLDEST:
        have, want = (".".join(map(str, each)) for each in (gpu.compute_capability, OLDEST))
        notes.append(
            f"GPU {gpu.index} has compute capability {have}; current builds of torch want {want} or newer."
        )
    elif gpu.compute_capability < BFLOAT16_FROM:
        notes.append(
            f"GPU {gpu.index} has no units for bfloat16: vlfit computes in float16 there, which nobody has "
            "tried on such a card."
        )
    if gpu.bandwidth is None:
        notes.append(
            f"The memory bandwidth of GPU {gpu.index} is not known, so its speed cannot be predicted."
        )
    return notes


def survey() -> Machine:
    """Look at the machine. Never fails: what cannot be found out is left out, and the notes say why."""
    host = read_host()
    gpus, problems = read_gpus(around=Surroundings(host.wsl2, host.container))
    return Machine(gpus, host, (*(problem.sentences for problem in problems), *remarks(gpus, host)))


# GPUs looked at again and again, as ``vlfit top`` and a server's status page do.
#
# NVML stays open: opening it for every sample can take a second where nothing else keeps the driver awake.


class Watch:
    """A context manager. ``look`` may be called from one thread at a time; it never fails."""

    def __init__(self) -> None:
        host = read_host()
        self.wsl2 = host.wsl2
        self._around = Surroundings(host.wsl2, host.container)
        self._open = False

    def __enter__(self) -> Self:
        self._hold()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def look(self) -> tuple[tuple[Gpu, ...], tuple[Problem, ...]]:
        """GPUs as they are now, and what is wrong, as ``read_gpus`` has it."""
        self._hold()  # a driver that was broken at the last look may be there again
        return read_gpus(around=self._around)

    def close(self) -> None:
        """Let NVML go."""
        if self._open:
            import pynvml  # type: ignore[import-untyped]

            self._open = False
            pynvml.nvmlShutdown()

    def _hold(self) -> None:
        """NVML counts who has opened it: while we are one of them, ``read_gpus`` opens it for nothing."""
        if self._open:
            return
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # the bindings or the driver are not there: `read_gpus` says so in words
            return
        self._open = True
