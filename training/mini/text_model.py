"""The text half of Qwen3-VL or Qwen3.5, dense: tokens and image tokens to the last hidden states.

Interleaved M-RoPE, grouped-query attention and deepstack, under the checkpoint's names. Of Qwen3.5 also gated
delta nets (``delta_net.py``), output gates, zero-centred norms, and the layer that drafts.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.mini.delta_net import DeltaNet, Pieces, pieces_of
from training.mini.shape import Shape
from training.mini.vision_model import rotate


class RootMeanSquareNorm(nn.Module):
    """Scales to unit root mean square."""

    def __init__(self, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.epsilon = epsilon

    def forward(self, states: Tensor) -> Tensor:
        return functional.rms_norm(states.float(), self.weight.shape, self.weight, self.epsilon)


class ZeroCentredNorm(nn.Module):
    """The same with weights that are differences from 1, as Qwen3.5 has them."""

    def __init__(self, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden))
        self.epsilon = epsilon

    def forward(self, states: Tensor) -> Tensor:
        return functional.rms_norm(states.float(), self.weight.shape, self.weight + 1, self.epsilon)


def norm_of(shape: Shape, width: int) -> nn.Module:
    """A fresh norm of the family."""
    return (ZeroCentredNorm if shape.is_hybrid else RootMeanSquareNorm)(width, shape.epsilon)


class TextAttention(nn.Module):
    """Grouped-query attention with normalised queries and keys; of Qwen3.5 with a gate on its output."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        # Of each head the query, then the gate.
        queries = shape.heads * shape.head_dim * (2 if shape.is_hybrid else 1)
        self.q_proj = nn.Linear(shape.hidden, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm = norm_of(shape, shape.head_dim)
        self.k_norm = norm_of(shape, shape.head_dim)

    def forward(self, states: Tensor, cosine: Tensor, sine: Tensor, visible: Tensor) -> Tensor:
        """``visible``: [batch, 1, length, length], true where a token may look."""
        batch, length, _ = states.shape
        split = (batch, length, -1, self.shape.head_dim)
        value = self.v_proj(states).view(split).transpose(1, 2)
        query, gate = self.q_proj(states), None
        if self.shape.is_hybrid:
            query, gate = query.view(batch, length, self.shape.heads, -1).chunk(2, -1)
        query = rotate_part(self.q_norm(query.reshape(split)).transpose(1, 2), cosine, sine).to(value.dtype)
        key = self.k_norm(self.k_proj(states).view(split)).transpose(1, 2)
        key = rotate_part(key, cosine, sine).to(value.dtype)
        repeats = self.shape.heads // self.shape.kv_heads
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        mixed = mixed.transpose(1, 2).reshape(batch, length, -1)
        if gate is not None:
            mixed = mixed * gate.reshape(batch, length, -1).sigmoid()
        return self.o_proj(mixed)  # type: ignore[no-any-return]


def rotate_part(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position of as many dimensions of each head as the tables are wide; the others stay."""
    turned = cosine.shape[-1]
    if turned == states.shape[-1]:
        return rotate(states, cosine, sine)
    return torch.cat([rotate(states[..., :turned], cosine, sine), states[..., turned:]], -1)


class TextFeedForward(nn.Module):
    """The gated feed-forward part."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.down_proj = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))  # type: ignore[no-any-return]


class TextLayer(nn.Module):
    """Attention or a gated delta net, then the feed-forward part, each after a norm."""

    def __init__(self, shape: Shape, full: bool = True) -> None:
        super().__init__()
        self.input_layernorm = norm_of(shape, shape.hidden)
        if full:
            self.self_attn = TextAttention(shape)
        else:
            self.linear_attn = DeltaNet(shape)
        self.full = full
        self.post_attention_layernorm = norm_of(shape, shape.hidden)
        self.mlp = TextFeedForward(shape)

    def forward(
        self, states: Tensor, cosine: Tensor, sine: Tensor, visible: Tensor, pieces: Pieces | None = None
    ) -> Tensor:
        normed = self.input_layernorm(states)
        if self.full:
            states = states + self.self_attn(normed, cosine, sine, visible)
        else:
            states = states + self.linear_attn(normed, pieces)
        return states + self.mlp(self.post_attention_layernorm(states))  # type: ignore[no-any-return]


class TextModel(nn.Module):
    """Tokens and image tokens to the last hidden states."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(TextLayer(shape, shape.is_full(layer)) for layer in range(shape.depth))
        self.norm = norm_of(shape, shape.hidden)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor,
        slots: Tensor,
        image: Tensor,
        levels: list[Tensor],
        segments: Tensor | None = None,
        trace: list[Tensor] | None = None,
    ) -> Tensor:
        """``tokens``, ``slots``: [batch, length]; ``positions``: [3, batch, length].

        ``slots`` says which image token stands there (-1: none); ``image`` and each of ``levels``:
        [batch, image tokens, hidden]. ``segments``: [batch, length], for gated delta nets; None: each row is
        one whole sequence, causal. ``trace``: gets what the layers read and what each gives.
        """
        cosine, sine = self.rotations(positions)
        pieces = None
        if self.shape.is_hybrid:
            pieces = pieces_of(torch.zeros_like(tokens) if segments is None else segments, self.shape.kernel)
        shows, picked = self.standing(slots)
        states = self.embed(tokens, slots, image)
        if trace is not None:
            trace.append(states)
        for number, layer in enumerate(self.layers):
            states = layer(states, cosine, sine, visible, pieces)
            if number < len(levels):
                states = states + levels[number].gather(1, picked) * shows
            if trace is not None:
                trace.append(states)
        return self.norm(states)  # type: ignore[no-any-return]

    def standing(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Where image tokens stand [batch, length, 1], and which ones, for ``gather``."""
        picked = slots.clamp_min(0).unsqueeze(-1).expand(-1, -1, self.shape.hidden)
        return (slots >= 0).unsqueeze(-1), picked

    def embed(self, tokens: Tensor, slots: Tensor, image: Tensor) -> Tensor:
        """What the first layer reads: embeddings, and image tokens in their places."""
        shows, picked = self.standing(slots)
        return torch.where(shows, image.gather(1, picked).float(), self.embed_tokens(tokens).float())

    def rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Interleaved M-RoPE: the frequencies turn by time, height, width, time, ... and the last by time."""
        shape = self.shape
        turned = shape.rotated or shape.head_dim
        exponents = torch.arange(0, turned, 2, device=positions.device).float() / turned
        frequencies = shape.rope_theta**-exponents
        axis = torch.zeros(turned // 2, dtype=torch.long)
        for dimension in (1, 2):
            axis[dimension : shape.mrope_section[dimension] * 3 : 3] = dimension
        chosen = positions.float()[axis.to(positions.device)].permute(1, 2, 0)
        angles = chosen * frequencies
        angles = torch.cat([angles, angles], -1).unsqueeze(1)
        return angles.cos(), angles.sin()


class Drafter(nn.Module):
    """Multi-token prediction: one full layer that says the token after next.

    It reads the last hidden states (after the final norm) and what the model reads at the next place,
    embedding first, as Qwen3.5's inference codes do; positions are those of the hidden states.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = norm_of(shape, shape.hidden)
        self.pre_fc_norm_hidden = norm_of(shape, shape.hidden)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList([TextLayer(shape)])
        self.norm = norm_of(shape, shape.hidden)

    def forward(
        self, states: Tensor, following: Tensor, cosine: Tensor, sine: Tensor, visible: Tensor
    ) -> Tensor:
        """``states``, ``following``: [batch, length, hidden]; the result is for the head."""
        both = torch.cat([self.pre_fc_norm_embedding(following), self.pre_fc_norm_hidden(states)], -1)
        (layer,) = self.layers
        return self.norm(layer(self.fc(both).float(), cosine, sine, visible))  # type: ignore[no-any-return]
