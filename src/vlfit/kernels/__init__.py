"""Triton kernels for CUDA cards: quantized and dense GEMMs, paged attention, row operations, sampling.

Each family has a host module, which allocates outputs and chooses tile sizes, and a module of kernels, which
is imported at the first launch. Host modules import no Triton and run on torch's meta device, where the plan
counts bytes. CPUs use none of this: ``layers/`` has the plain PyTorch that the kernels are tested against.
"""

from collections.abc import Set

import torch

from vlfit.api.engine_options import KERNEL_GROUPS, KernelGroup

_NONE: frozenset[KernelGroup] = frozenset()
_plain: dict[torch.device, frozenset[KernelGroup]] = {}


def enabled_on(device: torch.device) -> bool:
    """Whether the engine uses these kernels on ``device``: on all but CPUs, so on torch's meta device too.

    False where ``use_plain`` says so of all groups.
    """
    return device.type != "cpu" and (not _plain or len(plain_on(device)) < len(KERNEL_GROUPS))


def enabled_for(group: KernelGroup, device: torch.device) -> bool:
    """Whether the engine uses the kernels of ``group`` on ``device``."""
    return enabled_on(device) and (not _plain or group not in plain_on(device))


def use_plain(device: torch.device, groups: Set[KernelGroup]) -> None:
    """Set which groups engines on ``device`` compute in plain PyTorch: in place of Triton's kernels, on a CPU
    of compiled code.

    For this process, and for what is loaded from now on: the last engine of a device decides for it.
    """
    if groups:
        _plain[_numbered(device)] = frozenset(groups)
    else:
        _plain.pop(_numbered(device), None)


def plain_on(device: torch.device) -> frozenset[KernelGroup]:
    """What ``use_plain`` set for ``device``; no group at first."""
    return _plain.get(_numbered(device), _NONE) if _plain else _NONE


def _numbered(device: torch.device) -> torch.device:
    """``device`` with its number: "cuda" is "cuda:0"."""
    return torch.device(device.type, device.index or 0)
