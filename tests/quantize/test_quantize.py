"""Quantization to FP8 and integers: as accurate as the format allows, and never worse than rounding to
nearest.
"""

import pytest
import torch
from torch import Tensor

from tests.quantize import reference
from vlfit.layers.linear import dequantize_int4, pack_int4, unpack_int4
from vlfit.quantize.rounding import nearest_squared_error, quantize_fp8, quantize_int

BLOCK = (128, 128)


def weights(rows: int, columns: int, seed: int = 0) -> Tensor:
    """As in trained models: normal, with rows of different magnitudes and a few outliers."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(rows, columns, generator=generator)
    noise[torch.rand(rows, columns, generator=generator) < 0.01] *= 4
    return noise * torch.rand(rows, 1, generator=generator)


@pytest.mark.parametrize("shape", [(128, 256), (130, 200), (1, 1), (127, 129)])
def test_fp8_error_is_at_most_half_a_step(shape: tuple[int, int]) -> None:
    weight = weights(*shape)
    codes, scale = quantize_fp8(weight, BLOCK)
    assert codes.dtype == torch.float8_e4m3fn
    assert scale.dtype == torch.bfloat16
    assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    back = reference.fp8(codes, scale)
    # Three bits after the point, so half a step is a sixteenth; the largest may be cut off by what rounding a
    # scale to bfloat16 takes away; and below the least normal number steps no longer shrink.
    least = (scale.float().max() * 2.0**-9 / 2).item()
    assert ((back - weight).abs() <= weight.abs() / 16 + least).all()


def test_fp8_of_the_official_block_uses_the_whole_range() -> None:
    codes, _ = quantize_fp8(weights(256, 256), BLOCK)
    assert codes.float().abs().amax() > 440


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_int4_codes(rows: int, group: int) -> None:
    weight = weights(rows, 256)
    packed, scale = quantize_int(weight, 4, group)
    assert (packed.dtype, packed.shape) == (torch.int32, (rows, 32))
    assert (scale.dtype, scale.shape) == (torch.bfloat16, (rows, 256 // group))
    expected = torch.from_numpy(reference.int4(packed, scale.float().numpy(), None, rows, 256))
    assert torch.equal(dequantize_int4(packed, scale, None, torch.float32), expected)
    # Every code is the nearest that its scale allows.
    spread = scale.float().repeat_interleave(group, dim=1)
    nearest = (weight / spread).round().clamp(-8, 7) * spread
    assert torch.equal(expected, nearest)


@pytest.mark.parametrize("group", [None, 128, 32])
@pytest.mark.parametrize("rows", [1, 5])
def test_int8_codes(rows: int, group: int | None) -> None:
    weight = weights(rows, 256)
    packed, scale = quantize_int(weight, 8, group)
    assert (packed.dtype, packed.shape) == (torch.int32, (rows, 64))
    assert (scale.dtype, scale.shape) == (torch.bfloat16, (rows, 256 // (group or 256)))
    back = torch.from_numpy(reference.int8(packed, scale.float().numpy(), rows, 256))
    spread = scale.float().repeat_interleave(group or 256, dim=1)
    assert torch.equal(back, (weight / spread).round().clamp(-128, 127) * spread)
    # Half a step wherever nothing is cut off, and little is: a row's error is near that of even rounding.
    assert (back - weight).square().sum() < 1.2 * (spread.square() / 12).sum()


def drawn(kind: str, rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    normal = torch.randn(rows, columns, generator=generator)
    if kind == "normal":
        return normal
    # Student's t with four degrees of freedom: tails as heavy as those of the heaviest layers.
    return normal / (torch.randn(4, rows, columns, generator=generator).square().mean(dim=0)).sqrt()


def missed(weight: Tensor, group: int) -> float:
    back = dequantize_int4(*quantize_int(weight, 4, group), None, torch.float32)
    return float((back - weight).square().sum())


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("kind", ["normal", "heavy"])
def test_int4_is_better_than_rounding_to_nearest(kind: str, group: int) -> None:
    """By at least a sixth of the root mean square; the reported error of plain rounding is exact."""
    weight = drawn(kind, 64, 1024)
    groups = weight.unflatten(1, (-1, group))
    plain_scale = (groups.abs().amax(2, keepdim=True) / 7).bfloat16().float()
    plain = ((groups / plain_scale).round().clamp(-8, 7) * plain_scale - groups).square().sum()
    assert nearest_squared_error(weight, 4, group) == pytest.approx(float(plain), rel=1e-5)
    assert (missed(weight, group) / float(plain)) ** 0.5 < 0.85


def test_scale_is_near_optimal() -> None:
    """Within 1 % of the best of a fine grid of scales of both signs."""
    weight = drawn("normal", 16, 512)
    groups = weight.unflatten(1, (-1, 32))
    least = torch.full(groups.shape[:2], torch.inf)
    for share in torch.linspace(0.5, 1.25, 151).tolist():
        for sign in (-1, 1):
            scale = (sign * share / 8 * groups.abs().amax(2, keepdim=True)).bfloat16().float()
            error = ((groups / scale).round().clamp(-8, 7) * scale - groups).square().sum(dim=2)
            least = torch.minimum(least, error)
    assert (missed(weight, 32) / float(least.sum())) ** 0.5 < 1.01


@pytest.mark.parametrize("value", [0.0, 1e-45, 3e38])
def test_blocks_of_zeros_and_of_extremes_stay_finite(value: float) -> None:
    weight = torch.full((128, 128), value)
    back = reference.fp8(*quantize_fp8(weight, BLOCK))
    int4 = dequantize_int4(*quantize_int(weight, 4, 32), None, torch.float32)
    packed, scale = quantize_int(weight, 8, None)
    bytewise = torch.from_numpy(reference.int8(packed, scale.float().numpy(), 128, 128))
    for result in (back, int4, bytewise):
        assert result.isfinite().all()
        assert torch.allclose(result, weight, rtol=0.07, atol=1e-37)


def test_outlier_affects_its_group_only() -> None:
    weight = weights(4, 128)
    alone = dequantize_int4(*quantize_int(weight, 4, 32), None, torch.float32)
    weight[2, 70] = 1000
    beside = dequantize_int4(*quantize_int(weight, 4, 32), None, torch.float32)
    same = torch.ones(4, 128, dtype=torch.bool)
    same[2, 64:96] = False
    assert torch.equal(alone[same], beside[same])


@pytest.mark.parametrize("columns", [8, 13, 1])
def test_packing_round_trip(columns: int) -> None:
    codes = torch.randint(0, 16, (5, columns), dtype=torch.uint8)
    packed = pack_int4(codes)
    assert packed.shape == (5, -(-columns // 8))
    assert torch.equal(unpack_int4(packed)[:, :columns], codes)
