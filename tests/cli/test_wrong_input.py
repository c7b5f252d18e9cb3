"""Wrong input of a first hour: each error has the right exit code and names the fix, before a model loads."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Vlfit
from tests.media import pdf, video, written
from tests.pictures import picture
from tests.scripted_backend import ScriptedBackend
from vlfit.cli.options import SETTINGS, complete_local_model, complete_model
from vlfit.settings import Settings


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with what the cases below name."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "photo.jpg", picture(64, 48, "JPEG"))
    written(tmp_path, "report.pdf", pdf(3))
    written(tmp_path, "clip.mp4", video(4))
    written(tmp_path, "iphone.heic", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100))
    written(tmp_path, "broken.log", b"\x7fELF\0\0\0\0" + bytes(100))
    (tmp_path / "gone.jpg").symlink_to("/nowhere/gone.jpg")
    (tmp_path / "empty").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("line", "code", "fix"),
    [
        ("caption phto.jpg -m mini", 1, "photo.jpg"),
        ("caption PHOTO.JPG -m mini", 1, "photo.jpg"),
        ("batch phto.jpg -o out.jsonl -m mini", 1, "photo.jpg"),
        ("caption gone.jpg -m mini", 1, "/nowhere/gone.jpg"),
        ("caption nofolder/photo.jpg -m mini", 1, "nofolder"),
        ("caption report.pdf#two -m mini", 1, "report.pdf#3"),
        ("caption photo.jpg#2 -m mini", 1, "#2"),
        ("detect photo.jpg cups -m mini --draw nofolder/a.png", 2, "mkdir -p nofolder"),
        ("detect photo.jpg cups -m mini --draw empty", 2, ".png"),
        ("detect photo.jpg cups -m mini --draw a.xyz", 2, "a.png"),
        ("batch empty -o out.jsonl -m mini", 1, "--include pdf"),
        ("batch photo.jpg -m mini", 2, "--output FILE"),
        ("serve -m mini --port abc", 2, "--port N"),
        ("top --interval 0", 2, "0.1"),
        ("caption -m mini", 2, "PICTURE"),
        ("plan --frobnicate", 2, "vlfit plan --help"),
        ("plan --context", 2, "vlfit plan --help"),
        ("--debug models rm --yes=3", 2, "vlfit models rm --help"),
        ("plan 70B", 1, "0.8B, 2B, 4B, 8B and 9B"),
        ("detect photo.jpg phone chair", 2, "vlfit detect PICTURE 'phone, chair'"),
        ("detect photo.jpg phone, a chair", 2, "vlfit detect PICTURE 'phone, a, chair'"),
        ("detect photo.jpg photo.jpg chair", 2, "one picture"),
        ("ask photo.jpg bad\udcff -m mini", 2, "0xff"),
        ("detect photo.jpg bad\udcff -m mini", 2, "0xff"),
        ("doctor --log broken.log", 1, "vllm.log"),
    ],
)
def test_the_error_names_the_fix(vlfit: Vlfit, files: Path, line: str, code: int, fix: str) -> None:
    ended = vlfit(*line.split())
    assert (ended.code, ended.out) == (code, "")
    assert fix in ended.err
    assert "hint:" in ended.err
    assert "loading" not in ended.err
    assert "pydantic" not in ended.err.lower()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("port", "99999", "65535"),
        ("context", "many", "whole number"),
        ("speculate", "maybe", "true or false"),
    ],
)
def test_a_wrong_variable_is_explained_in_plain_words(
    vlfit: Vlfit, files: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, reason: str
) -> None:
    monkeypatch.setenv(f"VLFIT_{name.upper()}", value)
    ended = vlfit("serve", "-m", "mini")
    assert ended.code == 2
    assert reason in ended.err
    assert value in ended.err
    assert f"VLFIT_{name.upper()}" in ended.err
    assert "Input should" not in ended.err


def test_a_misspelt_variable_is_noticed(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLFIT_MAXTOKENS", "VLFIT_CONTEXTS", "VLFIT_OF_ANOTHER_PROGRAM"):
        monkeypatch.setenv(name, "5")
    warnings = vlfit("version").err.splitlines()
    assert [line.split()[-1] for line in sorted(warnings)] == ["VLFIT_CONTEXT?", "VLFIT_MAX_TOKENS?"]


def test_no_setting_is_taken_for_a_misspelt_one(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*Settings.model_fields, *SETTINGS, "home"):
        monkeypatch.setenv(f"VLFIT_{name.upper()}", "")
    assert vlfit("version").err == ""


@pytest.mark.parametrize(("name", "extra"), [("clip.mp4", "video"), ("iphone.heic", "heif")])
def test_a_missing_extra_is_named_before_the_model_loads(
    vlfit: Vlfit, files: Path, monkeypatch: pytest.MonkeyPatch, name: str, extra: str
) -> None:
    monkeypatch.setattr("vlfit.images.media_kinds.find_spec", lambda _: None)
    monkeypatch.setattr("vlfit.images.file_kinds.find_spec", lambda _: None)
    ended = vlfit("caption", name, "-m", "mini")
    assert (ended.code, ended.out) == (1, "")
    assert f"vlfit[{extra}]" in ended.err
    assert "loading" not in ended.err


def test_options_for_videos_beside_a_picture_are_noted(
    vlfit: Vlfit, files: Path, scripted: ScriptedBackend
) -> None:
    scripted.answers += ["A.", "B."]
    ended = vlfit("caption", "photo.jpg", "./photo.jpg", "-m", "mini", "--every", "2s")
    assert ended.code == 0
    assert ended.err.count("--every") == 1


ASK = """
import time
from vlfit.checkpoint.hub import download_size
from vlfit.errors import HubUnreachable
started = time.monotonic()
try:
    download_size("Qwen/Qwen3-VL-4B-Instruct-FP8")
