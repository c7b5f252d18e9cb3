"""What a checkpoint is made for, by the files beside it and by its name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.tiny_pooled import INSTRUCTION, NO, YES, make_embedding_model, make_reranker
from vlfit.api.pooling import DEFAULT_INSTRUCTION, RERANK_INSTRUCTION
from vlfit.checkpoint.pooling_files import FILES, kind_of_name, read_pooling
from vlfit.checkpoint.source import open_checkpoint
from vlfit.errors import CheckpointError, MissingTensor
from vlfit.models.registry import read_config

Tiny = Callable[[str], Path]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Qwen/Qwen3-VL-Embedding-2B", "embedding"),
        ("qwen3-vl-embedding-8b", "embedding"),
        ("Qwen3-VL-Reranker-2B-FP8", "reranker"),
        ("org/Qwen3-VL-Reranker-2B@main", "reranker"),
        ("Qwen3-VL-Reranker", "reranker"),
        ("Qwen/Qwen3-VL-2B-Instruct", "chat"),
        ("reranker-tools/Qwen3-VL-2B-Instruct", "chat"),
        ("Embeddings-of-the-world", "chat"),
        ("mini", "chat"),
    ],
)
def test_names(name: str, kind: str) -> None:
    assert kind_of_name(name) == kind


def test_a_checkpoint_without_such_files_chats_unless_its_name_says_otherwise(tiny: Tiny) -> None:
    folder = tiny("tied")
    config = read_config(folder)
    plain = read_pooling(folder, "tied", config)
    assert (plain.kind, plain.dimensions, plain.instruction) == ("chat", 64, DEFAULT_INSTRUCTION)
    assert read_pooling(folder, "Qwen3-VL-Embedding-2B", config).kind == "embedding"
    reranker = read_pooling(folder, "Qwen3-VL-Reranker-2B", config)
    assert (reranker.kind, reranker.instruction) == ("reranker", RERANK_INSTRUCTION)
    assert reranker.score_tokens is None


def test_files_say_more_than_the_name(tiny: Tiny, tmp_path: Path) -> None:
    embedding = open_checkpoint(make_embedding_model(tiny("tied"), tmp_path / "Some-Reranker"))
    pooling = read_pooling(embedding.folder, embedding.name, embedding.config)
    assert (pooling.kind, pooling.instruction) == ("embedding", INSTRUCTION)
    reranker = open_checkpoint(make_reranker(tiny("tied"), tmp_path / "Some-Embedding"))
    pooling = read_pooling(reranker.folder, reranker.name, reranker.config)
    assert (pooling.kind, pooling.score_tokens) == ("reranker", (YES, NO))


def test_a_wrong_path_of_the_score_module_is_put_right(tiny: Tiny, tmp_path: Path) -> None:
    """As in one published checkpoint, whose modules.json names a folder that does not exist."""
    folder = make_reranker(tiny("tied"), tmp_path / "reranker")
    modules = json.loads((folder / "modules.json").read_text("utf-8"))
    for path in ("1_Score", "../outside", "/etc"):
        modules[1]["path"] = path
        (folder / "modules.json").write_text(json.dumps(modules))
        assert read_pooling(folder, "any", read_config(folder)).score_tokens == (YES, NO)


@pytest.mark.parametrize(
    ("file", "value"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "mean"}),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True, "pooling_mode_lasttoken": False}),
        ("1_Pooling/config.json", [1]),
        ("modules.json", {"not": "a list"}),
        ("modules.json", [{"path": "1_Pooling"}]),
        ("modules.json", [{"type": "a.Pooling"}] * 17),
        ("modules.json", [{"type": "a.Pooling"}, {"type": "a.Dense", "path": "2_Dense"}]),
        ("config_sentence_transformers.json", {"default_prompt_name": "x", "prompts": {"x": 5}}),
    ],
)
def test_what_vlfit_would_pool_wrongly_is_refused(tiny: Tiny, tmp_path: Path, file: str, value: Any) -> None:
    folder = make_embedding_model(tiny("tied"), tmp_path / "model")
    (folder / file).write_text(json.dumps(value))
    with pytest.raises(CheckpointError):
        read_pooling(folder, "model", read_config(folder))


def test_a_text_only_embedding_model_is_refused(tiny_decoder: Tiny, tmp_path: Path) -> None:
    folder = make_embedding_model(tiny_decoder("qwen3"), tmp_path / "model")
    with pytest.raises(CheckpointError):
        read_pooling(folder, "model", read_config(folder))


def test_the_files_are_downloaded() -> None:
    from vlfit.checkpoint.hub import SMALL_FILES

    assert set(FILES) <= set(SMALL_FILES)


def test_an_embedding_model_needs_no_output_head(tiny: Tiny, tmp_path: Path) -> None:
    """As in one published checkpoint, whose config.json says that it has one."""
    folder = make_embedding_model(tiny("odd_vocab_one_kv_head"), tmp_path / "model")
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file, {"format": "pt"})
    assert open_checkpoint(folder).config.tie_word_embeddings
    (folder / "modules.json").unlink()
    with pytest.raises(MissingTensor):
        open_checkpoint(folder)
