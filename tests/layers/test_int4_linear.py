"""4-bit weights times their scales, against the definition written out element by element."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.quantize import reference
from vlfit.kernels.gemm.weights import QuantizedWeight
from vlfit.layers.linear import PackedLinear, dequantize_int4, stack_zero_points

Part = tuple[Tensor, Tensor, Tensor | None]


def part(rows: int, columns: int, group: int, symmetric: bool) -> Part:
    """Random bits, as a file could hold them."""
    generator = np.random.default_rng(rows + columns)
    words = generator.integers(-(2**31), 2**31, (rows, columns // 8), dtype=np.int32)
    zeros = generator.integers(-(2**31), 2**31, (-(-rows // 8), columns // group), dtype=np.int32)
    scale = torch.rand(rows, columns // group).to(torch.bfloat16)
    return torch.from_numpy(words), scale, None if symmetric else torch.from_numpy(zeros)


def expected(stored: Part) -> Tensor:
    packed, scale, zero = stored
    rows, columns = packed.shape[0], packed.shape[1] * 8
    return torch.from_numpy(reference.int4(packed, scale.float().numpy(), zero, rows, columns))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("rows", "columns", "group"), [(8, 32, 8), (9, 64, 32), (1, 32, 32), (17, 48, 16)])
def test_dequantization(rows: int, columns: int, group: int, symmetric: bool) -> None:
    stored = part(rows, columns, group, symmetric)
    assert torch.equal(dequantize_int4(*stored, torch.float32), expected(stored))


def test_half_precision_is_rounded_once() -> None:
    stored = part(16, 64, 32, True)
    assert torch.equal(dequantize_int4(*stored, torch.bfloat16), expected(stored).to(torch.bfloat16))


@pytest.mark.parametrize("symmetric", [True, False])
def test_layer_equals_gemm_with_dequantized_weights(symmetric: bool) -> None:
    stored = part(9, 64, 32, symmetric)
    bias, x = torch.randn(9), torch.randn(3, 64)
    layer = PackedLinear(QuantizedWeight(*stored, (1, 32)), bias)
    torch.testing.assert_close(layer(x), x @ expected(stored).T + bias)


def test_zero_points_of_stacked_matrices_keep_their_rows() -> None:
    """Nine rows of the first: those of the second begin in the middle of a word."""
    parts = [part(9, 64, 16, False), part(5, 64, 16, False)]
    zeros = stack_zero_points([zero for _, _, zero in parts if zero is not None], [9, 5])
    packed, scale = (torch.cat(each) for each in list(zip(*parts, strict=True))[:2])
    expected_weight = torch.cat([dequantize_int4(*each, torch.float32) for each in parts])
    assert torch.equal(dequantize_int4(packed, scale, zeros, torch.float32), expected_weight)
