"""How many of the CPU's threads a forward pass is worth. Knows nothing of what is computed."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Multiplications that one core does in a millisecond or two. A pass with fewer ends sooner alone: waking the
# other threads for each of its hundreds of operations takes longer than what they would take over.
WORTH_SHARING = 25_000_000


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
