"""How many bytes the engine's parts hold, counted from the tensors that are there. Changes nothing.

Knows Python objects with tensors in them, torch's own statistics, and this process's RAM. Does not know what
the plan expected (``plan/actual.py``).
"""

import os
from pathlib import Path

import torch
from torch import Tensor

from vlfit.engine.decoder.text import TextModel
from vlfit.engine.qwen3_vl.vision import VisionTower


def weight_holdings(text: TextModel, vision: VisionTower) -> dict[str, int]:
    """Bytes of all tensors of the model, by ledger line. A storage that is shared counts once."""
    seen: set[int] = set()
    embedding = bytes_of([text.embedding, text.head], seen)
    return {
        "weights.text": bytes_of(text, seen),
        "weights.vision": bytes_of(vision, seen),
        "weights.embedding": embedding,
    }


def bytes_of(thing: object, seen: set[int] | None = None) -> int:
    """Bytes of the storages behind every tensor in ``thing``, its attributes and what they hold.

    ``seen`` are objects and storages that were counted before, by id; what is counted here is added.
    """
    seen = set() if seen is None else seen
    if isinstance(thing, Tensor):
        storage = thing.untyped_storage()
        key = storage.data_ptr() or id(thing)
        if key in seen:
            return 0
        seen.add(key)
        return storage.nbytes()
    if isinstance(thing, str | bytes | int | float | type(None)) or id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, dict):
        return sum(bytes_of(value, seen) for value in thing.values())
    if isinstance(thing, list | tuple | set):
        return sum(bytes_of(value, seen) for value in thing)
    if not type(thing).__module__.startswith("vlfit."):
        return 0  # what is not ours holds no tensors of ours
    attributes = list(getattr(thing, "__dict__", {}).values())
    for kind in type(thing).__mro__:
        attributes += [getattr(thing, name, None) for name in getattr(kind, "__slots__", ())]
    return sum(bytes_of(value, seen) for value in attributes)


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
