"""The walk of a gated delta net's states from piece to piece: kernels on a GPU, else PyTorch.

The walk is a few small products for each piece, one after the other: launched one by one they would take
longer than all the rest of a training step.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# How far the kernels may be from PyTorch's numbers, as a share of the largest: both multiply in TF32.
TOLERANCE = 0.01
Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def scan_by_torch(
    fresh: Tensor, known: Tensor, to_end: Tensor, left: Tensor, flags: Tensor
) -> tuple[Tensor, Tensor]:
    """The state before each piece, and what each piece writes.

    ``fresh``: [batch, pieces, heads, tokens, value width]; ``known`` and ``to_end``: likewise, key width;
    ``left``: [batch, pieces, heads], what remains of a state after a piece; ``flags``: [batch, pieces, 3],
    whether a piece goes on from the one before, from the common beginning, belongs to the beginning.
    """
    batch, pieces, heads, _, width = fresh.shape
    state = common = fresh.new_zeros(batch, heads, to_end.shape[-1], width)
    states, news = [], []
    for piece in range(pieces):
        goes_on, follows, is_common = flags[:, piece, :, None, None, None].unbind(1)
        if piece:
            state = state * goes_on + common * follows
        written = fresh[:, piece] - known[:, piece] @ state
        states.append(state)
        news.append(written)
        state = state * left[:, piece, :, None, None] + to_end[:, piece].mT @ written
        common = torch.lerp(common, state, is_common)
    return torch.stack(states, 1), torch.stack(news, 1)


def compare(scan: Scan, device: torch.device | str, shape: tuple[int, int, int, int, int, int]) -> float:
    """The largest difference of ``scan`` from PyTorch's numbers, with gradients, as a share of the largest.

    ``shape``: batch, pieces, heads, tokens, key width, value width.
    """
    batch, pieces, heads, tokens, keys, values = shape
    random = torch.Generator().manual_seed(0)

    def some(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=random).to(device)

    each = (batch, pieces, heads, tokens)
    inputs = [some(*each, values), some(*each, keys) / 8, some(*each, keys) / 8, some(*each[:3]).sigmoid()]
    flags = torch.zeros(batch, pieces, 3)
    for row in range(batch):
        # A common beginning, one that goes on, one from the beginning that goes on, one from nothing.
        for piece, flag in enumerate([2, 0, 2, 1, 0, 1, 3][:pieces]):
            flags[row, piece] = torch.tensor([float(flag == 0), float(flag == 1), float(flag == 2)])
        flags[row, 2, 0] = 1
    flags = flags.to(device)
    weights = [some(batch, pieces, heads, keys, values), some(*each, values)]
    found = []
    for one in (scan_by_torch, scan):
        given = [each.clone().requires_grad_() for each in inputs]
        outputs = one(*given, flags)  # type: ignore[call-arg]
        parts = [(output * weight).sum() for output, weight in zip(outputs, weights, strict=True)]
        torch.stack(parts).sum().backward()
        found.append([*(output.detach() for output in outputs), *(each.grad for each in given)])
    return max(
        float((ours - theirs).abs().max() / theirs.abs().max()) for theirs, ours in zip(*found, strict=True)
    )


_chosen: dict[tuple[str, int, int, int], Scan] = {}


def scan(fresh: Tensor, known: Tensor, to_end: Tensor, left: Tensor, flags: Tensor) -> tuple[Tensor, Tensor]:
    """``scan_by_torch``, on a GPU by kernels if they compile there and give its numbers; says so if not."""
    widths = (fresh.shape[3], known.shape[-1], fresh.shape[-1])
    key = (fresh.device.type, *widths)
    if key not in _chosen:
        _chosen[key] = scan_by_torch
        if fresh.is_cuda:
            try:
                from training.mini.delta_kernels import ScanByTriton

                with torch.enable_grad():
                    apart = compare(ScanByTriton.apply, fresh.device, (3, 7, 2, *widths))
            except Exception as error:  # whatever a compiler raises: the slow way is as good
                print(f"states are walked by PyTorch: the kernel failed with {error!r:.300}", flush=True)
            else:
                good = apart < TOLERANCE
                print(f"the kernel for states is {apart:.5f} off{'' if good else ': not used'}", flush=True)
                if good:
                    _chosen[key] = ScanByTriton.apply
    return _chosen[key](fresh, known, to_end, left, flags)
