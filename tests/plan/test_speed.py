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
