"""Root-mean-square normalization, as Qwen3 applies it. Layer norm is torch's own."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, computed in float32.

    The reference rounds to the model's dtype before it multiplies by ``weight``; in half precision that
    changes the last bit, so it is followed here.
    """
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)
