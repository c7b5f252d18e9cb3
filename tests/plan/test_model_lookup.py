"""From a name to models: folders, the catalog, families, planned conversions, the hub."""

import json
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.checkpoint.test_source import put
from vlfit.checkpoint import catalog, hub
from vlfit.checkpoint import remote_headers as remote
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.source import read_checkpoint
from vlfit.cli.main import app
from vlfit.errors import (
    BrokenShard,
    CheckpointError,
    HubModelNotFound,
    NotACheckpoint,
    UnknownArchitecture,
    UsageError,
)
from vlfit.plan.model_lookup import (
    alternatives_to,
    catalog_models,
    find_exact_models,
    find_models,
    model_of_entry,
)
from vlfit.plan.shapes import FROM_HEADERS, Model, model_of
from vlfit.quantize.conversion import convert

CACHED_FOLDER = hub.cached_folder


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unknown names would reach the hub, which no test here does."""

    def refuse(name: str) -> None:
        raise AssertionError(f"the hub was asked for {name}")

    monkeypatch.setattr(hub, "cached_folder", lambda name, *_: None)
    monkeypatch.setattr(remote, "read_remote_checkpoint", refuse)


@pytest.mark.parametrize("tokenizer", ["tokenizer.json", None])
def test_a_plan_of_weights_that_are_here_needs_no_network(
    tmp_path: Path, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tokenizer: str | None
) -> None:
    """``_no_hub`` fails where the hub is asked. Other programs download other tokenizer files, or none."""
    monkeypatch.setattr(hub, "cached_folder", CACHED_FOLDER)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = put(tmp_path, "org/model", tiny("tied"))
    if tokenizer is None:
        (folder / "tokenizer.json").unlink()
    (model,) = find_exact_models("org/model")
    assert model.weight_bytes == find_exact_models(str(tiny("tied")))[0].weight_bytes


def test_catalog_names_need_no_network() -> None:
    assert [model.weights for model in find_exact_models("Qwen/Qwen3-VL-8B-Thinking-FP8")] == ["fp8"]
    assert [model.weights for model in find_exact_models("4B")] == ["bf16", "fp8", "int4"]
    assert [model.name for model in find_exact_models("4B", "fp8")] == ["Qwen/Qwen3-VL-4B-Instruct-FP8"]
    assert [model.name for model in find_exact_models("Qwen/Qwen3-VL-4B-Thinking", "int4")] == [
        "Qwen3-VL-4B-Thinking-INT4"
    ]
    assert len(catalog_models()) == 30
    assert all("Thinking" not in model.name for model in catalog_models())
    assert "Qwen/Qwen3-VL-4B-Thinking" in [model.name for model in catalog_models(edition="Thinking")]


def test_unknown_names_are_looked_up_on_the_hub() -> None:
    with pytest.raises(AssertionError, match="org/other"):
        find_exact_models("org/other")


def test_folders_are_read_from_their_headers(tiny: Callable[[str], Path]) -> None:
    (model,) = find_exact_models(str(tiny("fp8")))
    assert model.weights == "fp8"
    assert model.known_by == FROM_HEADERS
    assert model.parameters == read_checkpoint("x", tiny("fp8")).parameter_count
    assert find_exact_models("mini")[0].name == "mini"


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_planned_conversion_sizes_are_exact(tmp_path: Path, weights: str) -> None:
    """Sizes counted from shapes equal those of the converted files, with mini."""
    source = read_checkpoint("mini", Path(str(subjects_folder())))
    planned = find_exact_models("mini", weights)[0]
    convert(source, weights, tmp_path / "made")
    (made,) = find_exact_models(str(tmp_path / "made"))
    assert planned.converted_from == "mini"
    assert planned.convert_command == f"vlfit convert mini --weights {weights}"
    same_sizes(planned, made)


def all_of(name: str, weights: str | None = None) -> list[Model]:
    found = find_models(name, weights)
    return [*found.exact, *found.make_smaller_variants()]


def same_sizes(planned: Model, made: Model) -> None:
    for part in ("text_bytes", "vision_bytes", "embedding_bytes", "parameters", "layer", "head"):
        assert getattr(planned, part) == getattr(made, part), part


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("untied_sharded", "fp8"),
        ("untied_sharded", "int4"),
        ("tied", "int4"),
        ("fp8", "int4"),
        ("fp8_untied_sharded", "fp8"),
    ],
)
def test_planned_rounding_sizes_are_exact(
    tmp_path: Path, tiny: Callable[[str], Path], name: str, weights: str
) -> None:
    """Runs the plan's own command, so that its options match its sizes."""
    models = all_of(str(tiny(name)), weights)
    assert len(models) > 2
    sizes = [model.weight_bytes for model in models]
    assert sizes == sorted(sizes, reverse=True)
    for number, model in enumerate(each for each in models if each.converted_from):
        words = shlex.split(model.convert_command)
        assert words[:5] == ["vlfit", "convert", str(tiny(name)), "--weights", weights]
        out = str(tmp_path / str(number))
        assert CliRunner().invoke(app, [*words[1:], "--out", out, "--quiet"]).exit_code == 0
        same_sizes(model, find_exact_models(out)[0])


