"""GGUF models in other programs' folders: their layouts, their names, and folders in any state."""

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hollow_gguf import Shapes, only, write_mmproj, write_model
from tests.wording import figures_in
from vlfit.checkpoint.gguf import places
from vlfit.checkpoint.gguf.file_names import best_mmproj, split_parts, with_mmproj
from vlfit.checkpoint.gguf.places import FoundModel, found_models, name_in_program
from vlfit.checkpoint.removal import find_removable, remove_model
from vlfit.checkpoint.source import locate_or_download, open_checkpoint, resolve_name
from vlfit.errors import (
    CheckpointError,
    MissingFile,
    NotACheckpoint,
    NotDownloaded,
    UnknownArchitecture,
    UsageError,
)

DIGESTS = {letter: letter * 64 for letter in "abcdef"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of nobody else's, with no variables of these programs."""
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE", "XDG_CACHE_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def named() -> dict[str, FoundModel]:
    return {model.name: model for model in found_models()}


def put(path: Path, size: int = 10) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    return path


def ollama_manifest(root: Path, name: str, *layers: tuple[str, str, int]) -> Path:
    path = root / "manifests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    content = [
        {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}", "size": size}
        for kind, digest, size in layers
    ]
    path.write_text(json.dumps({"schemaVersion": 2, "layers": content}))
    return path


def ollama_blob(root: Path, digest: str, size: int = 10) -> Path:
    return put(root / "blobs" / f"sha256-{digest}", size)


def test_ollama(home: Path) -> None:
    root = home / ".ollama" / "models"
    model, tower = ollama_blob(root, DIGESTS["a"]), ollama_blob(root, DIGESTS["b"], 5)
    library = "registry.ollama.ai/library"
    ollama_manifest(root, f"{library}/qwen3-vl/4b", ("model", DIGESTS["a"], 10), ("params", DIGESTS["f"], 1))
    ollama_manifest(
        root, "hf.co/unsloth/Q-GGUF/Q4_K_M", ("model", DIGESTS["a"], 10), ("projector", DIGESTS["b"], 5)
    )
    ollama_manifest(root, "registry.ollama.ai/me/mine/latest", ("model", DIGESTS["b"], 9))
    ollama_manifest(root, f"{library}/gone/1b", ("model", DIGESTS["c"], 10))
    ollama_manifest(root, f"{library}/cloud/latest", ("params", DIGESTS["f"], 1))
    found = {model.name: model for model in places.models_of("ollama")}
    assert found["ollama:qwen3-vl:4b"] == FoundModel("ollama:qwen3-vl:4b", model, "ollama", bytes=10)
    pair = found["ollama:hf.co/unsloth/Q-GGUF:Q4_K_M"]
    assert (pair.path, pair.mmproj, pair.type, pair.bytes) == (model, tower, "Q4_K_M", 15)
    assert "5 of 9 bytes" in found["ollama:me/mine:latest"].problem
    assert found["ollama:gone:1b"].problem
    assert len(found) == 4


def test_names_of_the_same_files_are_one_model(home: Path) -> None:
    root = home / ".ollama" / "models"
    blob, tower = ollama_blob(root, DIGESTS["a"]), ollama_blob(root, DIGESTS["b"], 5)
    layers = [("model", DIGESTS["a"], 10), ("projector", DIGESTS["b"], 5)]
    for name in ("registry.ollama.ai/library/m/4b", "registry.ollama.ai/library/m/latest", "hf.co/me/m/Q8_0"):
        ollama_manifest(root, name, *layers)
    ollama_manifest(root, "registry.ollama.ai/library/m/text", layers[0])
    link = home / ".lmstudio" / "models" / "me" / "m" / "m-Q8_0.gguf"
    link.parent.mkdir(parents=True)
    link.symlink_to(blob)
    pair, alone = found_models()
    assert pair.names == ("ollama:hf.co/me/m:Q8_0", "ollama:m:4b", "ollama:m:latest")
    assert (pair.path, pair.mmproj) == (blob, tower)
    assert alone.names == ("ollama:m:text", "lmstudio:me/m:Q8_0")
    assert alone.mmproj is None
    for model in (pair, alone):
        for name in model.names:
            (one,) = resolve_name(name)
            assert one.folder is not None
            assert one.folder.resolve() == blob
            assert one.mmproj == model.mmproj


