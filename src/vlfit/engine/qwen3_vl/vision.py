"""The vision tower of Qwen3-VL: pixels of one picture or clip in, rows for the text model out.

Reads top to bottom: patches, learned positions stretched to the picture's grid, blocks with rotary attention
inside each frame, a merger that makes one row of each 2 x 2 patches, and deepstack: the same merge of earlier
blocks, which the text model adds to its first layers. One picture at a time, so the workspace does not grow
with the number of pictures waiting.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from vlfit.checkpoint.config import VisionConfig
from vlfit.engine.decoder.rope import rotate
from vlfit.engine.loader import Loader
from vlfit.engine.qwen3_vl.rope import merge_order, vision_tables

LAYER_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class VisionFeatures:
    """What one picture is to the text model: ``rows`` [tokens, hidden] stand in for its placeholders,
    ``deepstack`` (one [tokens, hidden] for each level) is added after the first text layers.
    """

    rows: Tensor
    deepstack: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.rows, *self.deepstack))


class VisionTower:
    def __init__(self, config: VisionConfig, loader: Loader) -> None:
        self.config = config
        self.device = loader.device
        # The patch convolution has stride = kernel, so it is a plain matrix product over flat patches.
        self.patch_weight = loader.tensor("model.visual.patch_embed.proj.weight").flatten(1)
        self.patch_bias = loader.tensor("model.visual.patch_embed.proj.bias")
        self.position_table = loader.tensor("model.visual.pos_embed.weight")
        self.blocks = [
            VisionBlock(config, loader, f"model.visual.blocks.{index}") for index in range(config.depth)
        ]
        self.merger = PatchMerger(config, loader, "model.visual.merger", norm_after_merge=False)
        self.deepstack_mergers = {
            block: PatchMerger(
                config, loader, f"model.visual.deepstack_merger_list.{level}", norm_after_merge=True
            )
            for level, block in enumerate(config.deepstack_visual_indexes)
        }

    def __call__(self, patches: Tensor, grid: tuple[int, int, int]) -> VisionFeatures:
        """``patches`` [time * rows * columns, channels * temporal * patch * patch] in merge order.

        ``grid`` is (time, rows, columns) in patches. Gives features of time * rows * columns / merge^2 rows.
        """
        frames, rows, columns = grid
        hidden = F.linear(patches.to(self.patch_weight.dtype), self.patch_weight, self.patch_bias)
        hidden.add_(self._positions(rows, columns).repeat(frames, 1))
        tables = vision_tables(self.config, rows, columns, self.device)
        deepstack = []
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, tables, frames)
            if index in self.deepstack_mergers:
                deepstack.append(self.deepstack_mergers[index](hidden))
        return VisionFeatures(self.merger(hidden), tuple(deepstack))

    def _positions(self, rows: int, columns: int) -> Tensor:
        """The square table of learned positions, stretched bilinearly (corners fixed) to rows x columns."""
        side = int(self.config.num_position_embeddings**0.5)
        square = self.position_table.view(side, side, -1).permute(2, 0, 1)[None]
        stretched = F.interpolate(square.float(), size=(rows, columns), mode="bilinear", align_corners=True)
        row, column = merge_order(rows, columns, self.config.spatial_merge_size)
        flat = stretched[0].permute(1, 2, 0).reshape(rows * columns, -1)
        return flat[(row * columns + column).to(self.device)].to(self.position_table.dtype)


class VisionBlock:
    def __init__(self, config: VisionConfig, loader: Loader, name: str) -> None:
        self.heads = config.num_heads
        self.norm1 = LayerNorm(loader, f"{name}.norm1")
        self.norm2 = LayerNorm(loader, f"{name}.norm2")
        self.qkv = loader.linear(f"{name}.attn.qkv", bias=True)
        self.projection = loader.linear(f"{name}.attn.proj", bias=True)
        self.fc1 = loader.linear(f"{name}.mlp.linear_fc1", bias=True)
        self.fc2 = loader.linear(f"{name}.mlp.linear_fc2", bias=True)

    def __call__(self, hidden: Tensor, tables: tuple[Tensor, Tensor], frames: int) -> Tensor:
        """One block, added to ``hidden`` [patches, hidden] in place."""
        hidden.add_(self._attention(self.norm1(hidden), tables, frames))
        return hidden.add_(self.fc2(F.gelu(self.fc1(self.norm2(hidden)), approximate="tanh")))

    def _attention(self, x: Tensor, tables: tuple[Tensor, Tensor], frames: int) -> Tensor:
        """Every patch looks at all patches of its own frame."""
        cosines, sines = (table.repeat(frames, 1, 1, 1) if frames > 1 else table for table in tables)
        joined = self.qkv(x).view(len(x), 3, self.heads, -1)
        query, key = rotate(joined[:, :2].float(), cosines, sines).to(x.dtype).unbind(1)
        query, key, value = (
            part.unflatten(0, (frames, -1)).transpose(1, 2) for part in (query, key, joined[:, 2])
        )  # [frames, heads, patches, head_dim]
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.projection(mixed.transpose(1, 2).reshape(len(x), -1))


class PatchMerger:
    """Joins each merge x merge patches into one row of the text model's width."""

    def __init__(self, config: VisionConfig, loader: Loader, name: str, *, norm_after_merge: bool) -> None:
        self.merged = config.hidden_size * config.spatial_merge_size**2
        self.norm_after_merge = norm_after_merge
        self.norm = LayerNorm(loader, f"{name}.norm")
        self.fc1 = loader.linear(f"{name}.linear_fc1", bias=True)
        self.fc2 = loader.linear(f"{name}.linear_fc2", bias=True)

    def __call__(self, hidden: Tensor) -> Tensor:
        if self.norm_after_merge:
            merged = self.norm(hidden.view(-1, self.merged))
        else:
            merged = self.norm(hidden).view(-1, self.merged)
        return self.fc2(F.gelu(self.fc1(merged)))


class LayerNorm:
    def __init__(self, loader: Loader, name: str) -> None:
        self.weight = loader.tensor(f"{name}.weight")
        self.bias = loader.tensor(f"{name}.bias")

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, LAYER_NORM_EPS)
