"""Triton kernels for CUDA cards: products with narrow weights, and attention over the paged cache.

``linear.py`` and ``attention.py`` say what is computed, allocate what it takes and choose sizes; they import
no Triton, so they run on torch's meta device, where the plan counts bytes. The modules beside them hold one
kernel each and are imported when it is launched. On a CPU none of this runs: ``engine/layers/`` has the plain
PyTorch that the kernels are held to.
"""

import torch


def used_on(device: torch.device) -> bool:
    """Whether the engine computes with kernels on ``device``: everywhere but on a CPU."""
    return device.type != "cpu"
