"""The vision tower of Qwen3-VL: patches of one picture or clip in, rows for the text model out.

Patch embedding, learned positions interpolated to the picture's grid, blocks with attention and RoPE within
each frame, a merger of each 2 x 2 patches into one row, and deepstack: merged outputs of earlier blocks,
which the text model adds to its first layers.

The workspace is small and known (``cost.py``): one picture, or one temporal patch of a clip, is encoded at a
time, and the feed-forward of large pictures runs in two halves, whose inner rows fit where q, k and v were.
On a GPU kernels compute positions where they are added (``kernels/rows/vision_ops.py``), without tables.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vlfit import kernels
from vlfit.checkpoint.config import VisionConfig
from vlfit.kernels.cpu import row_functions as cpu_rows
from vlfit.kernels.rows.vision_ops import add_layer_norm as add_and_normalize
from vlfit.kernels.rows.vision_ops import (
    add_position_embedding,
    apply_vision_rope,
    gelu_tanh_,
    vision_attention,
)
from vlfit.layers.cpu_stored import StoredLinear, rounds_inputs
from vlfit.layers.linear import DenseLinear
from vlfit.layers.rope import apply_rope
from vlfit.loading.loader import Loader
from vlfit.models.interface import EncoderRunner, LevelOutput, VisionFeatures
from vlfit.models.qwen3_vl.cost import MAX_UNSPLIT_PATCHES
from vlfit.models.qwen3_vl.mrope import merge_order_indices, vision_rope_angles, vision_rope_tables

LAYER_NORM_EPS = 1e-6
CPU_POSITION_ROWS = 2048  # patches at a time for positions on a CPU, in float32


class VisionTower:
    """Qwen3-VL's vision tower with its weights: a ``VisionEncoder``.

    Called with patches of one picture or clip, it returns their ``VisionFeatures``.
    """

    max_graph_patches = MAX_UNSPLIT_PATCHES

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

    @property
    def deepstack_levels(self) -> int:
        """See ``VisionEncoder``."""
        return len(self.deepstack_mergers)

    @contextmanager
    def shortened(self, kind: Callable[[object], Hashable]) -> Iterator[None]:
        """See ``VisionEncoder``."""
        blocks, mergers = self.blocks, self.deepstack_mergers
        kept = blocks[: len(mergers) + 1]
        kinds = set(map(kind, kept))
        for block in blocks[len(kept) :]:
            if kind(block) not in kinds:
                kinds.add(kind(block))
                kept.append(block)
        self.blocks, self.deepstack_mergers = kept, dict(enumerate(mergers.values()))
        try:
            yield
        finally:
            self.blocks, self.deepstack_mergers = blocks, mergers

    def __call__(
        self, patches: Iterable[Tensor], grid: tuple[int, int, int], runner: EncoderRunner | None = None
    ) -> VisionFeatures:
        """Encode one picture or clip with a ``grid`` of (time, rows, columns) patches.

        ``patches`` yields one temporal patch at a time, as ``patches_by_time`` does: [rows * columns,
        channels * temporal * patch * patch] in merge order, in the tower's dtype. ``runner``: runs the
        blocks, perhaps by replaying a CUDA graph. Returns time * rows * columns / merge^2 rows of features.
        """
        time, rows, columns = grid
        tokens = rows * columns // self.config.spatial_merge_size**2  # of a frame
        patches = iter(patches)
        rope = VisionRope(self.config, rows, columns, self.device)
        # Deepstack's outputs first, as they stay: temporary tensors then reuse the same memory in each block.
        outputs = [self._output(time * tokens) for _ in self.deepstack_mergers]
        for first in range(0, time * tokens, tokens):
            frame = slice(first, first + tokens)

            def output(level: int, frame: slice = frame) -> Tensor:
                if level == len(outputs):
                    outputs.append(self._output(time * tokens))
                return outputs[level][frame]

            def run_blocks(hidden: Tensor, output: LevelOutput) -> None:
                for level, merger in enumerate(self._run_blocks(hidden, rope)):
                    merger(hidden, output(level))

            hidden = self._embed(next(patches), rows, columns)
            if runner is None:
                run_blocks(hidden, output)
            else:
                runner.forward((rows, columns), hidden, output, len(self.deepstack_mergers) + 1, run_blocks)
            del hidden
        *deepstack, merged = outputs
        return VisionFeatures(merged, tuple(deepstack))

    def _output(self, rows: int) -> Tensor:
        return self.position_table.new_empty(rows, self.config.out_hidden_size)

    def _run_blocks(self, hidden: Tensor, rope: "VisionRope") -> Iterator["PatchMerger"]:
        """Run the blocks on ``hidden`` in place; yield each merger when ``hidden`` is its input."""
        stream = ResidualStream(hidden)
        for index, block in enumerate(self.blocks):
            block(stream, rope)
            if index in self.deepstack_mergers:
                stream.settle()
                yield self.deepstack_mergers[index]
        stream.settle()
        yield self.merger

    def _embed(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        """Embedded patches of a frame with learned positions added, [patches, hidden]."""
        hidden = self.patches(patches)
        merge = self.config.spatial_merge_size
        if kernels.enabled_for("tower", self.device):
            add_position_embedding(hidden, self.position_table, rows, columns, merge)
            return hidden
        places = position_interpolation(len(self.position_table), rows, columns, merge)
        index, shares = (each.to(self.device) for each in places)
        for some in row_slices(len(hidden), CPU_POSITION_ROWS):
            positions = self.position_table[index[0, some]] * shares[0, some]
            for corner in range(1, 4):
                positions.addcmul_(self.position_table[index[corner, some]], shares[corner, some])
            hidden[some] += positions.to(hidden.dtype)
        return hidden


def position_interpolation(count: int, rows: int, columns: int, merge: int) -> tuple[Tensor, Tensor]:
    """Bilinear interpolation (corners aligned) of a square table of ``count`` positions to rows x columns.

    Returns, for each patch of a frame in merge order, the indices of the four nearest table rows [4, patches]
    and their weights [4, patches, 1] in float32.
    """
    side = int(count**0.5)
    (top, lower), (left, right) = _interpolation(side, rows), _interpolation(side, columns)
    row, column = merge_order_indices(rows, columns, merge)
    below, beside = np.minimum(top + 1, side - 1), np.minimum(left + 1, side - 1)
    index = [line[row] * side + place[column] for line in (top, below) for place in (left, beside)]
    shares = [up[row] * along[column] for up in (1 - lower, lower) for along in (1 - right, right)]
    return torch.from_numpy(np.stack(index)), torch.from_numpy(np.stack(shares)[..., None])


def _interpolation(side: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """``count`` points spread over ``side`` entries: the entry before each, and the distance past it."""
    place = np.arange(count, dtype=np.float32) * np.float32(side - 1) / np.float32(max(count - 1, 1))
    before = np.floor(place)
    return before.astype(np.int64), place - before


def feed_forward_slices(count: int, unit: int) -> list[slice]:
    """Slices in which the feed-forward runs ``count`` rows: one or, above ``MAX_UNSPLIT_PATCHES``, two.

    Of two, the first has a multiple of ``unit`` rows and at least as many as the second.
    """
    if count <= MAX_UNSPLIT_PATCHES:
        return [slice(0, count)]
    middle = -(-count // (2 * unit)) * unit
    return [slice(0, middle), slice(middle, count)]


def row_slices(count: int, most: int) -> Iterator[slice]:
    """Consecutive slices of ``count`` rows with at most ``most`` rows each."""
    return (slice(first, min(first + most, count)) for first in range(0, count, most))


class ResidualStream:
    """``hidden`` [patches, hidden] of one frame, to which blocks add in place.

    What was added last is pending until it is needed: on a GPU one kernel then adds and normalizes.
    """

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden
        self._pending: Tensor | None = None

    def add(self, delta: Tensor) -> None:
        """Add ``delta`` [patches, hidden]. The caller keeps no reference, so that its memory is freed."""
        self.settle()
        self._pending = delta

    def normalized(self, norm: "LayerNorm") -> Tensor:
        """``norm`` of all that was added, [patches, hidden]."""
        delta, self._pending = self._pending, None
        return norm(self.hidden) if delta is None else add_layer_norm(self.hidden, delta, norm)

    def sum(self) -> Tensor:
        """All that was added, [patches, hidden]: ``hidden`` itself; a new tensor if something is pending."""
        return self.hidden if self._pending is None else self.hidden + self._pending

    def settle(self) -> None:
        """Add what is pending to ``hidden``."""
        if self._pending is not None:
            self.hidden.add_(self._pending)
            self._pending = None


class VisionBlock:
    """One transformer block of the tower: pre-norm attention and feed-forward.

    Called with the ``ResidualStream`` of one frame, to which it adds, and the frame's ``VisionRope``.
    """

    def __init__(self, config: VisionConfig, loader: Loader, name: str) -> None:
        self.merge = config.spatial_merge_size**2
        self.heads = config.num_heads
        self.norm1 = LayerNorm(loader, f"{name}.norm1")
        self.norm2 = LayerNorm(loader, f"{name}.norm2")
        self.qkv = loader.linear(f"{name}.attn.qkv", bias=True)
        self.projection = loader.linear(f"{name}.attn.proj", bias=True)
        self.fc1 = loader.linear(f"{name}.mlp.linear_fc1", bias=True)
        self.fc2 = loader.linear(f"{name}.mlp.linear_fc2", bias=True)

    def __call__(self, stream: ResidualStream, rope: "VisionRope") -> None:
        """Run one block on ``stream``. Every patch attends to all patches."""
        stream.add(self.projection(self._attend(stream, rope)))
        x = stream.normalized(self.norm2)
        slices = feed_forward_slices(len(x), self.merge)
        if len(slices) == 1:
            stream.add(self._feed_forward(x))
        else:
            for part in slices:
                stream.hidden[part].add_(self._feed_forward(x[part]))

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.fc2(self._gelu_(self.fc1(x)))

    def _gelu_(self, inner: Tensor) -> Tensor:
        """GELU by tanh of ``inner``, which may be overwritten; only stored weights have the compiled code."""
        if isinstance(self.fc1, StoredLinear) and "tower" not in kernels.plain_on(inner.device):
            return cpu_rows.gelu_tanh_(inner)
        return gelu_(inner, "tanh")

    def _attend(self, stream: ResidualStream, rope: "VisionRope") -> Tensor:
        """Attention output [patches, hidden]. A method of its own, so that q, k and v are freed."""
        qkv = self.qkv(stream.normalized(self.norm1)).view(len(stream.hidden), 3, self.heads, -1)
        rope(qkv)
        return attention(qkv, rounds=rounds_inputs(self.qkv))


def attention(qkv: Tensor, *, rounds: bool = False) -> Tensor:
    """Attention, without a mask, of each patch of a frame over all of them.

    Returns [patches, heads * head_dim] for ``qkv`` [patches, 3, heads, head_dim]. The score matrix is never
    materialized. ``rounds``: on a CPU it may be computed in bfloat16.
    """
    if kernels.enabled_for("tower", qkv.device):
        return vision_attention(qkv)
    if rounds and "tower" not in kernels.plain_on(qkv.device) and cpu_rows.takes_many_queries(qkv.shape[-1]):
        query, keys, values = qkv.unbind(1)
        return cpu_rows.attend_in_bf16(query, keys, values).flatten(1)
    query, key, value = (qkv[:, part].transpose(0, 1)[None] for part in range(3))
    mixed = F.scaled_dot_product_attention(query, key, value)
    return mixed[0].transpose(0, 1).reshape(len(qkv), -1)


def add_layer_norm(hidden: Tensor, delta: Tensor, norm: "LayerNorm") -> Tensor:
    """Add ``delta`` to ``hidden`` [rows, width] in place; return ``norm`` of the sum."""
    if kernels.enabled_for("tower", hidden.device):
        return add_and_normalize(hidden, delta, norm.weight, norm.bias, LAYER_NORM_EPS)
    return norm(hidden.add_(delta))


class VisionRope:
    """2-D RoPE of q and k, by row and column, for frames of ``rows`` x ``columns`` patches in merge order.

    Called with ``qkv`` [patches, 3, heads, head_dim], it rotates q and k in place. An instance belongs to
    one grid: its tables are made at construction, on ``device``.
    """

    def __init__(self, config: VisionConfig, rows: int, columns: int, device: torch.device) -> None:
        self.columns = columns
        self.merge = config.spatial_merge_size
        self._tables: tuple[Tensor, Tensor] | None = None
        if kernels.enabled_for("tower", device):
            angles = vision_rope_angles(config.head_dim, max(rows, columns))
            self._angles = angles.to(device, non_blocking=True)
        else:
            cosines, sines = vision_rope_tables(config, rows, columns)
            self._tables = cosines.to(device), sines.to(device)

    def __call__(self, qkv: Tensor) -> None:
        """Rotate q and k of ``qkv`` [patches, 3, heads, head_dim] in place, computed in float32."""
        if self._tables is None:
            apply_vision_rope(qkv, self._angles, self.columns, self.merge)
            return
        cosines, sines = self._tables
        for part in row_slices(len(qkv), CPU_POSITION_ROWS):
            qkv[part, :2] = apply_rope(qkv[part, :2].float(), cosines[part], sines[part])


def gelu_(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU of ``x``, which may be overwritten: use the returned tensor.

    In place on a GPU, for which ``torch.nn.functional`` has no form; a new tensor on a CPU, where in-place
    GELU would copy too. ``approximate``: ``none`` or ``tanh``.
    """
    if not kernels.enabled_for("tower", x.device):
        return F.gelu(x, approximate=approximate)
    if approximate == "tanh":
        return gelu_tanh_(x)
    activated: Tensor = torch.ops.aten.gelu_(x, approximate=approximate)
    return activated


