"""Vision tower operations, each one kernel for what PyTorch does in up to ten.

Merge order: the patches of each ``merge`` x ``merge`` square, which become one image token, are contiguous.
References: ``patchify`` in ``models/qwen3_vl/image_processor.py``, and the CPU code in
``models/qwen3_vl/vision.py``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vlfit.kernels.launch import next_power_of_2
from vlfit.kernels.target import launches_on

LOG2_E = 1.4426950408889634
_GELU_BLOCK = 1024  # elements per program
MIN_DOT_DIM = 16  # smallest inner dimension of tl.dot


def extract_patches(
    pixels: Tensor, lookup: Tensor, dtype: torch.dtype, patch: int, merge: int, temporal: int
) -> Tensor:
    """Cut ``pixels`` uint8 [frames, height, width, channels] into normalized patches in merge order.

    Returns [patches, channels * temporal * patch * patch] in ``dtype``, as ``image_processor.patchify``
    does. ``patch``: side in pixels; ``merge``: side, in patches, of the squares whose patches are
    contiguous; ``temporal``: frames per patch. ``lookup`` [256, channels] float32: the normalized value of
    each byte. ``frames`` is 1, repeated to fill the temporal patch, or a multiple of ``temporal``.
    """
    frames, height, width, channels = pixels.shape
    rows, columns = height // patch, width // patch
    depth = min(frames, temporal)
    patches = frames // depth * rows * columns
    values = channels * temporal * patch**2
    out = torch.empty((patches, values), dtype=dtype, device=pixels.device)
    if patches and launches_on(pixels.device):
        from vlfit.kernels.rows.vision_kernels import extract_patches_kernel

        extract_patches_kernel[(patches,)](
            pixels.contiguous(),
            lookup,
            out,
            rows,
            columns,
            FRAMES=depth,
            CHANNELS=channels,
            PATCH=patch,
            MERGE=merge,
            TEMPORAL=temporal,
            BLOCK=next_power_of_2(values),
            num_warps=4,
        )
    return out


def add_position_embedding(hidden: Tensor, table: Tensor, rows: int, columns: int, merge: int) -> None:
    """Add position embeddings in place to ``hidden`` [rows * columns, width], one frame in merge order.

    ``rows`` and ``columns``: of patches; ``merge``: side of a merged square, in patches. ``table`` [side *
    side, width] is interpolated bilinearly to rows x columns. Allocates nothing.
    """
    patches, width = hidden.shape
    if patches and launches_on(hidden.device):
        from vlfit.kernels.rows.vision_kernels import add_position_embedding_kernel

        side = int(len(table) ** 0.5)
        add_position_embedding_kernel[(patches,)](
            hidden,
            table,
            rows,
            columns,
            SIDE=side,
            MERGE=merge,
            WIDTH=width,
            BLOCK=next_power_of_2(width),
            num_warps=4,
        )


def apply_vision_rope(qkv: Tensor, angles: Tensor, columns: int, merge: int) -> None:
    """Apply 2-D RoPE to q and k of ``qkv`` [patches, 3, heads, head_dim], in place and computed in float32.

    The patches are those of one frame in merge order, ``columns`` patches wide; ``merge``: side of a
    merged square, in patches. ``angles`` [2, positions, head_dim / 4] float32: cosines, then sines
    (``mrope.vision_rope_angles``). Allocates nothing.
    """
    patches, _, heads, head_dim = qkv.shape
    if patches and launches_on(qkv.device):
        from vlfit.kernels.rows.vision_kernels import vision_rope_kernel

        vision_rope_kernel[(patches,)](
            qkv,
            angles,
            columns,
            angles.shape[1],
            MERGE=merge,
            WIDTH=heads * head_dim,
            HEAD_DIM=head_dim,
            BLOCK=next_power_of_2(heads * head_dim),
            num_warps=4,
        )


@dataclass(frozen=True, slots=True)
class VisionTiles:
    """Tile of one program of vision attention: ``rows`` (queries), which attend to ``keys`` per step.

    ``warps`` and pipeline ``stages`` of the program.
    """

    rows: int
    keys: int
    warps: int
    stages: int


def vision_tiles(dtype: torch.dtype) -> VisionTiles:
    """The default tile of ``vision_attention`` for ``dtype``."""
    return VisionTiles(32, 32, 4, 2) if dtype == torch.float32 else VisionTiles(64, 128, 4, 2)


def vision_attention(qkv: Tensor, tiles: VisionTiles | None = None) -> Tensor:
    """Attention, without a mask, of each patch of a frame over all of them.

    Returns [patches, heads * head_dim] for ``qkv`` [patches, 3, heads, head_dim]. ``tiles``: None for the
    default of the dtype.
    """
    patches, _, heads, head_dim = qkv.shape
    out = torch.empty((patches, heads * head_dim), dtype=qkv.dtype, device=qkv.device)
    if patches and launches_on(qkv.device):
        from vlfit.kernels.rows.vision_kernels import vision_attention_kernel

        tiles = tiles or vision_tiles(qkv.dtype)
        low, rest = split_head_dim(head_dim)
        vision_attention_kernel[(-(-patches // tiles.rows), heads)](
            qkv,
            out,
            patches,
            NUM_HEADS=heads,
            HEAD_DIM=head_dim,
            BLOCK_D=low,
            REST_D=rest,
            SCALE_LOG2=LOG2_E / head_dim**0.5,
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.keys,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
    return out


def split_head_dim(head_dim: int) -> tuple[int, int]:
    """Split a head into two sizes that ``tl.dot`` takes, powers of two from 16 on: 72 into 64 and 16.

    Together at least ``head_dim``; the rest is padding. The second is 0 if ``head_dim`` is such a size itself
    or below 16.
    """
    low = max(next_power_of_2(head_dim + 1) // 2, MIN_DOT_DIM)
    remaining = head_dim - low
    return low, max(next_power_of_2(remaining), MIN_DOT_DIM) if remaining > 0 else 0


def add_layer_norm(hidden: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Add ``delta`` to ``hidden`` [rows, width] in place; returns the LayerNorm of the sum."""
    out = torch.empty_like(hidden)
    rows, width = hidden.shape
    if rows and launches_on(hidden.device):
        from vlfit.kernels.rows.vision_kernels import add_layer_norm_kernel

        block = next_power_of_2(width)
        add_layer_norm_kernel[(rows,)](
            hidden,
            delta,
            weight,
            bias,
            out,
            eps,
            WIDTH=width,
            BLOCK=block,
            num_warps=8 if block >= 2048 else 4,
        )
    return out


def gelu_tanh_(x: Tensor) -> Tensor:
    """GELU by tanh of ``x``, contiguous, in place and computed in float32; returns ``x``."""
    if x.numel() and launches_on(x.device):
        from vlfit.kernels.rows.vision_kernels import gelu_tanh_kernel

        gelu_tanh_kernel[(-(-x.numel() // _GELU_BLOCK),)](x, x.numel(), BLOCK=_GELU_BLOCK, num_warps=4)
    return x
