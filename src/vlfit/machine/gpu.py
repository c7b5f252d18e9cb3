"""NVIDIA GPUs as the driver's management library (NVML) sees them.

NVML takes milliseconds and no GPU memory, where a CUDA context takes hundreds of MB. Some drivers leave some
fields out.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from vlfit.machine import problems
from vlfit.machine.cards import card_of_driver, memory_bandwidth, pcie_bandwidth
from vlfit.machine.model import Gpu, GpuProcess
from vlfit.machine.problems import Problem, Surroundings

Value = TypeVar("Value")
_LIBRARY_NOT_FOUND = 12  # nvmlReturn_t
_GB = 10**9


def read_gpus(
    environment: Mapping[str, str] = os.environ, around: Surroundings | None = None
) -> tuple[tuple[Gpu, ...], tuple[Problem, ...]]:
    """The GPUs in the driver's order, and what is wrong: why there is none, or which one fails. Never fails.

    ``CUDA_VISIBLE_DEVICES`` hides GPUs here as it does from CUDA. ``around`` says what kind of computer this
    is, for the words of a problem.
    """
    around = around or Surroundings()
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError as error:
        return (), (problems.bindings_missing(str(error)),)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), (_failure(error, around),)
    try:
        gpus, wrong = _read_all(pynvml, around)
    except pynvml.NVMLError as error:
        return (), (_failure(error, around),)
    finally:
        pynvml.nvmlShutdown()
    if not gpus:
        return (), wrong or (problems.no_gpu_found(around),)
    setting = environment.get("CUDA_VISIBLE_DEVICES")
    visible = _visible(gpus, setting)
    return visible, wrong if visible else (problems.all_hidden(setting or '""'), *wrong)


def gpu_behind(gpus: Sequence[Gpu], uuid: str, device: str) -> Gpu | None:
    """The one of ``gpus`` that torch calls ``device`` ("cuda:1") and that has ``uuid``, if torch tells it.

    None if it is not among them.
    """
    same = [gpu for gpu in gpus if uuid and gpu.uuid == uuid]
    if same:
        return same[0]
    _, _, number = device.partition(":")
    index = int(number) if number.isdigit() else 0
    return gpus[index] if index < len(gpus) else None


def _failure(error: Exception, around: Surroundings) -> Problem:
    code = getattr(error, "value", None)
    if code == _LIBRARY_NOT_FOUND:
        return problems.library_missing(around)
    return problems.driver_failed(code, str(error), around)


def _read_all(nvml: Any, around: Surroundings) -> tuple[tuple[Gpu, ...], tuple[Problem, ...]]:
    """Each GPU that answers; one that does not is a problem and no reason to lose the others."""
    gpus, wrong = [], []
    driver = _text(_ask(nvml, nvml.nvmlSystemGetDriverVersion) or "")
    cuda = _cuda(_ask(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2))
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            gpus.append(_read_gpu(nvml, index, driver, cuda))
        except nvml.NVMLError as error:
            problem = _failure(error, around)
            wrong.append(Problem(problem.id, f"GPU {index} fails: {problem.what}", problem.fix))
    return tuple(gpus), tuple(wrong)


def _read_gpu(nvml: Any, index: int, driver: str, cuda: str) -> Gpu:
    """Raises NVMLError where name, memory or compute capability cannot be had; all else may be untold."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    name = _text(_ask(nvml, nvml.nvmlDeviceGetName, handle) or "unknown NVIDIA GPU")
    total, free = int(memory.total), int(memory.free)
    processes, ours = _processes(nvml, handle)
    bandwidth, how = _bandwidth(nvml, handle, name, total)
    generation, lanes = _pcie_link(nvml, handle)
    return Gpu(
        index=index,
        name=name,
        total=total,
        free=free,
        desktop=max(total - free - ours, 0),
        processes=processes,
        driver=driver,
        cuda=cuda,
        compute_capability=(int(major), int(minor)),
        bandwidth=bandwidth,
        bandwidth_how=how,
        pcie_bandwidth=pcie_bandwidth(generation, lanes),
        pcie_generation=generation,
        pcie_lanes=lanes,
        reserved=_reserved(nvml, handle),
        uuid=_text(_ask(nvml, nvml.nvmlDeviceGetUUID, handle) or ""),
    )