class PatchMerger:
    """Merges each square of merge x merge patches into one row of the text model's width.

    Called with ``hidden`` [patches, hidden] and ``target`` [patches / merge^2, text width], to which it
    writes the result. ``norm_after_merge``: LayerNorm is applied to the concatenated patches instead of to
    each patch.
    """

    def __init__(self, config: VisionConfig, loader: Loader, name: str, *, norm_after_merge: bool) -> None:
        self.merge = config.spatial_merge_size**2
        self.merged = config.hidden_size * self.merge
        self.norm_after_merge = norm_after_merge
        self.norm = LayerNorm(loader, f"{name}.norm")
        self.fc1 = loader.linear(f"{name}.linear_fc1", bias=True)
        self.fc2 = loader.linear(f"{name}.linear_fc2", bias=True)

    def __call__(self, hidden: Tensor, target: Tensor) -> None:
        """Write ``hidden`` [patches, hidden], merged, to ``target`` [patches / merge^2, text width]."""
        if self.norm_after_merge:
            merged = self.norm(hidden.view(-1, self.merged))
        else:
            merged = self.norm(hidden).view(-1, self.merged)
        inner = self.fc1(merged)
        del merged
        target[:] = self.fc2(gelu_(inner))


class LayerNorm:
    """LayerNorm with the weight and bias of the module ``name``, and eps ``LAYER_NORM_EPS``.

    Called with ``x`` [rows, width], it returns a new tensor of the same shape.
    """

    def __init__(self, loader: Loader, name: str) -> None:
        self.weight = loader.tensor(f"{name}.weight")
        self.bias = loader.tensor(f"{name}.bias")

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, LAYER_NORM_EPS)
