"""What torch reserves from the driver for tensors: more than their bytes, as it takes memory in segments.

The rules are those of torch's caching allocator (``c10/cuda/CUDACachingAllocator.cpp`` of torch 2.11, nothing
set in ``PYTORCH_CUDA_ALLOC_CONF``), followed tensor by tensor in the order of loading. In 17 processes on a
GPU that came within 0.3 MiB of what torch reported (``tests/plan/test_allocator.py``). For what is allocated
and freed while the model runs ``calibration.py`` has a factor instead.
"""

import re
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from functools import cache

from vlfit.checkpoint.tensors import COMPRESSED_SUFFIXES, FP8_SCALE_SUFFIX, is_vision
from vlfit.units import MIB

UNIT = 512  # sizes are multiples of it
_SMALL, SMALL_SEGMENT = MIB, 2 * MIB  # tensors up to the first share segments of the second
_LARGE, LARGE_SEGMENT = 10 * MIB, 20 * MIB  # tensors below the first share segments of the second
_OWN_SEGMENT = 2 * MIB  # larger tensors have segments of their own, multiples of this
_LEFT_OVER = MIB  # a remainder of a shared segment up to this stays with the tensor
# Tensors of text layers from this size on share one allocation, and so do those of the tower
# (``loading/arena.py``): a choice, as torch itself packs what is smaller.
ARENA_MIN_BYTES = 64 * 1024
PARTIAL_SEGMENTS = SMALL_SEGMENT + LARGE_SEGMENT  # one shared segment of each kind that is not full

_PARTS_OF_A_LAYER = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
)
# The engine makes one matrix of those that share their input.
_JOINED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
_JOINED |= {"in_proj_z": "in_proj_qkv", "in_proj_a": "in_proj_b"}
_BLOCK = re.compile(r"\.blocks\.(\d+)\.")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


class AllocatorPool:
    """Simulation of torch's caching allocator on one GPU.

    Attribute ``reserved``: bytes taken from the driver so far.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._free: tuple[list[int], list[int]] = ([], [])

    def allocate(self, size: int) -> None:
        """Allocate ``size`` bytes in the smallest free block that is large enough, else in a new segment.

        ``reserved`` grows by a new segment. As in torch, small and large tensors (1 MiB is the limit) have
        segments of their own, and a remainder too small to split off is lost.
        """
        size = max(-(-size // UNIT), 1) * UNIT
        small = size <= _SMALL
        free = self._free[0 if small else 1]
        index = bisect_left(free, size)
        block = free.pop(index) if index < len(free) else self._new_segment(size)
        left = block - size
        if left >= UNIT if small else left > _LEFT_OVER:
            insort(free, left)

    def _new_segment(self, size: int) -> int:
        if size <= _SMALL:
            segment = SMALL_SEGMENT
        elif size < _LARGE:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // _OWN_SEGMENT) * _OWN_SEGMENT
        self.reserved += segment
        return segment


def reserved_bytes(sizes: Iterable[int]) -> int:
    """Bytes that torch reserves for tensors of ``sizes`` bytes, allocated in this order, none freed."""
    pool = AllocatorPool()
    for size in sizes:
        pool.allocate(size)
    return pool.reserved


def rounding_bytes(size: int) -> int:
    """Bytes that torch adds to a tensor of ``size`` bytes to fill a segment of its own (multiples of 2 MiB).

    ``size`` is not checked: only tensors of 10 MiB and more have a segment of their own.
    """
    return -size % _OWN_SEGMENT


def engine_tensor_sizes(loaded: Mapping[str, int]) -> dict[str, int]:
    """Bytes of the native engine's tensors by name, in loading order; the vision tower comes last.

    ``loaded``: bytes of the checkpoint's tensors by name. Matrices that share their input become one tensor
    in the engine: q, k and v under the name of ``q_proj``, gate and up under that of ``gate_proj``.
    """
    sizes: dict[str, int] = {}
    for name in sorted(loaded, key=_turn_joined):
        whole = _engine_tensor_name(name)
        sizes[whole] = sizes.get(whole, 0) + loaded[name]
    return sizes


@cache  # the models of the catalog have their names in common
def _engine_tensor_name(name: str) -> str:
    """The name of the engine's tensor that ``name`` of the files becomes part of."""
    return ".".join(_JOINED.get(part, part) for part in name.split("."))


def arena_allocation_sizes(sizes: Mapping[str, int]) -> list[int]:
    """Bytes of each allocation that the native engine makes for tensors of ``sizes``, in order.

    ``sizes``: what ``engine_tensor_sizes`` returns. Tensors of 64 KiB and more share one allocation for all
    text layers, and one for the vision tower; other tensors have one each.
    """
    allocations: dict[str, int] = {}
    for name, size in sizes.items():
        arena = "tower" if is_vision(name) else "layers" if _LAYER.search(name) else ""
        if not arena or size < ARENA_MIN_BYTES:
            allocations[name] = size
        else:
            allocations[arena] = allocations.get(arena, 0) + -(-size // UNIT) * UNIT
    return list(allocations.values())


def separate_tensor_sizes(loaded: Mapping[str, int]) -> dict[str, int]:
    """Bytes of transformers' tensors by name, in the order in which they are allocated: the tower first.

    ``loaded``: bytes of the checkpoint's tensors by name. Unlike ``engine_tensor_sizes``, joins none.
    """
    return {name: loaded[name] for name in sorted(loaded, key=_turn_apart)}


@cache
def _turn_joined(name: str) -> tuple[int, int, int, int]:
    return _load_order_key(name, vision=3)


@cache
def _turn_apart(name: str) -> tuple[int, int, int, int]:
    return _load_order_key(name, vision=-1)


def _load_order_key(name: str, vision: int) -> tuple[int, int, int, int]:
    """Sort key of the order of loading; the vision tower, as a whole, at ``vision``, of -1 to 3."""
    if is_vision(name):
        block = _BLOCK.search(name)
        # What is before the blocks in the files, then they, then the mergers.
        return vision, int(block[1]) if block else 2**31 if "merger" in name else -1, 0, 0
    layer = _LAYER.search(name)
    if layer is None:
        return 1, 0, 0, 0
    part = next((place for place, part in enumerate(_PARTS_OF_A_LAYER) if f".{part}." in name), 0)
    if vision > 0:  # joined: the scales of all parts follow the weights of all parts
        part = _PARTS_OF_A_LAYER.index(_JOINED.get(_PARTS_OF_A_LAYER[part], _PARTS_OF_A_LAYER[part]))
    return 0, int(layer[1]), part, int(name.endswith((FP8_SCALE_SUFFIX, *COMPRESSED_SUFFIXES[1:])))
