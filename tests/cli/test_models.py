"""``vlfit models`` and ``vlfit models rm`` over a cache that a test fills."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.checkpoint.test_source import COMMIT, OLDER, put
from vlfit.cli.models import models_app
from vlfit.errors import NotDownloaded, UsageError, VlfitError
from vlfit.machine.cards import machine_with_card
from vlfit.units import format_bytes

Tiny = Callable[[str], Path]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    root = tmp_path / "hub"
    root.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    # Whether mini is in this build is not what these tests are about.
    monkeypatch.setattr("importlib.resources.files", lambda _: tmp_path)
    return root


def run(*words: str, typed: str = "") -> Result:
    return CliRunner().invoke(models_app, list(words), input=typed, catch_exceptions=True)


def test_nothing_here_says_how_to_get_something(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desktop = machine_with_card("RTX 5060", 951 * 1024**2, wsl2=True)
    monkeypatch.setattr("vlfit.machine.survey.survey", lambda: desktop)
    result = run()
    assert result.exit_code == 0
    assert result.stdout.split() == ["NAME", "SIZE", "FORMAT", "WHERE"]
    assert "vlfit pull 4B-FP8" in result.stderr
    assert json.loads(run("--json").stdout) == []


def test_table(cache: Path, tiny: Tiny) -> None:
    plain, fp8 = put(cache, "org/plain", tiny("tied")), put(cache, "org/fp8", tiny("fp8"))
    lines = run().stdout.splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["org/fp8", *size_of(tiny("fp8")), "fp8", str(fp8)],
        ["org/plain", *size_of(tiny("tied")), "fp32", str(plain)],
    ]
    # Columns line up.
    assert {line.index(word) for line, word in zip(lines, ("SIZE", "2.5", "2.6"), strict=True)} == {11}


def size_of(folder: Path) -> list[str]:
    return format_bytes(sum(path.stat().st_size for path in folder.iterdir())).split()


def test_json(cache: Path, tiny: Tiny) -> None:
    folder = put(cache, "org/fp8", tiny("fp8"))
    (model,) = json.loads(run("--json").stdout)
    assert (model["name"], model["folder"], model["format"]) == ("org/fp8", str(folder), "fp8")
    assert model["complete"] is True
    assert model["bytes"] > model["weight_bytes"] > model["parameters"] > 1_000_000


def test_part_of_a_model_says_how_to_get_the_rest(cache: Path, tiny: Tiny) -> None:
    (put(cache, "org/part", tiny("tied")) / "model.safetensors").unlink()
    result = run()
    assert "org/part" in result.stdout
    assert "vlfit pull org/part" in result.stderr


@pytest.mark.parametrize(("typed", "gone"), [("y\n", True), ("n\n", False), ("", False)])
def test_rm_asks(cache: Path, tiny: Tiny, typed: str, gone: bool) -> None:
    folder = put(cache, "org/model", tiny("tied"))
    result = run("rm", "org/model", typed=typed)
    assert (result.exit_code == 0) is gone
    assert folder.exists() is not gone
    assert "org/model" in result.stderr
    assert result.stdout.strip() == typed.strip()  # the runner shows what was typed
    if not gone:
        assert isinstance(result.exception, VlfitError)
        assert "--yes" in result.exception.hint


def test_rm_yes_does_not_ask(cache: Path, tiny: Tiny) -> None:
    folder = put(cache, "org/model", tiny("tied"))
    result = run("rm", "org/model", "--yes")
    assert result.exit_code == 0
    assert not folder.exists()
    assert "org/model: 2." in result.stderr
    assert "?" not in result.stderr


def test_rm_one_of_two_revisions(cache: Path, tiny: Tiny) -> None:
    put(cache, "org/model", tiny("tied"), OLDER, ref="")
    put(cache, "org/model", tiny("tied"), COMMIT)
    assert run("rm", f"org/model@{OLDER}", "--yes").exit_code == 0
    assert [model["name"] for model in json.loads(run("--json").stdout)] == ["org/model"]


def test_rm_of_what_is_not_there_does_not_ask(cache: Path) -> None:
    result = run("rm", "org/none")
    assert isinstance(result.exception, NotDownloaded)
    assert "Remove" not in result.stderr


def test_rm_never_touches_a_folder(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("photos", str(tmp_path / "photos"), "./photos", "mini"):
        assert isinstance(run("rm", name, "--yes").exception, UsageError)
    assert (tmp_path / "photos").is_dir()
