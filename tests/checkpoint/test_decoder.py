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
from vlfit.models.cache_spec import Paged
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
    assert ours.text.sliding_windows == ()


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
    assert ours.attention_factor == pytest.approx(scale, rel=1e-12)
    assert ours.attention_factor > 1


def test_phi3_slides_in_every_layer(tmp_path: Path) -> None:
    text = read(tmp_path, "phi3", lambda config: config.update(sliding_window=2047)).text
    assert text.sliding_windows == (2047,) * 3
    assert (text.max_position_embeddings, text.default_context) == (4096, 4096)
    assert [layer.window for layer in text.cache_spec if isinstance(layer, Paged)] == [2047] * 3
    limited = text.limited_to(2047)  # in which no token leaves the window
    assert [layer.window for layer in limited.cache_spec if isinstance(layer, Paged)] == [None] * 3


SLIDES, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({"use_sliding_window": False, "sliding_window": 8}, ()),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, ()),  # no layer slides
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, (None, None, 8)),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, (8, 8, 8)),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": [FULL] * 3}, ()),
        (
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": [FULL, SLIDES, FULL]},
            (None, 8, None),
        ),
        ({"use_sliding_window": True, "max_window_layers": 2}, (None, None, 4096)),  # transformers' default
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 2}, ()),
    ],
)
def test_windows_of_qwen_are_transformers(
    tmp_path: Path, change: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    from transformers import AutoConfig

    text = read(tmp_path, "qwen3", lambda config: config.update(change)).text
    assert text.sliding_windows == windows
    assert text.max_position_embeddings == 4096
    theirs = AutoConfig.from_pretrained(tmp_path)
    reference = [theirs.sliding_window if kind == SLIDES else None for kind in theirs.layer_types]
    assert reference == list(windows or (None,) * 3)


def test_usual_context_of_longrope_is_the_original(tmp_path: Path) -> None:
    text = read(tmp_path, "phi3_long").text
    assert (text.default_context, text.max_position_embeddings) == (64, 4096)
    assert text.limited_to(1024).max_position_embeddings == 1024


REFUSED: dict[str, tuple[str, Change]] = {
    "'qwen3_moe'": ("qwen3", lambda config: config.update(model_type="qwen3_moe")),
    "'mistral'": ("llama2", lambda config: config.update(model_type="mistral")),
    "LlamaForCausalLM": (
        "llama2",
        lambda config: config.update(architectures=["LlamaForSequenceClassification"]),
    ),
    "mlp_bias": ("llama2", lambda config: config.update(mlp_bias=True)),
    "'gelu'": ("phi3", lambda config: config.update(hidden_act="gelu")),
    "'yarn' = qwen2": (
        "qwen2",
        lambda config: config.update(rope_scaling={"type": "yarn", "factor": 4.0}),
    ),
    "'dynamic'": ("llama2", lambda config: config.update(rope_scaling={"type": "dynamic", "factor": 2.0})),
    "'longrope' = llama": ("llama2", lambda config: config.update(rope_scaling={"type": "longrope"})),
    "layer_types = chunked_attention": (
        "llama2",
        lambda config: config.update(layer_types=["chunked_attention"]),
    ),
    "partial_rotary_factor = 0.5": ("llama2", lambda config: config.update(partial_rotary_factor=0.5)),
    "'default' = qwen2": (
        "qwen2",
        lambda config: config.update(rope_parameters={"full_attention": {"rope_theta": 1.0}}),
    ),
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_vlfit_does_not_run_is_named(tmp_path: Path, word: str) -> None:
    name, change = REFUSED[word]
    with pytest.raises(UnknownArchitecture) as error:
        read(tmp_path, name, change)
    for fact in word.split(" = "):
        assert fact in error.value.message
    assert error.value.hint


WRONG: dict[str, tuple[str, Change]] = {
    "hidden_size = 66": ("llama2", lambda config: config.update(hidden_size=66)),
    "num_key_value_heads = 3": ("qwen2", lambda config: config.update(num_key_value_heads=3)),
    "vocab_size": ("qwen3", lambda config: config.pop("vocab_size")),
    "layer_types = 2": (
        "qwen2",
        lambda config: config.update(use_sliding_window=True, layer_types=["sliding_attention"] * 2),
    ),
    "sliding_window = -1": ("phi3", lambda config: config.update(sliding_window=-1)),
    "partial_rotary_factor = 0": ("phi3", lambda config: config.update(partial_rotary_factor=0.01)),
    "partial_rotary_factor = 32": ("phi3", lambda config: config.update(partial_rotary_factor=2)),
    "short_factor = 1": (
        "phi3_long",
        lambda config: config["rope_scaling"].update(short_factor=[1.0]),
    ),
    "long_factor is": ("phi3_long", lambda config: config["rope_scaling"].update(long_factor=["a"])),
    "rope_scaling.factor": (
        "llama2",
        lambda config: config.update(rope_scaling={"type": "linear"}),
    ),
    "high_freq_factor = 0.5": (
        "llama3",
        lambda config: config["rope_scaling"].update(high_freq_factor=0.5),
    ),
    "rope_theta = 0": ("qwen2", lambda config: config.update(rope_theta=0)),
}


@pytest.mark.parametrize("word", WRONG)
def test_wrong_fields_are_named(tmp_path: Path, word: str) -> None:
    name, change = WRONG[word]
    with pytest.raises(CheckpointError) as error:
        read(tmp_path, name, change)
    for fact in word.split(" = "):
        assert fact in error.value.message
    assert not isinstance(error.value, UnknownArchitecture)
    assert error.value.hint
