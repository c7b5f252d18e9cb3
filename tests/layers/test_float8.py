"""Rows in FP8: what comes back is near what went in, for every size that a row can have."""

import pytest
import torch

from vlfit.layers.kv_cache import MIN_SCALE, dequantize_rows, quantize_rows


def rows_of_many_sizes(dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    largest = 15 if dtype == torch.float16 else 120
    sizes = torch.randint(-14, largest - 3, (400, 1)).double().exp2()
    return (torch.randn(400, 64).double() * sizes).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_numbers_come_back_to_half_a_unit_of_three_bits(dtype: torch.dtype) -> None:
    rows = rows_of_many_sizes(dtype)
    codes, scales = quantize_rows(rows)
    back = dequantize_rows(codes, scales, torch.float64)
    exact = rows.double()
    # Half a unit of the last of three bits of fraction, 2^-4 of a number; of the smallest ones, which have
    # no exponent of their own, 2^-10 where the largest is 448. Either a little more by the scale's rounding.
    largest = exact.abs().amax(-1, keepdim=True)
    bound = torch.maximum(exact.abs() / 16, largest / 448 / 1024) * (1 + 2**-8)
    assert ((back - exact).abs() <= bound).all()
    assert float((back - exact).norm() / exact.norm()) < 0.03
    # The largest number is rounded no more than its scale is.
    of_largest = exact.abs() == largest
    assert ((back - exact).abs()[of_largest] <= exact.abs()[of_largest] * 2**-8).all()


def test_the_largest_number_is_used_whole() -> None:
    rows = torch.tensor([[448.0, -1.0], [449.0, 1.0], [-896.0, 2.0], [3.5, 1.0]])
    codes, scales = quantize_rows(rows)
    assert scales.view(torch.bfloat16).tolist() == [1, 1, 2, 2**-7]
    assert dequantize_rows(codes, scales, torch.float32)[:, 0].tolist() == [448, 448, -896, 3.5]


def test_zeros_stay_and_what_is_not_finite_shows() -> None:
    rows = torch.tensor([[0.0, 0.0], [torch.inf, 1.0], [torch.nan, 1.0], [-torch.inf, 0.0], [1e-30, 0.0]])
    codes, scales = quantize_rows(rows)
    assert scales.view(torch.bfloat16)[[0, 4]].tolist() == [MIN_SCALE, MIN_SCALE]
    back = dequantize_rows(codes, scales, torch.float32)
    assert not back[[0, 4]].any()
    assert back[1:4].isnan().all()
