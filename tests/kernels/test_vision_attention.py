"""Vision attention, and residual add with LayerNorm, against plain PyTorch."""

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.conftest import DTYPES, TOLERANCES, relative_error
from vlfit.kernels.rows.vision_ops import (
    VisionTiles,
    add_layer_norm,
    gelu_tanh_,
    split_head_dim,
    vision_attention,
)

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")


def reference(qkv: torch.Tensor) -> torch.Tensor:
    query, key, value = (qkv[:, part].transpose(0, 1).double() for part in range(3))
    scores = query @ key.transpose(1, 2) / qkv.shape[-1] ** 0.5
    return (F.softmax(scores, -1) @ value).transpose(0, 1).flatten(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("patches", [4, 32, 84])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 8), (2, 16), (3, 24), (2, 64), (2, 72)])
def test_vision_attention(
    patches: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    qkv = (2 * torch.randn(patches, 3, heads, head_dim)).to(device, dtype)
    out = vision_attention(qkv, VisionTiles(32, 32, 4, 2))
    # Weights of values are rounded too, in half precision.
    assert relative_error(out, reference(qkv)) < 2 * TOLERANCES[dtype]


def test_large_scores_stay_finite(device: torch.device) -> None:
    qkv = torch.full((40, 3, 1, 16), 60.0, device=device)
    qkv[20:, 1] = -60.0
    assert relative_error(vision_attention(qkv), reference(qkv)) < TOLERANCES[torch.float32]


@pytest.mark.parametrize(
    ("head_dim", "parts"), [(8, (16, 0)), (16, (16, 0)), (24, (16, 16)), (64, (64, 0)), (72, (64, 16))]
)
def test_split_head_dim(head_dim: int, parts: tuple[int, int]) -> None:
    assert split_head_dim(head_dim) == parts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (5, 64), (3, 72), (2, 1152)])
def test_add_layer_norm(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    hidden, delta = (torch.randn(2, rows, width) + 3).to(device, dtype)
    weight, bias = torch.randn(2, width).to(device, dtype)
    expected_sum = hidden + delta
    norm = add_layer_norm(hidden, delta, weight, bias, 1e-6)
    assert torch.equal(hidden, expected_sum)
    expected = F.layer_norm(expected_sum.double(), (width,), weight.double(), bias.double(), 1e-6)
    assert relative_error(norm, expected) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 3), (5, 64), (3, 1025)])
def test_gelu_tanh(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    x = (3 * torch.randn(rows, width)).to(device, dtype)
    x.view(-1)[:3] = torch.tensor([0.0, -60.0, 60.0])
    expected = F.gelu(x.double(), approximate="tanh")
    found = gelu_tanh_(x)
    assert found is x
    assert relative_error(x, expected) < TOLERANCES[dtype]
    assert x.view(-1)[:3].tolist() == pytest.approx([0.0, 0.0, 60.0], abs=1e-30)
