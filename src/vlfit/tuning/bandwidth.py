"""Measured memory bandwidth of a device, the upper bound of decoding speed."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from vlfit.errors import DeviceError
from vlfit.machine.host import read_host
from vlfit.units import MIB

# Far larger than caches: 96 MiB on the largest consumer cards, some hundred MiB on servers.
MAX_BUFFER, MIN_BUFFER = 1024 * MIB, 64 * MIB
_COLUMNS = 4096
_LOADS, _BLOCK_SIZES = 4, (2048, 4096)  # loads in flight per program, and words per load
_MIN_ROUNDS = 12
MIN_SECONDS = 0.3  # an idle card needs some time to raise its clocks


def measure_memory_bandwidth(device: torch.device) -> float:
    """Measure the memory bandwidth of ``device`` in bytes per second: the best of many runs, in some seconds.

    Reads a large buffer, or copies it (counting bytes read and written) if that is faster. On a CPU torch's
    threads read the buffer. Lifts the cap on torch's memory pool that an engine sets, so no engine may run in
    this process. Raises ``DeviceError`` if too little memory is free; 256 MiB are enough.
    """
    buffer = _allocate_buffer(device)
    half = len(buffer) // 2

    def copy() -> None:
        buffer[half:].copy_(buffer[:half])

    if device.type == "cuda":
        words = buffer.view(torch.int32)
        sums = torch.empty(len(words) // min(_BLOCK_SIZES), dtype=torch.int32, device=device)
        readers: list[Callable[[], object]] = [
            partial(launch_read_kernel, words, sums, block) for block in _BLOCK_SIZES
        ]
    else:
        # A matrix-vector product, as in decoding: a sum is bound by the arithmetic of one core.
        readers = [partial(F.linear, torch.ones(1, _COLUMNS), buffer.view(-1, _COLUMNS))]
    return buffer.nbytes / min(min(time_repeatedly(reader, device)) for reader in (copy, *readers))


def launch_read_kernel(words: Tensor, sums: Tensor, block: int) -> int:
    """Launch a kernel that reads ``words`` [n] int32, n a multiple of ``block`` * ``_LOADS``.

    Each program stores the sum of its words in ``sums`` [at least as many as programs] int32, from its
    beginning. Returns the number of programs, without waiting for the kernel.
    """
    from vlfit.kernels.primitives import read_bandwidth_kernel

    programs = len(words) // (block * _LOADS)
    read_bandwidth_kernel[(programs,)](words, sums, BLOCK=block, STEPS=_LOADS, num_warps=8)
    return programs


def _allocate_buffer(device: torch.device) -> Tensor:
    """[n] float32, at most a quarter of free memory, in whole rows and blocks."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_per_process_memory_fraction(1.0, index)
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = read_host().ram_available
    size = min(MAX_BUFFER if device.type == "cuda" else MAX_BUFFER // 4, free // 4)
    try:
        if size >= MIN_BUFFER:
            return torch.ones(size // MIN_BUFFER * MIN_BUFFER // 4, dtype=torch.float32, device=device)
    except torch.OutOfMemoryError:
        pass  # another process took the memory
    raise DeviceError(
        f"measuring memory takes {MIN_BUFFER // MIB * 4} MiB; {free // MIB} MiB are free on {device}",
        "Close other programs that use it.",
    )


def median_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Run ``work`` as ``time_repeatedly`` does; return the median seconds of one run."""
    return float(statistics.median(time_repeatedly(work, device)))


def time_repeatedly(work: Callable[[], object], device: torch.device) -> list[float]:
    """Run ``work`` at least 12 times and for 0.3 s; return the seconds of each run.

    The first quarter of the runs, while clocks rise, is left out.
    """
    time_once = time_on_gpu if device.type == "cuda" else time_on_cpu
    times: list[float] = []
    while len(times) < _MIN_ROUNDS or sum(times) < MIN_SECONDS:
        times.append(time_once(work, device))
    return times[len(times) // 4 :]


def time_on_gpu(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of ``work`` on the GPU by CUDA events. Runs it twice and times the second run."""
    with torch.cuda.device(device):  # events belong to the current device
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        work()  # keeps the GPU busy during the timed launch, which is about a tenth of the time
        start.record()
        work()
        end.record()
        torch.cuda.synchronize(device)
    return float(start.elapsed_time(end) / 1e3)


def time_on_cpu(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run of ``work`` by the clock; ``device`` is ignored."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