def test_8b_conversions_from_the_mildest() -> None:
    def endings(name: str, weights: str) -> list[str]:
        found = [each for each in all_of(name) if each.weights == weights]
        return [each.name.rpartition(weights.upper())[2] for each in found if each.convert_options]

    assert endings("8B", "int4") == ["-E8", "-E8-V8", "-E8-V8-G64", "-E8-V8-G128", "-E8-V8-G128-H4"]
    assert endings("8B", "fp8") == ["-E8", "-E8-V8"]
    assert endings("2B", "int4") == [
        "-E8",
        "-E8-V8",
        "-E8-V8-G64",
        "-E8-V8-G128",
    ]  # its head is the embedding
    (named,) = find_exact_models("Qwen3-VL-8B-Instruct-INT4-E8-V8-G128-H4")
    assert named.head.form == "int4"
    assert named.convert_command == (
        "vlfit convert Qwen/Qwen3-VL-8B-Instruct --weights int4 --embedding int8 --head int4 --vision int8 "
        "--group-size 128"
    )
    assert all_of("2B-INT4")[1].convert_command.endswith("--embedding int8")
    assert all_of("8B-FP8")[1].convert_command == (
        "vlfit convert Qwen/Qwen3-VL-8B-Instruct-FP8 --weights fp8 --embedding int8 --head int8"
    )


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("4B-FP8", "Qwen/Qwen3-VL-4B-Instruct-FP8"),
        ("4b-bf16", "Qwen/Qwen3-VL-4B-Instruct"),
        ("8b-thinking-fp8", "Qwen/Qwen3-VL-8B-Thinking-FP8"),
        ("qwen3-vl:4b", "Qwen/Qwen3-VL-4B-Instruct"),
        ("Qwen3_VL_4B_Instruct_FP8", "Qwen/Qwen3-VL-4B-Instruct-FP8"),
        ("Phi-3-mini", "microsoft/Phi-3-mini-4k-instruct"),
        ("Llama-2-7B", "meta-llama/Llama-2-7b-hf"),
        ("Qwen2.5-3B", "Qwen/Qwen2.5-3B-Instruct"),
        ("https://huggingface.co/Qwen/Qwen3-VL-4B-Instruct", "Qwen/Qwen3-VL-4B-Instruct"),
        ("https://huggingface.co/Qwen/Qwen3-VL-4B-Thinking-FP8/tree/main", "Qwen/Qwen3-VL-4B-Thinking-FP8"),
        ("hf.co/Qwen/Qwen3-VL-2B-Instruct/", "Qwen/Qwen3-VL-2B-Instruct"),
    ],
)
def test_names_in_many_spellings(typed: str, name: str) -> None:
    assert find_exact_models(typed)[0].name == name


@pytest.mark.parametrize(
    ("typed", "similar"),
    [
        ("Qwen3-VL-4B-Instuct", ["Qwen/Qwen3-VL-4B-Instruct"]),
        ("qwen3-vl", ["Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen3-VL-4B-Instruct"]),
        ("qwen3-8b", ["Qwen/Qwen3-VL-8B-Instruct"]),  # another model than Qwen3-VL-8B
        ("llama-7b", ["meta-llama/Llama-2-7b-hf"]),
        ("gpt2", []),
        ("[4B", []),
        ("http://[::1", []),
        ("https://huggingface.co/", []),
        ("x" * 5000, []),
        ("~nobody-of-that-name/model", []),
    ],
)
def test_unknown_and_ambiguous_names_are_refused_with_similar_ones(typed: str, similar: list[str]) -> None:
    with pytest.raises(NotACheckpoint) as raised:
        find_exact_models(typed)
    assert all(name in raised.value.hint for name in similar)
    assert similar or "Qwen/" not in raised.value.hint


