"""Products of every number of rows at the start: which are run, and that results are those without."""

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from vlfit.engine.execution.product_sweep import ProductSweep


class Products(TorchDispatchMode):
    """Records the rows and outputs of each product that torch runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.shapes.append(tuple(out.shape))
        return out


@pytest.mark.parametrize("with_bias", [False, True])
@torch.no_grad()
def test_rows_between_a_product_and_half_of_it(with_bias: bool) -> None:
    x, weight, bias = torch.randn(256, 8), torch.randn(24, 8), torch.randn(24) if with_bias else None
    with Products() as ran, ProductSweep():
        out = F.linear(x, weight, bias)
    assert torch.equal(out, F.linear(x, weight, bias))
    assert ran.shapes == [*((rows, 24) for rows in range(248, 128, -8)), (256, 24)]


@torch.no_grad()
def test_once_for_each_shape() -> None:
    x, weight = torch.randn(64, 8), torch.randn(24, 8)
    with Products() as ran, ProductSweep():
        for each in (weight, weight.clone(), weight.T.contiguous().T):  # the last one has other strides
            F.linear(x, each)
        F.linear(x[:1], weight)
    rows = list(range(62, 32, -2))
    assert [rows for rows, _ in ran.shapes] == [*rows, 64, 64, *rows, 64, 1]


@torch.no_grad()
def test_part_of_a_result() -> None:
    x, weight, out = torch.randn(64, 8), torch.randn(24, 8), torch.full((64, 48), 7.0)
    with ProductSweep():
        torch.mm(x, weight.T, out=out[:, 24:])
    assert torch.equal(out[:, 24:], x @ weight.T)
    assert (out[:, :24] == 7).all()


def test_the_compiler_is_not_imported() -> None:
    """torch imports it, which takes seconds, for tensors that are made in modes of another kind."""
    code = (
        "import sys, torch; from vlfit.engine.execution.product_sweep import ProductSweep\n"
        "with ProductSweep(): torch.tensor([1, 2]).cpu() * 2, torch.empty(3, 4) @ torch.zeros(4, 2)\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
