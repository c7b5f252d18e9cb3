"""Image processor settings, chat template and generation config: all their places, against transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.edit import change_json, copy_of
from tests.tiny import TINY
from tests.tiny_text import chat_template
from vlfit.checkpoint.processor_files import (
    GenerationDefaults,
    read_chat_template,
    tokenizer_file,
)
from vlfit.errors import CheckpointError, MissingFile
from vlfit.models.qwen3_vl.config import read_image_processor_config, read_video_processor_config

Tiny = Callable[[str], Path]


def write(folder: Path, name: str, value: object) -> Path:
    (folder / name).write_text(json.dumps(value), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", TINY)
def test_picture_settings_are_the_references(tiny: Tiny, name: str) -> None:
    """Both ways to write the limits, as transformers' own processor understands them."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    ours: Any = read_image_processor_config(tiny(name))
    theirs: Any = Qwen2VLImageProcessorPil.from_pretrained(tiny(name))
    assert (ours.min_pixels, ours.max_pixels) == (theirs.size["shortest_edge"], theirs.size["longest_edge"])
    assert (ours.min_pixels, ours.max_pixels) == (TINY[name].min_pixels, TINY[name].max_pixels)
    assert (ours.patch_size, ours.merge_size) == (theirs.patch_size, theirs.merge_size)
    assert ours.temporal_patch_size == theirs.temporal_patch_size
    assert (list(ours.mean), list(ours.std)) == (list(theirs.image_mean), list(theirs.image_std))
    assert ours.rescale_factor == theirs.rescale_factor


def test_pictures_need_their_file(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match="preprocessor_config") as error:
        read_image_processor_config(tmp_path)
    assert "vlfit pull" in error.value.hint


@pytest.mark.parametrize(
    ("file", "limits"),
    [
        ({"size": {"shortest_edge": 100, "longest_edge": 200}}, (100, 200)),
        ({"size": {"min_pixels": 100, "max_pixels": 200}}, (100, 200)),
        ({"min_pixels": 100, "max_pixels": 200}, (100, 200)),
        ({"size": {"shortest_edge": 1, "longest_edge": 2}, "min_pixels": 100, "max_pixels": 200}, (100, 200)),
        ({"size": None, "min_pixels": 100}, (100, 28 * 28 * 1280)),
        ({}, (56 * 56, 28 * 28 * 1280)),
    ],
)
def test_where_the_limits_stand(tmp_path: Path, file: dict[str, Any], limits: tuple[int, int]) -> None:
    write(tmp_path, "preprocessor_config.json", file)
    found = read_image_processor_config(tmp_path)
    assert (found.min_pixels, found.max_pixels) == limits


def test_transformers_5_writes_one_file_for_both(tmp_path: Path) -> None:
    both = {
        "image_processor": {"size": {"shortest_edge": 10, "longest_edge": 20}},
        "video_processor": {"size": {"shortest_edge": 30, "longest_edge": 40}},
    }
    write(tmp_path, "processor_config.json", both)
    assert read_image_processor_config(tmp_path).max_pixels == 20
    assert read_video_processor_config(tmp_path).max_pixels == 40


def test_clips_have_their_own_file_else_the_pictures_else_the_defaults(tmp_path: Path) -> None:
    nothing = read_video_processor_config(tmp_path)
    assert (nothing.min_pixels, nothing.max_pixels) == (131072, 786432)
    assert (nothing.patch_size, nothing.temporal_patch_size, nothing.merge_size) == (16, 2, 2)
    write(tmp_path, "preprocessor_config.json", {"size": {"shortest_edge": 10, "longest_edge": 20}})
    assert read_video_processor_config(tmp_path).max_pixels == 20
    write(tmp_path, "video_preprocessor_config.json", {"size": {"shortest_edge": 30, "longest_edge": 40}})
    assert read_video_processor_config(tmp_path).max_pixels == 40
    assert read_image_processor_config(tmp_path).max_pixels == 20


@pytest.mark.parametrize(
    ("words", "file"),
    [
        ("do_resize", {"do_resize": False}),
        ("resample = 2", {"resample": 2}),
        ("image_mean = [0.5]", {"image_mean": [0.5]}),
        ("image_std", {"image_std": [0.5, 0.5, 0.0]}),
        ("patch_size = 0", {"patch_size": 0}),
        ("rescale_factor = 'a'", {"rescale_factor": "a"}),
        ("size = 9 = 3", {"size": {"shortest_edge": 9, "longest_edge": 3}}),
        ("size.longest_edge = -3", {"size": {"shortest_edge": 9, "longest_edge": -3}}),
        ("size", {"size": 448}),
    ],
)
def test_wrong_picture_settings_are_named(tmp_path: Path, words: str, file: dict[str, Any]) -> None:
    write(tmp_path, "preprocessor_config.json", file)
    with pytest.raises(CheckpointError) as error:
        read_image_processor_config(tmp_path)
    for fact in ("preprocessor_config.json", *words.split(" = ")):
        assert fact in error.value.message


