"""The kernel that turns q and k of the vision tower by their place, against plain PyTorch."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.conftest import DTYPES, TOLERANCES, relative_error
from vlfit.checkpoint.config import VisionConfig
from vlfit.kernels.rows.vision_ops import turn_by_place
from vlfit.layers.rope import rotate
from vlfit.models.qwen3_vl.mrope import vision_angles, vision_tables

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")

CONFIG = VisionConfig(1, 64, 64, 1, 3, 16, 2, 2, 64, 36, (), "gelu_pytorch_tanh")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "heads", "head_dim"), [(2, 2, 1, 16), (4, 6, 3, 24), (2, 10, 2, 72), (6, 4, 4, 64)]
)
def test_turning(
    rows: int, columns: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    patches = rows * columns
    fresh = torch.randn(patches, 3, heads, head_dim).to(device, dtype)
    around = torch.full((patches + 2, 3, heads, head_dim), 77.0).to(device, dtype)
    joined = around[1:-1]
    joined.copy_(fresh)
    turn_by_place(joined, vision_angles(head_dim, max(rows, columns)).to(device), columns, 2)
    config = replace(CONFIG, hidden_size=heads * head_dim, num_heads=heads)
    cosines, sines = (table.double().to(device) for table in vision_tables(config, rows, columns))
    exact = rotate(fresh[:, :2].double(), cosines, sines)
    assert relative_error(joined[:, :2], exact) < TOLERANCES[dtype]
    assert torch.equal(joined[:, 2], fresh[:, 2])
    assert (around[0] == 77).all()
    assert (around[-1] == 77).all()


def test_no_patches_are_no_work(device: torch.device) -> None:
    turn_by_place(torch.empty(0, 3, 2, 16, device=device), vision_angles(16, 2).to(device), 2, 2)
