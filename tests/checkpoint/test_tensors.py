"""Names and shapes against transformers' own modules, and what is said when they do not match."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.tiny import TINY, tiny_reference
from vlfit.checkpoint.headers import TensorInfo, read_headers
from vlfit.checkpoint.source import open_checkpoint
from vlfit.checkpoint.tensors import check_tensors, expected_tensor_shapes
from vlfit.errors import MissingTensor, SurplusTensor, UnknownWeightsFormat, WrongShape
from vlfit.models.registry import read_config

Tiny = Callable[[str], Path]


def reference_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of transformers' model for the config in ``folder``; no memory is used for weights."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    config = Qwen3VLConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return shapes


@pytest.mark.parametrize("name", TINY)
def test_names_and_shapes_are_the_references(tiny: Tiny, name: str) -> None:
    expected = expected_tensor_shapes(read_config(tiny(name)))
    plain = {key: shape for key, shape in expected.items() if not key.endswith("_scale_inv")}
    assert plain == reference_shapes(tiny(name))


# Sizes of the official models, and their parameter counts as counted on transformers' own modules.
OFFICIAL = {
    "2b": ((2048, 6144, 28, 16, True), (24, 1024, 4096, [5, 11, 17]), 2.128e9),
    "4b": ((2560, 9728, 36, 32, True), (24, 1024, 4096, [5, 11, 17]), 4.438e9),
    "8b": ((4096, 12288, 36, 32, False), (27, 1152, 4304, [8, 16, 24]), 8.767e9),
}


@pytest.mark.parametrize("size", OFFICIAL)
def test_official_sizes(tmp_path: Path, size: str) -> None:
    (hidden, inner, layers, heads, tied), (depth, width, wide, levels), parameters = OFFICIAL[size]
    config = {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": tied,
        "text_config": {
            "vocab_size": 151936,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 5000000,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
                "rope_type": "default",
            },
        },
        "vision_config": {
            "depth": depth,
            "hidden_size": width,
            "intermediate_size": wide,
            "num_heads": 16,
            "out_hidden_size": hidden,
            "deepstack_visual_indexes": levels,
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = expected_tensor_shapes(read_config(tmp_path))
    assert expected == reference_shapes(tmp_path)
    count = sum(torch.Size(shape).numel() for shape in expected.values())
    assert count == pytest.approx(parameters, rel=5e-4)


@pytest.mark.parametrize("name", TINY)
def test_transformers_loads_what_we_accept(tiny: Tiny, name: str) -> None:
    """Every tiny checkpoint opens here, and there with no tensor missing or left over (or it raises)."""
    checkpoint = open_checkpoint(tiny(name))
    parameters = dict(tiny_reference(tiny(name)).named_parameters())
    assert checkpoint.parameter_count == sum(value.numel() for value in parameters.values())


def test_fp8_has_a_scale_beside_each_text_layer(tiny: Tiny) -> None:
    spec = TINY["fp8"]
    expected = expected_tensor_shapes(read_config(tiny("fp8")))
    scales = {name: shape for name, shape in expected.items() if name.endswith("_scale_inv")}
    assert len(scales) == 7 * spec.layers
    assert all(name.startswith("model.language_model.layers.") for name in scales)
    # 320 x 192 in blocks of 128 x 128: the last of each is partial.
    assert scales["model.language_model.layers.0.mlp.up_proj.weight_scale_inv"] == (3, 2)


class Headers:
    """Headers of a tiny checkpoint that a test may spoil."""

    def __init__(self, folder: Path) -> None:
        self.config = read_config(folder)
        self.tensors = read_headers(folder)

    def change(self, name: str, **fields: object) -> None:
        self.tensors[name] = replace(self.tensors[name], **fields)  # type: ignore[arg-type]

    def check(self) -> None:
        check_tensors(self.config, self.tensors)


UP = "model.language_model.layers.0.mlp.up_proj.weight"


def test_missing_tensors_are_counted_and_named(tiny: Tiny) -> None:
    headers = Headers(tiny("tied"))
    gone = [name for name in headers.tensors if ".layers.2." in name]
    for name in gone:
        del headers.tensors[name]
    with pytest.raises(
        MissingTensor, match=rf"\b{len(gone)} .*\b{len(headers.tensors) + len(gone)} tensors"
    ) as error:
        headers.check()
    assert "model.language_model.layers.2.input_layernorm.weight" in error.value.message
    assert error.value.hint


def test_untied_head_must_be_there(tiny: Tiny) -> None:
    headers = Headers(tiny("untied_sharded"))
    del headers.tensors["lm_head.weight"]
    with pytest.raises(MissingTensor, match=r"\b1 .*: lm_head\.weight"):
        headers.check()


def test_wrong_shape_says_found_and_expected(tiny: Tiny) -> None:
    headers = Headers(tiny("tied"))
    headers.change(UP, shape=(96, 65))
    with pytest.raises(WrongShape, match=r"up_proj\.weight\b.*\[96, 65\].*\[96, 64\]"):
        headers.check()


def add(headers: Headers, name: str, dtype: str = "F32") -> None:
    info = next(iter(headers.tensors.values()))
    headers.tensors[name] = TensorInfo(name, dtype, (1,), info.file, 0, 4)


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("tied", "lm_head.weight"),
        ("tied", "model.language_model.rotary_emb.inv_freq"),
        ("tied", "model.language_model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("tied", "model.visual.rotary_pos_emb.inv_freq"),
        ("fp8", "model.language_model.layers.0.mlp.up_proj.input_scale"),
    ],
)
def test_ignorable_tensors(tiny: Tiny, folder: str, name: str) -> None:
    headers = Headers(tiny(folder))
    add(headers, name)
    headers.check()


@pytest.mark.parametrize(
    "name",
    [
        "model.visual.blocks.99.norm1.weight",
        "model.visual.deepstack_merger_list.9.norm.weight",
        "model.language_model.layers.0.self_attn.q_proj.bias",
        "model.language_model.layers.0.mlp.up_proj.weight_scale_inv",
        "model.language_model.layers.0.mlp.up_proj.input_scale",
        "model.mtp.weight",
    ],
)
def test_unexpected_tensors_are_named(tiny: Tiny, name: str) -> None:
    headers = Headers(tiny("tied"))
    add(headers, name)
    with pytest.raises(SurplusTensor, match=rf"\b1 .*: {name}\n") as error:
        headers.check()
    assert "config.json" in error.value.hint


def test_a_config_of_fewer_layers_runs_no_other_model(tiny: Tiny) -> None:
    """Ignoring a layer of the weights would run another model."""
    headers = Headers(tiny("tied"))
    last = headers.config.text.num_hidden_layers - 1
    text = replace(headers.config.text, num_hidden_layers=last)
    headers.config = replace(headers.config, text=text)
    layer = [name for name in headers.tensors if f"language_model.layers.{last}." in name]
    with pytest.raises(SurplusTensor, match=rf"\b{len(layer)} .*\b{len(headers.tensors)} tensors") as error:
        headers.check()
    assert f"model.language_model.layers.{last}.input_layernorm.weight" in error.value.message
    assert error.value.message.endswith(", ...")


@pytest.mark.parametrize("dtype", ["I8", "U8", "F64", "F8_E5M2"])
def test_unreadable_types_are_named(tiny: Tiny, dtype: str) -> None:
    headers = Headers(tiny("tied"))
    headers.change(UP, dtype=dtype)
    with pytest.raises(UnknownWeightsFormat, match=rf"\b{dtype}\b"):
        headers.check()


def test_fp8_without_quantization_config(tiny: Tiny) -> None:
    headers = Headers(tiny("fp8"))
    headers.config = replace(headers.config, quantization=None)
    with pytest.raises(UnknownWeightsFormat, match="quantization_config"):
        headers.check()


def test_fp8_is_for_linear_layers(tiny: Tiny) -> None:
    headers = Headers(tiny("fp8"))
    headers.change("model.language_model.embed_tokens.weight", dtype="F8_E4M3")
    with pytest.raises(UnknownWeightsFormat, match="embed_tokens"):
        headers.check()


def test_fp8_weight_needs_its_scale(tiny: Tiny) -> None:
    headers = Headers(tiny("fp8"))
    del headers.tensors[UP + "_scale_inv"]
    with pytest.raises(MissingTensor, match=r"up_proj\.weight_scale_inv"):
        headers.check()


def test_wrong_scale_shape(tiny: Tiny) -> None:
    headers = Headers(tiny("fp8"))
    headers.change(UP + "_scale_inv", shape=(2, 2))
    with pytest.raises(WrongShape, match=r"scale_inv\b.*\[2, 2\]"):
        headers.check()


def test_layer_in_16_bits_that_the_config_calls_fp8(tiny: Tiny) -> None:
    """The header decides: such a layer has 16 bits."""
    headers = Headers(tiny("fp8"))
    headers.change(UP, dtype="BF16")
    del headers.tensors[UP + "_scale_inv"]
    headers.check()
