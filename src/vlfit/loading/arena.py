"""One device allocation that holds many tensors.

torch rounds each allocation up: allocated one by one, the tensors of a model waste 36 to 101 MiB
(``tests/plan/test_allocator.py``), in one allocation 2 MiB at most. The size is found by building the model
twice: with an ``ArenaSizer`` that only adds up, then in the ``Arena``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vlfit.plan.allocator import UNIT


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """``parts`` (at least one) concatenated in their first dimension, in new memory.

    Not ``torch.cat``: on the meta device it imports torch's compiler, three seconds at start.
    """
    rows = [len(part) for part in parts]
    first = parts[0]
    joined = torch.empty((sum(rows), *first.shape[1:]), dtype=first.dtype, device=first.device)
    for target, part in zip(joined.split(rows), parts, strict=True):
        target.copy_(part)
    return joined


class ArenaSizer:
    """Stands in for an ``Arena`` to find the ``size`` in bytes that it needs; allocates no memory.

    ``size``: sum of all allocations so far, each rounded up to the unit of torch's allocator. ``min_bytes``:
    smaller tensors are not for the arena.
    """

    def __init__(self, min_bytes: int = 0) -> None:
        self.size = 0
        self.min_bytes = min_bytes

    def allocate(self, size: int) -> Tensor:
        """A tensor [size] uint8 on the meta device."""
        self.size += -(-size // UNIT) * UNIT
        return torch.empty(size, dtype=torch.uint8, device="meta")


class Arena:
    """``buffer`` [bytes] uint8, one allocation, handed out from front to back.

    It is freed when neither this object nor any tensor from it is left. ``min_bytes``: as in ``ArenaSizer``.
    """

    def __init__(self, buffer: Tensor, min_bytes: int = 0) -> None:
        self._buffer = buffer
        self._used = 0
        self.min_bytes = min_bytes

    def allocate(self, size: int) -> Tensor:
        """The next ``size`` bytes as [size] uint8, aligned as torch aligns tensors.

        Not checked: all allocations together must fit an ``ArenaSizer``'s ``size``.
        """
        start = self._used
        self._used += -(-size // UNIT) * UNIT
        return self._buffer[start : start + size]
