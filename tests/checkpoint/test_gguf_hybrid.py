"""Qwen3.5 through GGUF files: llama.cpp's order of value heads, its norms and decays, and back."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tests.engine.test_parity import CONVERSATIONS, run
from tests.gguf_files import as_blocks, as_gguf, dequantized
from tests.tiny_qwen3_5 import QWEN3_5, HybridSpec, build_qwen3_5
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.errors import UsageError
from vlfit.layers.linear import Int8Linear, PackedLinear
from vlfit.loading.loader import Loader
from vlfit.models.qwen3_5.config import text_config

SQUARE = {"linear_value_head_dim": 16}  # llama.cpp has one width for keys and values
WIDE = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "intermediate_size": 256}
SPECS = {
    "pictures": HybridSpec("9B", kv_heads=2, value_heads=4, tied=False, mtp=True, more=SQUARE),
    "alone": HybridSpec("2B", vision=False, more=SQUARE),
    # Rows of whole blocks of 256, where two heads share a block's super scale.
    "wide": HybridSpec("4B", hidden=256, value_heads=6, vision=False, more=WIDE),
}
# Of two key heads with three value heads each: where in the file their heads are.
PLACES = [0, 2, 4, 1, 3, 5]
Make = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    def build(name: str) -> Path:
        monkeypatch.setitem(QWEN3_5, name, SPECS[name])
        return build_qwen3_5(name, tmp_path / name)

    return build


def engine(folder: Path) -> NativeEngine:
    return NativeEngine(open_checkpoint(folder), EngineOptions(device="cpu", max_model_len=1024))


@pytest.mark.parametrize("name", ["pictures", "alone"])
def test_a_model_comes_back_as_it_was(name: str, make: Make, tmp_path: Path) -> None:
    source = make(name)
    model, mmproj = as_gguf(source, tmp_path / "gguf", "f32")
    assert (mmproj is not None) == (name == "pictures")
    before, after = open_checkpoint(source), open_checkpoint(model)
    assert after.config == before.config
    assert {key: info.shape for key, info in after.tensors.items()} == {
        key: info.shape for key, info in before.tensors.items()
    }
    device = torch.device("cpu")
    with Loader(before, device, torch.float32) as first, Loader(after, device, torch.float32) as second:
        for key in before.tensors:
            assert torch.allclose(second.tensor(key), first.tensor(key), rtol=1e-5, atol=3e-7), key
    wanted = [CONVERSATIONS["text"]]
    if mmproj is not None:
        wanted.append(next(talk for key, talk in CONVERSATIONS.items() if "picture" in key))
    for talk in wanted:
        assert run(engine(model), talk) == run(engine(source), talk)


def test_what_the_file_has(make: Make, tmp_path: Path) -> None:
    """By the converter's own rules, written out once more."""
    source = make("pictures")
    model, _ = as_gguf(source, tmp_path / "gguf", "f32")
    reader = gguf.GGUFReader(model)
    found = {tensor.name: dequantized(tensor) for tensor in reader.tensors}
    checkpoint = open_checkpoint(source)
    text = text_config(checkpoint.config)
    with Loader(checkpoint, torch.device("cpu"), torch.float32) as loader:
        layer = f"{text.prefix}.layers.0"
        tiled = [0, 2, 1, 3]  # heads of the value: the first of each key head, then the second
        decay = -np.exp(loader.tensor(f"{layer}.linear_attn.A_log").numpy())
        assert np.allclose(found["blk.0.ssm_a"], decay[tiled])
        bias = loader.tensor(f"{layer}.linear_attn.dt_bias").numpy()
        assert np.array_equal(found["blk.0.ssm_dt.bias"], bias[tiled])
        gates = loader.tensor(f"{layer}.linear_attn.in_proj_z.weight").numpy().reshape(4, 16, -1)
        assert np.array_equal(found["blk.0.attn_gate.weight"].reshape(4, 16, -1), gates[tiled])
        out = loader.tensor(f"{layer}.linear_attn.out_proj.weight").numpy().reshape(-1, 4, 16)
        assert np.array_equal(found["blk.0.ssm_out.weight"].reshape(-1, 4, 16), out[:, tiled])
        mixed = loader.tensor(f"{layer}.linear_attn.in_proj_qkv.weight").numpy()
        assert np.array_equal(found["blk.0.attn_qkv.weight"][:64], mixed[:64])
        convolution = loader.tensor(f"{layer}.linear_attn.conv1d.weight").numpy()[:, 0]
        assert np.array_equal(found["blk.0.ssm_conv1d.weight"][64:80], convolution[64:80])
        assert np.array_equal(found["blk.0.ssm_conv1d.weight"][80:96], convolution[96:112])
        norm = loader.tensor(f"{layer}.input_layernorm.weight").numpy()
        assert np.allclose(found["blk.0.attn_norm.weight"], norm + 1)
        own = loader.tensor(f"{layer}.linear_attn.norm.weight").numpy()
        assert np.array_equal(found["blk.0.ssm_norm.weight"], own)
        fc = loader.tensor("mtp.fc.weight").numpy()
        assert np.array_equal(found["blk.4.nextn.eh_proj.weight"], fc)
    values = {key: field.contents() for key, field in reader.fields.items()}
    assert values["qwen35.block_count"] == 5
    assert values["qwen35.nextn_predict_layers"] == 1
    assert values["qwen35.full_attention_interval"] == 4
    assert values["qwen35.ssm.time_step_rank"] == 4
    assert values["qwen35.ssm.group_count"] == 2
    assert values["qwen35.ssm.inner_size"] == 64
    assert values["qwen35.rope.dimension_sections"] == [2, 1, 1, 0]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K", "IQ2_S"])
def test_columns_of_blocks_move_whole(kind: str, make: Make, tmp_path: Path) -> None:
    """Codes stay codes, though heads share super scales in the file; what has none is dequantized."""
    source = make("wide")
    model, _ = (as_gguf if kind == "Q8_0" else as_blocks)(source, tmp_path / "gguf", kind.lower())
    stored = {tensor.name: dequantized(tensor) for tensor in gguf.GGUFReader(model).tensors}
    with Loader(open_checkpoint(model), torch.device("cpu"), torch.float32) as loader:
        loader._keeps_quantized = True
        for name, file, axis in (("out_proj", "ssm_out", 1), ("in_proj_z", "attn_gate", 0)):
            layer = loader.linear(f"model.layers.0.linear_attn.{name}")
            assert isinstance(layer, Int8Linear | PackedLinear) == (kind != "IQ2_S")
            wide = stored[f"blk.0.{file}.weight"]
            heads = wide.reshape(-1, 6, 128) if axis else wide.reshape(6, 128, -1)
            expected = torch.from_numpy(np.take(heads, PLACES, axis=axis).reshape(wide.shape).copy())
            inputs = torch.eye(wide.shape[1])
            assert torch.allclose(layer(inputs).T, expected, rtol=1e-3, atol=1e-4)


def test_what_has_no_keys_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(SPECS, "unequal", replace(SPECS["alone"], more={}))
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    monkeypatch.setitem(SPECS, "uneven", replace(SPECS["alone"], more={**SQUARE, "layer_types": kinds}))
    for name in ("unequal", "uneven"):
        with pytest.raises(UsageError):
            as_gguf(make(name), tmp_path / "gguf" / name)
