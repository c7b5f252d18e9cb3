"""Kernels around the patch embedding against plain PyTorch: patches bit for bit, and position embeddings."""

import numpy as np
import pytest
import torch

from tests.kernels.conftest import DTYPES, TOLERANCES, relative_error
from vlfit.checkpoint.processor_files import ImageProcessorConfig
from vlfit.kernels.rows.vision_ops import add_position_embedding, extract_patches
from vlfit.models.qwen3_vl.image_processor import normalized_byte_values, patchify
from vlfit.models.qwen3_vl.vision import position_interpolation

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")

# Different mean and deviation per channel, so that a mix-up of channels shows.
UNLIKE = ImageProcessorConfig(1, 1 << 30, 16, 2, 2, (0.48, 0.46, 0.41), (0.27, 0.26, 0.276), 1 / 255)
ODD = ImageProcessorConfig(1, 1 << 30, 14, 2, 2, (0.48, 0.46, 0.41), (0.27, 0.26, 0.276), 1 / 255)
COARSE = ImageProcessorConfig(1, 1 << 30, 4, 3, 3, (0.48, 0.46, 0.41), (0.27, 0.26, 0.276), 1 / 256)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("processing", "frames", "rows", "columns"),
    [(UNLIKE, 1, 2, 2), (UNLIKE, 1, 4, 6), (UNLIKE, 4, 2, 4), (ODD, 2, 4, 2), (COARSE, 6, 3, 6)],
)
def test_extract_patches_is_bit_equal(
    processing: ImageProcessorConfig,
    frames: int,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    size = processing.patch_size
    frames_data = np.random.default_rng(0).integers(
        0, 256, (frames, rows * size, columns * size, 3), dtype=np.uint8
    )
    pixels = torch.from_numpy(frames_data)
    lookup = torch.from_numpy(normalized_byte_values(processing)).to(device)
    sizes = (size, processing.merge_size, processing.temporal_patch_size)
    patches = extract_patches(pixels.to(device), lookup, dtype, *sizes)
    # On a CPU, whatever the kernel runs on: there the formula is computed as the reference computes it.
    assert torch.equal(patches.cpu(), patchify(pixels, processing, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns", "merge"), [(2, 2, 2), (4, 10, 2), (22, 6, 2), (9, 3, 3)])
@pytest.mark.parametrize("side", [1, 6])
def test_position_embedding(
    rows: int, columns: int, merge: int, side: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    width = 40
    hidden, table = torch.randn(rows * columns, width), torch.randn(side**2, width)
    hidden, table = hidden.to(device, dtype), table.to(device, dtype)
    index, shares = (each.to(device) for each in position_interpolation(side**2, rows, columns, merge))
    expected = hidden.double() + (table.double()[index] * shares.double()).sum(0)
    padded = torch.full((len(hidden) + 2, width), 77.0).to(device, dtype)
    padded[1:-1] = hidden
    add_position_embedding(padded[1:-1], table, rows, columns, merge)
    # Rounded twice in half precision: the position, and the sum.
    assert relative_error(padded[1:-1], expected) < 2 * TOLERANCES[dtype]
    assert (padded[0] == 77).all()
    assert (padded[-1] == 77).all()
