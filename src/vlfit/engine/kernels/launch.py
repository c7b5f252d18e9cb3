"""What kernels are launched with besides their sizes: whether they overlap, and what they count in."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

MOST_TILES = 16384  # of a product that is shared out: those are cut into less than ``BUSY`` tiles


def power_of_two(size: int) -> int:
    """The smallest that is not below ``size``."""
    return 1 << (size - 1).bit_length()


@cache
def overlapping(device: torch.device) -> dict[str, Any]:
    """Arguments of every kernel of a decode step: whether it is made ready while the one before it runs.

    Programmatic dependent launch, which cards have from compute capability 9.0 on.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"overlap": True, "launch_pdl": True}
    return {"overlap": False}


@cache
def arrivals(device: torch.device) -> Tensor:
    """How many programs of each tile have finished, of a product that several share.

    [MOST_TILES] int32: zeros between any two kernels of a device's stream.
    """
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)