def test_misspelt_hub_names_get_similar_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise HubModelNotFound(f"no model {name}", "Check the spelling.")

    monkeypatch.setattr(remote, "read_remote_checkpoint", none)
    with pytest.raises(HubModelNotFound) as raised:
        find_exact_models("Qwen/Qwen3-VL-4B-Instuct-FP8")
    assert "Qwen/Qwen3-VL-4B-Instruct-FP8" in raised.value.hint
    assert "Check the spelling." in raised.value.hint  # the hub's own


def test_page_of_a_revision_means_that_revision() -> None:
    page = "https://huggingface.co/org/other/tree/refs"
    with pytest.raises(AssertionError, match="org/other@refs"):
        find_exact_models(page)


def test_alternatives_to_a_folder_are_conversions(tiny: Callable[[str], Path]) -> None:
    folder = tiny("untied_sharded")
    others = [
        each
        for each in alternatives_to(find_exact_models(str(folder)), str(folder))
        if each.converted_from == str(folder)
    ]
    assert [each.weights for each in others] == ["fp8"] * 3 + ["int4"] * 4
    assert (
        alternatives_to(find_exact_models("4B-thinking"), "4B-thinking")[0].name
        == "Qwen/Qwen3-VL-8B-Thinking"
    )


def subjects_folder() -> Path:
    from vlfit.checkpoint.source import mini_folder

    return mini_folder()


def test_impossible_formats_are_refused(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match="bf16"):
        find_exact_models(str(tiny("fp8")), "bf16")
    assert [model.name for model in find_exact_models("Qwen3-VL-8B-Instruct-INT4-E8", "fp8")] == [
        "Qwen/Qwen3-VL-8B-Instruct-FP8"
    ]


@pytest.mark.parametrize("entry", catalog.entries(), ids=lambda entry: entry.name)
def test_tensor_groups_and_single_tensors_give_the_same_model(entry: catalog.CatalogEntry) -> None:
    """The catalog counts a layer once; headers of the same files are counted tensor by tensor."""
    counted, read = model_of_entry(entry), model_of(entry.name, entry.config, entry.tensors, "")
    for part in fields(Model):
        if part.name not in ("known_by", "family", "converted_from", "source", "convert_options", "files"):
            assert getattr(counted, part.name) == getattr(read, part.name), part.name
    assert counted.files is not None
    assert read.files is not None
    assert counted.files.tensors == read.files.tensors
    assert counted.weights == entry.weights


def test_text_only_models_are_in_every_format_too() -> None:
    assert [model.weights for model in find_exact_models("Phi-3-mini")] == ["bf16", "fp8", "int4"]
    (fp8,) = find_exact_models("Phi-3-mini", "fp8")
    assert fp8.convert_command == "vlfit convert microsoft/Phi-3-mini-4k-instruct --weights fp8"
    assert all_of("Llama-2-7B", "int4")[-1].name == "Llama-2-7b-hf-INT4-E8-G128-H4"
    assert all_of("Qwen2.5-3B", "fp8")[-1].name == "Qwen2.5-3B-Instruct-FP8-E8"  # it has no tower


def test_files_and_folders_that_are_no_checkpoint(tmp_path: Path, tiny: Callable[[str], Path]) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(BrokenShard, match=r"model\.gguf"):
        find_exact_models(str(tmp_path / "model.gguf"))
    for name in ("nowhere.gguf", "org/some.gguf"):
        with pytest.raises(NotACheckpoint, match=re.escape(name)):
            find_exact_models(name)
    (tmp_path / "model.gguf").unlink()
    with pytest.raises(NotACheckpoint, match="no such model"):
        find_exact_models("no such model")
    with pytest.raises(NotACheckpoint, match=r"config\.json"):
        find_exact_models(str(tmp_path))
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotACheckpoint, match="file"):
        find_exact_models(str(tmp_path / "file"))


def test_config_without_vision_is_refused_by_name(tmp_path: Path, tiny: Callable[[str], Path]) -> None:
    folder = tmp_path / "blind"
    shutil.copytree(tiny("tied"), folder)
    config = json.loads((folder / "config.json").read_text())
    del config["vision_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="vision_config"):
        find_exact_models(str(folder))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_moe"}))
    with pytest.raises(UnknownArchitecture, match="qwen2_moe"):
        find_exact_models(str(folder))


def test_catalog_and_folder_agree_on_the_same_tensors(tiny: Callable[[str], Path]) -> None:
    """Sizes counted from shapes equal those from headers of the same config."""
    checkpoint = read_checkpoint("x", tiny("fp8"))
    assert isinstance(checkpoint.config, ModelConfig)
    counted = catalog.tensors_of(checkpoint.config)
    assert {name: info.shape for name, info in counted.items()} == {
        name: info.shape for name, info in checkpoint.tensors.items()
    }
