"""The paged KV cache: keys and values of all layers, in 16 or 32 bits or in FP8 with a scale per row.

A sequence has a block table (a list of block numbers). Its token i lies in slot
``table[i // block_size] * block_size + i % block_size`` of every layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Self

import torch
from torch import Tensor

from vlfit.models.cache_spec import CacheSpec, Paged, State, paged_shapes

# FP8 rows (e4m3), each with a bfloat16 scale that maps its largest value to the largest code: keys have few
# large values, which decide attention, and these are rounded least. (Power-of-two scales would take one byte
# instead of two, at five times the loss of bits in mini's answers, docs/log.md.) The kernels do the same bit
# for bit (``kernels/primitives.py``).

FP8_MAX = 448.0  # the largest code of e4m3
MIN_SCALE = 2.0**-40  # its reciprocal is finite; rows that need a smaller one are as good as 0
SCALE_DTYPE = torch.bfloat16


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 codes [..., width] uint8 and scales [...] (bfloat16 bits as int16) of ``rows`` [..., width].

    Rounds to the nearest code, ties to even. A row with an infinity or NaN dequantizes to NaN throughout.
    """
    wide = rows.float()
    largest = wide.abs().amax(-1)
    scale = (largest / FP8_MAX).clamp_min(MIN_SCALE).to(SCALE_DTYPE)
    codes = (wide * (1.0 / scale.float())[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    scale.masked_fill_(~largest.isfinite(), torch.nan)
    return codes.view(torch.uint8), scale.view(torch.int16)


def dequantize_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows that ``codes`` [..., width] with ``scales`` [...] stand for."""
    numbers = codes.view(torch.float8_e4m3fn).float()
    return numbers.mul_(scales.view(SCALE_DTYPE).float()[..., None]).to(dtype)


SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class CacheRows:
    """Keys, or values, of several layers: ``numbers`` [layers, slots, kv_heads, head_dim] of ``dtype``.

    With ``scales`` [layers, slots, kv_heads] int16 the numbers are FP8 codes, uint8.
    """

    numbers: Tensor
    scales: Tensor | None
    dtype: torch.dtype

    @classmethod
    def empty(
        cls, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, *, narrow: bool
    ) -> Self:
        """Uninitialized, in one allocation. ``narrow``: in FP8."""
        if not narrow:
            return cls(torch.empty(shape, dtype=dtype, device=device), None, dtype)
        return cls._within(torch.empty(_fp8_bytes(shape), dtype=torch.uint8, device=device), shape, dtype)

    @classmethod
    def _within(cls, whole: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Self:
        """Codes and scales as views of ``whole`` [bytes]."""
        codes = prod(shape)
        scales = whole[codes + codes % SCALE_BYTES :].view(torch.int16)
        return cls(whole[:codes].view(shape), scales.view(shape[:-1]), dtype)

    def resized(self, slots: int) -> Self:
        """The same layers with ``slots`` slots, uninitialized."""
        layers, _, heads, head_dim = self.numbers.shape
        shape = (layers, slots, heads, head_dim)
        if self.scales is None:
            return replace(self, numbers=self.numbers.new_empty(shape))
        return self._within(self.numbers.new_empty((_fp8_bytes(shape),)), shape, self.dtype)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All tensors, with slots as their second dimension."""
        return (self.numbers,) if self.scales is None else (self.numbers, self.scales)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in all layers."""
        return sum(len(part) * prod(part.shape[2:]) * part.dtype.itemsize for part in self.parts)

    def copy_to_host(self, blocks: Mapping[int, int], size: int) -> dict[int, tuple[Tensor, ...]]:
        """Copies in RAM of ``blocks`` (new numbers by old) of ``size`` slots, by their new numbers."""
        return {
            new: tuple(part[:, old * size : (old + 1) * size].to("cpu", copy=True) for part in self.parts)
            for old, new in blocks.items()
        }

    def copy_from_host(self, blocks: Mapping[int, tuple[Tensor, ...]], size: int) -> None:
        """Write what ``copy_to_host`` returned."""
        for number, block in blocks.items():
            for part, saved in zip(self.parts, block, strict=True):
                part[:, number * size : (number + 1) * size] = saved

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy ``count`` slots from slot ``source`` on to slot ``target`` on, in all layers."""
        for part in self.parts:
            part[:, target : target + count].copy_(part[:, source : source + count])

    def write(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """Write ``rows`` [tokens, kv_heads, head_dim] to ``slots`` [tokens]."""
        new = (rows,) if self.scales is None else quantize_rows(rows)
        for part, values in zip(self.parts, new, strict=True):
            part[layer].index_copy_(0, slots, values)

    def read(self, layer: int, slots: Tensor, first: int | None) -> Tensor:
        """Rows of ``slots`` (any shape), [*slots.shape, kv_heads, head_dim].

        Consecutive slots that begin at ``first`` are a view, unless they have to be dequantized.
        """

        def select(part: Tensor) -> Tensor:
            if first is not None:
                return part[layer, first : first + slots.numel()].view(*slots.shape, *part.shape[2:])
            return part[layer].index_select(0, slots.reshape(-1)).view(*slots.shape, *part.shape[2:])

        if self.scales is None:
            return select(self.numbers)
        return dequantize_rows(select(self.numbers), select(self.scales), self.dtype)


def _fp8_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of FP8 codes of ``shape`` and their scales, which begin at an even byte."""
    codes = prod(shape)
    return codes + codes % SCALE_BYTES + prod(shape[:-1]) * SCALE_BYTES


def slots_of_blocks(blocks: list[int], block_size: int) -> Tensor:
    """All slots [len(blocks) * block_size] of a block table, in token order."""
    starts = torch.tensor(blocks, dtype=torch.long) * block_size
    return (starts[:, None] + torch.arange(block_size)).reshape(-1)


@dataclass(slots=True)
class PagedLayers:
    """Keys and values of the paged layers of one shape, each [layers, slots, kv_heads, head_dim]."""

    keys: CacheRows
    values: CacheRows


class KVCache:
    """What the layers of a text model cache, as ``spec`` says: one entry for each layer.

    Paged layers of one shape share two tensors [layers, slots, kv_heads, head_dim] of ``dtype``, keys and
    values; ``narrow``: in FP8, each row with its scale. Layers with a state have a tensor [sequences, *shape]
    each. Uninitialized: no slot is read before its token was written.
    """

    def __init__(
        self,
        spec: CacheSpec,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        narrow: bool = False,
        sequences: int = 0,
    ) -> None:
        """``sequences``: most that run at once; layers with a state have a slot for each."""
        self.spec = spec
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self._groups: list[PagedLayers] = []
        self._places: dict[int, tuple[PagedLayers, int]] = {}  # of each paged layer: group, number in it
        for (kv_heads, head_dim), layers in paged_shapes(spec).items():
            shape = (len(layers), blocks * block_size, kv_heads, head_dim)
            keys = CacheRows.empty(shape, dtype, device, narrow=narrow)
            group = PagedLayers(keys, CacheRows.empty(shape, dtype, device, narrow=narrow))
            self._groups.append(group)
            self._places |= {layer: (group, number) for number, layer in enumerate(layers)}
        self.states = {
            index: torch.zeros((sequences, *layer.shape), dtype=getattr(torch, layer.dtype), device=device)
            for index, layer in enumerate(spec)
            if isinstance(layer, State)
        }
        self._windows = [layer.window if isinstance(layer, Paged) else None for layer in spec]

    @property
    def keys(self) -> Tensor:
        """[layers, slots, kv_heads, head_dim], in FP8 codes: of the first shape, mostly the only one."""
        return self._groups[0].keys.numbers

    @property
    def values(self) -> Tensor:
        """As ``keys``."""
        return self._groups[0].values.numbers

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [slots, kv_heads, head_dim]; in FP8 codes."""
        group, number = self._places[index]
        return group.keys.numbers[number], group.values.numbers[number]

    def scales(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Of the keys and of the values of one layer in FP8, [slots, kv_heads]; else None."""
        group, number = self._places[layer]
        if group.keys.scales is None or group.values.scales is None:
            return None
        return group.keys.scales[number], group.values.scales[number]

    def window(self, layer: int) -> int | None:
        """How many tokens a token of this layer attends to, itself included; None: all before it."""
        return self._windows[layer]

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of the tensors, which ``resize`` allocates anew."""
        rows = [part for group in self._groups for part in (group.keys, group.values)]
        return tuple(part.numbers.data_ptr() for part in rows)

    @property
    def nbytes(self) -> int:
        paged = sum(group.keys.nbytes + group.values.nbytes for group in self._groups)
        return paged + sum(state.nbytes for state in self.states.values())

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        slots = sum(group.keys.slot_bytes + group.values.slot_bytes for group in self._groups)
        return slots * self.block_size

    def resize(self, blocks: int, kept: Mapping[int, int], release: Callable[[], None]) -> None:
        """Change to ``blocks`` blocks and carry over those in ``kept`` (new numbers by old) through RAM.

        One tensor after the other, so that no more than one waits in RAM. ``release`` gives what was freed
        back to the device. Raises ``torch.OutOfMemoryError`` when the new tensors do not fit; then all
        blocks are lost.
        """
        try:
            for group in self._groups:
                for name in ("keys", "values"):
                    self._resize(group, name, blocks, kept, release)
        except torch.OutOfMemoryError:
            for group in self._groups:
                group.keys, group.values = group.keys.resized(0), group.values.resized(0)
            release()
            raise

    def _resize(
        self,
        group: PagedLayers,
        name: str,
        blocks: int,
        kept: Mapping[int, int],
        release: Callable[[], None],
    ) -> None:
        """``keys`` or ``values`` anew. The old ones are freed before the new ones are allocated."""
        old: CacheRows = getattr(group, name)
        saved = old.copy_to_host(kept, self.block_size)
        empty = old.resized(0)
        setattr(group, name, empty)
        del old
        release()
        fresh = empty.resized(blocks * self.block_size)
        fresh.copy_from_host(saved, self.block_size)
        setattr(group, name, fresh)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put ``keys`` and ``values`` [tokens, kv_heads, head_dim] into ``slots`` [tokens]."""
        group, number = self._places[layer]
        group.keys.write(number, slots, keys)
        group.values.write(number, slots, values)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first ``tokens`` tokens of block ``source`` to block ``target``, in all layers."""
        if source == target:
            return
        for group in self._groups:
            for rows in (group.keys, group.values):
                rows.copy(source * self.block_size, target * self.block_size, tokens)

    def read(self, layer: int, slots: Tensor, first: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values of ``slots`` (any shape), each [*slots.shape, kv_heads, head_dim].

        With consecutive slots that begin at ``first`` nothing is copied, except to dequantize FP8.
        """
        group, number = self._places[layer]
        return group.keys.read(number, slots, first), group.values.read(number, slots, first)
