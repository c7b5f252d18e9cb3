"""How many programs of each tile have finished: what kernels that share a tile out count in."""

from functools import cache

import torch
from torch import Tensor

MOST_TILES = 16384  # of any product that is shared out: those are cut into less than ``BUSY`` tiles


@cache
def arrivals(device: torch.device) -> Tensor:
    """[MOST_TILES] int32: zeros between any two kernels of a device's stream."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)