@pytest.mark.parametrize("name", TINY)
def test_chat_template_wherever_it_stands(tiny: Tiny, name: str) -> None:
    assert read_chat_template(tiny(name)) == chat_template()


def test_chat_template_order(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer_config.json", {"chat_template": "third"})
    assert read_chat_template(tmp_path) == "third"
    (tmp_path / "chat_template.jinja").write_text("second")
    assert read_chat_template(tmp_path) == "second"
    write(tmp_path, "chat_template.json", {"chat_template": "first"})
    assert read_chat_template(tmp_path) == "first"


@pytest.mark.parametrize(
    "several",
    [
        [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}],
        {"tool_use": "no", "default": "yes"},
    ],
)
def test_of_several_chat_templates_the_default(tmp_path: Path, several: object) -> None:
    write(tmp_path, "tokenizer_config.json", {"chat_template": several})
    assert read_chat_template(tmp_path) == "yes"


@pytest.mark.parametrize("template", [3, [], [{"name": "other", "template": "x"}], {"default": 3}])
def test_chat_template_of_no_known_form(tmp_path: Path, template: object) -> None:
    write(tmp_path, "tokenizer_config.json", {"chat_template": template})
    with pytest.raises(CheckpointError, match="chat_template"):
        read_chat_template(tmp_path)


def test_no_chat_template(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer_config.json", {})
    with pytest.raises(MissingFile, match=r"chat_template\.jinja") as error:
        read_chat_template(tmp_path)
    assert error.value.hint


def test_chat_template_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        read_chat_template(tmp_path)


def test_tokenizer_file(tiny: Tiny, tmp_path: Path) -> None:
    assert tokenizer_file(tiny("tied")).is_file()
    with pytest.raises(MissingFile, match="tokenizer"):
        tokenizer_file(tmp_path)


def test_generation_settings(tiny: Tiny) -> None:
    from tests.tiny_text import tokenizer

    found = GenerationDefaults.read(tiny("tied"))
    ends = tuple(tokenizer().token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>"))
    assert found.do_sample
    assert (found.temperature, found.top_p, found.top_k) == (0.7, 0.8, 20)
    assert (found.min_p, found.repetition_penalty) == (0.0, 1.0)
    assert found.eos_token_ids == ends
    assert found.max_new_tokens is None


def test_without_generation_settings_it_is_greedy(tiny: Tiny, tmp_path: Path) -> None:
    folder = copy_of(tiny("tied"), tmp_path / "copy")
    (folder / "generation_config.json").unlink()
    found = GenerationDefaults.read(folder)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    assert (found.do_sample, found.temperature) == (False, 0.0)
    assert found.eos_token_ids == (text["eos_token_id"],)


def test_temperature_means_nothing_without_sampling(tmp_path: Path) -> None:
    write(tmp_path, "generation_config.json", {"do_sample": False, "temperature": 0.7})
    assert GenerationDefaults.read(tmp_path).temperature == 0.0


def test_one_end_token_or_several(tmp_path: Path) -> None:
    write(tmp_path, "generation_config.json", {"eos_token_id": 7, "max_new_tokens": 9})
    assert GenerationDefaults.read(tmp_path).eos_token_ids == (7,)
    assert GenerationDefaults.read(tmp_path).max_new_tokens == 9
    write(tmp_path, "generation_config.json", {"eos_token_id": [7, 8]})
    assert GenerationDefaults.read(tmp_path).eos_token_ids == (7, 8)


@pytest.mark.parametrize(
    "file",
    [
        {"do_sample": "yes"},
        {"do_sample": True, "temperature": -1},
        {"top_p": 0},
        {"top_k": 1.5},
        {"eos_token_id": "x"},
        {"eos_token_id": [-1]},
    ],
)
def test_wrong_generation_settings_are_named(tmp_path: Path, file: dict[str, Any]) -> None:
    write(tmp_path, "generation_config.json", file)
    with pytest.raises(CheckpointError, match="generation_config") as error:
        GenerationDefaults.read(tmp_path)
    assert list(file)[-1] in error.value.message


def test_changed_files_are_read_again(tiny: Tiny, tmp_path: Path) -> None:
    folder = copy_of(tiny("tied"), tmp_path / "copy")
    change_json(folder / "generation_config.json", lambda value: value.update(temperature=0.1))
    assert GenerationDefaults.read(folder).temperature == 0.1