def _ask(nvml: Any, question: Callable[..., Value], *arguments: Any) -> Value | None:
    """An answer, or None where this driver does not give it (N/A, as much of NVML under WSL2)."""
    try:
        return question(*arguments)
    # Bindings decode names as UTF-8, which a driver that leaves them unset does not hold to.
    except (nvml.NVMLError, UnicodeDecodeError):
        return None


def _processes(nvml: Any, handle: Any) -> tuple[tuple[GpuProcess, ...], int]:
    """Other processes on the GPU, largest first, and the bytes that our own process holds."""
    found: dict[int, int | None] = {}
    # A process that draws and computes is in both lists, with the same bytes.
    for process in (*_listed(nvml, handle, "Graphics"), *_listed(nvml, handle, "Compute")):
        used = process.usedGpuMemory
        held = None if used is None else int(used)
        found[int(process.pid)] = max(held or 0, found.get(int(process.pid)) or 0) or held
    ours = found.pop(os.getpid(), None) or 0
    processes = (GpuProcess(pid, _process_name(nvml, pid), held) for pid, held in found.items())
    return tuple(sorted(processes, key=lambda each: (-(each.bytes or 0), each.pid))), ours


def _listed(nvml: Any, handle: Any, kind: str) -> Sequence[Any]:
    """Processes that draw ("Graphics") or compute. Old drivers know the older question only."""
    for version in ("v3", "v2"):
        question = getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses_{version}")
        processes: Sequence[Any] | None = _ask(nvml, question, handle)
        if processes is not None:
            return processes
    return ()


def _process_name(nvml: Any, pid: int) -> str:
    """The program's file name. Browsers call themselves "/proc/self/exe": there the kernel knows better."""
    command = _text(_ask(nvml, nvml.nvmlSystemGetProcessName, pid) or "")
    program = command.split(" -")[0].strip().replace("\\", "/").rsplit("/", 1)[-1]
    if program and program != "exe":
        return program
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return program


def _bandwidth(nvml: Any, handle: Any, name: str, total: int) -> tuple[int | None, str]:
    """Bytes per second of the card's memory and where the number is from."""
    clock = _ask(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_MEM)
    width = _ask(nvml, nvml.nvmlDeviceGetMemoryBusWidth, handle)
    speed = memory_bandwidth(clock, width)
    if speed is not None:
        return speed, "clocks"
    card = card_of_driver(name, total)
    return (round(card.bandwidth * _GB), "table") if card else (None, "unknown")


def _pcie_link(nvml: Any, handle: Any) -> tuple[int | None, int | None]:
    """Generation and lanes.

    An idle link falls back to generation 1, so what card and slot can do counts, with the lanes of now.
    """
    generation = _ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
    lanes = _ask(nvml, nvml.nvmlDeviceGetCurrPcieLinkWidth, handle)
    lanes = lanes or _ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
    return int(generation) if generation else None, int(lanes) if lanes else None


def _reserved(nvml: Any, handle: Any) -> int:
    """What the driver keeps for itself: told by the second version of the question only."""
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
    return int(getattr(memory, "reserved", 0) or 0)


def _cuda(version: int | None) -> str:
    """12080 is CUDA 12.8."""
    return f"{version // 1000}.{version % 1000 // 10}" if version else ""


def _text(value: str | bytes) -> str:
    """Old bindings answer in bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _visible(gpus: tuple[Gpu, ...], setting: str | None) -> tuple[Gpu, ...]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` names, in its order; as in CUDA, a wrong name ends the list."""
    if setting is None:
        return gpus
    chosen: list[Gpu] = []
    for word in (part.strip() for part in setting.split(",")):
        found = [gpu for gpu in gpus if word == str(gpu.index) or (word and gpu.uuid.startswith(word))]
        if not found or found[0] in chosen:
            break
        chosen.append(found[0])
    return tuple(chosen)
