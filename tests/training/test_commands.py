"""What the programs of training/mini refuse at once, before anything is fetched, drawn or learnt."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from training.mini import draw_held_out, prepare, refine, tokenizer, train
from training.mini.arguments import folder_to_write
from training.mini.refine import begin_with
from training.mini.tokenizer import PACKAGE
from vlfit.checkpoint.source import mini_folder

Main = Callable[[list[str]], int]


@pytest.fixture(autouse=True)
def never_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is refused must not have begun."""

    def begun(*_: object, **__: object) -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr(train, "tiny", begun)
    monkeypatch.setattr(train, "Trainer", begun)
    monkeypatch.setattr(refine, "full_atlas", begun)
    monkeypatch.setattr(prepare, "build", begun)
    monkeypatch.setattr(draw_held_out, "fetch_photos", begun)
    monkeypatch.setattr(tokenizer, "train_tokenizer", begun)


def refused(main: Main, given: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What ``main`` says as it ends with the status of wrong usage."""
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--minutes", "-1"], ["'-1'", " 0"]),
        (["--minutes", "nan"], ["'nan'", " 0"]),
        (["--minutes", "inf"], ["'inf'", " 0"]),
        (["--stop-after", "0"], ["'0'", " 0"]),
        (["--rate", "fast"], ["'fast'", " 0"]),
        (["--batch", "0"], ["'0'", " 8 "]),
        (["--batch", "7"], ["'7'", " 8 "]),
        (["--workers", "-1"], ["'-1'", " 0 "]),
        (["--tokenizer", "nowhere"], ["nowhere "]),
        (["--tokenizer", "empty"], ["empty ", " tokenizer.json ", " tokenizer_config.json"]),
        (["--work", "file"], ["file "]),
    ],
)
def test_training_refuses_what_makes_no_sense(
    given: list[str],
    named: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    said = refused(train.main, ["--tiny", "--out", "new", *given], capsys)
    _, argument, fault = said.rpartition(f"error: argument {given[0]}: ")
    assert argument, said
    assert [each for each in named if each not in fault] == []
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("place", ["file", "file/below/it"])
def test_a_place_that_is_no_folder_is_refused_before_the_work(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("kept")
    out = ["--out", str(tmp_path / place)]
    start = ["--start", str(mini_folder()), "--sort", "photo"]
    for main, given in ((train.main, ["--tiny"]), (refine.main, start), (prepare.main, [])):
        assert f"--out: {tmp_path / 'file'} " in refused(main, [*given, *out], capsys)
    assert (tmp_path / "file").read_text() == "kept"


def test_a_place_that_may_not_be_written_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Root may write anywhere, so the answer of the system is what is given."""
    monkeypatch.setattr("os.access", lambda *_: False)
    said = refused(train.main, ["--tiny", "--out", str(tmp_path / "new" / "deep")], capsys)
    assert f"--out: {tmp_path} " in said


def test_a_place_where_nothing_can_be_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in /proc, where root may write and yet cannot."""

    def cannot(**_: object) -> str:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    monkeypatch.setattr("tempfile.mkdtemp", cannot)
    said = refused(prepare.main, ["--out", str(tmp_path / "new")], capsys)
    assert "argument --out: " in said
    assert f" {tmp_path} ({os.strerror(errno.ENOENT)})" in said


def test_looking_whether_a_folder_can_be_written_to_leaves_nothing_there(tmp_path: Path) -> None:
    assert folder_to_write(str(tmp_path / "new")) == tmp_path / "new"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("below", ["", "part"])
def test_the_mini_that_ships_is_never_written_over(
    below: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(PACKAGE)
    start = ["--start", str(mini_folder()), "--sort", "photo"]
    programs: list[tuple[Main, list[str]]] = [(train.main, ["--tiny"]), (train.main, [])]
    programs += [(refine.main, start), (tokenizer.main, [])]
    for main, given in programs:
        for folder in (PACKAGE, tmp_path / "link"):
            said = refused(main, [*given, "--out", str(folder / below)], capsys)
            assert f"argument --out: {folder / below} " in said
    work = ["--tiny", "--out", str(tmp_path / "new"), "--work", str(PACKAGE / below)]
    assert f"argument --work: {PACKAGE / below} " in refused(train.main, work, capsys)
    assert not (PACKAGE / "part").exists()


def test_a_tokenizer_is_written_where_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert "required: --out" in refused(tokenizer.main, [], capsys)


def test_held_out_questions_are_drawn_from_materials_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(draw_held_out, "MATERIALS", tmp_path / "none")
    for given in ([], ["--materials", str(tmp_path)]):
        said = refused(draw_held_out.main, given, capsys)
        assert "argument --materials" in said
        assert "training.mini.prepare" in said
    assert "atlas.npz" in said


def test_a_model_of_another_shape_is_told_from_mini(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(mini_folder(), folder)
    told = json.loads((folder / "config.json").read_text())
    told["vision_config"]["depth"] = 3
    (folder / "config.json").write_text(json.dumps(told))
    said = refused(refine.main, ["--start", str(folder), "--out", str(tmp_path / "new")], capsys)
    assert f" {folder} " in said.rpartition("error: argument --start: ")[2]


def test_refining_begins_with_the_weights_of_a_mini(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(folder: Path, *more: str) -> str:
        given = ["--start", str(folder), "--sort", "photo", "--out", str(tmp_path / "new"), *more]
        return refused(refine.main, given, capsys)

    mini = mini_folder()
    assert f"--start: {tmp_path / 'nosuch'} " in said(tmp_path / "nosuch")
    assert "--minutes: '-1'" in said(mini, "--minutes", "-1")
    assert "--batch: '0'" in said(mini, "--batch", "0")
    folder = tmp_path / "part"
    folder.mkdir()
    for path in mini.glob("tokenizer*"):
        shutil.copy(path, folder)
    assert "*.safetensors" in said(folder)
    shards = sorted(mini.glob("*.safetensors"))
    assert len(shards) > 1
    shutil.copy(shards[0], folder)
    half = said(folder)
    assert f"--start: {folder} " in half
    assert "Missing key" in half
    assert len(half) < 1500, "not the names of all tensors"
    (folder / shards[0].name).write_bytes(b"broken")
    broken = said(folder)
    assert f"--start: {folder} " in broken
    assert "*.safetensors" not in broken
    assert not (tmp_path / "new").exists()


def test_the_mini_that_ships_can_be_begun_with() -> None:
    assert sum(parameter.numel() for parameter in begin_with(mini_folder()).parameters()) > 10**7


def test_help_says_where_the_sources_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prepare.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "sources.json" in said
    assert "(--out)" in said
