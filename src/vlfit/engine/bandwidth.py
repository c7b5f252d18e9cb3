"""How fast a device reads its memory, measured now: what no decoding is faster than. Knows torch and clocks.

Does not know what is read for a token (``timing.py``), nor what a data sheet promises (``machine/``).
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from vlfit.errors import DeviceError
from vlfit.machine.host import read_host
from vlfit.units import MIB

# Far beyond what caches hold: 96 MiB on the largest consumer cards, some hundreds in all cores of a server.
_MOST, _LEAST = 1024 * MIB, 64 * MIB
_COLUMNS = 4096
_ROUNDS = 12
_ENOUGH = 0.3  # seconds; a card that idled takes some to raise its clocks


def memory_speed(device: torch.device) -> float:
    """Bytes per second: a large buffer read once, or copied (read and written), whichever is faster.

    On a CPU it is read by the threads that torch has here. The cap that an engine has put on torch's pool is
    lifted, so no engine may be running. Raises ``DeviceError`` where there is no memory for a buffer.
    """
    size = _size(device)
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
    half = len(buffer) // 2
    copied = 2 * 4 * half / seconds_of(lambda: buffer[half:].copy_(buffer[:half]), device)
    if device.type == "cuda":
        return max(copied, buffer.nbytes / seconds_of(buffer.sum, device))
    # The operation of a decode step: a sum is bound by arithmetic on one core.
    matrix, vector = buffer.view(-1, _COLUMNS), torch.ones(1, _COLUMNS)
    return max(copied, buffer.nbytes / seconds_of(lambda: F.linear(vector, matrix), device))


def _size(device: torch.device) -> int:
    """Bytes of the buffer: at most a quarter of what is free, in whole rows."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_per_process_memory_fraction(1.0, index)
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = read_host().ram_available
    size = min(_MOST if device.type == "cuda" else _MOST // 4, free // 4)
    if size < _LEAST:
        raise DeviceError(
            f"measuring how fast memory is takes {_LEAST // MIB * 4} MiB; {free // MIB} are free on {device}",
            "close other programs that use it",
        )
    return size // (8 * _COLUMNS) * 8 * _COLUMNS


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Median time of ``work``, on a GPU by its own clock; the first rounds warm it up."""
    clock = _on_gpu if device.type == "cuda" else _on_cpu
    times: list[float] = []
    while len(times) < _ROUNDS or sum(times) < _ENOUGH:
        times.append(clock(work, device))
    return float(statistics.median(times[len(times) // 4 :]))


def _on_gpu(work: Callable[[], object], device: torch.device) -> float:
    with torch.cuda.device(device):  # events belong to the one that is current
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize(device)
    return float(start.elapsed_time(end) / 1e3)


def _on_cpu(work: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
