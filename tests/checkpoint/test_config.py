"""config.json: both forms, the official files, and everything that can be wrong with one."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.edit import change_json
from tests.tiny import TINY, config_json
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.fields import Fields
from vlfit.checkpoint.quantization import Fp8Format
from vlfit.errors import CheckpointError, NotACheckpoint, UnknownArchitecture, UnknownWeightsFormat
from vlfit.models.registry import read_config

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config_json(TINY["tied"], "float32")))
    return tmp_path


def changed(folder: Path, change: Change) -> ModelConfig:
    change_json(folder / "config.json", change)
    return read_config(folder)


def test_official_form(folder: Path) -> None:
    config = read_config(folder)
    spec = TINY["tied"]
    assert config.text.rope_theta == 5_000_000
    assert list(config.text.mrope_section) == spec.mrope_section
    assert config.text.head_dim == spec.head_dim
    assert config.required_vision.head_dim == spec.vision_hidden // spec.vision_heads
    assert config.required_vision.deepstack_visual_indexes == (0, 1, 2)
    assert config.tie_word_embeddings
    assert config.fp8 is None


@pytest.mark.parametrize("name", TINY)
def test_both_forms_read_alike(name: str, tmp_path: Path) -> None:
    """The form is a matter of writing: the same model in either form is the same config."""
    configs = []
    for form in ("rope_scaling", "rope_parameters"):
        spec = replace(TINY[name], config_form=form)
        (tmp_path / "config.json").write_text(json.dumps(config_json(spec, "float32")))
        configs.append(read_config(tmp_path))
    assert configs[0] == configs[1]


@pytest.mark.parametrize("name", TINY)
def test_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    """What transformers reads from the same file, defaults included."""
    from transformers import Qwen3VLConfig

    (tmp_path / "config.json").write_text(json.dumps(config_json(TINY[name], "float32")))
    ours, theirs = read_config(tmp_path), Qwen3VLConfig.from_pretrained(tmp_path)
    text: Any = theirs.text_config
    vision: Any = theirs.vision_config
    for field in ("vocab_size", "head_dim", "num_key_value_heads", "rms_norm_eps", "attention_bias"):
        assert getattr(ours.text, field) == getattr(text, field)
    assert ours.text.rope_theta == text.rope_parameters["rope_theta"]
    assert list(ours.text.mrope_section) == text.rope_parameters["mrope_section"]
    for field in ("depth", "hidden_size", "num_heads", "out_hidden_size", "num_position_embeddings"):
        assert getattr(ours.vision, field) == getattr(vision, field)
    assert list(ours.required_vision.deepstack_visual_indexes) == list(vision.deepstack_visual_indexes)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.image_token_id == theirs.image_token_id


def test_defaults_are_those_of_transformers(folder: Path) -> None:
    from transformers import Qwen3VLConfig

    def strip(config: dict[str, Any]) -> None:
        for name in ("head_dim", "rms_norm_eps", "attention_bias", "hidden_act", "max_position_embeddings"):
            del config["text_config"][name]
        for name in ("patch_size", "num_position_embeddings", "in_channels", "hidden_act"):
            del config["vision_config"][name]
        del config["text_config"]["rope_theta"]

    ours = changed(folder, strip)
    theirs: Any = Qwen3VLConfig.from_pretrained(folder)
    for field in ("head_dim", "rms_norm_eps", "attention_bias", "hidden_act", "max_position_embeddings"):
        assert getattr(ours.text, field) == getattr(theirs.text_config, field)
    for field in ("patch_size", "num_position_embeddings", "in_channels", "hidden_act"):
        assert getattr(ours.vision, field) == getattr(theirs.vision_config, field)
    assert ours.text.rope_theta == theirs.text_config.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("top", "text", "tied"),
    [(True, False, True), (False, True, False), (None, True, True), (None, None, False), (True, None, True)],
)
def test_tied_head_is_the_top_levels_word(
    folder: Path, top: bool | None, text: bool | None, tied: bool
) -> None:
    def say(config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = top
        config["text_config"]["tie_word_embeddings"] = text

    assert changed(folder, say).tie_word_embeddings is tied


def test_no_folder_and_no_config(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint, match="nowhere") as error:
        read_config(tmp_path / "nowhere")
    assert "mini" in error.value.hint
    with pytest.raises(NotACheckpoint, match=r"config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1, 2]", "\xff\xfe", '"text"', "[" * 100_000])
def test_config_that_is_no_json_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json") as error:
        read_config(tmp_path)
    assert error.value.hint


OTHER_ARCHITECTURES: dict[str, Change] = {
    "'llava'": lambda config: config.update(model_type="llava"),
    "'qwen3_vl_moe'": lambda config: config.update(model_type="qwen3_vl_moe"),
    "'none'": lambda config: config.pop("model_type"),
    "architectures": lambda config: config.update(architectures=["SomethingElse"]),
    "'yarn'": lambda config: config["text_config"]["rope_scaling"].update(rope_type="yarn"),
    "mrope_interleaved": lambda config: config["text_config"]["rope_scaling"].update(mrope_interleaved=False),
    "'relu'": lambda config: config["text_config"].update(hidden_act="relu"),
    "'quick_gelu'": lambda config: config["vision_config"].update(hidden_act="quick_gelu"),
}


@pytest.mark.parametrize("word", OTHER_ARCHITECTURES)
def test_other_architectures_are_named(folder: Path, word: str) -> None:
    with pytest.raises(UnknownArchitecture, match=word) as error:
        changed(folder, OTHER_ARCHITECTURES[word])
    assert error.value.hint


def test_architectures_may_be_left_out(folder: Path) -> None:
    assert changed(folder, lambda config: config.pop("architectures")).text.hidden_size == 64


WRONG_FIELDS: dict[str, Change] = {
    "config.json: text_config": lambda config: config.pop("text_config"),
    "vision_config": lambda config: config.pop("vision_config"),
    "text_config": lambda config: config.update(text_config=[]),
    "text_config.hidden_size": lambda config: config["text_config"].pop("hidden_size"),
    "text_config.hidden_size = '64'": lambda config: config["text_config"].update(hidden_size="64"),
    "text_config.hidden_size = -64": lambda config: config["text_config"].update(hidden_size=-64),
    "text_config.hidden_size = True": lambda config: config["text_config"].update(hidden_size=True),
    "text_config.num_key_value_heads = 3": lambda config: config["text_config"].update(num_key_value_heads=3),
    "text_config.head_dim = 15": lambda config: config["text_config"].update(head_dim=15),
    "text_config.rms_norm_eps = 0": lambda config: config["text_config"].update(rms_norm_eps=0),
    "text_config.rope_theta = 'x'": lambda config: config["text_config"].update(rope_theta="x"),
    "mrope_section": lambda config: config["text_config"]["rope_scaling"].update(mrope_section=[1, 2]),
    "tie_word_embeddings = 1": lambda config: config.update(tie_word_embeddings=1),
    "image_token_id = 512": lambda config: config.update(image_token_id=512),
    "vision_config.depth": lambda config: config["vision_config"].pop("depth"),
    "vision_config.hidden_size = 66": lambda config: config["vision_config"].update(hidden_size=66),
    "out_hidden_size = 32": lambda config: config["vision_config"].update(out_hidden_size=32),
    "num_position_embeddings = 65": lambda config: config["vision_config"].update(num_position_embeddings=65),
    "deepstack_visual_indexes = [9]": lambda config: config["vision_config"].update(
        deepstack_visual_indexes=[9]
    ),
    "deepstack_visual_indexes = [1, 1]": lambda config: config["vision_config"].update(
        deepstack_visual_indexes=[1, 1]
    ),
    "deepstack_visual_indexes = 4": lambda config: config["vision_config"].update(
        deepstack_visual_indexes=[0, 1, 2, 3]
    ),
}


@pytest.mark.parametrize("words", WRONG_FIELDS)
def test_wrong_fields_are_named(folder: Path, words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        changed(folder, WRONG_FIELDS[words])
    for fact in ("config.json", *words.split(" = ")):
        assert fact in error.value.message
    assert error.value.hint


def with_fp8(**fields: object) -> Change:
    section = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", **fields}
    return lambda config: config.update(quantization_config=section)


def test_fp8(folder: Path) -> None:
    config = changed(folder, with_fp8(weight_block_size=[128, 64], modules_to_not_convert=["lm_head"]))
    assert config.fp8 == Fp8Format(128, 64, ("lm_head",))
    assert config.fp8.scale_shape(192, 320) == (2, 5)


def test_fp8_block_size_defaults_to_the_official_one(folder: Path) -> None:
    assert changed(folder, with_fp8()).fp8 == Fp8Format(128, 128, ())


UNREADABLE: dict[str, Change] = {
    "'hqq'": lambda config: config.update(quantization_config={"quant_method": "hqq", "bits": 4}),
    "'bitsandbytes'": lambda config: config.update(quantization_config={"quant_method": "bitsandbytes"}),
    "quant_method": lambda config: config.update(quantization_config={"bits": 4}),
    "'e5m2'": with_fp8(fmt="e5m2"),
    "'static'": with_fp8(activation_scheme="static"),
    "'ue8m0'": with_fp8(scale_fmt="ue8m0"),
    "weight_block_size": with_fp8(weight_block_size=None),
    "modules_to_convert": with_fp8(modules_to_convert=["embed_tokens"]),
}


@pytest.mark.parametrize("word", UNREADABLE)
def test_other_weights_formats_are_named(folder: Path, word: str) -> None:
    with pytest.raises(UnknownWeightsFormat, match=word) as error:
        changed(folder, UNREADABLE[word])
    for known in ("bf16", "fp16", "fp32", "FP8"):
        assert known in error.value.hint


@pytest.mark.parametrize(
    ("entry", "exempt"),
    [
        ("model.language_model.layers.0.mlp.up_proj", True),  # its full name
        ("model.language_model.layers.0", True),  # an ancestor
        ("layers.0.mlp.up_proj", True),  # the end of its name
        ("model.language_model.layers.*.mlp", True),  # a pattern
        ("model.visual", False),
        ("model.language_model.layers.0.mlp.up", False),  # not up to a dot
        ("model.language_model.layers.1", False),
        ("([", False),  # no pattern at all
    ],
)
def test_which_modules_keep_their_16_bits(entry: str, exempt: bool) -> None:
    from transformers.quantizers.quantizers_utils import should_convert_module

    name = "model.language_model.layers.0.mlp.up_proj"
    assert Fp8Format(128, 128, (entry,)).quantizes(name) is not exempt
    if entry != "([":
        assert should_convert_module(name, [entry]) is not exempt


def test_the_head_is_never_converted() -> None:
    assert not Fp8Format(128, 128, ()).quantizes("lm_head")


@pytest.mark.parametrize("text", ["Infinity", "-Infinity", "NaN", "1e400", "1" + "0" * 400, "true", '"1"'])
def test_numbers_are_finite(text: str) -> None:
    fields = Fields(json.loads(f'{{"theta": {text}, "scales": [1, {text}]}}'), "config.json")
    with pytest.raises(CheckpointError, match="theta"):
        fields.number("theta", 1.0)
    with pytest.raises(CheckpointError, match="scales"):
        fields.numbers("scales", ())
