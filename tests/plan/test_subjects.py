"""From a name to models: folders, the catalog, families, conversions that are still to be made, the hub."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from vlfit.checkpoint import catalog, hub, remote
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.source import read_checkpoint
from vlfit.engine.convert.convert import convert
from vlfit.errors import CheckpointError, NotACheckpoint, UnknownArchitecture, UsageError
from vlfit.plan.subjects import everything, subjects


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
    assert len(everything()) == 12
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
    (planned,) = subjects("mini", weights)
    convert(source, weights, tmp_path / "made")
    (made,) = subjects(str(tmp_path / "made"))
    assert planned.converted_from == "mini"
    for part in ("text_bytes", "vision_bytes", "embedding_bytes", "parameters", "layer", "head"):
        assert getattr(planned, part) == getattr(made, part), part


def subjects_folder() -> Path:
    from vlfit.checkpoint.source import mini_folder

    return mini_folder()


def test_formats_that_cannot_be_had(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match="cannot be made int4"):
        subjects(str(tiny("fp8")), "int4")
    with pytest.raises(UsageError, match="in bf16 only"):
        subjects("Qwen/Qwen2.5-3B-Instruct", "int4")


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
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(UnknownArchitecture, match="qwen2"):
        subjects(str(folder))


def test_catalog_and_folder_agree_on_the_same_tensors(tiny: Callable[[str], Path]) -> None:
    """What is counted from shapes is what headers of the same config say."""
    checkpoint = read_checkpoint("x", tiny("fp8"))
    assert isinstance(checkpoint.config, ModelConfig)
    counted = catalog.tensors_of(checkpoint.config)
    assert {name: info.shape for name, info in counted.items()} == {
        name: info.shape for name, info in checkpoint.tensors.items()
    }
