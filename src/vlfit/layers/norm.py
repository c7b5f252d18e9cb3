"""RMSNorm. LayerNorm is torch's own."""

from functools import cache

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension: ``x / sqrt(mean(x^2) + eps) * weight``, computed in float32.

    Returns a new tensor in the dtype of ``x``. ``weight`` is broadcast over the leading dimensions of ``x``.
    As in transformers, numbers are rounded to the dtype of ``x`` before they are multiplied by ``weight``; by
    a weight in float32 they are multiplied first.
    """
    # No torch mean or rms_norm, no separate scale and add, no cast to the same dtype: on a CPU each is one
    # more small operation, and a decode step's single row is all overhead.
    wide = x if x.dtype == torch.float32 else x.float()
    squares = (wide * wide).sum(-1, keepdim=True)
    normalized = wide * torch.add(_scalar(eps), squares, alpha=1 / x.shape[-1]).rsqrt_()
    if wide is x or weight.dtype == torch.float32:
        return normalized.mul_(weight).to(x.dtype)
    return normalized.to(x.dtype).mul_(weight)


@cache
def _scalar(value: float) -> Tensor:
    """``value`` as a cached tensor; torch would otherwise make one at each call."""
    return torch.tensor(value, dtype=torch.float32)
