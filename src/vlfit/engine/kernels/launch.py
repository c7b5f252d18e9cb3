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


AHEAD = 0  # bytes of weights that a product's programs ask for together before it is their turn
LATE = False
LATER = 0  # bytes that attention asks for of the product after the next
_ASKED = 16  # bytes: what is asked for are multiples of it


def ahead(weight: Tensor, programs: int, tile_outputs: int, share: int) -> int:
    """Bytes of each row of its tile of ``weight`` [outputs, columns] that each of so many ``programs`` asks
    for while it waits, if kernels overlap: at most ``share``, what it is going to read. 0: none.

    A multiple of 16 for each of up to 256 threads that share them.
    """
    row = weight.stride(0) * weight.element_size()
    if not overlapping(weight.device)["overlap"] or row % _ASKED or weight.data_ptr() % _ASKED:
        return 0
    step = _ASKED * max(256 // tile_outputs, 1)
    return min(AHEAD // (programs * tile_outputs), share) // step * step


def asked_for(later: Tensor | None, threads: int) -> tuple[int, int]:
    """Every how many bytes of the weights ``later`` one of so many ``threads`` asks for some, and for how
    many, if kernels overlap: multiples of 16, evenly over all of them. 0, 0: none.
    """
    if later is None or not overlapping(later.device)["overlap"] or later.data_ptr() % _ASKED:
        return 0, 0
    step = later.nbytes // threads // _ASKED * _ASKED
    return step, min(LATER // threads // _ASKED * _ASKED, step)


@cache
def arrivals(device: torch.device) -> Tensor:
    """How many programs of each tile have finished, of a product that several share.

    [MOST_TILES] int32: zeros between any two kernels of a device's stream.
    """
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)
