"""The vision tower of Qwen3-VL: patches of one picture or clip in, rows for the text model out.

Reads top to bottom: patches, learned positions stretched to the picture's grid, blocks with rotary attention
inside each frame, a merger that makes one row of each 2 x 2 patches, and deepstack: the same merge of earlier
blocks, which the text model adds to its first layers.

The workspace is small and known (``vision_peak`` in ``plan/costs.py``): one picture at a time, and one frame
of a clip, for no frame looks at another. What lives for all patches is the residual, q, k and v, and the
tables that these are turned by; anything else lives for a slice of them.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vlfit.checkpoint.config import VisionConfig
from vlfit.engine import kernels
from vlfit.engine.decoder.rope import rotate
from vlfit.engine.kernels.vision import turn_into
from vlfit.engine.loader import Loader
from vlfit.engine.qwen3_vl.rope import merge_order, vision_tables

LAYER_NORM_EPS = 1e-6
SLICE_ROWS = 2048  # patches: those of 1024x512 pixels. Matrix products of so many rows keep a large card busy


@dataclass(frozen=True, slots=True, weakref_slot=True)
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

    def __call__(self, pieces: Iterable[Tensor], grid: tuple[int, int, int]) -> VisionFeatures:
        """``pieces`` [patches, channels * temporal * patch * patch] are all patches in merge order.

        ``grid`` is (time, rows, columns) in patches; no piece has patches of two time steps. Gives features
        of time * rows * columns / merge^2 rows.
        """
        time, rows, columns = grid
        patches = rows * columns
        tokens = patches // self.config.spatial_merge_size**2  # of a frame
        pieces = iter(pieces)
        corners = learned_positions(self.config, rows, columns, self.device)
        tables = vision_tables(self.config, rows, columns, self.device)
        outputs: list[Tensor] = []
        with fused_attention(self.device):
            for first in range(0, time * tokens, tokens):
                hidden = self._embed(pieces, patches, corners)
                for level, merger in enumerate(self._through_blocks(hidden, tables)):
                    if level == len(outputs):
                        outputs.append(hidden.new_empty(time * tokens, self.config.out_hidden_size))
                    merger(hidden, outputs[level][first : first + tokens])
                del hidden
        *deepstack, merged = outputs
        return VisionFeatures(merged, tuple(deepstack))

    def _through_blocks(self, hidden: Tensor, tables: tuple[Tensor, Tensor]) -> Iterator["PatchMerger"]:
        """Sends ``hidden`` through the blocks; wherever a merger is to look at it, gives that merger."""
        joined = hidden.new_empty(len(hidden), 3, self.config.num_heads, self.config.head_dim)
        for index, block in enumerate(self.blocks):
            block(hidden, joined, *tables)
            if index in self.deepstack_mergers:
                yield self.deepstack_mergers[index]
        del joined
        yield self.merger

    def _embed(self, pieces: Iterator[Tensor], patches: int, corners: tuple[Tensor, Tensor]) -> Tensor:
        """The patches of a frame, each with its position [patches, hidden]."""
        index, shares = corners
        hidden = self.patch_weight.new_empty(patches, self.config.hidden_size)
        done = 0
        while done < patches:
            done += self._embed_piece(next(pieces), hidden[done:], index[:, done:], shares[:, done:])
        return hidden

    def _embed_piece(self, piece: Tensor, target: Tensor, index: Tensor, shares: Tensor) -> int:
        """One piece of patches, into the first rows of ``target``. Gives how many they are."""
        rows = len(piece)
        embedded = F.linear(piece.to(target.dtype), self.patch_weight, self.patch_bias)
        positions = self.position_table[index[0, :rows]] * shares[0, :rows]
        for corner in range(1, len(index)):
            positions.addcmul_(self.position_table[index[corner, :rows]], shares[corner, :rows])
        torch.add(embedded, positions.to(target.dtype), out=target[:rows])
        return rows


def learned_positions(
    config: VisionConfig, rows: int, columns: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The square table of learned positions, stretched bilinearly (corners fixed) to rows x columns.

    For each patch of a frame, in merge order, the four rows of the table around its place [4, patches], and
    the share of each [4, patches, 1] in float32.
    """
    side = int(config.num_position_embeddings**0.5)
    index, shares = _corners(side, rows, columns, config.spatial_merge_size)
    return torch.from_numpy(index).to(device), torch.from_numpy(shares).to(device)


