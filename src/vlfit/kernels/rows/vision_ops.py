"""What the vision tower does before and between products, in one kernel where plain PyTorch takes up to ten.

Knows: what each step allocates, and how many programs it gets: one for each patch. The references are
``patchify`` in ``image_processor.py`` and, in ``vision.py``, ``learned_positions`` and ``Turn``
on a CPU.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vlfit.kernels.launch import power_of_two

LOG2_E = 1.4426950408889634
SHORTEST = 16  # elements of a row that matrix units take


def patches_of(
    pixels: Tensor, numbers: Tensor, dtype: torch.dtype, patch: int, merge: int, temporal: int
) -> Tensor:
    """The patches of ``pixels``, uint8 [frames, height, width, channels], as ``images.patchify`` gives them.

    ``numbers`` [256, channels] float32 is what each byte becomes. ``frames`` is 1, which fills the whole
    temporal patch, or a multiple of ``temporal``. Allocates what it gives.
    """
    frames, height, width, channels = pixels.shape
    rows, columns = height // patch, width // patch
    depth = min(frames, temporal)
    patches = frames // depth * rows * columns
    values = channels * temporal * patch**2
    output = torch.empty((patches, values), dtype=dtype, device=pixels.device)
    if patches and pixels.device.type != "meta":
        from vlfit.kernels.rows.vision_kernels import patches_into

        patches_into[(patches,)](
            pixels.contiguous(),
            numbers,
            output,
            rows,
            columns,
            frames=depth,
            channels=channels,
            patch=patch,
            merge=merge,
            temporal=temporal,
            tile=power_of_two(values),
            num_warps=4,
        )
    return output


def add_positions(hidden: Tensor, table: Tensor, rows: int, columns: int, merge: int) -> None:
    """Adds to ``hidden`` [rows * columns, width], patches of one frame in merge order, what is learned of
    their places: ``table`` [side * side, width], stretched to rows x columns. Allocates nothing.
    """
    patches, width = hidden.shape
    if patches and hidden.device.type != "meta":
        from vlfit.kernels.rows.vision_kernels import add_positions as kernel

        side = int(len(table) ** 0.5)
        kernel[(patches,)](
            hidden,
            table,
            rows,
            columns,
            side=side,
            merge=merge,
            width=width,
            tile=power_of_two(width),
            num_warps=4,
        )


def turn_by_place(joined: Tensor, angles: Tensor, columns: int, merge: int) -> None:
    """q and k of ``joined`` [patches, 3, heads, head_dim] turned by their place in float32, where they are.

    The patches are those of one frame in merge order, ``columns`` wide. ``angles`` [2, places, head_dim / 4]
    (``rope.vision_angles``) are float32. Allocates nothing.
    """
    patches, _, heads, head_dim = joined.shape
    if patches and joined.device.type != "meta":
        from vlfit.kernels.rows.vision_kernels import turn_by_place as kernel

        kernel[(patches,)](
            joined,
            angles,
            columns,
            angles.shape[1],
            merge=merge,
            width=heads * head_dim,
            head_dim=head_dim,
            tile=power_of_two(heads * head_dim),
            num_warps=4,
        )


@dataclass(frozen=True, slots=True)
class Tiles:
    """What a program of attention computes: patches, with so many keys at a time."""

    rows: int
    keys: int
    warps: int
    stages: int


def attention_tiles(dtype: torch.dtype) -> Tiles:
    return Tiles(32, 32, 4, 2) if dtype == torch.float32 else Tiles(128, 64, 8, 3)


def attend(joined: Tensor, tiles: Tiles | None = None) -> Tensor:
    """What each patch finds in all: ``joined`` [patches, 3, heads, head_dim], q, k and v, to [patches, heads
    * head_dim].

    Allocates what it gives. ``tiles`` are chosen if not given.
    """
    patches, _, heads, head_dim = joined.shape
    output = torch.empty((patches, heads * head_dim), dtype=joined.dtype, device=joined.device)
    if patches and joined.device.type != "meta":
        from vlfit.kernels.attention.vision_kernel import whole_attention

        tiles = tiles or attention_tiles(joined.dtype)
        low, rest = parts_of_head(head_dim)
        whole_attention[(-(-patches // tiles.rows), heads)](
            joined,
            output,
            patches,
            heads=heads,
            head_dim=head_dim,
            low=low,
            rest=rest,
            factor=LOG2_E / head_dim**0.5,
            tile_rows=tiles.rows,
            tile_keys=tiles.keys,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
    return output


def parts_of_head(head_dim: int) -> tuple[int, int]:
    """A head as two powers of two that matrix units take, the second of which may be 0: 72 as 64 and 16."""
    low = max(power_of_two(head_dim + 1) // 2, SHORTEST)
    left = head_dim - low
    return low, max(power_of_two(left), SHORTEST) if left > 0 else 0


def add_layer_norm(hidden: Tensor, found: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Adds ``found`` to ``hidden`` [rows, width] in place; gives the layer norm of the sum."""
    output = torch.empty_like(hidden)
    rows, width = hidden.shape
    if rows and hidden.device.type != "meta":
        from vlfit.kernels.rows.vision_kernels import add_layer_norm as kernel

        tile = power_of_two(width)
        kernel[(rows,)](
            hidden,
            found,
            weight,
            bias,
            output,
            eps,
            width=width,
            tile=tile,
            num_warps=8 if tile >= 2048 else 4,
        )
    return output
