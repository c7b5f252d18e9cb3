"""The vision half of Qwen3-VL, dense: pictures of one size to image tokens and deepstack features.

Parameters have the checkpoint's names.
"""

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.mini.shape import Shape


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

    def forward(self, patches: Tensor, frames: int) -> Tensor:
        """``patches``: [batch * frames, count, 3 * 16 * 16]; ``frames`` is 1 or 2. Returns [batch, count,
        hidden]."""
        if frames == 1:
            # Equal frames: the two halves of the weight can be added before, which halves the work.
            weight = self.proj.weight.sum(2).flatten(1)
            return functional.linear(patches, weight, self.proj.bias)
        first, second = self.proj.weight.unbind(2)
        return functional.linear(patches[0::2], first.flatten(1), self.proj.bias) + functional.linear(
            patches[1::2], second.flatten(1)
        )


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

    def forward(self, pictures: Tensor, frames: int = 1) -> tuple[Tensor, list[Tensor]]:
        """``pictures``: [batch * frames, 3, height, width] in -1..1; two ``frames`` make one pair of a clip.

        Returns [batch, tokens, hidden], and one such for each deepstack level."""
        states, levels = self.see(pictures, frames)
        return self.merger(states), levels

    def see(self, pictures: Tensor, frames: int = 1) -> tuple[Tensor, list[Tensor]]:
        """The same before the last merger: [batch, patches, vision hidden]."""
        shape = self.shape
        rows, columns = pictures.shape[2] // shape.patch, pictures.shape[3] // shape.patch
        order = patch_order(rows, columns, shape.merge).to(pictures.device)
        states = self.patch_embed(patchify(pictures, shape.patch, shape.merge), frames)
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
        return states, levels


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