@lru_cache(maxsize=8)  # pictures of one camera, frames of a clip
def _corners(side: int, rows: int, columns: int, merge: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """``learned_positions`` in host memory. Not to be changed."""
    (top, lower), (left, right) = _stretched(side, rows), _stretched(side, columns)
    row, column = merge_order(rows, columns, merge)
    below, beside = np.minimum(top + 1, side - 1), np.minimum(left + 1, side - 1)
    index = [line[row] * side + place[column] for line in (top, below) for place in (left, beside)]
    shares = [up[row] * along[column] for up in (1 - lower, lower) for along in (1 - right, right)]
    return np.stack(index), np.stack(shares)[..., None]


def _stretched(side: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Where ``count`` places lie on an axis of ``side``: the one before, and how far they are past it."""
    place = np.arange(count, dtype=np.float32) * np.float32(side - 1) / np.float32(max(count - 1, 1))
    before = np.floor(place)
    return before.astype(np.int64), place - before


def fused_attention(device: torch.device) -> AbstractContextManager[None]:
    """Attention on a CUDA card within this never holds the scores of all patches with all.

    Only torch's flash and its memory-efficient kernels may run, both of which read q, k and v where they lie;
    where neither can, torch raises a ``RuntimeError`` instead of falling back to plain products. Beside its
    output flash takes 4 bytes for each query and head. A head of 72 (8B) is a multiple of 8, which is all
    that torch pads to, so nothing is copied; the kernel rounds it up in registers. cuDNN's attention, which
    torch would take first on the largest cards, is left out: it builds a plan for every size of picture.
    """
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])


def slices(count: int, unit: int) -> list[slice]:
    """``count`` rows in equal parts of at most ``SLICE_ROWS``, each but the last a multiple of ``unit``."""
    parts = -(-count // SLICE_ROWS)
    size = -(-count // (parts * unit)) * unit
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


class VisionBlock:
    def __init__(self, config: VisionConfig, loader: Loader, name: str) -> None:
        self.merge = config.spatial_merge_size**2
        self.norm1 = LayerNorm(loader, f"{name}.norm1")
        self.norm2 = LayerNorm(loader, f"{name}.norm2")
        self.qkv = loader.linear(f"{name}.attn.qkv", bias=True)
        self.projection = loader.linear(f"{name}.attn.proj", bias=True)
        self.fc1 = loader.linear(f"{name}.mlp.linear_fc1", bias=True)
        self.fc2 = loader.linear(f"{name}.mlp.linear_fc2", bias=True)

    def __call__(self, hidden: Tensor, joined: Tensor, cosines: Tensor, sines: Tensor) -> None:
        """One block, added to ``hidden`` [patches, hidden] in place: every patch looks at all patches.

        ``joined`` [patches, 3, heads, head_dim] is overwritten: q, k and v. Slice by slice, and all keys and
        values first, so that a slice that is done changes no other.
        """
        parts = slices(len(hidden), self.merge)
        for part in parts:
            turn(self._query_key_value(hidden[part], joined), cosines[part], sines[part], joined[part])
        key, value = by_head(joined[:, 1]), by_head(joined[:, 2])
        for part in parts:
            rows = hidden[part]
            mixed = F.scaled_dot_product_attention(by_head(joined[part, 0]), key, value)
            rows.add_(self.projection(mixed.transpose(1, 2).reshape(len(rows), -1)))
            del mixed
            rows.add_(self.fc2(gelu_(self.fc1(self.norm2(rows)), "tanh")))

    def _query_key_value(self, rows: Tensor, like: Tensor) -> Tensor:
        return self.qkv(self.norm1(rows)).view(len(rows), *like.shape[1:])


def turn(fresh: Tensor, cosines: Tensor, sines: Tensor, target: Tensor) -> None:
    """q and k of ``fresh`` [rows, 3, heads, head_dim] turned by their position in float32, into ``target``.

    v goes with them as it is.
    """
    if kernels.used_on(fresh.device):
        turn_into(fresh, cosines, sines, target)
        return
    target[:, :2] = rotate(fresh[:, :2].float(), cosines, sines)
    target[:, 2] = fresh[:, 2]


def by_head(x: Tensor) -> Tensor:
    """[patches, heads, head_dim] as [1, heads, patches, head_dim], nothing moved."""
    return x.transpose(0, 1)[None]


def gelu_(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU in place, which ``torch.nn.functional`` has no name for."""
    activated: Tensor = torch.ops.aten.gelu_(x, approximate=approximate)
    return activated


class PatchMerger:
    """Joins each merge x merge patches into one row of the text model's width."""

    def __init__(self, config: VisionConfig, loader: Loader, name: str, *, norm_after_merge: bool) -> None:
        self.merge = config.spatial_merge_size**2
        self.merged = config.hidden_size * self.merge
        self.norm_after_merge = norm_after_merge
        self.norm = LayerNorm(loader, f"{name}.norm")
        self.fc1 = loader.linear(f"{name}.linear_fc1", bias=True)
        self.fc2 = loader.linear(f"{name}.linear_fc2", bias=True)

    def __call__(self, hidden: Tensor, target: Tensor) -> None:
        """``hidden`` [patches, hidden] to ``target`` [patches / merge^2, the text model's width]."""
        for part in slices(len(hidden), self.merge):
            target[part.start // self.merge : part.stop // self.merge] = self._rows(hidden[part])

    def _rows(self, hidden: Tensor) -> Tensor:
        if self.norm_after_merge:
            merged = self.norm(hidden.view(-1, self.merged))
        else:
            merged = self.norm(hidden).view(-1, self.merged)
        return self.fc2(gelu_(self.fc1(merged)))


class LayerNorm:
    def __init__(self, loader: Loader, name: str) -> None:
        self.weight = loader.tensor(f"{name}.weight")
        self.bias = loader.tensor(f"{name}.bias")

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, LAYER_NORM_EPS)
