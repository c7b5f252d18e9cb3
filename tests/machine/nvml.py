"""A fake NVML, for machines without an NVIDIA driver."""

import sys
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pynvml  # type: ignore[import-untyped]
import pytest

from vlfit.units import MIB

NOT_FOUND, NOT_SUPPORTED, LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND = 6, 3, 12, 13


@dataclass(frozen=True)
class Process:
    pid: int
    command: str
    mib: int | None


@dataclass(frozen=True)
class FakeCard:
    """NVML's values for one card. None: the driver does not support the query."""

    name: str | bytes = "NVIDIA GeForce RTX 5060"
    uuid: str = "GPU-aaaa"
    total: int = 8151
    free: int = 7200
    reserved: int | None = 207  # made up, like everything but totals and clocks
    capability: tuple[int, int] = (12, 0)
    memory_clock: int | None = 14001
    bus_width: int | None = 128
    cores: int | None = 3840
    highest_clock: int | None = 3090
    generation: int | None = 5
    lanes: int | None = 8
    graphics: tuple[Process, ...] = ()
    compute: tuple[Process, ...] = ()
    broken: int | None = None


DESKTOP = FakeCard(
    graphics=(
        Process(1200, "/usr/lib/xorg/Xorg", 310),
        Process(1400, "/usr/bin/gnome-shell", 122),
        Process(2600, "/usr/lib/firefox/firefox -contentproc", 298),
        Process(3100, "/opt/discord/Discord --type=gpu-process", 96),
    )
)
WSL2 = replace(
    DESKTOP, graphics=(Process(400, "/Xwayland", None),), memory_clock=None, generation=None, lanes=None
)
LAPTOP = FakeCard(
    name="NVIDIA GeForce RTX 4060 Laptop GPU",
    total=8188,
    free=7948,
    capability=(8, 9),
    memory_clock=None,
    bus_width=None,
    generation=4,
)
LARGE = FakeCard(
    name="NVIDIA GeForce RTX 3090",
    uuid="GPU-bbbb",
    total=24576,
    free=24000,
    capability=(8, 6),
    memory_clock=9751,
    bus_width=384,
    generation=4,
    lanes=16,
)


@dataclass
class FakeNvml:
    """The functions of ``pynvml`` that vlfit calls. ``failure``: the code that nvmlInit raises."""

    cards: tuple[FakeCard, ...]
    failure: int | None = None
    driver: str | bytes = "596.49"
    cuda: int | None = 13020
    old: bool = False
    open: int = field(default=0)

    NVMLError = pynvml.NVMLError
    NVML_CLOCK_MEM = pynvml.NVML_CLOCK_MEM
    NVML_CLOCK_SM = pynvml.NVML_CLOCK_SM
    nvmlMemory_v2 = pynvml.nvmlMemory_v2  # noqa: N815

    def nvmlInit(self) -> None:  # noqa: N802
        if self.failure is not None:
            raise pynvml.NVMLError(self.failure)
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str | bytes:  # noqa: N802
        return self.driver

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802
        return told(self.cuda)

    def nvmlSystemGetProcessName(self, pid: int) -> str:  # noqa: N802
        for card in self.cards:
            for process in (*card.graphics, *card.compute):
                if process.pid == pid and process.command:
                    return process.command
        raise pynvml.NVMLError(NOT_FOUND)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:  # noqa: N802
        card = self.cards[index]
        if card.broken is not None:
            raise pynvml.NVMLError(card.broken)
        return card

    def nvmlDeviceGetMemoryInfo(self, card: FakeCard, version: int | None = None) -> Any:  # noqa: N802
        answer = SimpleNamespace(total=card.total * MIB, free=card.free * MIB)
        if version is not None:
            answer.reserved = told(card.reserved) * MIB
        return answer

    def nvmlDeviceGetCudaComputeCapability(self, card: FakeCard) -> tuple[int, int]:  # noqa: N802
        return card.capability

    def nvmlDeviceGetName(self, card: FakeCard) -> str | bytes:  # noqa: N802
        return card.name

    def nvmlDeviceGetUUID(self, card: FakeCard) -> str:  # noqa: N802
        return card.uuid

    def nvmlDeviceGetMaxClockInfo(self, card: FakeCard, clock: int) -> int:  # noqa: N802
        return told({self.NVML_CLOCK_MEM: card.memory_clock, self.NVML_CLOCK_SM: card.highest_clock}[clock])

    def nvmlDeviceGetNumGpuCores(self, card: FakeCard) -> int:  # noqa: N802
        return told(card.cores)

    def nvmlDeviceGetMemoryBusWidth(self, card: FakeCard) -> int:  # noqa: N802
        return told(card.bus_width)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, card: FakeCard) -> int:  # noqa: N802
        return told(card.generation)

    def nvmlDeviceGetCurrPcieLinkWidth(self, card: FakeCard) -> int:  # noqa: N802
        return told(card.lanes)

    def nvmlDeviceGetMaxPcieLinkWidth(self, card: FakeCard) -> int:  # noqa: N802
        return told(card.lanes)

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, card: FakeCard) -> list[Any]:  # noqa: N802
        return self.newest(card.graphics)

    def nvmlDeviceGetComputeRunningProcesses_v3(self, card: FakeCard) -> list[Any]:  # noqa: N802
        return self.newest(card.compute)

    def nvmlDeviceGetGraphicsRunningProcesses_v2(self, card: FakeCard) -> list[Any]:  # noqa: N802
        return listed(card.graphics)

    def nvmlDeviceGetComputeRunningProcesses_v2(self, card: FakeCard) -> list[Any]:  # noqa: N802
        return listed(card.compute)

    def newest(self, processes: tuple[Process, ...]) -> list[Any]:
        if self.old:
            raise pynvml.NVMLError(FUNCTION_NOT_FOUND)
        return listed(processes)


def told(value: int | None) -> int:
    if value is None:
        raise pynvml.NVMLError(NOT_SUPPORTED)
    return value


def listed(processes: tuple[Process, ...]) -> list[Any]:
    """Processes as the bindings return them: usedGpuMemory is None for N/A."""
    return [
        SimpleNamespace(pid=each.pid, usedGpuMemory=None if each.mib is None else each.mib * MIB)
        for each in processes
    ]


def install(monkeypatch: pytest.MonkeyPatch, *cards: FakeCard, failure: int | None = None) -> FakeNvml:
    """Replace ``pynvml`` by a fake with these cards."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml = FakeNvml(cards, failure)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml
