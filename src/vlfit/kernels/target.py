"""The card that kernels are chosen and compiled for: a device's own, or one that is simulated.

Host functions run on torch's meta device, where they allocate but launch nothing: the plan counts bytes
there. With ``simulate_card`` they go on to their launches, choosing tiles and variants as on that card. So
the launches of a whole engine are known on a computer that has no such card (``launches.py``).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch

from vlfit.plan.native.tiles import MANY_MULTIPROCESSORS

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TargetCard:
    """A card's compute ``capability`` (major, minor), ``name`` as the driver has it, and ``multiprocessors``.

    0 of them: not known.
    """

    capability: tuple[int, int]
    name: str = ""
    multiprocessors: int = 0

    @property
    def has_few_multiprocessors(self) -> bool:
        """Whether there are so few that they, not memory, bound a decode step; False if not known."""
        return 0 < self.multiprocessors < MANY_MULTIPROCESSORS


_simulated: list[TargetCard] = []  # at most one
_caches: list[Any] = []


def per_device(function: Callable[[torch.device], T]) -> Callable[[torch.device], T]:
    """Decorate a function of a device with a cache that ``simulate_card`` empties."""
    cached = cache(function)
    _caches.append(cached)
    return cached


@per_device
def card_of(device: torch.device) -> TargetCard | None:
    """The card that ``device`` is; for the meta device the one that is simulated, None if there is none.

    None for CPUs, too.
    """
    if device.type == "meta":
        return _simulated[0] if _simulated else None
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return TargetCard((properties.major, properties.minor), properties.name, properties.multi_processor_count)


def launches_on(device: torch.device) -> bool:
    """Whether host functions launch kernels on ``device``: not on the meta device, unless it is a card."""
    return device.type != "meta" or bool(_simulated)


@contextmanager
def simulate_card(card: TargetCard | None) -> Iterator[None]:
    """Have the meta device be ``card`` within the block; None: no card, also within an outer block.

    For all threads of the process. Launches on it must be recorded: it cannot run them.
    """
    before = list(_simulated)
    _simulated[:] = [] if card is None else [card]
    _empty_caches()
    try:
        yield
    finally:
        _simulated[:] = before
        _empty_caches()


def _empty_caches() -> None:
    for each in _caches:
        each.cache_clear()
