"""Root-mean-square normalization, as Qwen3 applies it. Layer norm is torch's own."""

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, computed in float32.

    ``weight`` is broadcast over the dimensions before it. The reference rounds to the model's dtype before it
    multiplies by ``weight``; in half precision that changes the last bit, so it is followed here.
    """
    wide = x.float()
    # Not torch's mean or its rms_norm: on a CPU they start twice as many small operations, and one row of a
    # decode step is all overhead.
    mean_square = (wide * wide).sum(-1, keepdim=True).mul_(1 / x.shape[-1])
    return (wide * mean_square.add_(eps).rsqrt_()).to(x.dtype).mul_(weight)
