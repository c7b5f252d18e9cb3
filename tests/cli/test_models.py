"""``vlfit models`` and ``vlfit models rm`` over a cache that a test fills."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.checkpoint.test_source import COMMIT, OLDER, put
from tests.cli.conftest import Terminal, Vlfit
from tests.hollow_gguf import write_model
from tests.wording import figures_in
from vlfit.checkpoint.gguf import places
from vlfit.cli.models import models_app
from vlfit.errors import NotDownloaded, UsageError, VlfitError
from vlfit.machine.cards import machine_with_card
from vlfit.plan import gguf_shelf
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


def test_rm_interrupted_at_its_question(
    cache: Path, tiny: Tiny, vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> str:
        raise KeyboardInterrupt

    folder = put(cache, "org/model", tiny("tied"))
    for stdin in (Terminal(), io.StringIO()):
        monkeypatch.setattr(stdin, "readline", interrupt)
        assert vlfit("models", "rm", "org/model", stdin=stdin).code == 130
    assert vlfit("models", "rm", "org/model", stdin=Terminal("n\n")).code == 1
    assert folder.exists()


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


# --- GGUF files --------------------------------------------------------------------------------------------


@pytest.fixture
def shelf(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot of a repository in the hub's cache with two models and the tower of both."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE", "XDG_CACHE_HOME", "VLFIT_HOME"):
        monkeypatch.delenv(name, raising=False)
    folder = cache / "models--org--Q-GGUF" / "snapshots" / COMMIT
    write_model(folder / "Q-Q4_K_M.gguf")
    write_model(folder / "Q-Q8_0.gguf")
    refs = cache / "models--org--Q-GGUF" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    return folder


def gguf_rows(result: Result) -> dict[str, list[str]]:
    """Type, model and pictures of each GGUF model in the table."""
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith("org/Q-GGUF:")]
    return {row[0]: row[3:6] for row in rows}


def test_what_time_was_over_for_is_unknown(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = gguf_rows(run())
    assert known["org/Q-GGUF:Q8_0"] == ["Q8_0", "qwen3vl", "no"]
    monkeypatch.setattr(gguf_shelf, "MAX_SECONDS", 0.0)
    late = run()
    assert gguf_rows(late)["org/Q-GGUF:Q8_0"] == ["Q8_0", "?", "?"]
    assert {2, gguf_shelf.MAX_SECONDS} <= set(figures_in(late.stderr))
    assert "--all" in late.stderr
    for each in json.loads(run("--json").stdout):
        assert (each["sees"], each["gguf"]["looked_at"], each["gguf"]["problem"]) == (None, False, None)
        assert each["complete"]
    assert gguf_rows(run("--all")) == known
    looked = [each["gguf"]["looked_at"] for each in json.loads(run("--all", "--json").stdout)]
    assert looked == [True, True]


def test_a_file_that_cannot_be_read_takes_unknown_pictures(shelf: Path) -> None:
    (shelf / "Q-Q8_0.gguf").write_bytes(b"GGUF")
    assert gguf_rows(run())["org/Q-GGUF:Q8_0"] == ["Q8_0", "-", "-"]
    sees = {each["name"]: each["sees"] for each in json.loads(run("--json").stdout)}
    assert sees == {"org/Q-GGUF:Q4_K_M": False, "org/Q-GGUF:Q8_0": None}


def test_a_place_left_before_its_end_is_named(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--all" not in run().stderr
    monkeypatch.setattr(places, "MAX_SECONDS", -1.0)
    late = run("--json")
    assert json.loads(late.stdout) == []
    assert str(shelf.parents[2]) in late.stderr
    assert "--all" in late.stderr
    assert len(json.loads(run("--all", "--json").stdout)) == 2


def test_rm_of_one_type_says_which_files(shelf: Path) -> None:
    no = run("rm", "org/Q-GGUF:q8_0", typed="n\n")
    assert no.exit_code == 1
    assert "Q-Q8_0.gguf" in no.stderr
    assert "Q-Q4_K_M.gguf" not in no.stderr
    assert run("rm", "org/Q-GGUF:q8_0", "--yes").exit_code == 0
    assert [path.name for path in shelf.iterdir()] == ["Q-Q4_K_M.gguf"]
    assert isinstance(run("rm", "org/Q-GGUF:q8_0", "--yes").exception, NotDownloaded)
