"""Opening checkpoints by folder and by name, and listing and removing what the cache holds. No network."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.edit import copy_of
from tests.tiny import TINY
from vlfit.checkpoint import source
from vlfit.checkpoint.cache import cached_models
from vlfit.checkpoint.hub import is_complete, is_hub_name
from vlfit.checkpoint.removal import remove_model
from vlfit.checkpoint.source import open_checkpoint
from vlfit.errors import (
    BrokenShard,
    MissingTensor,
    NotACheckpoint,
    NotDownloaded,
    UnknownWeightsFormat,
    UsageError,
)

Tiny = Callable[[str], Path]
COMMIT, OLDER = "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub."""
    from huggingface_hub import constants

    root = tmp_path / "hub"
    root.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    return root


def put(cache: Path, name: str, folder: Path, commit: str = COMMIT, ref: str = "main") -> Path:
    """What a finished download of ``folder`` as ``name`` leaves in ``cache``; the snapshot's folder."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for path in (repository / "blobs", repository / "refs", snapshot):
        path.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        blob = repository / "blobs" / f"{commit[0]}-{file.name}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    if ref:
        (repository / "refs" / ref).write_text(commit)
    return snapshot


@pytest.mark.parametrize("name", TINY)
def test_opens_a_folder(tiny: Tiny, name: str) -> None:
    folder, spec = tiny(name), TINY[name]
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.name, checkpoint.folder) == (name, folder)
    assert open_checkpoint(str(folder)) == checkpoint
    formats = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    assert checkpoint.weights_format == ("fp8" if spec.fp8 else formats[spec.dtype])
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert weights - 20_000 * spec.shards < checkpoint.weight_bytes < weights


def test_relative_folder(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny("tied"))
    assert open_checkpoint(".").name == "tied"


@pytest.mark.parametrize(
    "model", ["/nowhere", "./nowhere", "mini2", "", "a/b/c", "../../x", Path("org/name")]
)
def test_neither_folder_nor_name(model: str | Path) -> None:
    with pytest.raises(NotACheckpoint) as error:
        open_checkpoint(model)
    assert "mini" in error.value.hint


def test_a_file_in_place_of_its_folder(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        for model in (tiny("tied") / file, str(tiny("tied") / file)):
            assert open_checkpoint(model).folder == tiny("tied")
    (tmp_path / "photo.jpg").write_bytes(b"")
    with pytest.raises(NotACheckpoint, match=r"photo\.jpg"):
        open_checkpoint(tmp_path / "photo.jpg")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "qwen.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BrokenShard, match=r"qwen\.gguf"):
        open_checkpoint("models/qwen.gguf")  # it has the form of a hub's name too


def test_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"")
    with pytest.raises(NotACheckpoint, match=r"config\.json"):
        open_checkpoint(tmp_path)


def test_config_and_weights_of_different_models(tiny: Tiny, tmp_path: Path) -> None:
    folder = copy_of(tiny("tied"), tmp_path / "copy")
    (folder / "config.json").write_bytes((tiny("untied_sharded") / "config.json").read_bytes())
    with pytest.raises(MissingTensor, match="lm_head"):
        open_checkpoint(folder)
    folder = copy_of(tiny("fp8"), tmp_path / "copy-8")
    (folder / "config.json").write_bytes((tiny("tied") / "config.json").read_bytes())
    with pytest.raises(UnknownWeightsFormat, match="quantization_config"):
        open_checkpoint(folder)


def test_mini_that_was_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.resources.files", lambda _: tmp_path)
    with pytest.raises(NotACheckpoint, match=str(tmp_path)):
        open_checkpoint("mini")


def test_mini_is_the_bundled_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: Tiny) -> None:
    monkeypatch.setattr("importlib.resources.files", lambda _: tmp_path)
    copy_of(tiny("tied"), tmp_path / "mini")
    assert open_checkpoint("mini").name == "mini"
    assert "mini" in [model.name for model in source.local_models()]


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("Qwen/Qwen3-VL-2B-Instruct-FP8", True),
        ("org/name@v1.0", True),
        ("org/name@refs/pr/1", True),
        ("name", False),
        ("a/b/c", False),
        ("./name", False),
        ("../name", False),
        ("/name", False),
        ("a/..", False),
        ("a/b@", False),
        ("a/b@../../x", False),
        ("a b/c", False),
    ],
)
def test_names_of_the_hub(text: str, good: bool) -> None:
    assert is_hub_name(text) is good


def test_a_cached_name_needs_no_network(cache: Path, tiny: Tiny) -> None:
    snapshot = put(cache, "org/model", tiny("untied_sharded"))
    for name in ("org/model", "org/model@main", f"org/model@{COMMIT}"):
        checkpoint = open_checkpoint(name)
        assert (checkpoint.name, checkpoint.folder) == (name, snapshot)


def test_a_folder_goes_before_a_name(
    cache: Path, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache, "org/model", tiny("untied_sharded"))
    copy_of(tiny("tied"), tmp_path / "org" / "model")
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("org/model").folder == Path("org/model")


@pytest.mark.parametrize("name", ["org/model", "org/model@v2"])
def test_offline_and_not_there(cache: Path, name: str) -> None:
    with pytest.raises(NotDownloaded, match=name) as error:
        open_checkpoint(name)
    assert "HF_HUB_OFFLINE" in error.value.hint


@pytest.mark.parametrize("gone", ["model-00002-of-00003.safetensors", "tokenizer.json"])
def test_offline_and_only_partly_there(cache: Path, tiny: Tiny, gone: str) -> None:
    snapshot = put(cache, "org/model", tiny("untied_sharded"))
    assert is_complete(snapshot)
    (snapshot / gone).unlink()
    assert not is_complete(snapshot)
    with pytest.raises(NotDownloaded, match="org/model"):
        open_checkpoint("org/model")


def test_list(cache: Path, tiny: Tiny) -> None:
    fp8, plain = put(cache, "org/b-fp8", tiny("fp8")), put(cache, "org/a", tiny("tied"))
    first, second = cached_models()
    assert (first.name, first.folder, first.format, first.complete) == ("org/a", plain, "fp32", True)
    assert (second.name, second.folder, second.format, second.complete) == ("org/b-fp8", fp8, "fp8", True)
    assert first.bytes == sum(path.stat().st_size for path in tiny("tied").iterdir())
    opened = open_checkpoint(tiny("fp8"))
    assert (second.weight_bytes, second.parameters) == (opened.weight_bytes, opened.parameter_count)


def test_list_leaves_out_what_vlfit_does_not_run(cache: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "llama"}')
    put(cache, "org/llama", other)
    (cache / "models--org--empty").mkdir()
    (cache / "version.txt").write_text("1")
    assert cached_models() == []


def test_list_of_a_cut_off_download(cache: Path, tiny: Tiny) -> None:
    snapshot = put(cache, "org/model", tiny("untied_sharded"))
    gone = snapshot / "model-00003-of-00003.safetensors"
    size = sum(path.stat().st_size for path in snapshot.iterdir()) - gone.stat().st_size
    gone.unlink()
    (snapshot.parent.parent / "blobs" / "abc.incomplete").write_bytes(b"x" * 1000)
    (model,) = cached_models()
    assert (model.complete, model.parameters, model.bytes) == (False, 0, size + 1000)


def test_list_of_a_broken_shard(cache: Path, tiny: Tiny) -> None:
    snapshot = put(cache, "org/model", tiny("tied"))
    blob = (snapshot / "model.safetensors").resolve()
    blob.write_bytes(blob.read_bytes()[:-5])
    assert [model.complete for model in cached_models()] == [False]


def test_older_commits_are_listed_by_a_name_that_opens_them(cache: Path, tiny: Tiny) -> None:
    put(cache, "org/model", tiny("tied"), OLDER, ref="")
    put(cache, "org/model", tiny("tied"), COMMIT)
    names = [model.name for model in cached_models()]
    assert names == ["org/model", f"org/model@{OLDER}"]
    assert [open_checkpoint(name).folder.name for name in names] == [COMMIT, OLDER]


def test_remove(cache: Path, tiny: Tiny) -> None:
    put(cache, "org/model", tiny("tied"))
    put(cache, "org/other", tiny("tied"))
    locks = cache / ".locks" / "models--org--model"
    locks.mkdir(parents=True)
    freed = remove_model("org/model")
    assert freed >= sum(path.stat().st_size for path in tiny("tied").iterdir())
    assert [model.name for model in cached_models()] == ["org/other"]
    assert not (cache / "models--org--model").exists()
    assert not locks.exists()


def test_remove_one_revision(cache: Path, tiny: Tiny) -> None:
    put(cache, "org/model", tiny("tied"), OLDER, ref="v1")
    put(cache, "org/model", tiny("tied"), COMMIT)
    freed = remove_model("org/model@v1")
    assert freed >= sum(path.stat().st_size for path in tiny("tied").iterdir())
    assert [model.name for model in cached_models()] == ["org/model"]
    assert open_checkpoint("org/model").folder.name == COMMIT


@pytest.mark.parametrize(
    "name", ["mini", "MINI", "mine", "./mine", "~/mine", "mine/config.json", "/tmp", ".."]
)
def test_only_downloaded_models_are_removed(
    cache: Path, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    own = copy_of(tiny("tied"), tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UsageError, match=re.escape(name)):
        remove_model(name)
    assert (own / "config.json").is_file()


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "/no/where", "", " ", "a\0b", "x" * 10_000])
def test_an_unknown_name_removes_nothing(cache: Path, tiny: Tiny, name: str) -> None:
    put(cache, "org/model", tiny("tied"))
    with pytest.raises(NotACheckpoint) as error:
        remove_model(name)
    assert len(str(error.value)) < 500
    assert len(cached_models()) == 1


@pytest.mark.parametrize("name", ["org/none", "org/model@none"])
def test_remove_what_is_not_there(cache: Path, tiny: Tiny, name: str) -> None:
    put(cache, "org/model", tiny("tied"))
    with pytest.raises(NotDownloaded, match=name):
        remove_model(name)
    assert len(cached_models()) == 1
