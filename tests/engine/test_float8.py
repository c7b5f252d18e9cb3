"""Rows in FP8: what comes back is near what went in, for every size that a row can have."""

import pytest
import torch

from vlfit.engine.float8 import LEAST, NOT_FINITE, narrowed, widened


def rows_of_many_sizes(dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    largest = 15 if dtype == torch.float16 else 120
    sizes = torch.randint(-14, largest - 3, (400, 1)).double().exp2()
    return (torch.randn(400, 64).double() * sizes).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_numbers_come_back_to_half_a_unit_of_three_bits(dtype: torch.dtype) -> None:
    rows = rows_of_many_sizes(dtype)
    codes, scales = narrowed(rows)
    back = widened(codes, scales, torch.float64)
    exact = rows.double()
    # Half a unit of the last of three bits of fraction, 2^-4 of a number; of the smallest ones, which have
    # no exponent of their own, 2^-10 at a scale that makes the largest number more than 224.
    bound = torch.maximum(exact.abs() / 16, exact.abs().amax(-1, keepdim=True) / 224 / 1024)
    assert ((back - exact).abs() <= bound).all()
    assert float((back - exact).norm() / exact.norm()) < 0.03
    assert torch.equal(widened(codes, scales, dtype).double(), back)  # exact in every dtype
    again = narrowed(back.to(dtype))
    assert torch.equal(widened(*again, torch.float64), back)


def test_the_largest_number_is_used_whole() -> None:
    rows = torch.tensor([[448.0, -1.0], [449.0, 1.0], [-447.9, 0.0], [224.0, 3.0]])
    assert (narrowed(rows)[1].int() - 127).tolist() == [0, 1, 0, -1]
    assert widened(*narrowed(rows), torch.float32)[:, 0].tolist() == [448, 448, -448, 224]


def test_zeros_stay_and_what_is_not_finite_shows() -> None:
    rows = torch.tensor([[0.0, 0.0], [torch.inf, 1.0], [torch.nan, 1.0], [-torch.inf, 0.0], [1e-30, 0.0]])
    codes, scales = narrowed(rows)
    assert scales.tolist() == [LEAST, NOT_FINITE, NOT_FINITE, NOT_FINITE, LEAST]
    back = widened(codes, scales, torch.float32)
    assert not back[[0, 4]].any()
    assert back[1:4].isnan().all()
