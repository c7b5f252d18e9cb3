"""Layers that wait in RAM and come to the GPU one after the other, each while others compute.

A layer that waits is one run of bytes in RAM that is not swapped. On the device there are two slots, each as
large as the largest of these layers. While one slot is computed with, the next layer is copied into the other
by a stream of its own; behind the last layer of a pass the first ones of the next pass follow. Knows
storages, slots and streams. Does not know what a layer computes, nor which wait (``plan/native/ram.py``).
"""

import io
import pickle
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from vlfit.loading.loader import Loader
from vlfit.loading.pinned import PinnedBytes, side_stream
from vlfit.plan.native.ram import ALIGNMENT, SLOTS

# A copy is made in pieces: what a step uploads meanwhile, a few kilobytes, waits for a piece and not for a
# layer where a card has one unit for copies. At 25 GB/s a piece takes 0.3 ms, of which asking for it is 2 %.
PIECE = 8 * 1024**2

Layer = TypeVar("Layer")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor begins in the bytes of its layer, and its form."""

    offset: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def inside(self, slot: Tensor) -> Tensor:
        """The tensor, if the bytes of its layer lie in ``slot`` [bytes] uint8."""
        values = slot.view(self.dtype)
        return values.as_strided(self.size, self.stride, self.offset // self.dtype.itemsize)


class _Waiting(Generic[Layer]):
    """A layer in RAM: its bytes, and the layer itself once for each slot, with tensors that lie there."""

    def __init__(self, layer: Layer, device: torch.device) -> None:
        tensors, self._rest = _take_apart(layer)
        starts: dict[int, int] = {}  # of each storage, by its address: tensors may share one
        end = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in starts:
                starts[storage.data_ptr()] = end
                end += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        self.pinned = PinnedBytes(end, device)
        self.places: list[_Place] = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            start = starts[storage.data_ptr()]
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.pinned.bytes[start : start + len(whole)].copy_(whole)
            inside = int(tensor.storage_offset()) * tensor.element_size()
            self.places.append(_Place(start + inside, tensor.dtype, tensor.size(), tensor.stride()))

    @property
    def size(self) -> int:
        return len(self.pinned.bytes)

    def inside(self, slot: Tensor) -> Layer:
        """The layer as it computes from ``slot``."""
        layer: Layer = _put_together(self._rest, [place.inside(slot) for place in self.places])
        return layer


class StreamedLayers(Sequence[Layer]):
    """The layers of a model in their order, those ``waiting`` in RAM. ``build`` makes the layer of an index.

    ``before``: the same layers, which are to be replaced; those of them that wait in RAM are taken over.

    Iterating yields each when its weights are on the device. They stay until the next layer is asked for, so
    whoever computes has given the device all of a layer's work by then. A pass that is broken off costs only
    what was copied ahead.
    """

    def __init__(
        self,
        build: Callable[[int], Layer],
        count: int,
        waiting: Collection[int],
        loader: Loader,
        before: Sequence[Layer] = (),
    ) -> None:
        self._device = device = loader.device
        self._there: dict[int, Layer] = {}
        self._waiting: dict[int, _Waiting[Layer]] = {}
        for index in range(count):
            if isinstance(before, StreamedLayers) and index in before._waiting:
                self._waiting[index] = before._waiting[index]
            elif index in waiting:
                with loader.into_ram():
                    self._waiting[index] = _Waiting(build(index), device)
            else:
                self._there[index] = build(index)
        largest = max((each.size for each in self._waiting.values()), default=0)
        self.slots = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self._in_slots = {
            index: [each.inside(slot) for slot in self.slots] for index, each in self._waiting.items()
        }
        following = [*self._waiting][1:] + [*self._waiting][:1]
        self._after = dict(zip(self._waiting, following, strict=True))
        self._on_gpu = device.type == "cuda"
        self._module: Any = torch.get_device_module(device)
        self._copies = side_stream(device) if self._on_gpu else self._module.Stream()
        self._turn = 0
        self._coming: deque[tuple[int, int, Any]] = deque()  # layer, slot, and when it is there

    def __len__(self) -> int:
        return len(self._there) + len(self._waiting)

    def __iter__(self) -> Iterator[Layer]:
        for index in range(len(self)):
            if index in self._there:
                yield self._there[index]
            else:
                yield self._arrived(index)
                self._done(index)

    def __getitem__(self, index: Any) -> Any:
        """One layer by itself, its weights on the device until another is asked for."""
        return self._there[index] if index in self._there else self._arrived(range(len(self))[index])

    @property
    def waiting_bytes(self) -> int:
        """RAM that is locked for the layers that wait."""
        return sum(each.size for each in self._waiting.values())

    def forget(self) -> None:
        """Wait for copies under way. Until the next pass the slots may hold something else, or be gone."""
        if self._on_gpu:
            self._copies.synchronize()
        self._coming.clear()

    def _arrived(self, index: int) -> Layer:
        """The layer ``index``: its weights are in a slot before the device does what is asked of it next."""
        if not self._coming or self._coming[0][0] != index:
            self._coming.clear()  # the first pass, or the pass before broke off
            following = index
            for _ in range(SLOTS):
                self._fetch(following)
                following = self._after[following]
        _, slot, there = self._coming[0]
        self._module.current_stream(self._device).wait_event(there)
        return self._in_slots[index][slot]

    def _done(self, index: int) -> None:
        """All of the work with layer ``index`` was asked for: its slot is next."""
        self._coming.popleft()
        newest = self._coming[-1][0] if self._coming else index
        self._fetch(self._after[newest])

    def _fetch(self, index: int) -> None:
        """Copy the layer into the slot whose turn it is, once what was asked for so far is computed."""
        slot, source = self.slots[self._turn], self._waiting[index].pinned.bytes
        computing = self._module.current_stream(self._device)
        with torch.inference_mode(), self._module.stream(self._copies):
            self._copies.wait_stream(computing)  # whatever reads the slot now was asked for before
            for start in range(0, len(source), PIECE):
                piece = slice(start, min(start + PIECE, len(source)))
                slot[piece].copy_(source[piece], non_blocking=True)
            there = self._copies.record_event()
        if self._on_gpu:
            # Should the slot be freed meanwhile, its memory is nobody else's before the copy has ended.
            slot.record_stream(self._copies)
        self._coming.append((index, self._turn, there))
        self._turn = (self._turn + 1) % SLOTS


class _Taker(pickle.Pickler):
    """Leaves tensors out, as pickle has it for what is kept elsewhere, and says which they were."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_id(self, thing: Any) -> int | None:
        if not isinstance(thing, Tensor):
            return None
        self.tensors.append(thing)
        return len(self.tensors) - 1


class _Giver(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]


def _take_apart(thing: object) -> tuple[list[Tensor], bytes]:
    """All tensors of ``thing``, and the rest of it."""
    file = io.BytesIO()
    taker = _Taker(file)
    taker.dump(thing)
    return taker.tensors, file.getvalue()


def _put_together(rest: bytes, tensors: list[Tensor]) -> Any:
    """What was taken apart, with other tensors in the places of its own."""
    return _Giver(io.BytesIO(rest), tensors).load()
