"""The whole machine at once, notes about it, and a monitor that reads GPUs again and again."""

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from vlfit.machine.cards import BFLOAT16_CAPABILITY as BFLOAT16_CAPABILITY
from vlfit.machine.gpu import read_gpus
from vlfit.machine.host import read_host
from vlfit.machine.model import Gpu, Host, Machine
from vlfit.machine.problems import Problem, SystemKind
from vlfit.machine.processor import read_processor
from vlfit.units import format_bytes

# Turing. Current builds of torch have no kernels for older GPUs.
OLDEST_CAPABILITY = (7, 5)


def survey() -> Machine:
    """Read the GPUs and host of this computer. Never raises: ``Machine.notes`` say what could not be read.

    Takes milliseconds, or up to a second where opening NVML is slow.
    """
    host = replace(read_host(), processor=read_processor())
    gpus, problems = read_gpus(system=SystemKind(host.wsl2, host.container))
    return Machine(gpus, host, (*(problem.text for problem in problems), *machine_notes(gpus, host)))


def machine_notes(gpus: Sequence[Gpu], host: Host) -> tuple[str, ...]:
    """Sentences on what limits a machine: WSL2, a cgroup's memory limit, old cards, unknown bandwidth.

    Problems of GPUs that could not be read are not among them.
    """
    return (
        *_wsl2_notes(gpus, host),
        *_limit_notes(host),
        *(note for gpu in gpus for note in _gpu_notes(gpu)),
    )


def _wsl2_notes(gpus: Sequence[Gpu], host: Host) -> list[str]:
    if not host.wsl2:
        return []
    notes = [
        f"WSL2 has {format_bytes(host.ram_total)} of RAM: half of the computer's, unless memory= in"
        r" %UserProfile%\.wslconfig sets another size (then run `wsl --shutdown`)."
    ]
    if gpus:
        notes.append(
            "WSL2 does not report which Windows programs hold GPU memory: Task Manager in Windows does"
            " (Details, column Dedicated GPU memory)."
        )
        notes.append(
            "Under WSL2, memory beyond the card's spills into RAM without an error and everything becomes"
            " several times slower: that a program starts does not prove that it fits."
        )
    return notes


def _limit_notes(host: Host) -> list[str]:
    if host.memory_limit is None:
        return []
    limit = format_bytes(host.memory_limit)
    return [f"A cgroup limits RAM to {limit}; a process that needs more is killed."]


def _gpu_notes(gpu: Gpu) -> list[str]:
    notes = []
    if gpu.compute_capability < OLDEST_CAPABILITY:
        has, needed = (".".join(map(str, each)) for each in (gpu.compute_capability, OLDEST_CAPABILITY))
        notes.append(
            f"GPU {gpu.index} has compute capability {has}; current builds of torch need {needed} or newer."
        )
    elif gpu.compute_capability < BFLOAT16_CAPABILITY:
        notes.append(
            f"GPU {gpu.index} has no bfloat16 units: vlfit's own engine does not run on such a card; "
            "--backend transformers does, in float16."
        )
    if gpu.bandwidth is None:
        notes.append(f"The memory bandwidth of GPU {gpu.index} is unknown: its speed cannot be predicted.")
    return notes


class GpuMonitor:
    """Reads the GPUs repeatedly, with NVML kept open, as opening it can take a second.

    A context manager that opens NVML and closes it at the end; ``read`` in between. ``wsl2``: whether this
    computer runs WSL2. For one thread at a time. Methods never raise.
    """

    def __init__(self) -> None:
        host = read_host()
        self.wsl2 = host.wsl2
        self._system = SystemKind(host.wsl2, host.container)
        self._open = False

    def __enter__(self) -> Self:
        self._open_nvml()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self) -> tuple[tuple[Gpu, ...], tuple[Problem, ...]]:
        """Read GPUs and problems as ``read_gpus`` does. Tries again to open NVML if that failed before."""
        self._open_nvml()  # a driver that failed before may work again
        return read_gpus(system=self._system)

    def close(self) -> None:
        """Close NVML. A later ``read`` opens it again."""
        if self._open:
            import pynvml  # type: ignore[import-untyped]

            self._open = False
            pynvml.nvmlShutdown()

    def _open_nvml(self) -> None:
        """Hold one reference to NVML, so that ``read_gpus`` opens it at no cost."""
        if self._open:
            return
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # no bindings or no driver: `read_gpus` reports it
            return
        self._open = True
