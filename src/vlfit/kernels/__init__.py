"""Triton kernels for CUDA cards: quantized and dense GEMMs, paged attention, row operations, sampling.

Each family has a host module, which allocates outputs and chooses tile sizes, and a module of kernels, which
is imported at the first launch. Host modules import no Triton and run on torch's meta device, where the plan
counts bytes. CPUs use none of this: ``layers/`` has the plain PyTorch that the kernels are tested against.
"""

import torch


def enabled_on(device: torch.device) -> bool:
    """Whether the engine uses these kernels on ``device``: on all but CPUs, so on torch's meta device too."""
    return device.type != "cpu"