except HubUnreachable:
    print(time.monotonic() - started)
"""


def test_without_a_network_the_question_fails_at_once() -> None:
    """No retries: a person waits for it."""
    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    asked = [sys.executable, "-c", ASK]
    done = subprocess.run(asked, env=os.environ | offline, capture_output=True, text=True, timeout=100)
    assert float(done.stdout) < 10  # the library tries for 23 s
    assert done.stderr == ""


def test_completion_offers_all_that_models_lists(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [line.split()[0] for line in vlfit("models").out.splitlines()[1:] if not line.startswith(" ")]
    assert "mini" in listed
    assert set(listed) <= set(complete_model(""))
    assert set(listed) <= set(complete_local_model(""))
    assert {"4B", "4B-FP8", "Qwen/Qwen3-VL-4B-Instruct-FP8"} <= set(complete_model(""))
    assert complete_model("4b-f") == ["4B-FP8"]
    monkeypatch.setenv("_VLFIT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "vlfit models rm mi")
    monkeypatch.setenv("COMP_CWORD", "3")
    assert "mini" in vlfit().out.splitlines()


def test_server_without_one_says_what_to_type(
    vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLFIT_PORT", "9")
    for variable in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    for command in (("chat", "--server"), ("ask", "Hello?", "--server", "auto")):
        ended = vlfit(*command)
        assert (ended.code, ended.out) == (1, "")
        assert "vlfit serve" in ended.err.split("hint:")[1]


def test_top_with_nothing_to_follow_says_so_once(tmp_path: Path) -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("there is a GPU to follow")
    for options in ((), ("--json",)):
        ended = subprocess.run(
            [sys.executable, "-m", "vlfit", "top", "--interval", "0.1", *options],
            capture_output=True,
            text=True,
            env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "VLFIT_PORT": "9"},
            timeout=60,
        )
        assert ended.returncode == 0
        assert len(ended.stdout.splitlines()) == 1
        assert options or "vlfit serve" in ended.stderr
