"""What torch takes from the driver for a model's weights: more than they are, as it takes memory in pieces.

The rules are those of torch's caching allocator (``c10/cuda/CUDACachingAllocator.cpp`` of torch 2.11, nothing
set in ``PYTORCH_CUDA_ALLOC_CONF``), followed tensor by tensor in the order of loading. In 17 processes on a
GPU that came within 0.3 MiB of what torch told (``tests/plan/test_allocator.py``). Knows sizes and their
order. Does not know what comes and goes while the model runs: there ``calibration.py`` has a factor.
"""

import re
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from functools import cache

from vlfit.checkpoint.tensors import COMPRESSED_SUFFIXES, SCALE_SUFFIX
from vlfit.units import MIB

UNIT = 512  # sizes are multiples of it
_SMALL, SMALL_SEGMENT = MIB, 2 * MIB  # up to the first, pieces of the second are shared
_LARGE, _LARGE_SEGMENT = 10 * MIB, 20 * MIB  # below the first, pieces of the second are shared
_OWN_SEGMENT = 2 * MIB  # from there on a tensor has a piece of its own, a multiple of this
_LEFT_OVER = MIB  # of a shared piece; less than this stays with the tensor
# Tensors of text layers from this size on share one allocation, and so do those of the tower
# (``loading/arena.py``): a choice, as what is smaller torch itself puts close together.
SHELVED = 64 * 1024
BEGUN = SMALL_SEGMENT + _LARGE_SEGMENT  # one shared piece of each kind that is not full

_PARTS_OF_A_LAYER = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
)
# The engine makes one matrix of those that share their input.
_JOINED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
_TOWER = "model.visual."
_BLOCK = re.compile(r"\.blocks\.(\d+)\.")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


class Pool:
    """Torch's pool on one GPU: ``reserved`` bytes, of which ``_free`` are small and large free pieces."""

    def __init__(self) -> None:
        self.reserved = 0
        self._free: tuple[list[int], list[int]] = ([], [])

    def take(self, size: int) -> None:
        """Room for a tensor of ``size`` bytes: the smallest free piece that it fits, or a new segment."""
        size = max(-(-size // UNIT), 1) * UNIT
        small = size <= _SMALL
        free = self._free[0 if small else 1]
        at = bisect_left(free, size)
        piece = free.pop(at) if at < len(free) else self._new(size)
        left = piece - size
        if left >= UNIT if small else left > _LEFT_OVER:
            insort(free, left)

    def _new(self, size: int) -> int:
        if size <= _SMALL:
            segment = SMALL_SEGMENT
        elif size < _LARGE:
            segment = _LARGE_SEGMENT
        else:
            segment = -(-size // _OWN_SEGMENT) * _OWN_SEGMENT
        self.reserved += segment
        return segment


def held_for(sizes: Iterable[int]) -> int:
    """Bytes that torch takes from the driver for tensors of ``sizes``, in this order."""
    pool = Pool()
    for size in sizes:
        pool.take(size)
    return pool.reserved


def beside(size: int) -> int:
    """Bytes that torch takes more than one large tensor of ``size`` needs."""
    return -size % _OWN_SEGMENT


def joined(loaded: Mapping[str, int]) -> dict[str, int]:
    """Tensors as the engine allocates them, by name and size, from those of the files; the tower last."""
    sizes: dict[str, int] = {}
    for name in sorted(loaded, key=_turn_joined):
        whole = _whole(name)
        sizes[whole] = sizes.get(whole, 0) + loaded[name]
    return sizes


@cache  # the models of the catalog have their names in common
def _whole(name: str) -> str:
    """What the tensor ``name`` of the files is a part of."""
    return ".".join(_JOINED.get(part, part) for part in name.split("."))


def shelved(sizes: Mapping[str, int]) -> list[int]:
    """Allocations as the engine makes them for the tensors of ``joined``, in its order.

    Large ones of all text layers are one, and so are those of the tower.
    """
    found: dict[str, int] = {}
    for name, size in sizes.items():
        shelf = "tower" if name.startswith(_TOWER) else "layers" if _LAYER.search(name) else ""
        if not shelf or size < SHELVED:
            found[name] = size
        else:
            found[shelf] = found.get(shelf, 0) + -(-size // UNIT) * UNIT
    return list(found.values())


def apart(loaded: Mapping[str, int]) -> dict[str, int]:
    """Tensors as transformers moves them to the GPU: each by itself, the vision tower first."""
    return {name: loaded[name] for name in sorted(loaded, key=_turn_apart)}


@cache
def _turn_joined(name: str) -> tuple[int, int, int, int]:
    return _turn(name, vision=3)


@cache
def _turn_apart(name: str) -> tuple[int, int, int, int]:
    return _turn(name, vision=-1)


def _turn(name: str, vision: int) -> tuple[int, int, int, int]:
    """When the tensor ``name`` is loaded; the tower, as a whole, at ``vision``, of -1 to 3."""
    if name.startswith(_TOWER):
        block = _BLOCK.search(name)
        # What is before the blocks in the files, then they, then the mergers.
        return vision, int(block[1]) if block else 2**31 if "merger" in name else -1, 0, 0
    layer = _LAYER.search(name)
    if layer is None:
        return 1, 0, 0, 0
    part = next((place for place, part in enumerate(_PARTS_OF_A_LAYER) if f".{part}." in name), 0)
    if vision > 0:  # joined: the scales of all parts follow the weights of all parts
        part = _PARTS_OF_A_LAYER.index(_JOINED.get(_PARTS_OF_A_LAYER[part], _PARTS_OF_A_LAYER[part]))
    return 0, int(layer[1]), part, int(name.endswith((SCALE_SUFFIX, *COMPRESSED_SUFFIXES[1:])))
