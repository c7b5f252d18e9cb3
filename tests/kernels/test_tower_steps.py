"""The kernels of a block of the vision tower, against plain PyTorch: attention, and residual and norm."""

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.conftest import DTYPES, TOLERANCES, relative_error
from vlfit.kernels.rows.vision_ops import Tiles, add_layer_norm, attend, parts_of_head

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")


def exact_attention(joined: torch.Tensor) -> torch.Tensor:
    query, key, value = (joined[:, part].transpose(0, 1).double() for part in range(3))
    scores = query @ key.transpose(1, 2) / joined.shape[-1] ** 0.5
    return (F.softmax(scores, -1) @ value).transpose(0, 1).flatten(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("patches", [4, 32, 84])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 8), (2, 16), (3, 24), (2, 64), (2, 72)])
def test_every_patch_looks_at_all(
    patches: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    joined = (2 * torch.randn(patches, 3, heads, head_dim)).to(device, dtype)
    found = attend(joined, Tiles(32, 32, 4, 2))
    # Weights of values are rounded too, in half precision.
    assert relative_error(found, exact_attention(joined)) < 2 * TOLERANCES[dtype]


def test_large_scores_stay_finite(device: torch.device) -> None:
    joined = torch.full((40, 3, 1, 16), 60.0, device=device)
    joined[20:, 1] = -60.0
    assert relative_error(attend(joined), exact_attention(joined)) < TOLERANCES[torch.float32]


@pytest.mark.parametrize(
    ("head_dim", "parts"), [(8, (16, 0)), (16, (16, 0)), (24, (16, 16)), (64, (64, 0)), (72, (64, 16))]
)
def test_a_head_is_two_powers_of_two(head_dim: int, parts: tuple[int, int]) -> None:
    assert parts_of_head(head_dim) == parts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (5, 64), (3, 72), (2, 1152)])
def test_residual_and_norm(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    hidden, found = (torch.randn(2, rows, width) + 3).to(device, dtype)
    weight, bias = torch.randn(2, width).to(device, dtype)
    total = hidden + found
    norm = add_layer_norm(hidden, found, weight, bias, 1e-6)
    assert torch.equal(hidden, total)
    exact = F.layer_norm(total.double(), (width,), weight.double(), bias.double(), 1e-6)
    assert relative_error(norm, exact) < TOLERANCES[dtype]
