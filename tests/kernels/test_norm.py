"""Residual and norm as parts of the products around them, against float64."""

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import ON_GPU, TOLERANCES, relative_error
from tests.kernels.test_linear import ODD, int4, on, widened
from vlfit.kernels.gemm import dense as few_rows
from vlfit.kernels.gemm import quantized as linear
from vlfit.kernels.gemm.epilogue import Onto, Scaled
from vlfit.kernels.gemm.quantized import NarrowWeights
from vlfit.plan.native.tiles import Tiles

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")

EPS = 1e-3  # large enough to be seen
SMALL = 0.01  # of rows in which it is


def sums(x: Tensor) -> Tensor:
    """Squares of ``x`` in three sums, as the product before leaves them."""
    squares = x.float().square()
    third = x.shape[1] // 3
    return torch.stack([part.sum(1) for part in squares.split([third, third, x.shape[1] - 2 * third], 1)], 1)


def weights(name: str) -> NarrowWeights | Tensor:
    return torch.randn(70, 136) if name == "dense" else ODD[name]()


def check(kind: NarrowWeights | Tensor, rows: int, dtype: torch.dtype, device: torch.device) -> None:
    """First a product of norms, then one that adds to rows, in programs that share inputs and in one."""
    matrix = on(kind, device) if isinstance(kind, NarrowWeights) else kind.to(device, dtype)
    wide = widened(matrix) if isinstance(matrix, NarrowWeights) else matrix.double()
    outputs, inputs = wide.shape
    x = (torch.randn(rows, inputs) * SMALL).to(device, dtype)
    bias = torch.randn(outputs).to(device, dtype) if rows % 2 else None
    before = Scaled((x * torch.randn(inputs).to(device, dtype)), sums(x), EPS)
    shrink = (x.double().square().mean(1, keepdim=True) + EPS).rsqrt()
    exact = before.rows.double() * shrink @ wide.T + (0 if bias is None else bias.double())
    found = x.double() @ wide.T + (0 if bias is None else bias.double())
    factor = torch.randn(outputs).to(device, dtype)
    of_narrow, of_wide = Tiles(8, 64, 64, 4, 2), few_rows.Tiles(32, 64, 4, 2)
    span = (of_narrow if isinstance(matrix, NarrowWeights) else of_wide).outputs
    for splits in (1, 2):
        hidden = torch.randn(rows, outputs).to(device, dtype)
        added = hidden.double() + found
        onto = Onto(hidden, factor, EPS)
        if isinstance(matrix, NarrowWeights):
            out = linear.linear(before, matrix, bias, of_narrow, splits)
            left = linear.add_product(x, matrix, bias, onto, of_narrow, splits)
        else:
            out = few_rows.multiply(before, matrix, bias, of_wide, splits)
            left = few_rows.add_product(x, matrix, bias, onto, of_wide, splits)
        assert relative_error(out, exact) < TOLERANCES[dtype]
        assert relative_error(hidden, added) < TOLERANCES[dtype]
        assert relative_error(left.rows, hidden.double() * factor.double()) < TOLERANCES[dtype]
        assert left.squares.shape == (rows, -(-outputs // span))
        assert (
            relative_error(left.squares.sum(1), hidden.double().square().sum(1)) < TOLERANCES[torch.float32]
        )
        assert left.eps == EPS


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    "name", ["dense", "fp8, blocks cut off", "int8, groups of 128", "int4, groups of 32", "int4, zero points"]
)
def test_norm_and_residual_are_parts_of_products(name: str, rows: int, device: torch.device) -> None:
    check(weights(name), rows, torch.float32, device)


@pytest.mark.parametrize("symmetric", [True, False])
def test_one_row_of_int4_in_half_precision(symmetric: bool, device: torch.device) -> None:
    check(int4(70, 512, 32, symmetric=symmetric), 1, torch.float16, device)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize("name", ["dense", "fp8, blocks cut off", "int4, groups of 32", "int4, zero points"])
def test_norm_and_residual_in_bfloat16(name: str, rows: int, device: torch.device) -> None:
    check(weights(name), rows, torch.bfloat16, device)
