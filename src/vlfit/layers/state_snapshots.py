"""Copies of sequences' recurrent states: some on the device, the others in RAM.

A state has one size whatever the context, so all copies are alike and lie in numbered slots, whose memory is
used again; which slot holds what is up to ``engine/scheduling/snapshot_index.py``. Copies are queued on the
device's stream, and nobody waits for them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from vlfit.loading.pinned import PinnedBytes
from vlfit.models.cache_spec import CacheSpec, State, snapshot_ram_bytes

States = Mapping[int, Mapping[str, Tensor]]  # by layer and name, each [slots, *shape]


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor of one layer, and where its bytes are in a copy."""

    layer: int
    name: str
    begin: int
    end: int


class StateSnapshots:
    """``slots`` copies of a sequence's states, ``bytes_each`` bytes each; for a spec without states none.

    The first ``device_slots`` are on ``device``, allocated at once, as the ledger has them; those in RAM, as
    many as ``ram_bytes`` holds, when they are first used (pinned for a GPU). On a CPU all are in RAM.
    """

    def __init__(
        self, spec: CacheSpec, device: torch.device, device_slots: int = 0, ram_bytes: int = 0
    ) -> None:
        self._device = device
        self._parts: list[_Part] = []
        begin = 0
        for index, layer in enumerate(spec):
            for tensor in layer.tensors if isinstance(layer, State) else ():
                if tensor.saved:
                    self._parts.append(_Part(index, tensor.name, begin, begin + tensor.nbytes))
                    begin += tensor.snapshot_bytes
        self.bytes_each = begin
        self.device_slots = device_slots if begin and device.type != "cpu" else 0
        self.slots = self.device_slots + snapshot_ram_bytes(spec, ram_bytes) // max(begin, 1)
        self._on_device: Tensor | None = None  # [device slots, bytes each]
        self._in_ram: dict[int, PinnedBytes] = {}
        self.allocate()

    @property
    def device_bytes(self) -> int:
        """Bytes allocated on a GPU."""
        return 0 if self._on_device is None else self._on_device.nbytes

    @property
    def ram_bytes(self) -> int:
        """Bytes allocated in RAM so far."""
        return len(self._in_ram) * self.bytes_each

    @property
    def ram_limit(self) -> int:
        """Bytes that the slots in RAM take when all are used."""
        return (self.slots - self.device_slots) * self.bytes_each

    def allocate(self) -> None:
        """Allocate the slots on the device, if they are not. Raises ``torch.OutOfMemoryError``."""
        if self.device_slots and self._on_device is None:
            shape = self.device_slots, self.bytes_each
            self._on_device = torch.empty(shape, dtype=torch.uint8, device=self._device)

    def release(self) -> None:
        """Free all memory; what was copied is lost. Slots in RAM come back by themselves."""
        self._on_device = None
        self._in_ram.clear()

    def save(self, states: States, state_slot: int, slot: int) -> None:
        """Copy the states in ``state_slot`` to ``slot``. Does not wait.

        Raises ``DeviceError``, ``OSError`` or ``MemoryError`` if there is no RAM for a slot used first.
        """
        copy = self._bytes_of(slot)
        for part in self._parts:
            source = states[part.layer][part.name][state_slot]
            _view(copy, part, source).copy_(source, non_blocking=True)

    def restore(self, states: States, state_slot: int, slot: int) -> None:
        """Copy ``slot``, which was saved, to ``state_slot`` of the states. Does not wait."""
        copy = self._bytes_of(slot)
        for part in self._parts:
            target = states[part.layer][part.name][state_slot]
            target.copy_(_view(copy, part, target), non_blocking=True)

    def _bytes_of(self, slot: int) -> Tensor:
        if self._on_device is not None and slot < self.device_slots:
            return self._on_device[slot]
        if slot not in self._in_ram:
            self._in_ram[slot] = PinnedBytes(self.bytes_each, self._device)
        return self._in_ram[slot].bytes


def _view(copy: Tensor, part: _Part, like: Tensor) -> Tensor:
    """The bytes of ``part`` in ``copy`` in the dtype and shape of ``like``."""
    assert part.end - part.begin == prod(like.shape) * like.dtype.itemsize
    return copy[part.begin : part.end].view(like.dtype).view(like.shape)
