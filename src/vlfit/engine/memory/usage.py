"""Memory in use: by parts of the engine, counted from live tensors, by torch's allocator, by the process."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, UntypedStorage

from vlfit.kernels.cpu.products import StoredWeight
from vlfit.layers.cpu_linear import HalfMatrix
from vlfit.layers.embedding import EmbeddingInRam
from vlfit.loading.offload import StreamedLayers
from vlfit.loading.pinned import PinnedBytes
from vlfit.models.decoder import TextModel
from vlfit.models.interface import DraftModel, VisionEncoder

CpuMatrix = HalfMatrix | StoredWeight  # weights on a CPU that count as one, whatever tensors they consist of


def weight_bytes_by_line(
    text: TextModel, vision: VisionEncoder | None, draft: DraftModel | None = None
) -> dict[str, int]:
    """Bytes of the model's weights by ledger line: "weights.text", "weights.vision", "weights.embedding".

    With a ``draft`` model also "weights.draft", without what it shares.
    With offloaded layers also "weights.offload": the two slots on the device that layers are copied to; their
    copies in RAM count nowhere. A storage shared by tensors counts once. ``vision`` None: 0.
    """
    seen: set[int] = set()
    embedding = tensor_bytes([text.embedding, text.head], seen)
    slots = text.layers.slots if isinstance(text.layers, StreamedLayers) else []
    offload = {"weights.offload": tensor_bytes(slots, seen)} if slots else {}
    sizes = {
        "weights.text": tensor_bytes(text, seen),
        "weights.vision": tensor_bytes(vision, seen),
        "weights.embedding": embedding,
    }
    drafting = {} if draft is None else {"weights.draft": tensor_bytes(draft, seen)}
    return {**sizes, **drafting, **offload}


def tensor_bytes(thing: object, seen: set[int] | None = None) -> int:
    """Bytes of all tensors that ``thing`` refers to, directly or not; each storage counts once.

    Follows containers and attributes of vlfit's objects. Includes matrices of a CPU (``CpuMatrix``), but
    not pinned RAM. ``seen``: ids of objects, and keys of storages, to leave out; it is extended by those
    visited, so that a second call with the same set counts only the rest.
    """
    return sum(storage.nbytes() for storage in _storages(thing, seen))


def storages_in(thing: object, seen: set[int] | None = None) -> Iterator[UntypedStorage]:
    """Each storage of the tensors that ``thing`` refers to, once, in the order of attributes.

    ``seen``: as in ``tensor_bytes``. Without matrices of a CPU.
    """
    return (storage for storage in _storages(thing, seen) if isinstance(storage, UntypedStorage))


def cpu_matrices_in(thing: object) -> list[CpuMatrix]:
    """The matrices on a CPU that ``thing`` refers to: weights that are no torch tensors of their own."""
    return [storage for storage in _storages(thing) if isinstance(storage, CpuMatrix)]


def tensors_in(thing: object, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor that ``thing`` refers to, in the order of attributes; several may share a storage.

    ``seen``: ids of objects to leave out; extended by those visited.
    """
    return (leaf for leaf in _leaves(thing, seen) if isinstance(leaf, Tensor))


def _storages(thing: object, seen: set[int] | None = None) -> Iterator[UntypedStorage | CpuMatrix]:
    seen = set() if seen is None else seen
    for leaf in _leaves(thing, seen):
        if isinstance(leaf, CpuMatrix):
            yield leaf
            continue
        storage = leaf.untyped_storage()
        key = storage.data_ptr() or id(leaf)
        if key not in seen:
            seen.add(key)
            yield storage


def _leaves(thing: object, seen: set[int] | None) -> Iterator[Tensor | CpuMatrix]:
    seen = set() if seen is None else seen
    if isinstance(thing, Tensor):
        yield thing
    elif (
        isinstance(thing, str | bytes | int | float | PinnedBytes | EmbeddingInRam | None)
        or id(thing) in seen
    ):
        return  # pinned RAM is no device memory
    else:
        seen.add(id(thing))
        if isinstance(thing, CpuMatrix):
            yield thing
            return
        for part in _parts(thing):
            yield from _leaves(part, seen)


def _parts(thing: object) -> Iterator[object]:
    """Members of a container or of an object of vlfit; no others refer to tensors of the engine."""
    if isinstance(thing, dict):
        yield from thing.values()
    elif isinstance(thing, list | tuple | set):
        yield from thing
    elif any(each.__module__.startswith("vlfit.") for each in type(thing).__mro__):
        yield from getattr(thing, "__dict__", {}).values()
        for base in type(thing).__mro__:
            yield from (getattr(thing, name, None) for name in getattr(base, "__slots__", ()))


def torch_statistics(device: torch.device) -> dict[str, int]:
    """Bytes allocated and reserved by torch on a GPU, now and at their peaks; {} on a CPU.

    The keys are fields of ``MemoryUsage``. Queries neither the driver nor the GPU.
    """
    if device.type != "cuda":
        return {}
    statistics = torch.cuda.memory_stats(device)
    return {
        "allocated": statistics.get("allocated_bytes.all.current", 0),
        "reserved": statistics.get("reserved_bytes.all.current", 0),
        "peak_allocated": statistics.get("allocated_bytes.all.peak", 0),
        "peak_reserved": statistics.get("reserved_bytes.all.peak", 0),
    }


def gpu_uuid(device: torch.device) -> str:
    """UUID of a GPU as NVML writes it ("GPU-..."); "" on a CPU, or if torch does not know it.

    It identifies the GPU in NVML, which may number GPUs differently than torch.
    """
    if device.type != "cuda":
        return ""
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    return f"GPU-{uuid}" if uuid and not uuid.startswith("GPU-") else uuid


def resident_bytes(proc: Path = Path("/proc")) -> int | None:
    """Resident set of this process in bytes, now; None where ``proc`` cannot be read (not on Linux)."""
    try:
        pages = int((proc / "self" / "statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
