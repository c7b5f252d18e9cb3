"""How many of the CPU's threads there are for torch, and how many a forward pass is worth. Knows nothing of
what is computed.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vlfit.machine.host import own_cores, whole_cores

# Multiplications that one core does in a millisecond or two. A pass with fewer ends sooner alone: waking the
# other threads for each of its hundreds of operations takes longer than what they would take over.
WORTH_SHARING = 25_000_000


def keep_to_own_cores() -> None:
    """Let torch compute on no more threads here than this process has cores; what the user set stands.

    torch knows ``taskset``, and not that a container has a share of the cores' time: its threads then wait
    for one another. That two processors may be one core it knows where MKL tells it. To be called by the
    thread that computes.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), own_cores(), whole_cores()))


@contextmanager
def threads_for(device: torch.device, multiplications: int) -> Iterator[None]:
    """Within the block torch computes on one thread if the work is small, else on as many as it had."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or multiplications > WORTH_SHARING or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
