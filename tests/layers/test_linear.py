"""FP8 weights times their block scales, against the definition written out element by element."""

import pytest
import torch

from vlfit.layers.linear import Fp8Linear, dequantize_fp8, stacked_block_rows

BLOCK = (4, 3)


def quantized(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // BLOCK[0]), -(-columns // BLOCK[1])) + 0.5
    return weight, scale


@pytest.mark.parametrize("shape", [(8, 6), (9, 7), (1, 1), (4, 10)])
def test_block_scales(shape: tuple[int, int]) -> None:
    weight, scale = quantized(*shape)
    full = dequantize_fp8(weight, scale, BLOCK, torch.float32)
    for row in range(shape[0]):
        for column in range(shape[1]):
            expected = weight.float()[row, column] * scale[row // BLOCK[0], column // BLOCK[1]]
            assert full[row, column] == expected


def test_layer_equals_gemm_with_dequantized_weights() -> None:
    weight, scale = quantized(9, 7)
    bias, x = torch.randn(9), torch.randn(3, 7)
    expected = x @ dequantize_fp8(weight, scale, BLOCK, torch.float32).T + bias
    torch.testing.assert_close(Fp8Linear(weight, scale, BLOCK, bias)(x), expected)


@pytest.mark.parametrize(
    ("heights", "expected"),
    [([2048, 1024, 1024], 128), ([64, 32, 32], 32), ([100], 128), ([96, 100], 32), ([9, 5], 1)],
)
def test_scale_blocks_do_not_straddle_stacked_matrices(heights: list[int], expected: int) -> None:
    assert stacked_block_rows(128, heights) == expected
    starts = [sum(heights[:index]) for index in range(len(heights))]
    assert all(start % expected == 0 for start in starts)
    assert 128 % expected == 0
