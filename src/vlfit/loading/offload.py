"""Weight offload: layers kept in pinned RAM and streamed to the GPU, each while others compute.

An offloaded layer is one run of bytes in pinned RAM. The device has two slots, each as large as the largest
such layer: while one is computed with, the next layer is copied into the other on a side stream. After the
last layer of a pass the first ones of the next pass follow.
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

# Copies are made in pieces: on a card with one copy engine, the few kilobytes that a step uploads wait for a
# piece and not for a layer. At 25 GB/s a piece takes 0.3 ms, 2 % of which is the launch.
PIECE = 8 * 1024**2

Layer = TypeVar("Layer")


@dataclass(frozen=True, slots=True)
class _TensorLayout:
    """Offset of a tensor in the bytes of its layer, with dtype, shape and strides."""

    offset: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def view_in(self, slot: Tensor) -> Tensor:
        """The tensor in ``slot`` [bytes] uint8, which holds the bytes of its layer."""
        elements = slot.view(self.dtype)
        return elements.as_strided(self.size, self.stride, self.offset // self.dtype.itemsize)


class _OffloadedLayer(Generic[Layer]):
    """A layer in RAM: its bytes, and its skeleton to build it with tensors in a slot."""

    def __init__(self, layer: Layer, device: torch.device) -> None:
        tensors, self._skeleton = _detach_tensors(layer)
        starts: dict[int, int] = {}  # of each storage, by address: tensors may share one
        end = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in starts:
                starts[storage.data_ptr()] = end
                end += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        self.pinned = PinnedBytes(end, device)
        self.layouts: list[_TensorLayout] = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            start = starts[storage.data_ptr()]
            contents = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.pinned.bytes[start : start + len(contents)].copy_(contents)
            offset = int(tensor.storage_offset()) * tensor.element_size()
            self.layouts.append(_TensorLayout(start + offset, tensor.dtype, tensor.size(), tensor.stride()))

    @property
    def size(self) -> int:
        return len(self.pinned.bytes)

    def view_in(self, slot: Tensor) -> Layer:
        """The layer with its tensors in ``slot``."""
        layer: Layer = _attach_tensors(self._skeleton, [layout.view_in(slot) for layout in self.layouts])
        return layer


class StreamedLayers(Sequence[Layer]):
    """The ``count`` layers of a model in order; those whose indices are in ``offloaded`` stay in RAM.

    ``build`` creates a layer by index. ``before``: the layers of the model that this one replaces; those that
    it has offloaded are reused instead of built, and stay offloaded. Raises ``DeviceError`` if the RAM cannot
    be pinned.

    Iterating yields each layer with its weights on the device. The weights of an offloaded layer stay there
    until the next layer is requested, so all its work must be launched by then. An interrupted pass costs
    only the copies made ahead. ``slots``: the buffers on the device, [bytes] uint8 each.
    """

    def __init__(
        self,
        build: Callable[[int], Layer],
        count: int,
        offloaded: Collection[int],
        loader: Loader,
        before: Sequence[Layer] = (),
    ) -> None:
        self._device = device = loader.device
        self._resident: dict[int, Layer] = {}
        self._offloaded: dict[int, _OffloadedLayer[Layer]] = {}
        for index in range(count):
            if isinstance(before, StreamedLayers) and index in before._offloaded:
                self._offloaded[index] = before._offloaded[index]
            elif index in offloaded:
                with loader.into_ram():
                    self._offloaded[index] = _OffloadedLayer(build(index), device)
            else:
                self._resident[index] = build(index)
        largest = max((each.size for each in self._offloaded.values()), default=0)
        self.slots = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self._in_slots = {
            index: [each.view_in(slot) for slot in self.slots] for index, each in self._offloaded.items()
        }
        successors = [*self._offloaded][1:] + [*self._offloaded][:1]
        self._next_offloaded = dict(zip(self._offloaded, successors, strict=True))
        self._on_gpu = device.type == "cuda"
        self._module: Any = torch.get_device_module(device)
        self._copy_stream = side_stream(device) if self._on_gpu else self._module.Stream()
        self._next_slot = 0
        self._pending: deque[tuple[int, int, Any]] = deque()  # layer, slot, event of its copy

    def __len__(self) -> int:
        return len(self._resident) + len(self._offloaded)

    def __iter__(self) -> Iterator[Layer]:
        for index in range(len(self)):
            if index in self._resident:
                yield self._resident[index]
            else:
                yield self._wait_for(index)
                self._release_slot(index)

    def __getitem__(self, index: Any) -> Any:
        """One layer by index; an offloaded one stays on the device only until another is requested."""
        return self._resident[index] if index in self._resident else self._wait_for(range(len(self))[index])

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of pinned RAM of the offloaded layers."""
        return sum(each.size for each in self._offloaded.values())

    def reset(self) -> None:
        """Wait for pending copies and discard them. Until the next pass ``slots`` may be used or freed."""
        if self._on_gpu:
            self._copy_stream.synchronize()
        self._pending.clear()

    def _wait_for(self, index: int) -> Layer:
        """The offloaded layer ``index``; the compute stream waits for its weights."""
        if not self._pending or self._pending[0][0] != index:
            self._pending.clear()  # the first pass, or the last one was interrupted
            following = index
            for _ in range(SLOTS):
                self._fetch(following)
                following = self._next_offloaded[following]
        _, slot, copied = self._pending[0]
        self._module.current_stream(self._device).wait_event(copied)
        return self._in_slots[index][slot]

    def _release_slot(self, index: int) -> None:
        """All work of layer ``index`` is launched: reuse its slot for the next layer."""
        self._pending.popleft()
        newest = self._pending[-1][0] if self._pending else index
        self._fetch(self._next_offloaded[newest])

    def _fetch(self, index: int) -> None:
        """Copy a layer into the next slot, after the work launched so far."""
        slot, source = self.slots[self._next_slot], self._offloaded[index].pinned.bytes
        computing = self._module.current_stream(self._device)
        with torch.inference_mode(), self._module.stream(self._copy_stream):
            self._copy_stream.wait_stream(computing)  # kernels that read the slot are launched already
            for start in range(0, len(source), PIECE):
                piece = slice(start, min(start + PIECE, len(source)))
                slot[piece].copy_(source[piece], non_blocking=True)
            copied = self._copy_stream.record_event()
        if self._on_gpu:
            # If the slot is freed meanwhile, its memory is not reused before the copy ends.
            slot.record_stream(self._copy_stream)
        self._pending.append((index, self._next_slot, copied))
        self._next_slot = (self._next_slot + 1) % SLOTS


class _DetachingPickler(pickle.Pickler):
    """Leaves tensors out (as persistent ids) and collects them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_id(self, thing: Any) -> int | None:
        if not isinstance(thing, Tensor):
            return None
        self.tensors.append(thing)
        return len(self.tensors) - 1


class _AttachingUnpickler(pickle.Unpickler):
    """Inserts other tensors for those left out."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]


def _detach_tensors(thing: object) -> tuple[list[Tensor], bytes]:
    """All tensors of ``thing``, and its pickle without them."""
    file = io.BytesIO()
    pickler = _DetachingPickler(file)
    pickler.dump(thing)
    return pickler.tensors, file.getvalue()


def _attach_tensors(skeleton: bytes, tensors: list[Tensor]) -> Any:
    """The object of a pickle without tensors, with other ``tensors`` inserted."""
    return _AttachingUnpickler(io.BytesIO(skeleton), tensors).load()
