"""The folder that a conversion makes: what is in it."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.edit import copy_of
from tests.quantize.reference import dequantized, dequantized_copy, stored
from vlfit.checkpoint.headers import read_headers
from vlfit.checkpoint.source import Checkpoint, open_checkpoint
from vlfit.checkpoint.tensors import is_text_layer
from vlfit.errors import BrokenShard, UsageError
from vlfit.quantize import output_files as files
from vlfit.quantize.conversion import convert

Tiny = Callable[[str], Path]
UP = "model.language_model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_only_text_layers_are_quantized(tiny: Tiny, out: Path, weights: str) -> None:
    source = tiny("untied_sharded")
    done = convert(open_checkpoint(source), weights, out)
    before, after, wide = stored(source), stored(out), dequantized(out)
    for name, tensor in before.items():
        if is_text_layer(name) and tensor.ndim == 2:
            kind = name.split(".")[-2]
            error = ((wide[name] - tensor).norm() / tensor.norm()).item()
            assert error < (0.04 if weights == "fp8" else 0.12)
            assert error == pytest.approx(done.relative_errors[kind], rel=0.2)
        else:
            assert torch.equal(after[name], tensor)
            assert after[name].dtype == tensor.dtype
    assert set(done.relative_errors) == {
        f"{kind}_proj" for kind in ("q", "k", "v", "o", "gate", "up", "down")
    }
    assert open_checkpoint(out).weights_format == weights
    assert open_checkpoint(out).parameter_count == open_checkpoint(source).parameter_count
    assert done.bytes_after == sum(info.bytes for info in read_headers(out).values())


def test_reported_errors_are_exact(tiny: Tiny, out: Path) -> None:
    done = convert(open_checkpoint(tiny("tied")), "int4", out)
    before, after = stored(tiny("tied")), dequantized(out)
    names = [name for name in before if name.endswith("up_proj.weight")]
    missed = sum((after[name] - before[name]).double().square().sum() for name in names)
    size = sum(before[name].double().square().sum() for name in names)
    assert done.relative_errors["up_proj"] == pytest.approx(float(missed / size) ** 0.5, rel=1e-6)


def test_small_files_and_config_are_kept(plain: Checkpoint, out: Path) -> None:
    source = copy_of(plain.folder, out.parent / "source")
    (source / "LICENSE").write_text("terms")
    (source / "README.md").write_text("scores")
    (source / "optimizer.pt").write_text("no part of the model")
    (source / "model.safetensors.index.json.bak").write_text("neither")
    convert(open_checkpoint(source), "int4", out)
    names = {path.name for path in out.iterdir()}
    assert names == {path.name for path in plain.folder.iterdir()} | {
        "LICENSE",
        "README.md",
        files.ORIGINAL_CARD,
    }
    assert (out / files.ORIGINAL_CARD).read_text() == "scores"
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    config = json.loads((out / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())
    assert quantization["quant_method"] == "compressed-tensors"
    card = (out / "README.md").read_text()
    assert "int4" in card
    assert "up_proj" in card
    assert "pip install compressed-tensors" in card, "what transformers needs to read it"
    convert(open_checkpoint(source), "fp8", out.parent / "fp8")
    assert "pip install accelerate" in (out.parent / "fp8" / "README.md").read_text()


@pytest.fixture
def wide(tiny: Tiny, tmp_path: Path) -> Path:
    """The checkpoint "fp8", whose layers are larger than one block, as it was before it was converted."""
    folder = copy_of(tiny("fp8"), tmp_path / "wide")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    values = {name: value.bfloat16() for name, value in dequantized(tiny("fp8")).items()}
    save_file(values, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_rows_per_chunk_do_not_matter(
    wide: Path, out: Path, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(open_checkpoint(wide), weights, out / "whole")
    monkeypatch.setattr("vlfit.quantize.conversion._READ_ROWS", 256)
    monkeypatch.setattr("vlfit.quantize.conversion._QUANTIZE_ROWS", 256)
    convert(open_checkpoint(wide), weights, out / "parts")
    files = [(out / name / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert files[0] == files[1]


def test_fp8_config_is_the_official_one(tiny: Tiny, wide: Path, out: Path) -> None:
    """tests/tiny.py writes it as the official FP8 checkpoints have it."""
    official = json.loads((tiny("fp8") / "config.json").read_text())["quantization_config"]
    convert(open_checkpoint(wide), "fp8", out)
    written = json.loads((out / "config.json").read_text())["quantization_config"]
    listed = "modules_to_not_convert"
    assert sorted(written.pop(listed)) == sorted([*official.pop(listed), "model.visual.pos_embed"])
    assert written == official
    assert {name: info.shape for name, info in read_headers(out).items()} == {
        name: info.shape for name, info in read_headers(tiny("fp8")).items()
    }
    assert {info.dtype for info in read_headers(out).values()} == {"BF16", "F8_E4M3"}


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_shards(plain: Checkpoint, out: Path, weights: str) -> None:
    limit = 150_000
    convert(plain, weights, out, shard_bytes=limit)
    convert(plain, weights, out.parent / "whole")
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) > 3
    for path in shards:
        tensors = load_file(path)
        modules = {name.rpartition(".")[0] for name in tensors}
        assert sum(tensor.nbytes for tensor in tensors.values()) <= limit or len(modules) == 1
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(info.bytes for info in read_headers(out).values())
    assert {name: Path(home) for name, home in index["weight_map"].items()} == {
        name: Path(info.file.name) for name, info in read_headers(out).items()
    }
    one, several = stored(out.parent / "whole"), stored(out)
    assert one.keys() == several.keys()
    assert all(torch.equal(one[name].view(torch.uint8), several[name].view(torch.uint8)) for name in one)


def test_indivisible_layers_stay_in_16_bits(tiny: Tiny, out: Path) -> None:
    done = convert(open_checkpoint(tiny("odd_vocab_one_kv_head")), "int4", out)
    kept = [f"model.language_model.layers.{index}.self_attn.o_proj" for index in range(3)]
    assert list(done.kept) == kept  # 144 inputs are 4.5 groups of 32
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert set(kept) < set(ignored)
    assert UP not in ignored
    assert re.search(r"\b3 of\b", (out / "README.md").read_text())


def test_no_divisible_layer(tiny: Tiny, out: Path) -> None:
    with pytest.raises(UsageError, match="128") as caught:
        convert(open_checkpoint(tiny("tied")), "int4", out, group_size=128)
    assert "--group-size 32" in caught.value.hint
    assert not out.exists()


def test_quantized_checkpoints_are_refused(tiny: Tiny, plain: Checkpoint, out: Path) -> None:
    with pytest.raises(UsageError, match="fp8"):
        convert(open_checkpoint(tiny("fp8")), "fp8", out)
    convert(plain, "int4", out)
    for weights in ("fp8", "int4"):
        with pytest.raises(UsageError, match="int4"):
            convert(open_checkpoint(out), weights, out.parent / "again")


# From FP8


def test_int4_from_fp8(tiny: Tiny, out: Path) -> None:
    """Byte-equal to converting a plain checkpoint with the same values, with rows read in uneven chunks."""
    done = convert(open_checkpoint(tiny("fp8")), "int4", out)
    values = dequantized_copy(tiny("fp8"), out.parent / "values")
    convert(open_checkpoint(values), "int4", out.parent / "of-values")
    ours, theirs = stored(out), stored(out.parent / "of-values")
    assert ours.keys() == theirs.keys()
    packed = [name for name in ours if name.rpartition(".")[2] in ("weight_packed", "weight_scale")]
    assert len(packed) == 2 * 7 * open_checkpoint(out).config.text.num_hidden_layers
    assert all(torch.equal(ours[name], theirs[name]) for name in packed)
    assert not any(name.endswith("_scale_inv") for name in ours)
    assert open_checkpoint(out).weights_format == done.weights == "int4"
    assert done.source_weights == "fp8"
    assert "FP8" in (out / "README.md").read_text()


def test_indivisible_fp8_layers_become_bfloat16(tiny: Tiny, out: Path) -> None:
    convert(open_checkpoint(tiny("odd_vocab_one_kv_head")), "fp8", out / "fp8")
    done = convert(open_checkpoint(out / "fp8"), "int4", out / "int4")
    assert len(done.kept) == 3
    values, now = dequantized(out / "fp8"), stored(out / "int4")
    for module in done.kept:
        assert torch.equal(now[f"{module}.weight"], values[f"{module}.weight"].bfloat16())


def test_fp8_text_is_copied_beside_int8_parts(tiny: Tiny, out: Path) -> None:
    source = tiny("fp8_untied_sharded")
    done = convert(open_checkpoint(source), "fp8", out, embedding="int8", vision="int8", head="int8")
    before, after = stored(source), stored(out)
    kept = [name for name in before if before[name].dtype == torch.float8_e4m3fn]
    assert len(kept) == 7 * open_checkpoint(source).config.text.num_hidden_layers
    for name in kept:
        assert torch.equal(after[name].view(torch.uint8), before[name].view(torch.uint8))
        assert torch.equal(after[f"{name}_scale"], before[f"{name}_scale_inv"])
    assert set(done.relative_errors) == {
        "embed_tokens",
        "lm_head",
        *(f"vision.{kind}" for kind in ("qkv", "proj", "linear_fc1", "linear_fc2")),
    }
    assert open_checkpoint(out).weights_format == "fp8"
    assert open_checkpoint(out).parameter_count == open_checkpoint(source).parameter_count


# Parts beside the text layers


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_embedding_head_and_tower_in_8_bits(tiny: Tiny, out: Path, weights: str) -> None:
    source = tiny("untied_sharded")
    done = convert(open_checkpoint(source), weights, out, embedding="int8", head="int8", vision="int8")
    before, after, wide = stored(source), stored(out), dequantized(out)
    in_8_bits = [
        name
        for name in before
        if name in ("lm_head.weight", "model.language_model.embed_tokens.weight")
        or (name.startswith("model.visual.") and before[name].ndim == 2 and "pos_embed" not in name)
    ]
    assert len(in_8_bits) > 8
    for name in in_8_bits:
        module = name.removesuffix(".weight")
        assert after[f"{module}.weight_packed"].shape == (len(before[name]), before[name].shape[1] // 4)
        assert after[f"{module}.weight_scale"].shape == (len(before[name]), 1)
        assert ((wide[name] - before[name]).norm() / before[name].norm()).item() < 0.015
    untouched = [name for name in before if name in after]
    assert "model.visual.pos_embed.weight" in untouched
    assert "model.visual.patch_embed.proj.weight" in untouched
    text = {name for name in before if is_text_layer(name) and before[name].ndim == 2}
    assert set(untouched) == set(before) - set(in_8_bits) - (set() if weights == "fp8" else text)
    assert open_checkpoint(out).weights_format == weights
    assert done.bytes_after == sum(info.bytes for info in read_headers(out).values())
    card = (out / "README.md").read_text()
    assert f"--weights {weights} " in card
    assert "--head int8 --embedding int8 --vision int8`" in card
    assert "compressed-tensors" in card
    assert "pip install" not in card, "other programs may not read int8 in these places"


def test_config_groups(tiny: Tiny, out: Path) -> None:
    convert(open_checkpoint(tiny("untied_sharded")), "int4", out, embedding="int8", head="int4")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    groups = config["config_groups"]
    assert [group["targets"] for group in groups.values()] == [
        ["Linear", "re:.*lm_head$"],
        ["re:.*embed_tokens$"],
    ]
    assert [group["weights"]["num_bits"] for group in groups.values()] == [4, 8]
    assert config["format"] == "pack-quantized"
    convert(open_checkpoint(tiny("untied_sharded")), "fp8", out.parent / "b", vision="int8")
    config = json.loads((out.parent / "b" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert [group["format"] for group in config["config_groups"].values()] == [
        "float-quantized",
        "pack-quantized",
    ]


def test_redundant_tied_head_is_dropped(plain: Checkpoint, out: Path) -> None:
    source = copy_of(plain.folder, out.parent / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors")
    convert(open_checkpoint(source), "int4", out, embedding="int8")
    assert "lm_head.weight" not in read_headers(out)
    assert "model.language_model.embed_tokens.weight_packed" in read_headers(out)


def test_output_head(tiny: Tiny, plain: Checkpoint, out: Path) -> None:
    convert(open_checkpoint(tiny("untied_sharded")), "int4", out, head="int4")
    assert "lm_head.weight_packed" in read_headers(out)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert "lm_head" not in config["ignore"]
    assert config["config_groups"]["group_0"]["targets"] == ["Linear", "re:.*lm_head$"]  # as vLLM wants it
    with pytest.raises(UsageError, match=plain.name) as caught:
        convert(plain, "int4", out.parent / "b", head="int8")
    assert "--embedding int8" in caught.value.hint


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_weights(plain: Checkpoint, out: Path, bad: float) -> None:
    source = copy_of(plain.folder, out.parent / "source")
    tensors = load_file(source / "model.safetensors")
    tensors[f"{UP}.weight"][3, 5] = bad
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(BrokenShard, match=r"0\.mlp\.up_proj\.weight"):
        convert(open_checkpoint(source), "fp8", out)
    assert sorted(path.name for path in out.parent.iterdir()) == ["source"]
