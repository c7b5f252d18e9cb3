"""The vision tower of Qwen3-VL: patches of one picture or clip in, rows for the text model out.

Reads top to bottom: patches, learned positions stretched to the picture's grid, blocks with rotary attention
inside each frame, a merger that makes one row of each 2 x 2 patches, and deepstack: the same merge of earlier
blocks, which the text model adds to its first layers.

The workspace is small and known (``vision_peak`` in ``cost.py``): one picture at a time, and one frame
of a clip, for no frame looks at another. What lives for all patches is the residual and, until they have
looked at each other, q, k and v, and a norm's output or what is found. The feed-forward of large pictures
goes in two halves, whose inner rows fit where q, k and v were. On a GPU the steps between products are
kernels of our own (``vision_ops.py``), which compute positions where they are added: there are no tables
of them to make, to copy or to keep.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vlfit import kernels
from vlfit.checkpoint.config import VisionConfig
from vlfit.engine.execution.encoder_graph import Place, Recorded
from vlfit.kernels.rows.vision_ops import add_layer_norm as add_and_normalize
from vlfit.kernels.rows.vision_ops import add_positions, attend, turn_by_place
from vlfit.layers.linear import DenseLinear
from vlfit.layers.rope import rotate
from vlfit.loading.loader import Loader
from vlfit.models.qwen3_vl.mrope import merge_order, vision_angles, vision_tables

LAYER_NORM_EPS = 1e-6
WHOLE_ROWS = 3072  # patches (those of 1024x768 pixels); of more the feed-forward goes in two halves
PLACED_ROWS = 2048  # patches that a CPU adds positions to, or turns, at once: in float32


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
        weight = loader.tensor("model.visual.patch_embed.proj.weight").flatten(1)
        self.patches = DenseLinear(weight, loader.tensor("model.visual.patch_embed.proj.bias"))
        self.dtype = weight.dtype
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

    def __call__(
        self, patches: Iterable[Tensor], grid: tuple[int, int, int], recorded: Recorded | None = None
    ) -> VisionFeatures:
        """``patches`` in merge order, those of each time step [rows * columns, channels * temporal * patch *
        patch] by themselves, in the dtype of the tower (``images.patches_by_time``).

        ``grid`` is (time, rows, columns) in patches. Gives features of time * rows * columns / merge^2 rows.
        ``recorded``: what the blocks do may be replayed from there.
        """
        time, rows, columns = grid
        tokens = rows * columns // self.config.spatial_merge_size**2  # of a frame
        patches = iter(patches)
        turn = Turn(self.config, rows, columns, self.device)
        # Deepstack's first, as they stay: what comes and goes then finds its place again in each block.
        outputs = [self._output(time * tokens) for _ in self.deepstack_mergers]
        for first in range(0, time * tokens, tokens):
            frame = slice(first, first + tokens)

            def place(level: int, frame: slice = frame) -> Tensor:
                if level == len(outputs):
                    outputs.append(self._output(time * tokens))
                return outputs[level][frame]

            def look(hidden: Tensor, place: Place) -> None:
                for level, merger in enumerate(self._through_blocks(hidden, turn)):
                    merger(hidden, place(level))

            hidden = self._embed(next(patches), rows, columns)
            if recorded is None:
                look(hidden, place)
            else:
                recorded.look((rows, columns), hidden, place, len(self.deepstack_mergers) + 1, look)
            del hidden
        *deepstack, merged = outputs
        return VisionFeatures(merged, tuple(deepstack))

    def _output(self, rows: int) -> Tensor:
        return self.position_table.new_empty(rows, self.config.out_hidden_size)

    def _through_blocks(self, hidden: Tensor, turn: "Turn") -> Iterator["PatchMerger"]:
        """Sends ``hidden`` through the blocks; wherever a merger is to look at it, gives that merger."""
        for index, block in enumerate(self.blocks):
            block(hidden, turn)
            if index in self.deepstack_mergers:
                yield self.deepstack_mergers[index]
        yield self.merger

    def _embed(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        """The patches of a frame, each with its position [patches, hidden]."""
        hidden = self.patches(patches)
        merge = self.config.spatial_merge_size
        if kernels.used_on(self.device):
            add_positions(hidden, self.position_table, rows, columns, merge)
            return hidden
        index, shares = learned_positions(len(self.position_table), rows, columns, merge)
        for some in parts_of(len(hidden), PLACED_ROWS):
            positions = self.position_table[index[0, some]] * shares[0, some]
            for corner in range(1, 4):
                positions.addcmul_(self.position_table[index[corner, some]], shares[corner, some])
            hidden[some] += positions.to(hidden.dtype)
        return hidden


def learned_positions(count: int, rows: int, columns: int, merge: int) -> tuple[Tensor, Tensor]:
    """A square table of ``count`` learned positions, stretched bilinearly (corners fixed) to rows x columns.

    For each patch of a frame, in merge order, the four rows of the table around its place [4, patches], and
    the share of each [4, patches, 1] in float32.
    """
    side = int(count**0.5)
    (top, lower), (left, right) = _stretched(side, rows), _stretched(side, columns)
    row, column = merge_order(rows, columns, merge)
    below, beside = np.minimum(top + 1, side - 1), np.minimum(left + 1, side - 1)
    index = [line[row] * side + place[column] for line in (top, below) for place in (left, beside)]
    shares = [up[row] * along[column] for up in (1 - lower, lower) for along in (1 - right, right)]
    return torch.from_numpy(np.stack(index)), torch.from_numpy(np.stack(shares)[..., None])


def _stretched(side: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Where ``count`` places lie on an axis of ``side``: the one before, and how far they are past it."""
    place = np.arange(count, dtype=np.float32) * np.float32(side - 1) / np.float32(max(count - 1, 1))
    before = np.floor(place)
    return before.astype(np.int64), place - before


