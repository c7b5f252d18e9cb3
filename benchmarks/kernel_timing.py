"""How long work on a GPU takes: captured as a CUDA graph, over more than a cache holds, median of replays.

Knows how to time and how fast this card copies. Does not know what is timed.
"""

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

BEYOND_CACHES = 384 * 1024**2  # bytes to go through before anything is read again: several times any L2
REPLAYS = 12


def seconds_of(calls: Sequence[Callable[[], Tensor]]) -> float:
    """Seconds for one of ``calls``, which are run one after the other in one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        seconds = []
        for _ in range(REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
    return float(statistics.median(seconds)) / len(calls)


def copies_beyond_caches(size: int) -> int:
    """How many tensors of ``size`` bytes in turn are beyond the caches."""
    return max(1, min(64, -(-BEYOND_CACHES // size)))


def copy_bandwidth() -> float:
    """Bytes per second of a large copy, read and written."""
    source = torch.ones(1024**3, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of([lambda: target.copy_(source)] * 4)
