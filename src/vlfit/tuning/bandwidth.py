"""How fast a device reads its memory, measured now: what no decoding is faster than. Knows torch and clocks.

Does not know what is read for a token (``timing.py``), nor what a data sheet promises (``machine/``).
"""

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

# Far beyond what caches hold: 96 MiB on the largest consumer cards, some hundreds in all cores of a server.
_MOST, _LEAST = 1024 * MIB, 64 * MIB
_COLUMNS = 4096
_STEPS, _BLOCKS = 4, (2048, 4096)  # loads under way in each program at once, and numbers in each load
_ROUNDS = 12
_ENOUGH = 0.3  # seconds; a card that idled takes some to raise its clocks


def memory_speed(device: torch.device) -> float:
    """Bytes per second: a large buffer read, or copied (read and written), whichever is faster, at its best.

    On a CPU it is read by the threads that torch has here. The cap that an engine has put on torch's pool is
    lifted, so no engine may be running. Raises ``DeviceError`` where there is no memory for a buffer.
    """
    buffer = _buffer(device)
    half = len(buffer) // 2

    def copy() -> None:
        buffer[half:].copy_(buffer[:half])

    if device.type == "cuda":
        numbers = buffer.view(torch.int32)
        sums = torch.empty(len(numbers) // min(_BLOCKS), dtype=torch.int32, device=device)
        ways: list[Callable[[], object]] = [partial(read_all, numbers, sums, block) for block in _BLOCKS]
    else:
        # The operation of a decode step: a sum is bound by arithmetic on one core.
        ways = [partial(F.linear, torch.ones(1, _COLUMNS), buffer.view(-1, _COLUMNS))]
    return buffer.nbytes / min(min(times_of(way, device)) for way in (copy, *ways))


def read_all(numbers: Tensor, sums: Tensor, block: int) -> int:
    """Read ``numbers`` [n] int32 on a GPU, n a multiple of ``block`` x ``_STEPS``; sums of so many each go to
    the beginning of ``sums``. Gives how many sums there are.
    """
    from vlfit.kernels.primitives import sum_kernel

    programs = len(numbers) // (block * _STEPS)
    sum_kernel[(programs,)](numbers, sums, block=block, steps=_STEPS, num_warps=8)
    return programs


def _buffer(device: torch.device) -> Tensor:
    """[n] float32: at most a quarter of what is free, in whole rows and blocks."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_per_process_memory_fraction(1.0, index)
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = read_host().ram_available
    size = min(_MOST if device.type == "cuda" else _MOST // 4, free // 4)
    try:
        if size >= _LEAST:
            return torch.ones(size // _LEAST * _LEAST // 4, dtype=torch.float32, device=device)
    except torch.OutOfMemoryError:
        pass  # others were faster
    raise DeviceError(
        f"measuring how fast memory is takes {_LEAST // MIB * 4} MiB; {free // MIB} are free on {device}",
        "close other programs that use it",
    )


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Median time of ``work``, on a GPU by its own clock; the first rounds warm it up."""
    return float(statistics.median(times_of(work, device)))


def times_of(work: Callable[[], object], device: torch.device) -> list[float]:
    """Seconds of ``work``, again and again, once it is warm; on a GPU by its own clock."""
    clock = _on_gpu if device.type == "cuda" else _on_cpu
    times: list[float] = []
    while len(times) < _ROUNDS or sum(times) < _ENOUGH:
        times.append(clock(work, device))
    return times[len(times) // 4 :]


def _on_gpu(work: Callable[[], object], device: torch.device) -> float:
    with torch.cuda.device(device):  # events belong to the one that is current
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        work()  # keeps the GPU busy while what is timed is launched: launching takes a tenth of it
        start.record()
        work()
        end.record()
        torch.cuda.synchronize(device)
    return float(start.elapsed_time(end) / 1e3)


def _on_cpu(work: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
