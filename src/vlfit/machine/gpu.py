"""NVIDIA GPUs, read through NVML: in milliseconds and without a CUDA context, which takes hundreds of MB."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from vlfit.machine import problems
from vlfit.machine.cards import Card, card_by_driver_name, memory_bytes_per_second, pcie_bandwidth
from vlfit.machine.host import read_or_empty
from vlfit.machine.model import Gpu, GpuProcess
from vlfit.machine.problems import Problem, SystemKind

Value = TypeVar("Value")
_LIBRARY_NOT_FOUND = 12  # nvmlReturn_t


def read_gpus(
    environment: Mapping[str, str] = os.environ, system: SystemKind | None = None
) -> tuple[tuple[Gpu, ...], tuple[Problem, ...]]:
    """Read the visible GPUs with NVML, and problems: why no GPU is visible, or which ones failed.

    Never raises. ``environment``: its ``CUDA_VISIBLE_DEVICES`` hides and orders GPUs as in CUDA; without it,
    all are visible in the driver's order. ``system``: the kind of computer for which fixes are given; None:
    neither WSL2 nor a container.
    """
    system = system or SystemKind()
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError as error:
        return (), (problems.explain_missing_bindings(str(error)),)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), (_problem_of(error, system),)
    try:
        gpus, failures = _read_all(pynvml, system)
    except pynvml.NVMLError as error:
        return (), (_problem_of(error, system),)
    finally:
        pynvml.nvmlShutdown()
    if not gpus:
        return (), failures or (problems.explain_no_gpu(system),)
    setting = environment.get("CUDA_VISIBLE_DEVICES")
    visible = _visible_gpus(gpus, setting)
    return visible, failures if visible else (problems.explain_hidden_gpus(setting or '""'), *failures)


def gpu_of_device(gpus: Sequence[Gpu], uuid: str, device: str) -> Gpu | None:
    """Find the GPU of a torch device by its ``uuid``; failing that, by the number in ``device``.

    ``gpus``: in CUDA's order. ``uuid``: "" if torch reports none. ``device``: like "cuda:1"; without a
    number, GPU 0. Returns None if ``gpus`` has too few entries.
    """
    same_uuid = [gpu for gpu in gpus if uuid and gpu.uuid == uuid]
    if same_uuid:
        return same_uuid[0]
    _, _, number = device.partition(":")
    position = int(number) if number.isdigit() else 0
    return gpus[position] if position < len(gpus) else None


def _problem_of(error: Exception, system: SystemKind) -> Problem:
    code = getattr(error, "value", None)
    if code == _LIBRARY_NOT_FOUND:
        return problems.explain_missing_library(system)
    return problems.explain_driver_error(code, str(error), system)


def _read_all(nvml: Any, system: SystemKind) -> tuple[tuple[Gpu, ...], tuple[Problem, ...]]:
    """Read every GPU; one that fails becomes a problem and does not hide the others."""
    gpus, failures = [], []
    driver = _decoded(_query(nvml, nvml.nvmlSystemGetDriverVersion) or "")
    cuda = _cuda_version(_query(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2))
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            gpus.append(_read_gpu(nvml, index, driver, cuda))
        except nvml.NVMLError as error:
            problem = _problem_of(error, system)
            failures.append(Problem(problem.id, f"GPU {index} fails: {problem.message}", problem.fix))
    return tuple(gpus), tuple(failures)


def _read_gpu(nvml: Any, index: int, driver: str, cuda: str) -> Gpu:
    """Read one GPU. Raises NVMLError without memory sizes and compute capability; all else is optional."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    name = _decoded(_query(nvml, nvml.nvmlDeviceGetName, handle) or "unknown NVIDIA GPU")
    total, free = int(memory.total), int(memory.free)
    processes, ours = _processes(nvml, handle)
    bandwidth, how = _bandwidth(nvml, handle, name, total)
    generation, lanes = _pcie_link(nvml, handle)
    capability = (int(major), int(minor))
    multiprocessors, clock = _multiprocessors(nvml, handle, capability, card_by_driver_name(name, total))
    return Gpu(
        index=index,
        name=name,
        total=total,
        free=free,
        desktop=max(total - free - ours, 0),
        processes=processes,
        driver=driver,
        cuda=cuda,
        compute_capability=capability,
        bandwidth=bandwidth,
        bandwidth_how=how,
        pcie_bandwidth=pcie_bandwidth(generation, lanes),
        pcie_generation=generation,
        pcie_lanes=lanes,
        reserved=_reserved(nvml, handle),
        uuid=_decoded(_query(nvml, nvml.nvmlDeviceGetUUID, handle) or ""),
        multiprocessors=multiprocessors,
        clock_mhz=clock,
    )


