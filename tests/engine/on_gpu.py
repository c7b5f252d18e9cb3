"""GPU memory by torch's allocator statistics, for tests that compare it with counted bytes.

Requested bytes: allocated ones are up to a MiB more per large tensor, depending on earlier allocations
(``plan/allocator.py``).
"""

import gc

import torch


def settle() -> None:
    """Nothing of earlier tests is left, and nothing of theirs will be freed while something is measured."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def requested() -> int:
    """Bytes of all tensors that there are."""
    return _told("current")


def most_requested() -> int:
    """Bytes of all tensors when they were most, since ``settle``."""
    return _told("peak")


def _told(when: str) -> int:
    torch.cuda.synchronize()
    told: int = torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]
    return told
