"""The vision tower's RoPE kernel against plain PyTorch."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.conftest import DTYPES, TOLERANCES, relative_error
from vlfit.checkpoint.config import VisionConfig
from vlfit.kernels.rows.vision_ops import apply_vision_rope
from vlfit.layers.rope import apply_rope
from vlfit.models.qwen3_vl.mrope import vision_rope_angles, vision_rope_tables

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")

CONFIG = VisionConfig(1, 64, 64, 1, 3, 16, 2, 2, 64, 36, (), "gelu_pytorch_tanh", "qwen3_vl")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "heads", "head_dim"), [(2, 2, 1, 16), (4, 6, 3, 24), (2, 10, 2, 72), (6, 4, 4, 64)]
)
def test_vision_rope(
    rows: int, columns: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    patches = rows * columns
    original = torch.randn(patches, 3, heads, head_dim).to(device, dtype)
    padded = torch.full((patches + 2, 3, heads, head_dim), 77.0).to(device, dtype)
    qkv = padded[1:-1]
    qkv.copy_(original)
    apply_vision_rope(qkv, vision_rope_angles(head_dim, max(rows, columns)).to(device), columns, 2)
    config = replace(CONFIG, hidden_size=heads * head_dim, num_heads=heads)
    cos, sin = (table.double().to(device) for table in vision_rope_tables(config, rows, columns))
    expected = apply_rope(original[:, :2].double(), cos, sin)
    assert relative_error(qkv[:, :2], expected) < TOLERANCES[dtype]
    assert torch.equal(qkv[:, 2], original[:, 2])
    assert (padded[0] == 77).all()
    assert (padded[-1] == 77).all()


def test_no_patches(device: torch.device) -> None:
    apply_vision_rope(torch.empty(0, 3, 2, 16, device=device), vision_rope_angles(16, 2).to(device), 2, 2)
