"""How many bytes the engine's parts hold, counted from the tensors that are there. Changes nothing.

Knows Python objects with tensors in them, torch's own statistics, and this process's RAM. Does not know what
the plan expected (``plan/actual.py``).
"""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, UntypedStorage

from vlfit.layers.cpu_linear import Half
from vlfit.loading.offload import StreamedLayers
from vlfit.loading.pinned import PinnedBytes
from vlfit.models.decoder import TextModel
from vlfit.models.qwen3_vl.vision import VisionTower


def weight_holdings(text: TextModel, vision: VisionTower | None) -> dict[str, int]:
    """Bytes of all tensors of the model, by ledger line. A storage that is shared counts once."""
    seen: set[int] = set()
    embedding = bytes_of([text.embedding, text.head], seen)
    # Layers that wait in RAM are on the device in two slots.
    slots = text.layers.slots if isinstance(text.layers, StreamedLayers) else []
    offload = {"weights.offload": bytes_of(slots, seen)} if slots else {}
    return {
        "weights.text": bytes_of(text, seen),
        "weights.vision": bytes_of(vision, seen),
        "weights.embedding": embedding,
        **offload,
    }


def bytes_of(thing: object, seen: set[int] | None = None) -> int:
    """Bytes of the storages behind every tensor in ``thing``, its attributes and what they hold, and of what
    is laid out for products.

    ``seen`` are objects and storages that were counted before, by id; what is counted here is added.
    """
    return sum(held.nbytes() for held in _held_by(thing, seen))


def storages_in(thing: object, seen: set[int] | None = None) -> Iterator[UntypedStorage]:
    """Each storage behind a tensor in ``thing`` once, in the order of attributes; ``seen`` as above."""
    return (held for held in _held_by(thing, seen) if isinstance(held, UntypedStorage))


def halves_in(thing: object) -> list[Half]:
    """Each matrix in ``thing`` that is laid out for products on a CPU, of which no tensor knows."""
    return [held for held in _held_by(thing) if isinstance(held, Half)]


def tensors_in(thing: object, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor in ``thing``, in the order of attributes; ``seen`` are objects that were looked into."""
    return (held for held in _leaves(thing, seen) if isinstance(held, Tensor))


def _held_by(thing: object, seen: set[int] | None = None) -> Iterator[UntypedStorage | Half]:
    seen = set() if seen is None else seen
    for leaf in _leaves(thing, seen):
        if isinstance(leaf, Half):
            yield leaf
            continue
        storage = leaf.untyped_storage()
        key = storage.data_ptr() or id(leaf)
        if key not in seen:
            seen.add(key)
            yield storage


def _leaves(thing: object, seen: set[int] | None) -> Iterator[Tensor | Half]:
    seen = set() if seen is None else seen
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, str | bytes | int | float | PinnedBytes | None) or id(thing) in seen:
        return  # locked RAM is no memory of the device
    else:
        seen.add(id(thing))
        if isinstance(thing, Half):
            yield thing
            return
        for part in _parts(thing):
            yield from _leaves(part, seen)


def _parts(thing: object) -> Iterator[object]:
    """What ``thing`` holds, if it is a container or an object of ours: others hold no tensors of ours."""
    if isinstance(thing, dict):
        yield from thing.values()
    elif isinstance(thing, list | tuple | set):
        yield from thing
    elif type(thing).__module__.startswith("vlfit."):
        yield from getattr(thing, "__dict__", {}).values()
        for kind in type(thing).__mro__:
            yield from (getattr(thing, name, None) for name in getattr(kind, "__slots__", ()))


def torch_statistics(device: torch.device) -> dict[str, int]:
    """``allocated``, ``reserved`` and their peaks on a GPU, from torch's own books; empty on a CPU.

    Asks neither the driver nor the GPU, so it costs the engine nothing.
    """
    if device.type != "cuda":
        return {}
    told = torch.cuda.memory_stats(device)
    return {
        "allocated": told.get("allocated_bytes.all.current", 0),
        "reserved": told.get("reserved_bytes.all.current", 0),
        "peak_allocated": told.get("allocated_bytes.all.peak", 0),
        "peak_reserved": told.get("reserved_bytes.all.peak", 0),
    }


def gpu_uuid(device: torch.device) -> str:
    """The GPU's name for the driver's library ("GPU-..."), "" on a CPU: torch and NVML may count GPUs in
    different orders.
    """
    if device.type != "cuda":
        return ""
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    return f"GPU-{uuid}" if uuid and not uuid.startswith("GPU-") else uuid


def resident_bytes(proc: Path = Path("/proc")) -> int | None:
    """RAM of this process now (its resident set); None where there is no ``/proc``."""
    try:
        pages = int((proc / "self" / "statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
