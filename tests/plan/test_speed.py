"""Bytes read per token: the plan's count against the layers that the loader builds."""

import pytest
import torch

from tests.plan.on_meta import loader
from vlfit.checkpoint import catalog
from vlfit.checkpoint.quantization import FP8, INT4
from vlfit.layers.linear import Fp8Linear, PackedLinear
from vlfit.plan import speed


@pytest.mark.parametrize("weights", [FP8, INT4])
def test_bytes_per_weight_match_the_layers(weights: str) -> None:
    """The kernels read codes and scales once."""
    entry = next(entry for entry in catalog.family_entries("4B") if entry.weights == weights)
    with torch.no_grad():
        layer = loader(entry).linear("model.language_model.layers.0.mlp.down_proj")
    assert isinstance(layer, Fp8Linear | PackedLinear)
    read = layer.weights.codes.nbytes + layer.weights.scale.nbytes
    assert read / (2560 * 9728) == pytest.approx(speed.BYTES_PER_WEIGHT[weights], rel=0.001)


@pytest.mark.parametrize("digits", [2, 3])
@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e3])
def test_shown_bounds_are_no_wider_than_a_range_of_half_again(digits: int, unit: float) -> None:
    for low in (unit * (1 + step / 700) for step in range(6400)):
        shown = speed.rounded_bounds(low, 1.5 * low, digits)
        assert 1.35 * shown[0] < shown[1] <= 1.5 * shown[0] * (1 + 1e-12)
        assert shown == pytest.approx((low, 1.5 * low), rel=max(0.5 * 10 ** (1 - digits), 0.01))


def test_shown_tokens_per_second_are_no_wider_either() -> None:
    for low in (0.5 + step / 77 for step in range(9000)):
        shown = [float(each) for each in speed.decode_bounds(low, 1.5 * low)]
        assert shown[1] <= 1.5 * shown[0] * (1 + 1e-12)
        assert shown == pytest.approx([low, 1.5 * low], abs=1)


def test_a_range_that_is_wider_is_shown_as_it_is() -> None:
    assert speed.rounded_bounds(0.1149, 0.1849, digits=2) == (0.11, 0.18)
    assert speed.decode_bounds(60.5, 132.4) == ("60", "132")
    assert speed.decode_bounds(729.2, 1093.8) == ("730", "1093")
