"""The gated delta net of Qwen3.5 in training: whole sequences with a gradient, in pieces of ``PIECE`` tokens.

A sequence consists of segments that begin at a piece's first token (``sequences.py``): the common beginning,
then conversations that go on from its state, and talks that begin with none. Within a piece all tokens are
computed at once, from piece to piece a state is handed on; all of it in float32.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.mini.delta_scan import scan
from training.mini.sequences import BLIND, PADDING, PIECE
from training.mini.shape import Shape

# The range of steps that a fresh layer takes, as Mamba begins: states last from a token to a thousand.
SHORTEST, LONGEST = 0.001, 0.1


@dataclass(frozen=True)
class Pieces:
    """How the pieces of a batch follow each other; every first dimension is the batch.

    ``real``: [batch, length], false for padding. ``left``: [batch, pieces * (kernel - 1)], the tokens before
    each piece, ``length`` where there is none. ``flags``: [batch, pieces, 3], 1.0 for a piece that goes on
    from the one before it; for one that follows the common beginning; for one of the beginning.
    """

    real: Tensor
    left: Tensor
    flags: Tensor


def pieces_of(segments: Tensor, kernel: int) -> Pieces:
    """The pieces of a batch. ``segments``: [batch, length], a multiple of ``PIECE`` long."""
    batch, length = segments.shape
    each = segments.view(batch, -1, PIECE)[:, :, 0]
    before = functional.pad(each[:, :-1], (1, 0), value=PADDING)
    goes_on = each == before
    follows = ~goes_on & (each > 0) & (each < BLIND)
    back = torch.arange(1 - kernel, 0, device=segments.device)
    starts = torch.arange(0, length, PIECE, device=segments.device)
    end = (segments == 0).sum(1)
    inside = (starts[:, None] + back).expand(batch, -1, -1)
    outside = (end[:, None, None] + back).expand(-1, len(starts), -1)
    left = torch.where(goes_on[..., None], inside, torch.where(follows[..., None], outside, length))
    left = torch.where(left < 0, length, left)

    flags = torch.stack([goes_on, follows, each == 0], -1).float()
    return Pieces(segments != PADDING, left.flatten(1), flags)


class _InverseOfLower(torch.autograd.Function):
    """The inverse of lower triangular matrices with ones on their diagonals, by doubling blocks.

    Every step is a product of well-conditioned blocks; the series of powers would overflow where keys repeat.
    """

    @staticmethod
    def forward(context: Any, lower: Tensor) -> Tensor:
        """``lower``: [..., PIECE, PIECE], of which only what lies under the diagonal is read."""
        size = lower.shape[-1]
        index = torch.arange(size, device=lower.device)
        inverse = torch.eye(size, device=lower.device, dtype=lower.dtype).expand_as(lower)
        half = 1
        while half < size:
            block = index // half
            corner = (block[:, None] % 2 == 1) & (block[None] == block[:, None] - 1)
            inverse = inverse - inverse @ (lower * corner) @ inverse
            half *= 2
        context.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        """Minus the transposed inverse on both sides."""
        (inverse,) = context.saved_tensors
        turned = inverse.mT
        return (-(turned @ gradient @ turned)).tril(-1)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, pieces: Pieces
) -> Tensor:
    """What the states answer, [batch, pieces, heads, PIECE, value width], in float32.

    ``query`` (scaled), ``key``: [batch, pieces, heads, PIECE, key width]; ``value`` likewise; ``decay``
    (logarithms, at most 0), ``beta``: [batch, pieces, heads, PIECE].
    """
    total = decay.cumsum(-1)
    apart = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    weighted = key * beta[..., None]
    inverse: Tensor = _InverseOfLower.apply((weighted @ key.mT) * apart)  # type: ignore[no-untyped-call]
    fresh = inverse @ (value * beta[..., None])
    known = inverse @ (weighted * total.exp()[..., None])
    to_end = key * (total[..., -1:] - total).exp()[..., None]
    states, news = scan(fresh, known, to_end, total[..., -1].exp(), pieces.flags)
    within = (query @ key.mT) * apart
    return (query * total.exp()[..., None]) @ states + within @ news


class GatedNorm(nn.Module):
    """Scales each head to unit root mean square, then by the gate's SiLU."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, states: Tensor, gate: Tensor) -> Tensor:
        normed = functional.rms_norm(states.float(), self.weight.shape, self.weight, self.epsilon)
        return normed * functional.silu(gate.float())


