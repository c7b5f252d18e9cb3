"""GPU memory by torch's allocator statistics, for tests that compare it with counted bytes.

Requested bytes: allocated ones are up to a MiB more per large tensor, depending on earlier allocations
(``plan/allocator.py``).
"""

import gc

import torch


def reset_memory_statistics() -> None:
    """Free what earlier tests left, lest it is freed during a measurement, and reset the peaks."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def requested_bytes() -> int:
    """Bytes of all tensors now."""
    return _requested_bytes("current")


def peak_requested_bytes() -> int:
    """Most bytes of all tensors since ``reset_memory_statistics``."""
    return _requested_bytes("peak")


def _requested_bytes(when: str) -> int:
    torch.cuda.synchronize()
    size: int = torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]
    return size
