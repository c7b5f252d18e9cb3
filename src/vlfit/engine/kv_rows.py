"""Keys, or values, of all layers as the cache holds them: numbers of the computation, or FP8 and scales.

Knows where a row lies and what is done to it on its way in and out, in plain PyTorch; on a GPU kernels read
and write the same tensors. Does not know who holds which slot (``kv_cache.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Self

import torch
from torch import Tensor

from vlfit.engine.float8 import narrowed, widened

_SCALE = 2  # bytes


@dataclass(frozen=True, slots=True)
class Rows:
    """``numbers`` [layers, slots, kv_heads, head_dim] of ``dtype``, the computation's.

    With ``scales`` [layers, slots, kv_heads] int16 they are codes of FP8, uint8 (``float8.py``).
    """

    numbers: Tensor
    scales: Tensor | None
    dtype: torch.dtype

    @classmethod
    def empty(
        cls, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, *, narrow: bool
    ) -> Self:
        """Unwritten, in one allocation, ``narrow``: in FP8."""
        if not narrow:
            return cls(torch.empty(shape, dtype=dtype, device=device), None, dtype)
        return cls._within(torch.empty(_bytes(shape), dtype=torch.uint8, device=device), shape, dtype)

    @classmethod
    def _within(cls, whole: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Self:
        """Codes and scales in ``whole``, which has as many bytes as they take."""
        codes = prod(shape)
        scales = whole[codes + codes % _SCALE :].view(torch.int16)
        return cls(whole[:codes].view(shape), scales.view(shape[:-1]), dtype)

    def resized(self, slots: int) -> Self:
        """Others like these, unwritten, of ``slots``."""
        layers, _, heads, head_dim = self.numbers.shape
        shape = (layers, slots, heads, head_dim)
        if self.scales is None:
            return replace(self, numbers=self.numbers.new_empty(shape))
        return self._within(self.numbers.new_empty((_bytes(shape),)), shape, self.dtype)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """What is to be moved where rows move; slots are the second dimension of each."""
        return (self.numbers,) if self.scales is None else (self.numbers, self.scales)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def slot_bytes(self) -> int:
        """What one slot takes in all layers."""
        return sum(len(part) * prod(part.shape[2:]) * part.dtype.itemsize for part in self.parts)

    def taken_out(self, blocks: Mapping[int, int], size: int) -> dict[int, tuple[Tensor, ...]]:
        """The blocks of ``size`` slots, given as new numbers by old, in RAM by their new numbers."""
        return {
            new: tuple(part[:, old * size : (old + 1) * size].to("cpu", copy=True) for part in self.parts)
            for old, new in blocks.items()
        }

    def put_in(self, blocks: Mapping[int, tuple[Tensor, ...]], size: int) -> None:
        """What ``taken_out`` gave."""
        for number, block in blocks.items():
            for part, waiting in zip(self.parts, block, strict=True):
                part[:, number * size : (number + 1) * size] = waiting

    def copy(self, source: int, target: int, count: int) -> None:
        """``count`` slots from ``source`` on to those from ``target`` on, in all layers."""
        for part in self.parts:
            part[:, target : target + count].copy_(part[:, source : source + count])

    def write(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """``rows`` [tokens, kv_heads, head_dim] into ``slots`` [tokens]."""
        new = (rows,) if self.scales is None else narrowed(rows)
        for part, values in zip(self.parts, new, strict=True):
            part[layer].index_copy_(0, slots, values)

    def read(self, layer: int, slots: Tensor, first: int | None) -> Tensor:
        """The rows of ``slots`` (any shape), [*slots.shape, kv_heads, head_dim].

        Where the slots follow each other and ``first`` is the first, they are read where they lie; what is in
        FP8 comes widened, as a copy.
        """

        def found(part: Tensor) -> Tensor:
            if first is not None:
                return part[layer, first : first + slots.numel()].view(*slots.shape, *part.shape[2:])
            return part[layer].index_select(0, slots.reshape(-1)).view(*slots.shape, *part.shape[2:])

        if self.scales is None:
            return found(self.numbers)
        return widened(found(self.numbers), found(self.scales), self.dtype)


def _bytes(shape: tuple[int, ...]) -> int:
    """Of codes of that shape and their scales, which begin at an even byte."""
    codes = prod(shape)
    return codes + codes % _SCALE + prod(shape[:-1]) * _SCALE