class DeltaNet(nn.Module):
    """A layer whose memory of all tokens is one matrix for each head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        heads, inner = shape.linear_value_heads, shape.linear_value_heads * shape.linear_value_dim
        self.in_proj_qkv = nn.Linear(shape.hidden, shape.conv_dim, bias=False)
        self.in_proj_z = nn.Linear(shape.hidden, inner, bias=False)
        self.in_proj_a = nn.Linear(shape.hidden, heads, bias=False)
        self.in_proj_b = nn.Linear(shape.hidden, heads, bias=False)
        self.conv1d = nn.Conv1d(
            shape.conv_dim, shape.conv_dim, shape.kernel, groups=shape.conv_dim, bias=False
        )
        steps = torch.logspace(0, 1, heads) * SHORTEST * (LONGEST / SHORTEST) ** 0.5
        self.dt_bias = nn.Parameter(torch.log(torch.expm1(steps)))
        self.A_log = nn.Parameter(torch.linspace(1, 8, heads).log())
        self.norm = GatedNorm(shape.linear_value_dim, shape.epsilon)
        self.out_proj = nn.Linear(inner, shape.hidden, bias=False)

    def forward(self, states: Tensor, pieces: Pieces) -> Tensor:
        """``states``: [batch, length, hidden], a multiple of ``PIECE`` long."""
        shape = self.shape
        batch, length, _ = states.shape
        mixed = self.convolve(self.in_proj_qkv(states), pieces.left)
        keys = shape.linear_key_heads * shape.linear_key_dim
        query, key, value = mixed.split((keys, keys, mixed.shape[-1] - 2 * keys), -1)
        repeats = shape.linear_value_heads // shape.linear_key_heads
        # The gradient of a stack is a sum of its parts, that of a repetition a slow walk on a CPU.
        query, key = (
            torch.stack([unit_length(part.unflatten(-1, (shape.linear_key_heads, -1)))] * repeats, 4)
            .flatten(3, 4)
            .transpose(2, 3)
            for part in (query, key)
        )
        value = value.unflatten(-1, (shape.linear_value_heads, -1)).transpose(2, 3)
        real = pieces.real[..., None]
        beta = self.in_proj_b(states).float().sigmoid() * real
        decay = -self.A_log.exp() * functional.softplus(self.in_proj_a(states).float() + self.dt_bias) * real
        beta, decay = (each.unflatten(1, (-1, PIECE)).transpose(2, 3) for each in (beta, decay))
        with torch.autocast(states.device.type, enabled=False):
            answers = delta_rule(query * shape.linear_key_dim**-0.5, key, value, decay, beta, pieces)
        gate = self.in_proj_z(states).unflatten(-1, (shape.linear_value_heads, -1))
        answers = answers.transpose(2, 3).reshape(batch, length, shape.linear_value_heads, -1)
        return self.out_proj(self.norm(answers, gate).flatten(2))  # type: ignore[no-any-return]

    def convolve(self, rows: Tensor, left: Tensor) -> Tensor:
        """Each channel over its last tokens, then SiLU: [batch, pieces, PIECE, channels] in float32."""
        batch, _, width = rows.shape
        padded = functional.pad(rows, (0, 0, 0, 1))
        before = padded.gather(1, left[..., None].expand(-1, -1, width))
        before = before.view(batch, -1, self.shape.kernel - 1, width)
        whole = torch.cat([before, rows.view(batch, -1, PIECE, width)], 2)
        weight = self.conv1d.weight[:, 0]
        total = whole[:, :, :PIECE].float() * weight[:, 0]
        for tap in range(1, self.shape.kernel):
            total = total + whole[:, :, tap : tap + PIECE].float() * weight[:, tap]
        return functional.silu(total)


def unit_length(states: Tensor) -> Tensor:
    """Each row divided by its length."""
    return states * torch.rsqrt((states * states).sum(-1, keepdim=True) + 1e-6)
