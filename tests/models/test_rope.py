"""Rotary frequencies and tables equal those of transformers for every kind."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_decoders import DECODERS, build_decoder
from vlfit.layers.rope import RotaryEmbedding, apply_rope
from vlfit.models.registry import read_config

CPU = torch.device("cpu")


def reference(folder: Path) -> Any:
    """The rotary embedding of transformers' model for the config in ``folder``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).model.rotary_emb


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("length", [40, 300])
def test_tables_equal_the_reference(tmp_path: Path, name: str, length: int) -> None:
    config = read_config(build_decoder(name, tmp_path)).text
    positions = torch.arange(length)
    theirs = reference(tmp_path)(torch.zeros(1), positions[None])
    ours = RotaryEmbedding(config.limited_to(length), CPU).tables(positions.expand(3, -1), torch.float32)
    half = config.rotary_dim // 2
    torch.testing.assert_close(ours[0][:, 0], theirs[0][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[1][:, 0, half:], theirs[1][0, :, half:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[1][:, 0, :half], -theirs[1][0, :, :half], rtol=1e-5, atol=1e-5)


def test_rope_scaling_changes_frequencies(tmp_path: Path) -> None:
    """The test above cannot pass by all kinds being the same."""
    plain = read_config(build_decoder("llama2", tmp_path / "a")).text
    found = {tuple(RotaryEmbedding(plain, CPU).inverse_frequencies.tolist())}
    for name in ("llama3", "phi3_long"):
        config = read_config(build_decoder(name, tmp_path / name)).text
        found.add(tuple(RotaryEmbedding(config.limited_to(64), CPU).inverse_frequencies.tolist()))
        found.add(tuple(RotaryEmbedding(config.limited_to(65), CPU).inverse_frequencies.tolist()))
    assert len(found) == 4


def test_partial_rotary_leaves_the_rest_of_a_head() -> None:
    x = torch.randn(5, 2, 16)
    cosines, sines = torch.randn(5, 1, 12), torch.randn(5, 1, 12)
    turned = apply_rope(x, cosines, sines)
    assert torch.equal(turned[..., 12:], x[..., 12:])
    assert torch.equal(turned[..., :12], apply_rope(x[..., :12].contiguous(), cosines, sines))
