"""From a name to models: folders, the catalog, families, conversions that are still to be made, the hub."""

import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vlfit.checkpoint import catalog, hub
from vlfit.checkpoint import remote_headers as remote
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.source import read_checkpoint
from vlfit.cli.main import app
from vlfit.errors import CheckpointError, HubModelNotFound, NotACheckpoint, UnknownArchitecture, UsageError
from vlfit.plan.shapes import Model, model_of
from vlfit.plan.subjects import everything, instead_of, named, of_entry, subjects
from vlfit.quantize.conversion import convert


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that are not on this disk or in the catalog reach the hub, and no test here does."""

    def refuse(name: str) -> None:
        raise AssertionError(f"the hub was asked for {name}")

    monkeypatch.setattr(hub, "cached_folder", lambda name: None)
    monkeypatch.setattr(remote, "read_remote", refuse)


def test_the_catalog_needs_no_network() -> None:
    assert [model.weights for model in subjects("Qwen/Qwen3-VL-8B-Thinking-FP8")] == ["fp8"]
    assert [model.weights for model in subjects("4B")] == ["bf16", "fp8", "int4"]
    assert [model.name for model in subjects("4B", "fp8")] == ["Qwen/Qwen3-VL-4B-Instruct-FP8"]
    assert [model.name for model in subjects("Qwen/Qwen3-VL-4B-Thinking", "int4")] == [
        "Qwen3-VL-4B-Thinking-INT4"
    ]
    assert len(everything()) == 18
    assert all("Thinking" not in model.name for model in everything())
    assert "Qwen/Qwen3-VL-4B-Thinking" in [model.name for model in everything(edition="Thinking")]


def test_other_names_are_asked_of_the_hub() -> None:
    with pytest.raises(AssertionError, match="org/other"):
        subjects("org/other")


def test_a_folder_is_read_from_its_headers(tiny: Callable[[str], Path]) -> None:
    (model,) = subjects(str(tiny("fp8")))
    assert model.weights == "fp8"
    assert model.known_by == "read from its headers"
    assert model.parameters == read_checkpoint("x", tiny("fp8")).parameter_count
    assert subjects("mini")[0].name == "mini"


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_a_conversion_is_planned_to_the_byte_before_it_is_made(tmp_path: Path, weights: str) -> None:
    """mini in fewer bits: what the plan counts from shapes is what is read from the converted files."""
    source = read_checkpoint("mini", Path(str(subjects_folder())))
    planned = subjects("mini", weights)[0]
    convert(source, weights, tmp_path / "made")
    (made,) = subjects(str(tmp_path / "made"))
    assert planned.converted_from == "mini"
    assert planned.made_by == f"vlfit convert mini --weights {weights}"
    same_sizes(planned, made)


def all_of(name: str, weights: str | None = None) -> list[Model]:
    found = named(name, weights)
    return [*found.exact, *found.coarser()]


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
def test_each_rounding_is_planned_to_the_byte_before_it_is_made(
    tmp_path: Path, tiny: Callable[[str], Path], name: str, weights: str
) -> None:
    """The command of the plan is what is run, so that its options cannot say another thing than its sizes."""
    models = all_of(str(tiny(name)), weights)
    assert len(models) > 2
    sizes = [model.weight_bytes for model in models]
    assert sizes == sorted(sizes, reverse=True)
    for number, model in enumerate(each for each in models if each.converted_from):
        words = shlex.split(model.made_by)
        assert words[:5] == ["vlfit", "convert", str(tiny(name)), "--weights", weights]
        out = str(tmp_path / str(number))
        if model.convert_options:
            assert words[-2:] == ["--out", model.place]
            words = words[:-2]
        assert CliRunner().invoke(app, [*words[1:], "--out", out, "--quiet"]).exit_code == 0
        same_sizes(model, subjects(out)[0])


def test_8b_has_what_convert_can_make_of_it_the_mildest_first() -> None:
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
    (named,) = subjects("Qwen3-VL-8B-Instruct-INT4-E8-V8-G128-H4")
    assert named.head.form == "int4"
    assert named.made_by == (
        "vlfit convert Qwen/Qwen3-VL-8B-Instruct --weights int4 --embedding int8 --head int4 --vision int8 "
        "--group-size 128 --out Qwen3-VL-8B-Instruct-INT4-E8-V8-G128-H4"
    )
    assert "--embedding int8 --out " in all_of("2B-INT4")[1].made_by
    assert all_of("8B-FP8")[1].made_by.startswith(
        "vlfit convert Qwen/Qwen3-VL-8B-Instruct-FP8 --weights fp8 --embedding int8 --head int8 --out "
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
def test_names_as_people_write_them(typed: str, name: str) -> None:
    assert subjects(typed)[0].name == name


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("Qwen3-VL-4B-Instuct", "Did you mean Qwen/Qwen3-VL-4B-Instruct or "),
        ("qwen3-vl", "Did you mean Qwen/Qwen3-VL-8B-Instruct or Qwen/Qwen3-VL-4B-Instruct or "),
        ("qwen3-8b", "Did you mean Qwen/Qwen3-VL-8B-Instruct or "),  # another model than Qwen3-VL-8B
        ("llama-7b", "Did you mean meta-llama/Llama-2-7b-hf or "),
        ("gpt2", "Give a folder"),
        ("[4B", "Give a folder"),
        ("http://[::1", "Give a folder"),
        ("https://huggingface.co/", "Give a folder"),
        ("x" * 5000, "Give a folder"),
        ("~nobody-of-that-name/model", "Give a folder"),
    ],
)
def test_names_that_mean_nothing_or_several_are_not_guessed(typed: str, words: str) -> None:
    with pytest.raises(NotACheckpoint) as raised:
        subjects(typed)
    assert raised.value.hint.startswith(words)


def test_a_misspelt_name_of_the_hub_has_its_neighbours_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise HubModelNotFound(f"no model {name}", "Check the spelling.")

    monkeypatch.setattr(remote, "read_remote", none)
    with pytest.raises(HubModelNotFound) as raised:
        subjects("Qwen/Qwen3-VL-4B-Instuct-FP8")
    assert raised.value.hint.startswith("Did you mean Qwen/Qwen3-VL-4B-Instruct-FP8 or ")
    assert raised.value.hint.endswith("Check the spelling.")


def test_the_page_of_a_revision_is_that_revision() -> None:
    page = "https://huggingface.co/org/other/tree/refs"
    with pytest.raises(AssertionError, match="org/other@refs"):
        subjects(page)


def test_a_folder_that_does_not_fit_can_be_converted(tiny: Callable[[str], Path]) -> None:
    folder = tiny("untied_sharded")
    others = [
        each for each in instead_of(subjects(str(folder)), str(folder)) if each.converted_from == str(folder)
    ]
    assert [each.weights for each in others] == ["fp8"] * 3 + ["int4"] * 4
    assert instead_of(subjects("4B-thinking"), "4B-thinking")[0].name == "Qwen/Qwen3-VL-8B-Thinking"


def subjects_folder() -> Path:
    from vlfit.checkpoint.source import mini_folder

    return mini_folder()


def test_formats_that_cannot_be_had(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match="cannot be made bf16"):
        subjects(str(tiny("fp8")), "bf16")
    assert [model.name for model in subjects("Qwen3-VL-8B-Instruct-INT4-E8", "fp8")] == [
        "Qwen/Qwen3-VL-8B-Instruct-FP8"
    ]


@pytest.mark.parametrize("entry", catalog.entries(), ids=lambda entry: entry.name)
def test_kinds_make_the_same_model_as_all_tensors_one_by_one(entry: catalog.CatalogEntry) -> None:
    """The catalog counts a layer once; headers of the same files are counted tensor by tensor."""
    counted, read = of_entry(entry), model_of(entry.name, entry.config, entry.tensors, "")
    for part in fields(Model):
        if part.name not in ("known_by", "family", "converted_from", "place", "convert_options"):
            assert getattr(counted, part.name) == getattr(read, part.name), part.name
    assert counted.weights == entry.weights


def test_text_only_models_are_in_every_format_too() -> None:
    assert [model.weights for model in subjects("Phi-3-mini")] == ["bf16", "fp8", "int4"]
    (fp8,) = subjects("Phi-3-mini", "fp8")
    assert fp8.made_by == "vlfit convert microsoft/Phi-3-mini-4k-instruct --weights fp8"
    assert all_of("Llama-2-7B", "int4")[-1].name == "Llama-2-7b-hf-INT4-E8-G128-H4"
    assert all_of("Qwen2.5-3B", "fp8")[-1].name == "Qwen2.5-3B-Instruct-FP8-E8"  # it has no tower


def test_what_is_no_checkpoint(tmp_path: Path, tiny: Callable[[str], Path]) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for name in (str(tmp_path / "model.gguf"), "nowhere.gguf", "org/some.gguf"):
        with pytest.raises(NotACheckpoint, match="GGUF"):
            subjects(name)
    with pytest.raises(NotACheckpoint, match="neither a folder"):
        subjects("no such model")
    with pytest.raises(NotACheckpoint, match=r"holds no config\.json"):
        subjects(str(tmp_path))
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotACheckpoint, match="is a file"):
        subjects(str(tmp_path / "file"))


def test_a_config_without_vision_is_refused_by_name(tmp_path: Path, tiny: Callable[[str], Path]) -> None:
    folder = tmp_path / "blind"
    shutil.copytree(tiny("tied"), folder)
    config = json.loads((folder / "config.json").read_text())
    del config["vision_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="vision_config"):
        subjects(str(folder))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_moe"}))
    with pytest.raises(UnknownArchitecture, match="qwen2_moe"):
        subjects(str(folder))


def test_catalog_and_folder_agree_on_the_same_tensors(tiny: Callable[[str], Path]) -> None:
    """What is counted from shapes is what headers of the same config say."""
    checkpoint = read_checkpoint("x", tiny("fp8"))
    assert isinstance(checkpoint.config, ModelConfig)
    counted = catalog.tensors_of(checkpoint.config)
    assert {name: info.shape for name, info in counted.items()} == {
        name: info.shape for name, info in checkpoint.tensors.items()
    }
