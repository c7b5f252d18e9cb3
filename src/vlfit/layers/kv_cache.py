"""The paged KV cache: keys and values of all layers, in 16 or 32 bits, or in FP8 with a scale per row.

A sequence has a block table (a list of block numbers). Its token i is in slot
``table[i // block_size] * block_size + i % block_size`` of every layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Self

import torch
from torch import Tensor

from vlfit.layers.state_snapshots import StateSnapshots
from vlfit.models.cache_spec import KV_SCALE_BYTES, CacheSpec, Paged, State, paged_shapes

# FP8 rows are e4m3 codes with a bfloat16 scale that maps the row's largest value to the largest code: keys
# have few large values, which decide attention, and these are rounded least. (Power-of-two scales would take
# one byte instead of two, at five times the loss of bits in mini's answers, docs/log.md.) The kernels do the
# same, bit for bit (``kernels/primitives.py``).

FP8_MAX = 448.0  # the largest code of e4m3
MIN_SCALE = 2.0**-40  # has a finite reciprocal; rows that need a smaller scale are practically 0
SCALE_DTYPE = torch.bfloat16


def quantize_kv_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize ``rows`` [..., width] to FP8: codes [..., width] uint8, scales [...] int16 (bfloat16 bits).

    Rounds to the nearest code, ties to even. A row with an infinity or NaN gets the scale NaN.
    """
    wide = rows.float()
    largest = wide.abs().amax(-1)
    scale = (largest / FP8_MAX).clamp_min(MIN_SCALE).to(SCALE_DTYPE)
    codes = (wide * (1.0 / scale.float())[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    scale.masked_fill_(~largest.isfinite(), torch.nan)
    return codes.view(torch.uint8), scale.view(torch.int16)


def dequantize_kv_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [..., width] in ``dtype`` from the codes and scales that ``quantize_kv_rows`` returned."""
    numbers = codes.view(torch.float8_e4m3fn).float()
    return numbers.mul_(scales.view(SCALE_DTYPE).float()[..., None]).to(dtype)


@dataclass(frozen=True, slots=True)
class CacheRows:
    """The cached keys, or the values, of several layers: ``data`` [layers, slots, kv_heads, head_dim].

    ``dtype``: of the rows that ``read`` returns. ``scales`` is None if ``data`` has that dtype; in FP8
    ``data`` holds codes (uint8) and ``scales`` is [layers, slots, kv_heads] int16 (``quantize_kv_rows``).
    Methods take a layer's index in ``data``, not in the model.
    """

    data: Tensor
    scales: Tensor | None
    dtype: torch.dtype

    @classmethod
    def empty(
        cls, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, *, fp8: bool
    ) -> Self:
        """Uninitialized rows with ``data`` of ``shape``, in one allocation. ``fp8``: codes and scales."""
        if not fp8:
            return cls(torch.empty(shape, dtype=dtype, device=device), None, dtype)
        return cls._from_buffer(
            torch.empty(_fp8_bytes(shape), dtype=torch.uint8, device=device), shape, dtype
        )

    @classmethod
    def _from_buffer(cls, buffer: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Self:
        """FP8 codes and scales as views of ``buffer`` [``_fp8_bytes(shape)``] uint8."""
        codes = prod(shape)
        scales = buffer[codes + codes % KV_SCALE_BYTES :].view(torch.int16)
        return cls(buffer[:codes].view(shape), scales.view(shape[:-1]), dtype)

    def new_empty(self, slots: int) -> Self:
        """Allocate uninitialized rows for the same layers with ``slots`` slots."""
        layers, _, heads, head_dim = self.data.shape
        shape = (layers, slots, heads, head_dim)
        if self.scales is None:
            return replace(self, data=self.data.new_empty(shape))
        return self._from_buffer(self.data.new_empty((_fp8_bytes(shape),)), shape, self.dtype)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """``data`` and, in FP8, ``scales``; the second dimension of each is the slot."""
        return (self.data,) if self.scales is None else (self.data, self.scales)

    @property
    def nbytes(self) -> int:
        """Bytes of ``data`` and ``scales``."""
        return sum(part.nbytes for part in self.tensors)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in all layers."""
        return sum(len(part) * prod(part.shape[2:]) * part.dtype.itemsize for part in self.tensors)

    def copy_to_host(self, new_by_old: Mapping[int, int], block_size: int) -> dict[int, tuple[Tensor, ...]]:
        """Copy blocks to RAM: for each old number in ``new_by_old`` the block's part of each of ``tensors``.

        The result is keyed by the new numbers. ``block_size``: slots per block.
        """
        return {
            new: tuple(
                part[:, old * block_size : (old + 1) * block_size].to("cpu", copy=True)
                for part in self.tensors
            )
            for old, new in new_by_old.items()
        }

    def copy_from_host(self, blocks: Mapping[int, tuple[Tensor, ...]], block_size: int) -> None:
        """Write ``blocks``, which ``copy_to_host`` returned, to the block numbers that are their keys.

        ``block_size``: slots per block.
        """
        for number, block in blocks.items():
            for part, saved in zip(self.tensors, block, strict=True):
                part[:, number * block_size : (number + 1) * block_size] = saved

    def copy_slots(self, source: int, target: int, count: int) -> None:
        """Copy slots from ``source`` up to ``source + count`` to those from ``target`` on, in all layers."""
        for part in self.tensors:
            part[:, target : target + count].copy_(part[:, source : source + count])

    def write(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """Write ``rows`` [tokens, kv_heads, head_dim] to ``slots`` [tokens] of a layer, in FP8 quantized."""
        new = (rows,) if self.scales is None else quantize_kv_rows(rows)
        for part, values in zip(self.tensors, new, strict=True):
            part[layer].index_copy_(0, slots, values)

    def read(self, layer: int, slots: Tensor, first_slot: int | None) -> Tensor:
        """Rows of ``slots`` (of any shape) in a layer: [*slots.shape, kv_heads, head_dim] in ``dtype``.

        ``first_slot``: that of ``slots`` if they are consecutive, so that the result is a view (in FP8 always
        a copy); None otherwise.
        """

        def select(part: Tensor) -> Tensor:
            if first_slot is not None:
                return part[layer, first_slot : first_slot + slots.numel()].view(
                    *slots.shape, *part.shape[2:]
                )
            return part[layer].index_select(0, slots.reshape(-1)).view(*slots.shape, *part.shape[2:])

        if self.scales is None:
            return select(self.data)
        return dequantize_kv_rows(select(self.data), select(self.scales), self.dtype)


def _fp8_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of FP8 codes of ``shape`` and, from an even byte on, their scales."""
    codes = prod(shape)
    return codes + codes % KV_SCALE_BYTES + prod(shape[:-1]) * KV_SCALE_BYTES


def slots_of_blocks(blocks: list[int], block_size: int) -> Tensor:
    """Slots [len(blocks) * block_size] of a block table's ``blocks``, in token order, on the CPU.

    ``block_size``: slots per block.
    """
    starts = torch.tensor(blocks, dtype=torch.long) * block_size
    return (starts[:, None] + torch.arange(block_size)).reshape(-1)


@dataclass(slots=True)
class PagedLayers:
    """Keys and values of the paged layers that have the same number of KV heads and head size."""

    keys: CacheRows
    values: CacheRows


class KVCache:
    """Cache of a text model's layers: paged keys and values, or recurrent states.

    ``spec`` has an entry per layer of the model. Paged layers of one shape share two tensors [layers, slots,
    kv_heads, head_dim] of ``dtype``, for keys and for values; with ``fp8`` rows are codes with a scale. They
    are uninitialized: a slot is written before it is read. A layer with a state has tensors of zeros
    [sequences, *shape] in ``states``, by layer index and name. Methods take a layer's index in the model.
    """

    def __init__(
        self,
        spec: CacheSpec,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        fp8: bool = False,
        sequences: int = 0,
        device_snapshots: int = 0,
        snapshot_ram_bytes: int = 0,
    ) -> None:
        """``blocks``: number of blocks of ``block_size`` tokens each, for every paged layer.

        ``sequences``: the most that run at once, for which states are allocated. ``device_snapshots``,
        ``snapshot_ram_bytes``: copies of states for the prefix cache, as in ``StateSnapshots``.
        """
        self.spec = spec
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self._groups: list[PagedLayers] = []
        self._locations: dict[int, tuple[PagedLayers, int]] = {}  # paged layer: its group and index in it
        for (kv_heads, head_dim), layers in paged_shapes(spec).items():
            shape = (len(layers), blocks * block_size, kv_heads, head_dim)
            keys = CacheRows.empty(shape, dtype, device, fp8=fp8)
            group = PagedLayers(keys, CacheRows.empty(shape, dtype, device, fp8=fp8))
            self._groups.append(group)
            self._locations |= {layer: (group, number) for number, layer in enumerate(layers)}
        self._sequences = sequences
        self.states = self._new_states(sequences)
        self.snapshots = StateSnapshots(spec, device, device_snapshots, snapshot_ram_bytes)
        self._windows = [layer.window if isinstance(layer, Paged) else None for layer in spec]

    def _new_states(self, sequences: int) -> dict[int, dict[str, Tensor]]:
        return {
            index: {
                each.name: torch.zeros(
                    (sequences, *each.shape), dtype=getattr(torch, each.dtype), device=self.device
                )
                for each in layer.tensors
            }
            for index, layer in enumerate(self.spec)
            if isinstance(layer, State)
        }

    @property
    def keys(self) -> Tensor:
        """Keys of the paged layers of the first shape, mostly the only one; in FP8 as codes.

        [layers, slots, kv_heads, head_dim].
        """
        return self._groups[0].keys.data

    @property
    def values(self) -> Tensor:
        """Values of the layers that ``keys`` returns, in the same shape."""
        return self._groups[0].values.data

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a paged layer, each [slots, kv_heads, head_dim]; in FP8 as codes.

        Raises ``KeyError`` for a layer with a state.
        """
        group, number = self._locations[index]
        return group.keys.data[number], group.values.data[number]

    def scales(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Scales of a paged layer's keys and values, each [slots, kv_heads]; None without FP8."""
        group, number = self._locations[layer]
        if group.keys.scales is None or group.values.scales is None:
            return None
        return group.keys.scales[number], group.values.scales[number]

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer: how many tokens a token attends to, itself included.

        None: no limit, or a layer with a state.
        """
        return self._windows[layer]

    @property
    def has_windows(self) -> bool:
        """Whether any layer has a sliding window."""
        return any(window is not None for window in self._windows)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Device addresses of keys, values and states.

        After ``resize`` they differ: CUDA graphs are then stale.
        """
        rows = [part.data for group in self._groups for part in (group.keys, group.values)]
        states = [part for state in self.states.values() for part in state.values()]
        return tuple(part.data_ptr() for part in (*rows, *states))

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, scales included, and states."""
        return sum(group.keys.nbytes + group.values.nbytes for group in self._groups) + self.state_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of all states."""
        return sum(part.nbytes for state in self.states.values() for part in state.values())

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all paged layers, scales included."""
        slots = sum(group.keys.slot_bytes + group.values.slot_bytes for group in self._groups)
        return slots * self.block_size

    def resize(self, blocks: int, new_by_old: Mapping[int, int], release: Callable[[], None]) -> None:
        """Reallocate keys and values with ``blocks`` blocks.

        States stay; with no blocks they are freed as well, and with the next ones they are zeros again. So
        are snapshots of them, whose contents are lost.
        ``new_by_old``: old and new numbers of the blocks to keep; the contents of all others are lost. They
        are kept through RAM, one tensor at a time. ``release`` is called after each tensor is freed, to
        return its memory to the device. Raises ``torch.OutOfMemoryError`` if the new tensors do not fit; the
        cache then has no blocks.
        """
        if not blocks:
            self.states = self._new_states(0)
            self.snapshots.release()
        try:
            for group in self._groups:
                for name in ("keys", "values"):
                    self._resize(group, name, blocks, new_by_old, release)
            if blocks and any(not len(part) for state in self.states.values() for part in state.values()):
                self.states = self._new_states(self._sequences)
            if blocks:
                self.snapshots.allocate()
        except torch.OutOfMemoryError:
            for group in self._groups:
                group.keys, group.values = group.keys.new_empty(0), group.values.new_empty(0)
            release()
            raise

    def _resize(
        self,
        group: PagedLayers,
        name: str,
        blocks: int,
        new_by_old: Mapping[int, int],
        release: Callable[[], None],
    ) -> None:
        """Reallocate ``keys`` or ``values`` (``name``); the old tensors are freed first."""
        old: CacheRows = getattr(group, name)
        saved = old.copy_to_host(new_by_old, self.block_size)
        empty = old.new_empty(0)
        setattr(group, name, empty)
        del old
        release()
        fresh = empty.new_empty(blocks * self.block_size)
        fresh.copy_from_host(saved, self.block_size)
        setattr(group, name, fresh)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write ``keys`` and ``values`` [tokens, kv_heads, head_dim] to ``slots`` [tokens] of a layer."""
        group, number = self._locations[layer]
        group.keys.write(number, slots, keys)
        group.values.write(number, slots, values)

    def copy_block(self, source: int, target: int, tokens: int) -> None:
        """Copy the first ``tokens`` tokens of block ``source`` to block ``target`` in all paged layers.

        Does nothing if both are the same block.
        """
        if source == target:
            return
        for group in self._groups:
            for rows in (group.keys, group.values):
                rows.copy_slots(source * self.block_size, target * self.block_size, tokens)

    def save_state(self, state_slot: int, snapshot: int) -> None:
        """Copy the states in ``state_slot`` to slot ``snapshot`` of the snapshots, as ``StateSnapshots``."""
        self.snapshots.save(self.states, state_slot, snapshot)

    def restore_state(self, state_slot: int, snapshot: int) -> None:
        """Copy slot ``snapshot`` of the snapshots to ``state_slot``, as ``StateSnapshots``."""
        self.snapshots.restore(self.states, state_slot, snapshot)

    def read(self, layer: int, slots: Tensor, first_slot: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer in ``slots`` (of any shape), each [*slots.shape, kv_heads, head_dim].

        ``first_slot``: that of ``slots`` if they are consecutive, so that the results are views (in FP8
        always copies); None otherwise.
        """
        group, number = self._locations[layer]
        return group.keys.read(number, slots, first_slot), group.values.read(number, slots, first_slot)
