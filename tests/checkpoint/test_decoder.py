"""config.json of text-only models: what transformers reads from it, and what vlfit refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_decoders import DECODERS, config_json
from vlfit.checkpoint.config import NO_TOKEN, ModelConfig
from vlfit.checkpoint.text_config import LongRopeScaling
from vlfit.errors import CheckpointError, InvalidRequest, UnknownArchitecture
from vlfit.models.registry import read_config

Change = Callable[[dict[str, Any]], object]


def read(folder: Path, name: str, change: Change | None = None) -> ModelConfig:
    config = config_json(DECODERS[name])
    if change is not None:
        change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return read_config(folder)


@pytest.mark.parametrize("name", DECODERS)
def test_agrees_with_transformers(tmp_path: Path, name: str) -> None:
    from transformers import AutoConfig

    ours = read(tmp_path, name)
    theirs = AutoConfig.from_pretrained(tmp_path)
    for field in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
        "hidden_act",
    ):
        assert getattr(ours.text, field) == getattr(theirs, field)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.text.head_dim == head_dim
    assert ours.text.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.text.rotary_dim == int(head_dim * theirs.rope_parameters.get("partial_rotary_factor", 1.0))
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.text.mrope_section == ()


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama", "phi3"])
def test_what_is_left_out_is_what_transformers_takes(tmp_path: Path, model_type: str) -> None:
    from transformers import AutoConfig

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **sizes, **heads}))
    ours, theirs = read_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    assert ours.text.rms_norm_eps == theirs.rms_norm_eps
    assert ours.text.max_position_embeddings == theirs.max_position_embeddings
    assert ours.text.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.text.head_dim == (getattr(theirs, "head_dim", None) or 16)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.text.window is None


def test_a_text_only_model_has_no_eyes(tmp_path: Path) -> None:
    config = read(tmp_path, "llama2")
    assert config.vision is None
    assert config.image_token_id == config.vision_start_token_id == NO_TOKEN
    with pytest.raises(InvalidRequest) as error:
        _ = config.required_vision
    assert error.value.http_status == 400


def test_both_forms_of_rope_read_alike(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64}

    def newer(config: dict[str, Any]) -> None:
        config["rope_parameters"] = {**scaling, "rope_theta": config.pop("rope_theta")}
        del config["rope_scaling"]

    assert read(tmp_path, "llama3", newer) == read(tmp_path, "llama3")


def test_longrope_scales_as_transformers_does(tmp_path: Path) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    ours = read(tmp_path, "phi3_long").text.rope_scaling
    assert isinstance(ours, LongRopeScaling)
    _, scale = ROPE_INIT_FUNCTIONS["longrope"](AutoConfig.from_pretrained(tmp_path))
    assert ours.scale == pytest.approx(scale, rel=1e-12)
    assert ours.scale > 1


def test_a_window_caps_the_context(tmp_path: Path) -> None:
    """As of Phi-3-mini-4k: its attention slides over 2,047 tokens, and vlfit has no windows."""
    text = read(tmp_path, "phi3", lambda config: config.update(sliding_window=2047)).text
    assert (text.window, text.max_position_embeddings, text.default_context) == (2047, 2047, 2047)


@pytest.mark.parametrize(
    ("change", "most"),
    [
        ({"use_sliding_window": False, "sliding_window": 8}, 4096),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, 4096),  # no layer slides
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, 8),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"] * 3}, 4096),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"] * 3}, 8),
    ],
)
def test_qwens_windows_count_where_a_layer_has_one(tmp_path: Path, change: dict[str, Any], most: int) -> None:
    text = read(tmp_path, "qwen3", lambda config: config.update(change)).text
    assert text.max_position_embeddings == most


def test_usual_context_of_longrope_is_the_original(tmp_path: Path) -> None:
    text = read(tmp_path, "phi3_long").text
    assert (text.default_context, text.max_position_embeddings) == (64, 4096)
    assert text.limited_to(1024).max_position_embeddings == 1024


REFUSED: dict[str, tuple[str, Change]] = {
    "'qwen3_moe'": ("qwen3", lambda config: config.update(model_type="qwen3_moe")),
    "'mistral'": ("llama2", lambda config: config.update(model_type="mistral")),
    "without LlamaForCausalLM": (
        "llama2",
        lambda config: config.update(architectures=["LlamaForSequenceClassification"]),
    ),
    "mlp_bias is true": ("llama2", lambda config: config.update(mlp_bias=True)),
    "'gelu'": ("phi3", lambda config: config.update(hidden_act="gelu")),
    "'yarn', for a qwen2": (
        "qwen2",
        lambda config: config.update(rope_scaling={"type": "yarn", "factor": 4.0}),
    ),
    "'dynamic'": ("llama2", lambda config: config.update(rope_scaling={"type": "dynamic", "factor": 2.0})),
    "'longrope', for a llama": ("llama2", lambda config: config.update(rope_scaling={"type": "longrope"})),
    "layer_types has chunked_attention": (
        "llama2",
        lambda config: config.update(layer_types=["chunked_attention"]),
    ),
    "partial_rotary_factor is 0.5": ("llama2", lambda config: config.update(partial_rotary_factor=0.5)),
    "'default', for a qwen2": (
        "qwen2",
        lambda config: config.update(rope_parameters={"full_attention": {"rope_theta": 1.0}}),
    ),
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_vlfit_does_not_run_is_named(tmp_path: Path, word: str) -> None:
    name, change = REFUSED[word]
    with pytest.raises(UnknownArchitecture, match=word) as error:
        read(tmp_path, name, change)
    assert error.value.hint


WRONG: dict[str, tuple[str, Change]] = {
    "hidden_size is 66": ("llama2", lambda config: config.update(hidden_size=66)),
    "num_key_value_heads is 3": ("qwen2", lambda config: config.update(num_key_value_heads=3)),
    "vocab_size is missing": ("qwen3", lambda config: config.pop("vocab_size")),
    "sliding_window is -1": ("phi3", lambda config: config.update(sliding_window=-1)),
    "partial_rotary_factor rotates 0": ("phi3", lambda config: config.update(partial_rotary_factor=0.01)),
    "partial_rotary_factor rotates 32": ("phi3", lambda config: config.update(partial_rotary_factor=2)),
    "short_factor has 1 numbers": (
        "phi3_long",
        lambda config: config["rope_scaling"].update(short_factor=[1.0]),
    ),
    "long_factor is": ("phi3_long", lambda config: config["rope_scaling"].update(long_factor=["a"])),
    "rope_scaling.factor is missing": (
        "llama2",
        lambda config: config.update(rope_scaling={"type": "linear"}),
    ),
    "high_freq_factor is 0.5": (
        "llama3",
        lambda config: config["rope_scaling"].update(high_freq_factor=0.5),
    ),
    "rope_theta is 0": ("qwen2", lambda config: config.update(rope_theta=0)),
}


@pytest.mark.parametrize("word", WRONG)
def test_wrong_fields_are_named(tmp_path: Path, word: str) -> None:
    name, change = WRONG[word]
    with pytest.raises(CheckpointError, match=word) as error:
        read(tmp_path, name, change)
    assert not isinstance(error.value, UnknownArchitecture)
    assert error.value.hint