def halves(count: int, unit: int) -> list[slice]:
    """``count`` rows whole or, if they are more than ``WHOLE_ROWS``, as two parts, the first a multiple of
    ``unit`` and at most so much larger.
    """
    if count <= WHOLE_ROWS:
        return [slice(0, count)]
    middle = -(-count // (2 * unit)) * unit
    return [slice(0, middle), slice(middle, count)]


def parts_of(count: int, most: int) -> Iterator[slice]:
    """``count`` rows, ``most`` at a time."""
    return (slice(first, min(first + most, count)) for first in range(0, count, most))


class VisionBlock:
    def __init__(self, config: VisionConfig, loader: Loader, name: str) -> None:
        self.merge = config.spatial_merge_size**2
        self.heads = config.num_heads
        self.norm1 = LayerNorm(loader, f"{name}.norm1")
        self.norm2 = LayerNorm(loader, f"{name}.norm2")
        self.qkv = loader.linear(f"{name}.attn.qkv", bias=True)
        self.projection = loader.linear(f"{name}.attn.proj", bias=True)
        self.fc1 = loader.linear(f"{name}.mlp.linear_fc1", bias=True)
        self.fc2 = loader.linear(f"{name}.mlp.linear_fc2", bias=True)

    def __call__(self, hidden: Tensor, turn: "Turn") -> None:
        """One block, added to ``hidden`` [patches, hidden] in place: every patch looks at all patches."""
        x = add_layer_norm(hidden, self.projection(self._seen(hidden, turn)), self.norm2)
        for part in halves(len(hidden), self.merge):
            hidden[part].add_(self.fc2(gelu_(self.fc1(x[part]), "tanh")))

    def _seen(self, hidden: Tensor, turn: "Turn") -> Tensor:
        """What each patch finds in all [patches, hidden]; q, k and v are gone."""
        joined = self.qkv(self.norm1(hidden)).view(len(hidden), 3, self.heads, -1)
        turn(joined)
        return attention(joined)


def attention(joined: Tensor) -> Tensor:
    """What each patch finds in all: q, k and v, ``joined`` [patches, 3, heads, head_dim], to [patches, heads
    * head_dim]. Never holds the scores of all patches with all.
    """
    if kernels.used_on(joined.device):
        return attend(joined)
    query, key, value = (joined[:, part].transpose(0, 1)[None] for part in range(3))
    mixed = F.scaled_dot_product_attention(query, key, value)
    return mixed[0].transpose(0, 1).reshape(len(joined), -1)


def add_layer_norm(hidden: Tensor, found: Tensor, norm: "LayerNorm") -> Tensor:
    """Adds ``found`` to ``hidden`` [rows, width] in place; gives ``norm`` of the sum."""
    if kernels.used_on(hidden.device):
        return add_and_normalize(hidden, found, norm.weight, norm.bias, LAYER_NORM_EPS)
    return norm(hidden.add_(found))


class Turn:
    """Turns q and k of all patches of a frame, of ``rows`` x ``columns``, by their place in float32."""

    def __init__(self, config: VisionConfig, rows: int, columns: int, device: torch.device) -> None:
        self.columns = columns
        self.merge = config.spatial_merge_size
        self._tables: tuple[Tensor, Tensor] | None = None
        if kernels.used_on(device):
            angles = vision_angles(config.head_dim, max(rows, columns))
            self._angles = angles.to(device, non_blocking=True)
        else:
            self._tables = vision_tables(config, rows, columns)

    def __call__(self, joined: Tensor) -> None:
        """``joined`` [patches, 3, heads, head_dim], q, k and v, in place; v stays as it is."""
        if self._tables is None:
            turn_by_place(joined, self._angles, self.columns, self.merge)
            return
        cosines, sines = self._tables
        for part in parts_of(len(joined), PLACED_ROWS):
            joined[part, :2] = rotate(joined[part, :2].float(), cosines[part], sines[part])


def gelu_(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU, in place on a GPU, which ``torch.nn.functional`` has no name for; a CPU would copy it there."""
    if not kernels.used_on(x.device):
        return F.gelu(x, approximate=approximate)
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
        if self.norm_after_merge:
            merged = self.norm(hidden.view(-1, self.merged))
        else:
            merged = self.norm(hidden).view(-1, self.merged)
        inner = self.fc1(merged)
        del merged
        target[:] = self.fc2(gelu_(inner))


class LayerNorm:
    def __init__(self, loader: Loader, name: str) -> None:
        self.weight = loader.tensor(f"{name}.weight")
        self.bias = loader.tensor(f"{name}.bias")

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, LAYER_NORM_EPS)
