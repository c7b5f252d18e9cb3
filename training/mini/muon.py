"""Muon: momentum with an orthogonalized update, matrix by matrix. Here it needs half the samples of AdamW.

Keller Jordan's update, scaled as Moonshot's, so that its learning rate compares with AdamW's. Matrices of one
shape are stacked and updated together, since a small model has many of them.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def orthogonalize(matrices: Tensor) -> Tensor:
    """Push all singular values towards 1 by five Newton-Schulz steps: [count, rows, columns]."""
    # Directions need no precision; but a CPU without tiles multiplies bfloat16 more slowly than float32.
    narrow = matrices.is_cuda or torch.cpu._is_amx_tile_supported()
    states = matrices.to(torch.bfloat16 if narrow else torch.float32)
    tall = states.shape[1] > states.shape[2]
    if tall:
        states = states.mT
    states = states / (states.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        product = states @ states.mT
        states = 3.4445 * states + (-4.7750 * product + 2.0315 * product @ product) @ states
    turned: Tensor = states.mT if tall else states
    return turned


class Muon(torch.optim.Optimizer):
    """For two-dimensional parameters. ``decay`` is decoupled weight decay."""

    def __init__(
        self, parameters: Iterable[Tensor], lr: float = 0.0, decay: float = 0.0, momentum: float = 0.95
    ) -> None:
        super().__init__(list(parameters), {"lr": lr, "decay": decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every matrix."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for same in by_shape.values():
                self._update(same, group)

    def _update(self, same: list[Tensor], group: dict[str, Any]) -> None:
        gradients = [parameter.grad for parameter in same if parameter.grad is not None]
        for parameter in same:
            if "momentum" not in self.state[parameter]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        kept = [self.state[parameter]["momentum"] for parameter in same]
        keep = group["momentum"]
        torch._foreach_lerp_(kept, gradients, 1 - keep)
        ahead = torch._foreach_lerp(gradients, kept, keep)
        stacked = torch.stack(ahead)
        count, rows, columns = stacked.shape
        # The fused query-key-value matrix is three matrices; each is made orthogonal by itself.
        parts = 3 if rows == 3 * columns else 1
        turned = orthogonalize(stacked.view(count * parts, rows // parts, columns)).view(count, rows, columns)
        scale = 0.2 * max(rows // parts, columns) ** 0.5
        torch._foreach_mul_(same, 1 - group["lr"] * group["decay"])
        torch._foreach_add_(same, list((turned.float() * (-group["lr"] * scale)).unbind()))
