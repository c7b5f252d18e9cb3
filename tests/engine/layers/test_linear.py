"""FP8 weights times their block scales, against the definition written out element by element."""

import pytest
import torch

from vlfit.engine.layers.linear import Fp8Linear, dequantize_fp8

BLOCK = (4, 3)


def quantized(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // BLOCK[0]), -(-columns // BLOCK[1])) + 0.5
    return weight, scale


@pytest.mark.parametrize("shape", [(8, 6), (9, 7), (1, 1), (4, 10)])
def test_every_element_takes_the_scale_of_its_block(shape: tuple[int, int]) -> None:
    weight, scale = quantized(*shape)
    full = dequantize_fp8(weight, scale, BLOCK, torch.float32)
    for row in range(shape[0]):
        for column in range(shape[1]):
            expected = weight.float()[row, column] * scale[row // BLOCK[0], column // BLOCK[1]]
            assert full[row, column] == expected


def test_stacked_parts_are_separate_products_side_by_side() -> None:
    parts = [quantized(9, 7), quantized(5, 7)]
    bias = torch.randn(14)
    x = torch.randn(3, 7)
    layer = Fp8Linear(parts, BLOCK, bias)
    expected = torch.cat([x @ dequantize_fp8(*part, BLOCK, torch.float32).T for part in parts], -1) + bias
    torch.testing.assert_close(layer(x), expected)
