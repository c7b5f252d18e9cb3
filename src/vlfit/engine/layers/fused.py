"""Steps between products that a GPU does in one kernel each; here is what they mean, in plain PyTorch.

Knows: what is added, normalized and multiplied, and in which dtype it is rounded. Does not know the
model: ``decoder/text.py`` puts the steps in order.
"""

from typing import TypeGuard

import torch.nn.functional as F
from torch import Tensor

from vlfit.engine import kernels
from vlfit.engine.kernels import eight_bits, fused
from vlfit.engine.kernels.few_rows import FEW_ROWS
from vlfit.engine.layers.linear import Fp8Linear, Gated, Linear
from vlfit.engine.layers.norm import rms_norm


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Adds ``delta`` to ``hidden`` [rows, width] in place; gives ``rms_norm`` of the sum."""
    if kernels.used_on(hidden.device):
        return fused.add_norm(hidden, delta, weight, eps)
    if delta is not None:
        hidden.add_(delta)
    return rms_norm(hidden, weight, eps)


def _in_eight_bits(layer: Linear, x: Tensor) -> TypeGuard[Fp8Linear]:
    return isinstance(layer, Fp8Linear) and layer.in_eight_bits(x)


def normed(layer: Linear, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """What ``layer`` makes of ``add_norm``, rounded where it is found if the layer takes its rows in FP8."""
    if _in_eight_bits(layer, hidden):
        return layer.multiply(eight_bits.add_norm(hidden, delta, weight, eps))
    return layer(add_norm(hidden, delta, weight, eps))


def feed_forward(
    gate_up: Linear, down: Linear, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """Adds ``delta`` to ``hidden`` [rows, width] in place; gives ``down`` of what the gates of ``gate_up``
    let through of the norm of the sum.
    """
    if _in_eight_bits(gate_up, hidden) and _in_eight_bits(down, hidden):
        # In one line, so that nothing outlives what reads it.
        return down.multiply(
            eight_bits.silu_and_multiply(gate_up.multiply(eight_bits.add_norm(hidden, delta, weight, eps)))
        )
    return down(gated(gate_up, add_norm(hidden, delta, weight, eps)))


def gated(gate_up: Linear, x: Tensor) -> Tensor:
    """``silu(gate) * up`` [rows, inner] of what ``gate_up`` makes of ``x`` [rows, hidden]."""
    if kernels.used_on(x.device) and len(x) <= FEW_ROWS and isinstance(gate_up, Gated):
        return gate_up.gated(x)
    return silu_and_multiply(gate_up(x))


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` [rows, inner] of ``gate_up`` [rows, 2 * inner], which may be overwritten."""
    if kernels.used_on(gate_up.device):
        return fused.silu_and_multiply(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate, inplace=True).mul_(up)
