"""The vision tower of Qwen3-VL and Qwen3.5 in float32, one block at a time.

Source: transformers' ``modeling_qwen3_vl`` (patch embedding, interpolated positions, rotary positions by row
and column, blocks, mergers with deepstack).
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vlfit.parity.reference.stored_tensors import Weights

_EPS = 1e-6
_THETA = 10000.0
_ROWS = 1024  # queries whose scores are in memory at a time


class TowerReference:
    """The tower that ``config`` (``vision_config``) describes. Grids: frames, rows and columns of patches."""

    root = "model.visual"

    def __init__(self, config: Mapping[str, Any], weights: Weights) -> None:
        self.weights = weights
        self.depth, self.hidden = int(config["depth"]), int(config["hidden_size"])
        self.inner, self.heads = int(config["intermediate_size"]), int(config.get("num_heads", 16))
        self.merge = int(config.get("spatial_merge_size", 2))
        self.patch, self.frames = int(config.get("patch_size", 16)), int(config.get("temporal_patch_size", 2))
        self.out = int(config["out_hidden_size"])
        self.side = round(int(config.get("num_position_embeddings", 2304)) ** 0.5)
        self.deepstack_after = tuple(int(each) for each in config.get("deepstack_visual_indexes") or ())

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = (self.weights.vector(f"{self.root}.{name}.{part}") for part in ("weight", "bias"))
        return F.layer_norm(x, (x.shape[-1],), weight, bias, _EPS)

    def _linear(self, name: str, x: Tensor, outputs: int) -> Tensor:
        return self.weights.linear(f"{self.root}.{name}", x, outputs)

    def embed(self, patches: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Patches [n, channels * frames * patch * patch] with their positions: [n, hidden]."""
        return self._linear("patch_embed.proj", patches, self.hidden) + self._positions(grid)

    def _merge_order(self, rows: int, columns: int) -> Tensor:
        """The patches of a frame, row by row, in the order of the model: all of a merged square together."""
        places = torch.arange(rows * columns).reshape(
            rows // self.merge, self.merge, columns // self.merge, self.merge
        )
        return places.permute(0, 2, 1, 3).flatten()

    def _positions(self, grid: tuple[int, int, int]) -> Tensor:
        """Position embeddings, linear between the table's four nearest; its corners are the picture's."""
        frames, rows, columns = grid
        table = self.weights.vector(f"{self.root}.pos_embed.weight").reshape(self.side, self.side, -1)
        down, across = torch.linspace(0, self.side - 1, rows), torch.linspace(0, self.side - 1, columns)
        top, left = down.long(), across.long()
        below, right = (top + 1).clamp_max(self.side - 1), (left + 1).clamp_max(self.side - 1)
        low, far = (down - top)[:, None, None], (across - left)[None, :, None]
        upper = table[top][:, left] * (1 - far) + table[top][:, right] * far
        lower = table[below][:, left] * (1 - far) + table[below][:, right] * far
        frame = (upper * (1 - low) + lower * low).flatten(0, 1)[self._merge_order(rows, columns)]
        return frame.repeat(frames, 1)

    def _rotation(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [rows * columns, head_dim / 2]: the first half by row, the second by column."""
        width = self.hidden // self.heads // 2
        frequencies = 1.0 / _THETA ** (torch.arange(0, width, 2).float() / width)
        order = self._merge_order(rows, columns)
        down, across = order // columns, order % columns
        angles = torch.cat((down[:, None] * frequencies, across[:, None] * frequencies), dim=-1)
        return angles.cos(), angles.sin()

    def block(self, index: int, hidden: Tensor, grid: tuple[int, int, int]) -> dict[str, Tensor]:
        """Block ``index``: ``attention`` and ``mlp``, what its halves add, and ``out``; all [n, hidden]."""
        name = f"blocks.{index}"
        attended = self._attention(f"{name}.attn", self._norm(hidden, f"{name}.norm1"), grid)
        middle = hidden + attended
        inner = self._linear(f"{name}.mlp.linear_fc1", self._norm(middle, f"{name}.norm2"), self.inner)
        added = self._linear(f"{name}.mlp.linear_fc2", F.gelu(inner, approximate="tanh"), self.hidden)
        return {"attention": attended, "mlp": added, "out": middle + added}

    def _attention(self, name: str, x: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Every patch attends to all of its own frame."""
        frames, rows, columns = grid
        width, count = self.hidden // self.heads, rows * columns
        qkv = self._linear(f"{name}.qkv", x, 3 * self.hidden).reshape(len(x), 3, self.heads, width)
        cos, sin = (each[:, None] for each in self._rotation(rows, columns))
        mixed = torch.empty(len(x), self.heads, width)
        for frame in range(frames):
            part = slice(frame * count, (frame + 1) * count)
            query, key, value = qkv[part].unbind(1)
            query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
            keys, values = key.permute(1, 2, 0), value.transpose(0, 1)
            for start in range(0, count, _ROWS):
                scores = query[start : start + _ROWS].transpose(0, 1) @ keys * width**-0.5
                found = (scores.softmax(-1) @ values).transpose(0, 1)
                mixed[frame * count + start : frame * count + start + len(found)] = found
        return self._linear(f"{name}.proj", mixed.flatten(1), self.hidden)

    def merged(self, hidden: Tensor) -> Tensor:
        """Image features [n / merge**2, out] for the text model: squares of patches, merged.

        ``hidden`` [n, hidden]: output of the last block. Each patch is normed before it is merged.
        """
        return self._join(
            self._norm(hidden, "merger.norm").reshape(-1, self.hidden * self.merge**2), "merger"
        )

    def deepstack(self, level: int, hidden: Tensor) -> Tensor:
        """Deepstack features [n / merge**2, out] that text layer ``level``, from 0, adds to its output.

        ``hidden`` [n, hidden]: output of their block. Patches are merged first, and the squares normed.
        """
        name = f"deepstack_merger_list.{level}"
        return self._join(self._norm(hidden.reshape(-1, self.hidden * self.merge**2), f"{name}.norm"), name)

    def _join(self, squares: Tensor, name: str) -> Tensor:
        inner = F.gelu(self._linear(f"{name}.linear_fc1", squares, squares.shape[1]))
        return self._linear(f"{name}.linear_fc2", inner, self.out)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
