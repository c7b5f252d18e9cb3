"""Steps between products that a GPU does in one kernel each; here is what they mean, in plain PyTorch.

Knows: what is added, normalized, rotated and stored, and in which dtype it is rounded. Does not know the
model: ``decoder/text.py`` puts the steps in order.
"""

import torch.nn.functional as F
from torch import Tensor

from vlfit.engine import kernels
from vlfit.engine.decoder.rope import rotate
from vlfit.engine.kernels import fused
from vlfit.engine.kv_cache import KVCache
from vlfit.engine.layers.norm import rms_norm


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Adds ``delta`` to ``hidden`` [rows, width] in place; gives ``rms_norm`` of the sum."""
    if kernels.used_on(hidden.device):
        return fused.add_norm(hidden, delta, weight, eps)
    if delta is not None:
        hidden.add_(delta)
    return rms_norm(hidden, weight, eps)


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` [rows, inner] of ``gate_up`` [rows, 2 * inner], which may be overwritten."""
    if kernels.used_on(gate_up.device):
        return fused.silu_and_multiply(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate, inplace=True).mul_(up)


def rotate_and_store(
    joined: Tensor,
    norm_weight: Tensor | None,
    tables: tuple[Tensor, Tensor],
    slots: Tensor,
    cache: KVCache,
    layer: int,
    eps: float,
) -> Tensor:
    """Queries [rows, heads, head_dim] of ``joined`` [rows, heads + 2 * key_heads, head_dim]; its keys and
    values go to ``slots`` [rows] of ``cache``.

    Queries and keys are normalized head by head if there is a ``norm_weight`` [heads + key_heads, head_dim],
    and turned by ``tables`` (``rope.rotate``).
    """
    if kernels.used_on(joined.device):
        keys, values = cache.keys[layer], cache.values[layer]
        return fused.rotate_and_store(joined, norm_weight, tables, slots, keys, values, eps)
    key_heads = cache.keys.shape[2]
    both = joined[:, :-key_heads]
    if norm_weight is not None:
        both = rms_norm(both, norm_weight, eps)
    turned = rotate(both, *tables)
    query, key = turned[:, :-key_heads], turned[:, -key_heads:]
    cache.write(layer, slots, key, joined[:, -key_heads:])
    return query
