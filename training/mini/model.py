"""Qwen3-VL as one dense, batched forward pass for training: every picture of a batch has the same size.

Knows: the architecture, with the parameter names of the released checkpoints, so that the state dict is the
checkpoint. Does not know: files, words, optimizers. A test holds it against the reference implementation.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; the defaults are mini's."""

    vision_depth: int = 8
    vision_hidden: int = 192
    vision_feed_forward: int = 768
    vision_heads: int = 3
    positions: int = 576
    deepstack: tuple[int, ...] = (2, 4, 6)
    depth: int = 6
    hidden: int = 256
    feed_forward: int = 640
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    vocabulary: int = 4096
    rope_theta: float = 10000.0
    mrope_section: tuple[int, int, int] = (12, 10, 10)
    patch: int = 16
    temporal: int = 2
    merge: int = 2
    context: int = 4096
    epsilon: float = 1e-6


def rotate(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position: the two halves of each head are the two coordinates that turn."""
    first, second = states.chunk(2, -1)
    return states * cosine + torch.cat([-second, first], -1) * sine


class VisionAttention(nn.Module):
    """Every patch attends to every patch."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, hidden * 3)
        self.proj = nn.Linear(hidden, hidden)

    def forward(self, states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, count, hidden = states.shape
        query, key, value = self.qkv(states).view(batch, count, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key = rotate(query, cosine, sine).to(value.dtype), rotate(key, cosine, sine).to(value.dtype)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.proj(mixed.transpose(1, 2).reshape(batch, count, hidden))  # type: ignore[no-any-return]


class VisionFeedForward(nn.Module):
    """Two layers with a tanh-approximated GELU between them."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(hidden, inner)
        self.linear_fc2 = nn.Linear(inner, hidden)

    def forward(self, states: Tensor) -> Tensor:
        return self.linear_fc2(functional.gelu(self.linear_fc1(states), approximate="tanh"))  # type: ignore[no-any-return]


class VisionBlock(nn.Module):
    """Attention, then the feed-forward part, each after a LayerNorm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.vision_hidden, eps=1e-6)
        self.norm2 = nn.LayerNorm(shape.vision_hidden, eps=1e-6)
        self.attn = VisionAttention(shape.vision_hidden, shape.vision_heads)
        self.mlp = VisionFeedForward(shape.vision_hidden, shape.vision_feed_forward)

    def forward(self, states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        states = states + self.attn(self.norm1(states), cosine, sine)
        return states + self.mlp(self.norm2(states))  # type: ignore[no-any-return]


class Merger(nn.Module):
    """Joins 2 x 2 patches into one image token. The deepstack mergers normalise after joining."""

    def __init__(self, shape: Shape, after: bool) -> None:
        super().__init__()
        self.joined = shape.vision_hidden * shape.merge**2
        self.after = after
        self.norm = nn.LayerNorm(self.joined if after else shape.vision_hidden, eps=1e-6)
        self.linear_fc1 = nn.Linear(self.joined, self.joined)
        self.linear_fc2 = nn.Linear(self.joined, shape.hidden)

    def forward(self, states: Tensor) -> Tensor:
        batch = states.shape[0]
        if not self.after:
            states = self.norm(states)
        states = states.reshape(batch, -1, self.joined)
        if self.after:
            states = self.norm(states)
        return self.linear_fc2(functional.gelu(self.linear_fc1(states)))  # type: ignore[no-any-return]


class PatchEmbedding(nn.Module):
    """One linear map of 16 x 16 pixels, two frames deep; a still picture fills both alike."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        kernel = (shape.temporal, shape.patch, shape.patch)
        self.proj = nn.Conv3d(3, shape.vision_hidden, kernel, stride=kernel)

    def forward(self, patches: Tensor) -> Tensor:
        """``patches``: [batch, count, 3 * 16 * 16]."""
        # Equal frames: the two halves of the weight can be added before, which halves the work.
        weight = self.proj.weight.sum(2).flatten(1)
        return functional.linear(patches, weight, self.proj.bias)


class VisionTower(nn.Module):
    """Pictures to image tokens, with the features of the deepstack layers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embed = PatchEmbedding(shape)
        self.pos_embed = nn.Embedding(shape.positions, shape.vision_hidden)
        self.blocks = nn.ModuleList(VisionBlock(shape) for _ in range(shape.vision_depth))
        self.merger = Merger(shape, after=False)
        self.deepstack_merger_list = nn.ModuleList(Merger(shape, after=True) for _ in shape.deepstack)

    def forward(self, pictures: Tensor) -> tuple[Tensor, list[Tensor]]:
        """``pictures``: [batch, 3, height, width] in -1..1. Returns [batch, tokens, hidden], and one
        such for each deepstack level."""
        shape = self.shape
        rows, columns = pictures.shape[2] // shape.patch, pictures.shape[3] // shape.patch
        order = patch_order(rows, columns, shape.merge).to(pictures.device)
        states = self.patch_embed(patchify(pictures, shape.patch, shape.merge))
        indices, weights = position_taps(rows, columns, int(shape.positions**0.5))
        indices, weights = indices.to(pictures.device)[order], weights.to(pictures.device)[order]
        states = states + (self.pos_embed(indices) * weights[..., None]).sum(1)
        cosine, sine = vision_rotations(rows, columns, shape.vision_hidden // shape.vision_heads)
        cosine, sine = cosine.to(pictures.device)[order], sine.to(pictures.device)[order]
        levels = []
        for layer, block in enumerate(self.blocks):
            states = block(states, cosine, sine)
            if layer in shape.deepstack:
                levels.append(self.deepstack_merger_list[shape.deepstack.index(layer)](states))
        return self.merger(states), levels


def patchify(pictures: Tensor, patch: int, merge: int) -> Tensor:
    """[batch, 3, height, width] to [batch, patches, 3 * patch * patch], patches in merge-block order."""
    batch, channels, height, width = pictures.shape
    size = patch * merge
    blocks = pictures.view(batch, channels, height // size, merge, patch, width // size, merge, patch)
    return blocks.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(batch, -1, channels * patch * patch)


@cache
def patch_order(rows: int, columns: int, merge: int) -> Tensor:
    """Raster index of each patch in merge-block order."""
    raster = torch.arange(rows * columns).view(rows // merge, merge, columns // merge, merge)
    return raster.permute(0, 2, 1, 3).reshape(-1)


@cache
def position_taps(rows: int, columns: int, side: int) -> tuple[Tensor, Tensor]:
    """Bilinear resampling of the square position grid (corners aligned): [patches, 4] indices and weights."""
    down, across = torch.linspace(0, side - 1, rows), torch.linspace(0, side - 1, columns)
    top, left = down.long(), across.long()
    bottom, right = (top + 1).clamp_max(side - 1), (left + 1).clamp_max(side - 1)
    mix_down, mix_across = (down - top)[:, None], (across - left)[None]
    indices = torch.stack(
        [
            top[:, None] * side + left,
            top[:, None] * side + right,
            bottom[:, None] * side + left,
            bottom[:, None] * side + right,
        ],
        -1,
    )
    weights = torch.stack(
        [
            (1 - mix_down) * (1 - mix_across),
            (1 - mix_down) * mix_across,
            mix_down * (1 - mix_across),
            mix_down * mix_across,
        ],
        -1,
    )
    return indices.view(-1, 4), weights.view(-1, 4)


@cache
def vision_rotations(rows: int, columns: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine [patches, head_dim] in raster order: a quarter by row, a quarter by column, twice."""
    frequencies = 10000.0 ** -(torch.arange(0, head_dim // 2, 2).float() / (head_dim // 2))
    row = (torch.arange(rows).float()[:, None] * frequencies)[:, None].expand(-1, columns, -1)
    column = (torch.arange(columns).float()[:, None] * frequencies)[None].expand(rows, -1, -1)
    angles = torch.cat([row, column, row, column], -1).reshape(rows * columns, head_dim)
    return angles.cos(), angles.sin()


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


class Body(nn.Module):
    """The two halves under the names the checkpoint gives them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.visual = VisionTower(shape)
        self.language_model = TextModel(shape)


class Model(nn.Module):
    """mini. The embedding is also the output head (tied)."""

    def __init__(self, shape: Shape | None = None) -> None:
        super().__init__()
        self.shape = shape or Shape()
        self.model = Body(self.shape)
        self.apply(self._start)
        depth = self.shape.depth + self.shape.vision_depth
        for name, parameter in self.named_parameters():
            # Layers that write into the residual stream start smaller, the deeper the model the more.
            if name.endswith(
                ("o_proj.weight", "down_proj.weight", "attn.proj.weight", "mlp.linear_fc2.weight")
            ):
                nn.init.normal_(parameter, std=0.02 / (2 * depth) ** 0.5)

    @staticmethod
    def _start(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Conv3d):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(
        self, pictures: Tensor, tokens: Tensor, positions: Tensor, visible: Tensor, slots: Tensor
    ) -> Tensor:
        """Last hidden states [batch, length, hidden]; ``logits`` turns those that matter into scores."""
        image, levels = self.model.visual(pictures)
        return self.read(image, levels, tokens, positions, visible, slots)

    def read(
        self,
        image: Tensor,
        levels: list[Tensor],
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """The text half alone, over image tokens that are known already."""
        states: Tensor = self.model.language_model(tokens, positions, visible, slots, image, levels)
        return states

    def logits(self, states: Tensor) -> Tensor:
        """Scores of the next token [..., vocabulary]."""
        return functional.linear(states, self.model.language_model.embed_tokens.weight)