def _query(nvml: Any, function: Callable[..., Value], *arguments: Any) -> Value | None:
    """Call an NVML function; None if this driver does not support it, as often under WSL2."""
    try:
        return function(*arguments)
    # The bindings decode names as UTF-8; a driver that leaves a name unset returns other bytes.
    except (nvml.NVMLError, UnicodeDecodeError):
        return None


def _processes(nvml: Any, handle: Any) -> tuple[tuple[GpuProcess, ...], int]:
    """Other processes on the GPU, largest first, and the bytes held by our own process."""
    bytes_of: dict[int, int | None] = {}
    # A process that uses graphics and compute is in both lists, with the same bytes.
    for kind in ("Graphics", "Compute"):
        for process in _running_processes(nvml, handle, kind):
            pid, used = int(process.pid), process.usedGpuMemory
            used = None if used is None else int(used)
            bytes_of[pid] = max(used or 0, bytes_of.get(pid) or 0) or used
    ours = bytes_of.pop(os.getpid(), None) or 0
    processes = (GpuProcess(pid, _process_name(nvml, pid), used) for pid, used in bytes_of.items())
    return tuple(sorted(processes, key=lambda process: (-(process.bytes or 0), process.pid))), ours


def _running_processes(nvml: Any, handle: Any, kind: str) -> Sequence[Any]:
    """Processes of one kind, "Graphics" or "Compute". Old drivers support version 2 only."""
    for version in ("v3", "v2"):
        function = getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses_{version}")
        processes: Sequence[Any] | None = _query(nvml, function, handle)
        if processes is not None:
            return processes
    return ()


def _process_name(nvml: Any, pid: int) -> str:
    """File name of the program. Browsers report "/proc/self/exe"; for those take the kernel's name."""
    command = _decoded(_query(nvml, nvml.nvmlSystemGetProcessName, pid) or "")
    program = command.split(" -")[0].strip().replace("\\", "/").rsplit("/", 1)[-1]
    if program and program != "exe":
        return program
    return read_or_empty(Path(f"/proc/{pid}/comm")).strip() or program


def _bandwidth(nvml: Any, handle: Any, name: str, total: int) -> tuple[int | None, str]:
    """Memory bandwidth in bytes per second, and its source."""
    clock = _query(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_MEM)
    width = _query(nvml, nvml.nvmlDeviceGetMemoryBusWidth, handle)
    speed = memory_bytes_per_second(clock, width)
    if speed is not None:
        return speed, "clocks"
    card = card_by_driver_name(name, total)
    return (round(card.gb_per_s * 10**9), "table") if card else (None, "unknown")


_CORES = {(7, 5): 64, (8, 0): 64}  # CUDA cores of a multiprocessor; 128 on all others since


def _multiprocessors(
    nvml: Any, handle: Any, capability: tuple[int, int], card: Card | None
) -> tuple[int | None, int | None]:
    """How many multiprocessors a GPU has and their clock in MHz, as in ``Gpu``; ``card``: of the table."""
    cores = _query(nvml, nvml.nvmlDeviceGetNumGpuCores, handle)
    count = int(cores) // _CORES.get(capability, 128) if cores else None
    highest = _query(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM)
    table = (None, None) if card is None else (card.multiprocessors, card.boost_mhz)
    return count or table[0], table[1] or (int(highest) if highest else None)


def _pcie_link(nvml: Any, handle: Any) -> tuple[int | None, int | None]:
    """Generation and lanes. The largest generation, as an idle link falls back to 1; the lanes in use now."""
    generation = _query(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
    lanes = _query(nvml, nvml.nvmlDeviceGetCurrPcieLinkWidth, handle)
    lanes = lanes or _query(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
    return int(generation) if generation else None, int(lanes) if lanes else None


def _reserved(nvml: Any, handle: Any) -> int:
    """Bytes reserved by the driver; only version 2 of the memory info has them."""
    memory = _query(nvml, nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
    return int(getattr(memory, "reserved", 0) or 0)


def _cuda_version(version: int | None) -> str:
    """Format 12080 as "12.8"."""
    return f"{version // 1000}.{version % 1000 // 10}" if version else ""


def _decoded(value: str | bytes) -> str:
    """Old bindings return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _visible_gpus(gpus: tuple[Gpu, ...], setting: str | None) -> tuple[Gpu, ...]:
    """The GPUs in ``CUDA_VISIBLE_DEVICES``, in its order; as in CUDA, an unknown name ends the list."""
    if setting is None:
        return gpus
    visible: list[Gpu] = []
    for name in (part.strip() for part in setting.split(",")):
        named = [gpu for gpu in gpus if name == str(gpu.index) or (name and gpu.uuid.startswith(name))]
        if not named or named[0] in visible:
            break
        visible.append(named[0])
    return tuple(visible)
