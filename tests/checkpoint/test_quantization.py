"""The 4-bit form in config.json and among the tensors: what is read, and what is refused by name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.edit import change_json, copy_of
from vlfit.checkpoint.cache import read_local_model
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.headers import TensorInfo, read_headers
from vlfit.checkpoint.quantization import CompressedFormat, Fp8Format, WeightScheme
from vlfit.checkpoint.source import open_checkpoint
from vlfit.checkpoint.tensors import check_tensors, count_parameters, expected_tensor_shapes, weights_format
from vlfit.errors import CheckpointError, MissingTensor, SurplusTensor, UnknownWeightsFormat, WrongShape
from vlfit.models.registry import read_config

Tiny = Callable[[str], Path]
UP = "model.language_model.layers.0.mlp.up_proj"


@pytest.fixture(scope="session")
def converted(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint "tied" in int4, in groups of 32. Not to be changed."""
    from vlfit.quantize.conversion import convert

    folder = tmp_path_factory.mktemp("int4") / "tied-INT4"
    convert(open_checkpoint(tiny("tied")), "int4", folder)
    return folder


def section(**weights: object) -> dict[str, Any]:
    """As llm-compressor writes it."""
    arguments: dict[str, object] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": 128,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "group",
        "symmetric": True,
        "type": "int",
    }
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"]}
    return {
        "config_groups": {"group_0": {**group, "weights": {**arguments, **weights}}},
        "format": "pack-quantized",
        "global_compression_ratio": None,
        "ignore": ["lm_head", "re:.*visual.*"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def read(tiny: Tiny, folder: Path, quantization: dict[str, Any]) -> ModelConfig:
    config = json.loads((tiny("tied") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return read_config(folder)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({}, WeightScheme(4, 128)),
        ({"group_size": 32, "symmetric": False}, WeightScheme(4, 32, False)),
        ({"actorder": "weight"}, WeightScheme(4, 128)),
        ({"actorder": "group"}, WeightScheme(4, 128, act_order=True)),
        ({"strategy": "channel", "group_size": None}, WeightScheme(4, None)),
        ({"num_bits": 8}, WeightScheme(8, 128)),
        ({"num_bits": 8, "strategy": "channel", "group_size": -1}, WeightScheme(8, None)),
    ],
)
def test_configs_of_other_programs(
    tiny: Tiny, tmp_path: Path, weights: dict[str, object], expected: WeightScheme
) -> None:
    config = read(tiny, tmp_path, section(**weights))
    assert config.compressed == CompressedFormat((expected,), ("lm_head", "re:.*visual.*"))
    assert config.fp8 is None


REFUSED: dict[str, dict[str, Any]] = {
    "num_bits = 3": section(num_bits=3),
    "symmetric = 8": section(num_bits=8, symmetric=False),
    "type = 'float'": section(type="float"),
    "strategy = 'tensor'": section(strategy="tensor", group_size=None),
    "actorder = 'random'": section(actorder="random"),
    "actorder = 'group'": {**section(actorder="group", num_bits=8), "format": "int-quantized"},
    "dynamic = True": section(dynamic=True),
    "group_size = 20": section(group_size=20),
    "format = 'marlin-24'": {**section(), "format": "marlin-24"},
    "num_bits = 4": {**section(), "format": "int-quantized"},
    "type = 'int'": {**section(num_bits=8), "format": "float-quantized"},
    "group_0.format = 'mixed-precision'": {**section(), "format": "mixed-precision"},
    "quantization_status = 'frozen'": {**section(), "quantization_status": "frozen"},
    "kv_cache_scheme": {**section(), "kv_cache_scheme": {"num_bits": 8}},
    "config_groups": {**section(), "config_groups": {}},
}


@pytest.mark.parametrize("words", REFUSED)
def test_unsupported_settings_are_named(tiny: Tiny, tmp_path: Path, words: str) -> None:
    with pytest.raises(UnknownWeightsFormat) as caught:
        read(tiny, tmp_path, REFUSED[words])
    for fact in words.split(" = "):
        assert fact in caught.value.message
    assert "vlfit convert" in caught.value.hint


def test_activations_and_other_formats_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    for change, words in (
        ({"input_activations": {"num_bits": 8}}, "input_activations"),
        ({"format": "nvfp4-pack-quantized"}, r"format\b.*'nvfp4"),
    ):
        config = section()
        config["config_groups"]["group_0"].update(change)
        with pytest.raises(UnknownWeightsFormat, match=words):
            read(tiny, tmp_path, config)


@pytest.mark.parametrize("name", ["num_bits", "group_size"])
def test_required_fields(tiny: Tiny, tmp_path: Path, name: str) -> None:
    """compressed-tensors means 8 bits where none are named: guessing 4 would read noise."""
    with pytest.raises(CheckpointError, match=rf"\.{name}\b"):
        read(tiny, tmp_path, section(**{name: None}))


@pytest.mark.parametrize(
    ("entry", "ignored"),
    [
        (UP, True),
        ("re:.*up_proj", True),
        ("re:model.language_model.layers.0.*", True),
        ("up_proj", False),
        ("model.language_model.layers.0", False),
        ("re:up_proj", False),  # a pattern begins where the name does
        ("re:.*visual.*", False),
    ],
)
def test_which_modules_are_ignored(entry: str, ignored: bool) -> None:
    assert CompressedFormat((WeightScheme(4, 32),), (entry,)).quantizes(UP) is not ignored


def test_an_invalid_pattern_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"\.ignore\b.*'re:\(\['"):
        CompressedFormat((WeightScheme(4, 32),), ("re:([",)).quantizes(UP)


def test_expected_tensors(converted: Path) -> None:
    headers = read_headers(converted)
    expected = expected_tensor_shapes(read_config(converted))
    assert expected[f"{UP}.weight_packed"] == (96, 8)
    assert expected[f"{UP}.weight_scale"] == (96, 2)
    there = {name: info.shape for name, info in headers.items() if not name.endswith("weight_shape")}
    assert there == expected


def test_zero_points(converted: Path) -> None:
    config = read_config(converted)
    assert config.compressed is not None
    lopsided = replace(config.compressed, schemes=(WeightScheme(4, 32, False),))
    config = replace(config, quantization=lopsided)
    assert expected_tensor_shapes(config)[f"{UP}.weight_zero_point"] == (12, 2)
    with pytest.raises(MissingTensor, match="weight_zero_point"):
        check_tensors(config, read_headers(converted))


def test_counts_and_names_of_the_format(tiny: Tiny, converted: Path) -> None:
    headers = read_headers(converted)
    form = read_config(converted).quantization
    assert weights_format(headers, form) == "int4"
    assert count_parameters(headers, form) == open_checkpoint(tiny("tied")).parameter_count
    model = read_local_model("org/x", converted)
    assert model is not None
    assert (model.format, model.complete, model.parameters) == ("int4", True, count_parameters(headers, form))
    assert model.weight_bytes == sum(info.bytes for info in headers.values())


def test_an_incomplete_one_is_named_by_its_config(converted: Path, tmp_path: Path) -> None:
    folder = copy_of(converted, tmp_path / "part")
    (folder / "model.safetensors").unlink()
    model = read_local_model("org/x", folder)
    assert model is not None
    assert (model.format, model.complete) == ("int4", False)


def changed(headers: dict[str, TensorInfo], name: str, **fields: Any) -> dict[str, TensorInfo]:
    return {**headers, name: replace(headers[name], **fields)}


def test_headers_that_do_not_agree_with_the_config(converted: Path) -> None:
    config, headers = read_config(converted), read_headers(converted)
    check_tensors(config, headers)
    packed, scale = f"{UP}.weight_packed", f"{UP}.weight_scale"
    with pytest.raises(UnknownWeightsFormat, match=r"\bU8\b"):
        check_tensors(config, changed(headers, packed, dtype="U8"))
    with pytest.raises(UnknownWeightsFormat, match=r"\bF8_E4M3\b"):
        check_tensors(config, changed(headers, scale, dtype="F8_E4M3"))
    with pytest.raises(WrongShape, match=r"weight_scale\b.*\[96, 4\]"):
        check_tensors(config, changed(headers, scale, shape=(96, 4)))
    with pytest.raises(MissingTensor, match=r"up_proj\.weight_packed"):
        check_tensors(config, {name: info for name, info in headers.items() if name != packed})
    with pytest.raises(UnknownWeightsFormat, match="quantization_config"):
        check_tensors(replace(config, quantization=None), headers)
    with pytest.raises(UnknownWeightsFormat, match="quantization_config"):
        check_tensors(replace(config, quantization=Fp8Format(128, 128, ())), headers)
    with pytest.raises(UnknownWeightsFormat, match=r"\b40\b"):
        check_tensors(replace(config, quantization=CompressedFormat((WeightScheme(4, 40),), ())), headers)
    zero = replace(headers[packed], name=f"{UP}.weight_zero_point")
    with pytest.raises(SurplusTensor, match="weight_zero_point"):
        check_tensors(config, {**headers, zero.name: zero})


def test_act_order_must_be_declared(converted: Path) -> None:
    config, headers = read_config(converted), read_headers(converted)
    order = replace(headers[f"{UP}.weight_packed"], name=f"{UP}.weight_g_idx", dtype="I32", shape=(64,))
    with pytest.raises(SurplusTensor, match="weight_g_idx"):
        check_tensors(config, {**headers, order.name: order})
    assert config.compressed is not None
    ordered = replace(config.compressed.schemes[0], act_order=True)
    config = replace(config, quantization=replace(config.compressed, schemes=(ordered,)))
    with pytest.raises(MissingTensor, match="weight_g_idx"):
        check_tensors(config, headers)


def test_a_layer_in_16_bits_that_the_config_calls_int4(tiny: Tiny, converted: Path) -> None:
    """The header decides: such a layer has 16 bits."""
    headers = read_headers(converted)
    plain = read_headers(tiny("tied"))[f"{UP}.weight"]
    left = {name: info for name, info in headers.items() if not name.startswith(f"{UP}.")}
    check_tensors(read_config(converted), {**left, plain.name: plain})


def test_opening_a_folder_with_another_group_size_fails(converted: Path, tmp_path: Path) -> None:
    folder = copy_of(converted, tmp_path / "other")

    def widen_groups(config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 16

    change_json(folder / "config.json", widen_groups)
    with pytest.raises(WrongShape, match="weight_scale"):
        open_checkpoint(folder)
