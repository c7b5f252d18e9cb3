"""Residual add and RMSNorm fused into GEMMs, against float64."""

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import ON_GPU, TOLERANCES, relative_error
from tests.kernels.test_linear import ODD, dequantized, int4, to_device
from vlfit.kernels.gemm import dense as dense
from vlfit.kernels.gemm import quantized as quantized
from vlfit.kernels.gemm.epilogue import PreNormRows, ResidualEpilogue
from vlfit.kernels.gemm.weights import QuantizedWeight
from vlfit.plan.native.tiles import GemmTiles

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")

EPS = 1e-3  # large enough to matter
SMALL = 0.01  # magnitude of rows for which eps matters


def partial_square_sums(x: Tensor) -> Tensor:
    """Squares of ``x`` in three partial sums, as the previous GEMM leaves them."""
    squares = x.float().square()
    third = x.shape[1] // 3
    return torch.stack([part.sum(1) for part in squares.split([third, third, x.shape[1] - 2 * third], 1)], 1)


def make_weights(name: str) -> QuantizedWeight | Tensor:
    return torch.randn(70, 136) if name == "dense" else ODD[name]()


def check(weights: QuantizedWeight | Tensor, rows: int, dtype: torch.dtype, device: torch.device) -> None:
    """A GEMM with a norm as prologue, and one with a residual as epilogue, with and without split-K."""
    matrix = to_device(weights, device) if isinstance(weights, QuantizedWeight) else weights.to(device, dtype)
    weight = dequantized(matrix) if isinstance(matrix, QuantizedWeight) else matrix.double()
    outputs, inputs = weight.shape
    x = (torch.randn(rows, inputs) * SMALL).to(device, dtype)
    bias = torch.randn(outputs).to(device, dtype) if rows % 2 else None
    prologue = PreNormRows((x * torch.randn(inputs).to(device, dtype)), partial_square_sums(x), EPS)
    rms = (x.double().square().mean(1, keepdim=True) + EPS).rsqrt()
    expected = prologue.rows.double() * rms @ weight.T + (0 if bias is None else bias.double())
    product = x.double() @ weight.T + (0 if bias is None else bias.double())
    norm_weight = torch.randn(outputs).to(device, dtype)
    gemm_tiles, dense_tiles = GemmTiles(8, 64, 64, 4, 2), dense.DenseTiles(32, 64, 4, 2)
    block_n = (gemm_tiles if isinstance(matrix, QuantizedWeight) else dense_tiles).outputs
    for splits in (1, 2):
        hidden = torch.randn(rows, outputs).to(device, dtype)
        expected_hidden = hidden.double() + product
        residual = ResidualEpilogue(hidden, norm_weight, EPS)
        if isinstance(matrix, QuantizedWeight):
            out = quantized.quantized_linear(prologue, matrix, bias, gemm_tiles, splits)
            prenorm = quantized.quantized_linear_add(x, matrix, bias, residual, gemm_tiles, splits)
        else:
            out = dense.dense_linear(prologue, matrix, bias, dense_tiles, splits)
            prenorm = dense.dense_linear_add(x, matrix, bias, residual, dense_tiles, splits)
        assert relative_error(out, expected) < TOLERANCES[dtype]
        assert relative_error(hidden, expected_hidden) < TOLERANCES[dtype]
        assert relative_error(prenorm.rows, hidden.double() * norm_weight.double()) < TOLERANCES[dtype]
        assert prenorm.square_sums.shape == (rows, -(-outputs // block_n))
        assert (
            relative_error(prenorm.square_sums.sum(1), hidden.double().square().sum(1))
            < TOLERANCES[torch.float32]
        )
        assert prenorm.eps == EPS


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    "name", ["dense", "fp8, blocks cut off", "int8, groups of 128", "int4, groups of 32", "int4, zero points"]
)
def test_fused_norm_and_residual(name: str, rows: int, device: torch.device) -> None:
    check(make_weights(name), rows, torch.float32, device)


@pytest.mark.parametrize("symmetric", [True, False])
def test_one_row_of_int4_in_half_precision(symmetric: bool, device: torch.device) -> None:
    check(int4(70, 512, 32, symmetric=symmetric), 1, torch.float16, device)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize("name", ["dense", "fp8, blocks cut off", "int4, groups of 32", "int4, zero points"])
def test_fused_norm_and_residual_in_bfloat16(name: str, rows: int, device: torch.device) -> None:
    check(make_weights(name), rows, torch.bfloat16, device)
