"""The paged KV cache: one pool of blocks, allocated once, and the account of who holds which.

A sequence holds a block table (a list of block numbers). Token i of it lives in slot
``table[i // block_size] * block_size + i % block_size`` of every layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Self

import torch
from torch import Tensor

from vlfit.checkpoint.text_config import TextConfig

# Rows of numbers in FP8 (e4m3: four bits of exponent, three of fraction), each row with a scale of its own.
#
# The scale makes the largest number of a row the largest code, 448: keys have few large numbers, which
# decide what is looked at, and so those are rounded least. (Powers of two for scales would take one byte
# instead of two: mini then says five times as many bits of something else, docs/log.md.) It is a bfloat16,
# as that has the range of all dtypes that are computed in. Here in plain PyTorch; the kernels do the same
# bit for bit (``kernels/primitives.py``). Does not know what the rows are.


LARGEST = 448.0  # the largest code; one more exponent would be NaN
LEAST = 2.0**-40  # of a scale: rows below 2^-31 of all are as good as 0, and one over it is a number
SCALE_DTYPE = torch.bfloat16


def narrowed(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [..., width] uint8 and scales [...] int16, bits of bfloat16, of ``rows`` [..., width].

    Numbers are rounded to the nearest code, halves to even ones. A row that has an infinity or NaN reads as
    NaN, all of it.
    """
    wide = rows.float()
    largest = wide.abs().amax(-1)
    scale = (largest / LARGEST).clamp_min(LEAST).to(SCALE_DTYPE)
    codes = (wide * (1.0 / scale.float())[..., None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    scale.masked_fill_(~largest.isfinite(), torch.nan)
    return codes.view(torch.uint8), scale.view(torch.int16)


def widened(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What ``codes`` [..., width] stand for at ``scales`` [...]."""
    numbers = codes.view(torch.float8_e4m3fn).float()
    return numbers.mul_(scales.view(SCALE_DTYPE).float()[..., None]).to(dtype)


# Keys, or values, of all layers as the cache holds them: numbers of the computation, or FP8 and scales.
#
# Knows where a row lies and what is done to it on its way in and out, in plain PyTorch; on a GPU kernels
# read and write the same tensors. Does not know who holds which slot (``kv_cache.py``).


_SCALE = 2  # bytes


@dataclass(frozen=True, slots=True)
class Rows:
    """``numbers`` [layers, slots, kv_heads, head_dim] of ``dtype``, the computation's.

    With ``scales`` [layers, slots, kv_heads] int16 they are codes of FP8, uint8 (``layers/kv_cache.py``).
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


def slots_of(blocks: list[int], block_size: int) -> Tensor:
    """All slots [len(blocks) * block_size] of a block table, in the order of the tokens."""
    starts = torch.tensor(blocks, dtype=torch.long) * block_size
    return (starts[:, None] + torch.arange(block_size)).reshape(-1)


class KVCache:
    """Keys and values of all layers: two tensors [layers, slots, kv_heads, head_dim] of ``dtype``.

    ``narrow``: in FP8, each row with its scale (``kv_cache.py``). Left unwritten at first: nothing reads a
    slot before its token has been written.
    """

    def __init__(
        self,
        config: TextConfig,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        narrow: bool = False,
    ) -> None:
        heads, head_dim = config.num_key_value_heads, config.head_dim
        shape = (config.num_hidden_layers, blocks * block_size, heads, head_dim)
        self.block_size = block_size
        self.dtype = dtype
        self._keys = Rows.empty(shape, dtype, device, narrow=narrow)
        self._values = Rows.empty(shape, dtype, device, narrow=narrow)

    @property
    def keys(self) -> Tensor:
        """[layers, slots, kv_heads, head_dim]; in FP8 codes."""
        return self._keys.numbers

    @property
    def values(self) -> Tensor:
        """As ``keys``."""
        return self._values.numbers

    def scales(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Of the keys and of the values of one layer in FP8, [slots, kv_heads]; else None."""
        if self._keys.scales is None or self._values.scales is None:
            return None
        return self._keys.scales[layer], self._values.scales[layer]

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    @property
    def block_bytes(self) -> int:
        """What one block takes in all layers."""
        return (self._keys.slot_bytes + self._values.slot_bytes) * self.block_size

    def resize(self, blocks: int, kept: Mapping[int, int], release: Callable[[], None]) -> None:
        """Make room for ``blocks`` and carry over those in ``kept``, new numbers by old, through RAM.

        First keys, then values, so that no more than one of the two waits there. ``release`` gives the
        device what was freed. Raises ``torch.OutOfMemoryError`` where there is no room; then all is lost.
        """
        try:
            for name in ("_keys", "_values"):
                self._resize(name, blocks, kept, release)
        except torch.OutOfMemoryError:
            self._keys, self._values = self._keys.resized(0), self._values.resized(0)
            release()
            raise

    def _resize(self, name: str, blocks: int, kept: Mapping[int, int], release: Callable[[], None]) -> None:
        """``_keys`` or ``_values`` anew. The old ones are gone before there is room for both."""
        old: Rows = getattr(self, name)
        waiting = old.taken_out(kept, self.block_size)
        nothing = old.resized(0)
        setattr(self, name, nothing)
        del old
        release()
        fresh = nothing.resized(blocks * self.block_size)
        fresh.put_in(waiting, self.block_size)
        setattr(self, name, fresh)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put ``keys`` and ``values`` [tokens, kv_heads, head_dim] into ``slots`` [tokens]."""
        self._keys.write(layer, slots, keys)
        self._values.write(layer, slots, values)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """The first ``tokens`` tokens of block ``source`` into block ``target``, in all layers."""
        if source == target:
            return
        for rows in (self._keys, self._values):
            rows.copy(source * self.block_size, target * self.block_size, tokens)

    def read(self, layer: int, slots: Tensor, first: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values of ``slots`` (any shape), each [*slots.shape, kv_heads, head_dim].

        Where the slots follow each other and ``first`` is the first, nothing is copied but what is widened.
        """
        return self._keys.read(layer, slots, first), self._values.read(layer, slots, first)
