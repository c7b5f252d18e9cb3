"""M-RoPE positions of Qwen3-VL's tokens (time, row, column), and the vision tower's rotary tables.

Sources: Qwen3-VL's reference in transformers (``get_rope_index``, ``Qwen3VLVisionRotaryEmbedding``).
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vlfit.checkpoint.config import VisionConfig

VISION_THETA = 10000.0
IntVector = npt.NDArray[np.int64]


def mrope_positions(
    is_visual: npt.NDArray[np.bool_], grids: Sequence[tuple[int, int, int]], merge: int
) -> tuple[npt.NDArray[np.int64], int]:
    """M-RoPE positions [3, tokens] (time, row, column) of a prompt, and that of the first token after it.

    ``is_visual`` [tokens] marks placeholders; ``grids``: (time, rows, columns) in patches of the pictures and
    clips in order; ``merge``: side of the square of patches that become one token. A text token advances all
    three axes by one. The tokens of a picture all have the same time t; their rows and columns count from t,
    and the next text token is at t plus the picture's longer side in tokens. Each temporal patch of a clip
    has placeholders of its own and counts as a picture.
    """
    frames = [(rows // merge, columns // merge) for time, rows, columns in grids for _ in range(time)]
    positions = np.empty((3, len(is_visual)), dtype=np.int64)
    at, count = 0, 0
    for rows, columns in frames:
        start = at + int(np.argmax(is_visual[at:]))
        positions[:, at:start] = np.arange(count, count + start - at)
        count += start - at
        end = start + rows * columns
        positions[0, start:end] = count
        positions[1, start:end] = count + np.repeat(np.arange(rows), columns)
        positions[2, start:end] = count + np.tile(np.arange(columns), rows)
        count += max(rows, columns)
        at = end
    positions[:, at:] = np.arange(count, count + len(is_visual) - at)
    return positions, count + len(is_visual) - at


def vision_rope_angles(head_dim: int, places: int) -> Tensor:
    """Cosines and sines of the RoPE angles of rows, or columns, 0 to ``places`` - 1.

    [2, places, head_dim / 4] float32, on the CPU, for heads ``head_dim`` wide. Cached: do not modify the
    tensor.
    """
    return torch.from_numpy(_vision_angles(head_dim, places))


@lru_cache(maxsize=4)
def _vision_angles(head_dim: int, places: int) -> npt.NDArray[np.float32]:
    """``vision_rope_angles`` as an array, computed by torch as the reference does."""
    quarter = torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2)
    inverse_frequencies = 1.0 / VISION_THETA**quarter
    angles = torch.arange(places, dtype=torch.float32)[:, None] * inverse_frequencies
    kept: npt.NDArray[np.float32] = torch.stack((angles.cos(), angles.sin())).numpy().copy()
    return kept


def vision_rope_tables(config: VisionConfig, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """RoPE tables for ``apply_rope``, for the patches of one frame in merge order: cosines and sines.

    [rows * columns, 1, 1, head_dim] each, float32 on the CPU. Of a patch's head_dim / 2 angles the first half
    are its row's, the second its column's.
    """
    row, column = map(torch.from_numpy, merge_order_indices(rows, columns, config.spatial_merge_size))
    cosines, sines = (
        torch.cat((of_place[row], of_place[column]), dim=-1)[:, None, None]
        for of_place in vision_rope_angles(config.head_dim, max(rows, columns))
    )
    return torch.cat((cosines, cosines), dim=-1), torch.cat((-sines, sines), dim=-1)


@lru_cache(maxsize=8)  # pictures of one camera, frames of a clip
def merge_order_indices(rows: int, columns: int, merge: int) -> tuple[IntVector, IntVector]:
    """Row and column of each patch in merge order, [rows * columns] each. Cached: do not modify them.

    Merge order: ``merge`` x ``merge`` squares of patches, row by row, and row by row within a square.
    """
    raster = np.arange(rows * columns).reshape(rows // merge, merge, columns // merge, merge)
    order = raster.transpose(0, 2, 1, 3).reshape(-1)
    return order // columns, order % columns