@pytest.mark.parametrize("kind", ["model", "projector"])
def test_a_broken_digest_is_a_problem(kind: str, home: Path) -> None:
    root = home / ".ollama" / "models"
    ollama_blob(root, DIGESTS["a"])
    layers = {"model": DIGESTS["a"], "projector": DIGESTS["a"], kind: "../../.."}
    each = [(name, digest, 10) for name, digest in layers.items()]
    ollama_manifest(root, "registry.ollama.ai/library/m/latest", *each)
    (found,) = found_models()
    assert found.name == "ollama:m:latest"
    assert found.problem
    with pytest.raises(MissingFile, match="digest"):
        resolve_name("ollama:m")


def test_vlfits_own_store(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``vlfit convert --to gguf`` wrote, under the name that ``--model`` takes."""
    monkeypatch.setenv("VLFIT_HOME", str(home / "own"))
    store = home / "own" / "models"
    (store / "Q-q8").mkdir(parents=True)
    model, tower = write_model(store / "Q-q8" / "Q-Q8_0.gguf", only("Q8_0")), store / "Q-q8" / "mmproj-Q.gguf"
    write_mmproj(tower)
    put(store / "safetensors" / "config.json")
    put(store / "safetensors" / "stray.gguf")
    put(store / ".unfinished" / "half.gguf")
    several = [put(store / "several" / f"{letter}-Q4_K.gguf") for letter in "ab"]
    found = {each.name: each for each in places.models_of("vlfit")}
    assert set(found) == {"Q-q8", *map(str, several)}
    ours = found["Q-q8"]
    assert (ours.path, ours.mmproj, ours.type, ours.program) == (model, tower, "Q8_0", "vlfit")
    assert ours.bytes == model.stat().st_size + tower.stat().st_size
    (one,) = resolve_name("Q-q8")
    assert one.folder == model
    assert find_removable("Q-q8").folder == store / "Q-q8"
    assert open_checkpoint("Q-q8").config.vision is not None


def test_ollama_elsewhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = home / "disk"
    ollama_blob(root, DIGESTS["a"])
    ollama_manifest(root, "registry.ollama.ai/library/m/latest", ("model", DIGESTS["a"], 10))
    assert named() == {}
    monkeypatch.setenv("OLLAMA_MODELS", f'"{root}"')
    assert set(named()) == {"ollama:m:latest"}


def test_lm_studio_and_its_settings(home: Path) -> None:
    files = home / "elsewhere" / "lmstudio-community" / "Qwen3-VL-4B-Instruct-GGUF"
    model = put(files / "Qwen3-VL-4B-Instruct-Q4_K_M.gguf")
    tower = put(files / "mmproj-Qwen3-VL-4B-Instruct-F16.gguf", 3)
    put(files / "Qwen3-VL-4B-Instruct-Q8_0.gguf")
    (home / ".lmstudio").mkdir()
    (home / ".lmstudio" / "settings.json").write_text(
        json.dumps({"downloadsFolder": str(home / "elsewhere")})
    )
    put(home / ".cache" / "lm-studio" / "models" / "me" / "old" / "old.gguf")
    found = named()
    name = "lmstudio:lmstudio-community/Qwen3-VL-4B-Instruct-GGUF"
    assert set(found) == {f"{name}:Q4_K_M", f"{name}:Q8_0", "lmstudio:me/old:old"}
    assert found[f"{name}:Q4_K_M"] == FoundModel(f"{name}:Q4_K_M", model, "lmstudio", tower, "Q4_K_M", "", 13)


def test_homes_of_windows_under_wsl2(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users = home / "mnt" / "c" / "Users"
    for user in ("Ada", "Public"):
        root = users / user / ".ollama" / "models"
        ollama_blob(root, DIGESTS["a"])
        ollama_manifest(root, f"registry.ollama.ai/library/{user.lower()}/1b", ("model", DIGESTS["a"], 10))
    put(users / "Ada" / "models" / "org" / "Q-GGUF" / "Q-Q4_0.gguf")
    put(users / "Ada" / ".lmstudio-home-pointer").write_text(str(users / "Ada" / ".lmstudio"))
    monkeypatch.setattr(places, "WINDOWS_USERS", users)
    assert named() == {}
    monkeypatch.setattr(places, "is_wsl2", lambda: True)
    assert set(named()) == {"ollama:ada:1b"}


def test_llama_cpp_before_and_after_its_move(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = home / ".cache" / "llama.cpp"
    model = put(cache / "ggml-org_Q-GGUF_Q-Q8_0.gguf")
    tower = put(cache / "ggml-org_Q-GGUF_mmproj-Q-Q8_0.gguf")
    put(cache / "by-address-Q4_0.gguf")
    manifest = {"ggufFile": {"rfilename": "Q-Q8_0.gguf"}, "mmprojFile": {"rfilename": "mmproj-Q-Q8_0.gguf"}}
    (cache / "manifest=ggml-org=Q-GGUF=latest.json").write_text(json.dumps(manifest))
    found = named()
    assert set(found) == {"llama.cpp:ggml-org/Q-GGUF:Q8_0", "llama.cpp:by-address-Q4_0"}
    assert found["llama.cpp:ggml-org/Q-GGUF:Q8_0"].path == model
    assert found["llama.cpp:ggml-org/Q-GGUF:Q8_0"].mmproj == tower
    new = home / "new"
    put(new / "models--org--R-GGUF" / "snapshots" / "c0ffee" / "R-Q6_K.gguf")
    monkeypatch.setenv("LLAMA_CACHE", str(new))
    assert "llama.cpp:org/R-GGUF:Q6_K@c0ffee" in named()


def hub_repository(home: Path, name: str, *files: str, commit: str = "c0ffee") -> Path:
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    for number, file in enumerate(files):
        blob = put(folder / "blobs" / f"{number:064d}")
        link = folder / "snapshots" / commit / file
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    put(folder / "refs" / "main").write_text(commit)
    return folder / "snapshots" / commit


def test_the_hubs_cache(home: Path) -> None:
    folder = hub_repository(
        home,
        "unsloth/Q-GGUF",
        "Q-UD-Q4_K_XL.gguf",
        "BF16/Q-BF16-00001-of-00002.gguf",
        "BF16/Q-BF16-00002-of-00002.gguf",
        "Q-Q8_0-00001-of-00002.gguf",
        "mmproj-F32.gguf",
        "mmproj-BF16.gguf",
        "mmproj-F16.gguf",
        "imatrix_unsloth.gguf",
        "mtp-Q-Q8_0.gguf",
    )
    found = named()
    name = "unsloth/Q-GGUF"
    assert set(found) == {f"{name}:UD-Q4_K_XL", f"{name}:BF16", f"{name}:Q8_0"}
    assert found[f"{name}:UD-Q4_K_XL"].mmproj == folder / "mmproj-BF16.gguf"
    assert found[f"{name}:BF16"].mmproj == folder / "mmproj-BF16.gguf"
    assert found[f"{name}:BF16"].bytes == 30
    assert re.search(r"\b1\b.*\b2\b", found[f"{name}:Q8_0"].problem)


def _loop(home: Path) -> None:
    root = home / ".lmstudio" / "models"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "up").symlink_to(root)
    (root / "self").symlink_to("self")
    put(root / "a" / "b" / "model-Q4_0.gguf")


def _pipes(home: Path) -> None:
    manifests = home / ".ollama" / "models" / "manifests" / "registry.ollama.ai" / "library" / "m"
    manifests.mkdir(parents=True)
    os.mkfifo(manifests / "pipe")
    os.mkfifo(home / ".lmstudio-home-pointer")
    put(home / ".lmstudio" / "models" / "a" / "b" / "model-Q4_0.gguf")


def _nonsense(home: Path) -> None:
    root = home / ".ollama" / "models"
    for number, content in enumerate(
        ("", "{", "[]", "7", '{"layers": {}}', '{"layers": [7, null, {}]}', "[" * 9000)
    ):
        put(root / "manifests" / "h" / "n" / "m" / str(number)).write_text(content)
    ollama_manifest(root, "h/n/m/dots", ("model", "../../../../etc/passwd", 10))
    put(home / ".lmstudio" / "settings.json").write_text('{"downloadsFolder": 7}')
    put(home / ".cache" / "llama.cpp" / "manifest=.json").write_text("{}")
    put(home / ".cache" / "llama.cpp" / "manifest=a=b=c.json").write_text('{"ggufFile": [1]}')
    put(home / ".lmstudio" / "models" / "a" / "b" / "model-Q4_0.gguf")


@pytest.mark.parametrize("spoil", [_loop, _pipes, _nonsense])
def test_folders_in_any_state(home: Path, spoil: Callable[[Path], None]) -> None:
    spoil(home)
    started = time.monotonic()
    usable = [name for name, model in named().items() if not model.problem]
    assert usable == ["lmstudio:a/b:Q4_0"]
    assert time.monotonic() - started < 5


def test_unreadable_folders(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(home / ".lmstudio" / "models" / "a" / "b" / "model-Q4_0.gguf")
    (home / ".ollama" / "models").mkdir(parents=True)
    scan = os.scandir

    def refuse(path: Any) -> Any:
        if ".ollama" in str(path):
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert list(named()) == ["lmstudio:a/b:Q4_0"]


def test_many_files_do_not_slow_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = home / ".lmstudio" / "models" / "a" / "b"
    folder.mkdir(parents=True)
    for number in range(3000):
        (folder / f"{number}.txt").touch()
    monkeypatch.setattr(places, "MAX_ENTRIES", 500)
    started = time.monotonic()
    assert named() == {}
    assert time.monotonic() - started < 3


def test_nothing_of_other_programs_is_written(home: Path) -> None:
    test_lm_studio_and_its_settings(home)
    before = {path: path.stat().st_mtime_ns for path in home.rglob("*")}
    found_models()
    with pytest.raises(CheckpointError):
        open_checkpoint("lmstudio:me/old")
    after = {path: path.stat().st_mtime_ns for path in home.rglob("*")}
    assert after == before


# --- by name -----------------------------------------------------------------------------------------------


def test_names_of_ollama_open_the_blobs(home: Path) -> None:
    root = home / ".ollama" / "models"
    model = write_model(root / "blobs" / f"sha256-{DIGESTS['a']}")
    tower = write_mmproj(root / "blobs" / f"sha256-{DIGESTS['b']}")
    ollama_manifest(
        root,
        "registry.ollama.ai/library/qwen3-vl/4b",
        ("model", DIGESTS["a"], model.stat().st_size),
        ("projector", DIGESTS["b"], tower.stat().st_size),
    )
    for typed in ("ollama:qwen3-vl:4b", "Ollama:QWEN3-VL:4B", "ollama:qwen3-vl"):
        (one,) = resolve_name(typed)
        assert (one.name, one.folder, one.mmproj) == ("ollama:qwen3-vl:4b", model, tower)
    opened = open_checkpoint("ollama:qwen3-vl:4b")
    assert opened.name == "ollama:qwen3-vl:4b"
    assert opened.config.vision is not None
    assert opened.folder.name == "qwen3-vl-4b"
    for typed in ("ollama:qwen3-vl:4b", "ollama:qwen3-vl", str(model)):
        with pytest.raises(UsageError, match="Ollama") as caught:
            find_removable(typed)
        assert caught.value.hint.endswith("ollama rm qwen3-vl:4b")
    with pytest.raises(NotACheckpoint, match="nothing-here"):
        find_removable("ollama:nothing-here")


def test_files_of_ollamas_converter_are_refused_by_what_to_do(home: Path) -> None:
    class Inside(Shapes):
        """The vision tower is in the model's file."""

        @property
        def text(self) -> dict[str, tuple[int, ...]]:
            return {**super().text, **self.tower}

    model = write_model(home / "model.gguf", only("Q8_0"), Inside())
    with pytest.raises(UnknownArchitecture, match=r"model\.gguf") as caught:
        open_checkpoint(model)
    assert "ollama pull hf.co/" in caught.value.hint


def test_names_that_are_not_there_come_with_those_that_are(home: Path) -> None:
    root = home / ".ollama" / "models"
    ollama_manifest(root, "registry.ollama.ai/library/qwen3-vl/4b", ("model", DIGESTS["a"], 10))
    with pytest.raises(NotACheckpoint) as caught:
        resolve_name("ollama:qwen3-vl:8b")
    assert "ollama:qwen3-vl:4b" in caught.value.hint
    with pytest.raises(MissingFile, match="qwen3-vl:4b"):
        resolve_name("ollama:qwen3-vl:4b")


def test_of_names_nearby_those_that_can_run_are_shown(home: Path) -> None:
    root = home / ".ollama" / "models"
    ollama_blob(root, DIGESTS["a"])
    ollama_manifest(root, "registry.ollama.ai/library/qwen3-vl/4b", ("model", DIGESTS["a"], 10))
    ollama_manifest(root, "registry.ollama.ai/library/qwen3-vl/8c", ("model", DIGESTS["b"], 10))  # no blob
    with pytest.raises(NotACheckpoint) as caught:
        resolve_name("ollama:qwen3-vl:8b")
    assert "ollama:qwen3-vl:4b" in caught.value.hint
    assert "ollama:qwen3-vl:8c" not in caught.value.hint


def test_a_type_that_is_not_here_is_said_to_be_missing_offline(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub_repository(home, "org/Q-GGUF", "Q-Q4_K_M.gguf")
    with pytest.raises(NotDownloaded) as caught:
        locate_or_download("org/Q-GGUF:Q6_K")
    assert "org/Q-GGUF:Q6_K" in caught.value.message
    assert "HF_HUB_OFFLINE" in caught.value.hint


def test_a_part_of_too_many_may_be_a_whole_file(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint) as caught:
        split_parts(put(tmp_path / "mini-00001-of-99999.gguf"))
    assert figures_in(caught.value.message)[-2:] == [1, 99_999]
    assert figures_in(caught.value.hint) == [999]
    with pytest.raises(NotACheckpoint) as caught:
        split_parts(put(tmp_path / "mini-00003-of-00002.gguf"))
    assert figures_in(caught.value.message)[-2:] == [3, 2]
    assert figures_in(caught.value.hint) == []


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q8_0", "F32"])
def test_the_type_of_a_vision_tower_is_no_likeness(kind: str) -> None:
    """Of one model's towers the one in 16 bits, whatever letters its type shares with the model's."""
    towers = [
        "mmproj-mini-F32.gguf",
        "mmproj-mini-Q8_0.gguf",
        "mmproj-mini-F16.gguf",
        "mmproj-maxi-BF16.gguf",
    ]
    assert best_mmproj(f"mini-{kind}.gguf", towers) == "mmproj-mini-F16.gguf"


def test_a_type_of_a_repository_is_found_wherever_it_is(home: Path) -> None:
    name = "lmstudio-community/Q-GGUF:Q4_K_M"
    assert resolve_name(name)[0].on_hub
    there = put(home / ".lmstudio" / "models" / "lmstudio-community" / "Q-GGUF" / "Q-Q4_K_M.gguf")
    assert resolve_name(name)[0].folder == there
    cached = hub_repository(home, "lmstudio-community/Q-GGUF", "Q-Q4_K_M.gguf") / "Q-Q4_K_M.gguf"
    for typed in (name, name.lower().replace("q-gguf", "Q-GGUF"), f"https://huggingface.co/{name}"):
        assert resolve_name(typed)[0].folder == cached
    page = "https://huggingface.co/lmstudio-community/Q-GGUF/blob/main/Q-Q4_K_M.gguf"
    assert resolve_name(page)[0].folder == cached


def test_a_repository_means_all_of_its_types_that_are_here(home: Path) -> None:
    hub_repository(home, "org/Q-GGUF", "Q-Q4_K_M.gguf", "Q-Q8_0.gguf")
    assert {one.name for one in resolve_name("org/Q-GGUF")} == {"org/Q-GGUF:Q4_K_M", "org/Q-GGUF:Q8_0"}
    with pytest.raises(UsageError, match=r"Q4_K_M.*Q8_0|leaves"):
        locate_or_download("org/Q-GGUF")


def left_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def test_one_type_of_several_is_removed(home: Path) -> None:
    parts = [f"BF16/Q-BF16-0000{number}-of-00002.gguf" for number in (1, 2)]
    folder = hub_repository(home, "org/Q-GGUF", *parts, "Q-Q8_0.gguf", "mmproj-F16.gguf", "README.md")
    whole = folder.parents[1]
    assert set(find_removable("org/Q-GGUF:bf16").files) == {folder / part for part in parts}
    assert remove_model("org/Q-GGUF:bf16") == 20
    assert left_in(folder) == {"Q-Q8_0.gguf", "mmproj-F16.gguf", "README.md"}
    assert len(left_in(whole / "blobs")) == 3
    assert list(named()) == ["org/Q-GGUF:Q8_0"]
    with pytest.raises(NotDownloaded) as caught:
        remove_model("org/Q-GGUF:BF16")
    assert "org/Q-GGUF:Q8_0" in caught.value.hint
    assert remove_model("org/Q-GGUF:Q8_0") == 20  # the tower goes with the last
    assert left_in(folder) == {"README.md"}


def test_nothing_stays_behind_the_last_type(home: Path) -> None:
    folder = hub_repository(home, "org/Q-GGUF", "Q-Q8_0.gguf", "mmproj-F16.gguf")
    (folder.parents[1] / "blobs" / "0.incomplete").write_bytes(b"x" * 7)  # of another type
    remove_model("org/Q-GGUF:Q8_0")
    assert left_in(folder.parents[1]) == {"blobs/0.incomplete"}
    hub_repository(home, "org/R-GGUF", "R-Q8_0.gguf")
    assert remove_model("org/R-GGUF:R-Q8_0") > 10
    assert not (home / "hub" / "models--org--R-GGUF").exists()


def test_what_is_removed_may_lack_a_part(home: Path) -> None:
    folder = hub_repository(home, "org/Q-GGUF", "Q-Q8_0-00001-of-00002.gguf", "Q-Q4_0.gguf")
    assert named()["org/Q-GGUF:Q8_0"].problem
    assert remove_model("org/Q-GGUF:Q8_0") == 10
    assert left_in(folder) == {"Q-Q4_0.gguf"}


def test_snapshots_share_what_is_removed(home: Path) -> None:
    files = ("Q-Q8_0.gguf", "Q-Q4_0.gguf")
    older = hub_repository(home, "org/Q-GGUF", *files, commit="0ld")
    newer = hub_repository(home, "org/Q-GGUF", *files)
    assert remove_model("org/Q-GGUF:Q8_0") == 0
    assert (left_in(newer), left_in(older)) == ({"Q-Q4_0.gguf"}, set(files))
    assert (older / "Q-Q8_0.gguf").read_bytes()
    assert remove_model("org/Q-GGUF:Q8_0@0ld") == 10
    assert left_in(older) == {"Q-Q4_0.gguf"}


def test_one_of_several_in_the_store_is_removed_by_its_path(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLFIT_HOME", str(home / "own"))
    folder = home / "own" / "models" / "several"
    one, other, tower = (put(folder / name) for name in ("a-Q4_K.gguf", "b-Q4_K.gguf", "mmproj-a.gguf"))
    assert remove_model(str(one)) == 10
    assert (other.is_file(), tower.is_file()) == (True, True)
    assert remove_model("several") == 20
    assert not folder.exists()
    elsewhere = put(home / "elsewhere" / "c-Q4_K.gguf")
    folder.symlink_to(elsewhere.parent)
    with pytest.raises(UsageError):
        remove_model(str(folder / elsewhere.name))
    assert elsewhere.is_file()


def test_models_of_other_programs_are_theirs_to_remove(home: Path) -> None:
    studio = put(home / ".lmstudio" / "models" / "org" / "Q-GGUF" / "Q-Q8_0.gguf")
    cached = put(home / ".cache" / "llama.cpp" / "by-address-Q4_0.gguf")
    for typed, title, file in (
        ("lmstudio:org/Q-GGUF:Q8_0", "LM Studio", studio),
        ("org/Q-GGUF:Q8_0", "LM Studio", studio),
        (str(studio), "LM Studio", studio),
        ("llama.cpp:by-address-Q4_0", "llama.cpp", cached),
    ):
        with pytest.raises(UsageError, match=title) as caught:
            remove_model(typed)
        assert title in caught.value.hint
        assert str(file) in caught.value.hint
        assert file.is_file()


def test_paths(tmp_path: Path) -> None:
    model = write_model(tmp_path / "models" / "Q-Q4_K_M.gguf")
    assert open_checkpoint(model).config.vision is None
    tower = write_mmproj(tmp_path / "towers" / "tower.gguf")
    for typed in (f"{model}+{tower}", f"{model.parent}+{tower}"):
        opened = open_checkpoint(typed)
        assert opened.config.vision is not None
        assert opened.name == "Q-Q4_K_M"
    write_mmproj(model.parent / "mmproj-F16.gguf")
    assert open_checkpoint(str(model)).config.vision is not None
    assert open_checkpoint(model.parent).config.vision is not None
    with pytest.raises(NotACheckpoint, match=r"none\.gguf"):
        resolve_name(f"{model}+{tmp_path / 'none.gguf'}")
    with pytest.raises(NotACheckpoint, match="mini"):
        resolve_name(f"mini+{tower}")
    write_model(model.parent / "Q-Q8_0.gguf")
    with pytest.raises(NotACheckpoint, match=r"\b2 GGUF"):
        resolve_name(model.parent)


def test_a_later_part_means_the_first(tmp_path: Path) -> None:
    first = put(tmp_path / "Q-Q8_0-00001-of-00002.gguf")
    second = put(tmp_path / "Q-Q8_0-00002-of-00002.gguf")
    assert resolve_name(second)[0].folder == first
    assert resolve_name(second)[0].name == "Q-Q8_0"
    first.unlink()
    for path in (second, tmp_path):
        with pytest.raises(MissingFile, match=first.name):
            resolve_name(path)


def test_a_folder_with_several_models_names_them_all(tmp_path: Path) -> None:
    models = [put(tmp_path / f"Q-{kind}.gguf") for kind in ("Q4_K_M", "Q8_0")]
    put(tmp_path / "mmproj-F16.gguf")
    with pytest.raises(NotACheckpoint, match=r"\b2 GGUF") as caught:
        resolve_name(tmp_path)
    assert all(str(path) in caught.value.hint for path in models)
    for number in range(20):
        put(tmp_path / f"R{number}-Q8_0.gguf")
    with pytest.raises(NotACheckpoint, match=r"\b22 GGUF") as caught:
        resolve_name(tmp_path)
    assert figures_in(caught.value.hint)[-1] == 22 - caught.value.hint.count(".gguf")


def test_a_folder_with_one_model_is_that_model(tmp_path: Path) -> None:
    model = write_model(tmp_path / "Q-Q4_K_M.gguf")
    put(tmp_path / "config.json").write_text("{}")  # of the original model, as publishers leave it there
    put(tmp_path / "imatrix.gguf")
    (tmp_path / "R-Q8_0.gguf").symlink_to("nowhere")
    os.mkfifo(tmp_path / "mmproj-F16.gguf")
    assert resolve_name(tmp_path)[0].folder == model
    assert open_checkpoint(tmp_path).config.vision is None


@pytest.mark.parametrize(
    ("files", "shown"),
    [
        (["mmproj-F16.gguf"], "--mmproj"),
        (["imatrix.gguf"], ""),
        (["BF16/Q-BF16.gguf"], "BF16/Q-BF16.gguf"),
    ],
)
def test_a_folder_without_a_model_says_what_is_in_it(tmp_path: Path, files: list[str], shown: str) -> None:
    for file in files:
        put(tmp_path / file)
    with pytest.raises(NotACheckpoint, match="GGUF") as caught:
        resolve_name(tmp_path)
    assert shown in caught.value.hint


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _dangling(path: Path) -> None:
    path.symlink_to("gone.gguf")


def _circle(path: Path) -> None:
    path.symlink_to(path.name)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("make", "says"), [(_pipe, "pipe"), (_dangling, r"gone\.gguf"), (_circle, "itself"), (_device, "device")]
)
def test_what_is_no_file_is_called_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], says: str
) -> None:
    """A test that opened the pipe would not end."""
    model, path = write_model(tmp_path / "model.gguf"), tmp_path / "folder" / "Q-Q8_0.gguf"
    path.parent.mkdir()
    make(path)
    monkeypatch.chdir(path.parent)
    for name in (path, str(path), path.name, path.parent, f"{model}+{path}"):
        with pytest.raises(NotACheckpoint, match=says):
            resolve_name(name)
    for open_anyway in (split_parts, lambda each: with_mmproj(str(model), each)):
        with pytest.raises(NotACheckpoint, match=says):
            open_anyway(path)
    assert list(named()) == []
    put(tmp_path / "Q-Q8_0-00001-of-00002.gguf")
    make(tmp_path / "Q-Q8_0-00002-of-00002.gguf")
    with pytest.raises(MissingFile, match=says):
        split_parts(tmp_path / "Q-Q8_0-00001-of-00002.gguf")


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("ollama:qwen3-vl:4b", "qwen3-vl:4b"),
        ("llamacpp:org/Q-GGUF:Q8_0", "org/Q-GGUF:Q8_0"),
        ("org/Q-GGUF:Q8_0", "org/Q-GGUF:Q8_0"),
        ("4B", "4B"),
    ],
)
def test_names_without_their_program(name: str, plain: str) -> None:
    assert name_in_program(name) == plain
