"""FP8 rows of the KV cache: rounding errors for rows of every magnitude."""

import pytest
import torch

from vlfit.layers.kv_cache import MIN_SCALE, dequantize_kv_rows, quantize_kv_rows


def rows_of_many_magnitudes(dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    largest = 15 if dtype == torch.float16 else 120
    sizes = torch.randint(-14, largest - 3, (400, 1)).double().exp2()
    return (torch.randn(400, 64).double() * sizes).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounding_error_is_at_most_half_a_unit_in_the_last_place(dtype: torch.dtype) -> None:
    rows = rows_of_many_magnitudes(dtype)
    codes, scales = quantize_kv_rows(rows)
    back = dequantize_kv_rows(codes, scales, torch.float64)
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


def test_a_row_s_largest_value_is_exact() -> None:
    rows = torch.tensor([[448.0, -1.0], [449.0, 1.0], [-896.0, 2.0], [3.5, 1.0]])
    codes, scales = quantize_kv_rows(rows)
    assert scales.view(torch.bfloat16).tolist() == [1, 1, 2, 2**-7]
    assert dequantize_kv_rows(codes, scales, torch.float32)[:, 0].tolist() == [448, 448, -896, 3.5]


def test_zeros_are_exact_and_non_finite_rows_become_nan() -> None:
    rows = torch.tensor([[0.0, 0.0], [torch.inf, 1.0], [torch.nan, 1.0], [-torch.inf, 0.0], [1e-30, 0.0]])
    codes, scales = quantize_kv_rows(rows)
    assert scales.view(torch.bfloat16)[[0, 4]].tolist() == [MIN_SCALE, MIN_SCALE]
    back = dequantize_kv_rows(codes, scales, torch.float32)
    assert not back[[0, 4]].any()
    assert back[1:4].isnan().all()
