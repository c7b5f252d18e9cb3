"""What torch's books say of a GPU's memory, in tests that compare it with what was counted.

Bytes as they were asked for: what is allocated is more by up to a MiB for each large tensor, as torch leaves
to it the rest of a piece that is not worth keeping apart, and which piece it gets depends on what ran before
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
