"""One allocation on a device in which many tensors lie side by side.

torch takes memory from the driver in pieces and rounds each up: for the tensors of a model, one by one, that
comes to 36 to 101 MiB that nobody uses (``tests/plan/test_allocator.py``), for one allocation to 2 MiB at
most. How large it must be is found by asking for all tensors twice: a ``Measure`` only adds up, a ``Shelf``
gives room.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vlfit.plan.allocator import UNIT


def concatenated(parts: Sequence[Tensor]) -> Tensor:
    """``parts`` one behind the other in their first dimension.

    Not by ``torch.cat``, which on the meta device imports torch's compiler: three seconds of a start.
    """
    heights = [len(part) for part in parts]
    first = parts[0]
    whole = torch.empty((sum(heights), *first.shape[1:]), dtype=first.dtype, device=first.device)
    for target, part in zip(whole.split(heights), parts, strict=True):
        target.copy_(part)
    return whole


class Measure:
    """Adds up the ``size`` of a shelf for what is asked of it, and gives tensors without bytes."""

    def __init__(self) -> None:
        self.size = 0

    def room(self, size: int) -> Tensor:
        """``size`` bytes [size] uint8, on torch's meta device."""
        self.size += -(-size // UNIT) * UNIT
        return torch.empty(size, dtype=torch.uint8, device="meta")


class Shelf:
    """``size`` bytes on ``device``, given out from the first on."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._bytes = torch.empty(size, dtype=torch.uint8, device=device)
        self._filled = 0

    def room(self, size: int) -> Tensor:
        """The next ``size`` bytes [size] uint8, aligned as torch aligns tensors."""
        first = self._filled
        self._filled += -(-size // UNIT) * UNIT
        return self._bytes[first : first + size]
