"""The kernel that turns q and k of the vision tower, against plain PyTorch."""

import pytest
import torch

from tests.engine.kernels.conftest import DTYPES, TOLERANCES, relative_error
from vlfit.engine.decoder.rope import rotate
from vlfit.engine.kernels.vision import turn_into

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "heads", "head_dim"), [(1, 1, 16), (7, 3, 24), (5, 2, 72), (9, 4, 64)])
def test_turning(rows: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    fresh = torch.randn(rows, 3, heads, head_dim).to(device, dtype)
    cosines, sines = torch.randn(2, rows, 1, 1, head_dim).to(device)
    around = torch.full((rows + 2, 3, heads, head_dim), 77.0).to(device, dtype)
    target = around[1:-1]
    turn_into(fresh, cosines, sines, target)
    exact = rotate(fresh[:, :2].double(), cosines.double(), sines.double())
    assert relative_error(target[:, :2], exact) < TOLERANCES[dtype]
    assert torch.equal(target[:, 2], fresh[:, 2])
    assert (around[0] == 77).all()
    assert (around[-1] == 77).all()


def test_no_rows_are_no_work(device: torch.device) -> None:
    nothing = torch.empty(0, 3, 2, 16, device=device)
    tables = torch.empty(0, 1, 1, 16, device=device)
    turn_into(nothing, tables, tables, nothing)
