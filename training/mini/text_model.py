"""The text half of Qwen3-VL, dense: tokens and image tokens to the last hidden states.

Interleaved M-RoPE, grouped-query attention and deepstack, under the checkpoint's names.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

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


class TextAttention(nn.Module):
    """Grouped-query attention with normalised queries and keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm = RootMeanSquareNorm(shape.head_dim, shape.epsilon)
        self.k_norm = RootMeanSquareNorm(shape.head_dim, shape.epsilon)

    def forward(self, states: Tensor, cosine: Tensor, sine: Tensor, visible: Tensor) -> Tensor:
        """``visible``: [batch, 1, length, length], true where a token may look."""
        batch, length, _ = states.shape
        split = (batch, length, -1, self.shape.head_dim)
        value = self.v_proj(states).view(split).transpose(1, 2)
        query = rotate(self.q_norm(self.q_proj(states).view(split)).transpose(1, 2), cosine, sine).to(
            value.dtype
        )
        key = rotate(self.k_norm(self.k_proj(states).view(split)).transpose(1, 2), cosine, sine).to(
            value.dtype
        )
        repeats = self.shape.heads // self.shape.kv_heads
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


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
    """Attention, then the feed-forward part, each after a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RootMeanSquareNorm(shape.hidden, shape.epsilon)
        self.self_attn = TextAttention(shape)
        self.post_attention_layernorm = RootMeanSquareNorm(shape.hidden, shape.epsilon)
        self.mlp = TextFeedForward(shape)

    def forward(self, states: Tensor, cosine: Tensor, sine: Tensor, visible: Tensor) -> Tensor:
        states = states + self.self_attn(self.input_layernorm(states), cosine, sine, visible)
        return states + self.mlp(self.post_attention_layernorm(states))  # type: ignore[no-any-return]


class TextModel(nn.Module):
    """Tokens and image tokens to the last hidden states."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(TextLayer(shape) for _ in range(shape.depth))
        self.norm = RootMeanSquareNorm(shape.hidden, shape.epsilon)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor,
        slots: Tensor,
        image: Tensor,
        levels: list[Tensor],
    ) -> Tensor:
        """``tokens``, ``slots``: [batch, length]; ``positions``: [3, batch, length].

        ``slots`` says which image token stands there (-1: none); ``image`` and each of ``levels``:
        [batch, image tokens, hidden].
        """
        cosine, sine = self.rotations(positions)
        shows = (slots >= 0).unsqueeze(-1)
        picked = slots.clamp_min(0).unsqueeze(-1).expand(-1, -1, self.shape.hidden)
        states = torch.where(shows, image.gather(1, picked).float(), self.embed_tokens(tokens).float())
        for number, layer in enumerate(self.layers):
            states = layer(states, cosine, sine, visible)
            if number < len(levels):
                states = states + levels[number].gather(1, picked) * shows
        return self.norm(states)  # type: ignore[no-any-return]

    def rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Interleaved M-RoPE: the frequencies turn by time, height, width, time, ... and the last by time."""
        shape = self.shape
        exponents = torch.arange(0, shape.head_dim, 2, device=positions.device).float() / shape.head_dim
        frequencies = shape.rope_theta**-exponents
        axis = torch.zeros(shape.head_dim // 2, dtype=torch.long)
        for dimension in (1, 2):
            axis[dimension : shape.mrope_section[dimension] * 3 : 3] = dimension
        chosen = positions.float()[axis.to(positions.device)].permute(1, 2, 0)
        angles = chosen * frequencies
        angles = torch.cat([angles, angles], -1).unsqueeze(1)
        return angles.cos(), angles.sin()
