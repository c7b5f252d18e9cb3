"""Exit codes and what a person reads: wrong usage, bad input, faults, interruptions. No tracebacks."""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import pictures
from tests.cli.conftest import Ended, Vlfit
from tests.scripted_backend import ScriptedBackend, png
from vlfit import client
from vlfit._version import __version__
from vlfit.cli.main import app, translate_foreign_commands
from vlfit.errors import CannotWrite, DeviceError


def failed(ended: Ended, code: int) -> str:
    """What an error says, once it is sure that it is told as errors should be."""
    assert ended.code == code
    assert ended.out == ""
    assert "Traceback" not in ended.err
    assert ended.err.strip()
    return ended.err


def test_version(vlfit: Vlfit) -> None:
    assert vlfit("--version") == Ended(0, f"vlfit {__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        (["ps"], ["status"]),
        (["ls", "--json"], ["models", "--json"]),
        (["list"], ["models"]),
        (["rm", "mini"], ["models", "rm", "mini"]),
        (["version"], ["--version"]),
        (["--debug", "ps"], ["--debug", "status"]),
        (["help", "plan"], ["plan", "--help"]),
        (["run", "4B"], ["chat", "--model", "4B"]),
        (["run", "4B", "What is a cat?"], ["ask", "--model", "4B", "What is a cat?"]),
        (["run"], ["chat"]),
        (["caption", "ps"], ["caption", "ps"]),
    ],
)
def test_words_of_other_programs(words: list[str], ours: list[str]) -> None:
    assert translate_foreign_commands(words) == ours


def test_a_wrong_word_is_corrected_as_all_errors_are_told(vlfit: Vlfit) -> None:
    said = failed(vlfit("statsu"), 2)
    assert said.startswith("error: ")
    assert "status" in said.split("hint:")[1]
    assert "--context" in failed(vlfit("caption", "--contxt", "5", "a.png"), 2).split("hint:")[1]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_the_script_of_completion(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    ended = vlfit("completion", shell)
    assert ended.code == 0
    assert f"complete_{shell}" in ended.out
    if shell in ("bash", "zsh", "fish"):
        monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
        assert vlfit("completion").out == ended.out


def test_completion_of_an_unknown_shell(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "bash" in failed(vlfit("completion", "cmd.exe"), 2)
    monkeypatch.setenv("SHELL", "/bin/nologin")
    assert "bash" in failed(vlfit("completion"), 2)


def test_completion(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_VLFIT_COMPLETE", "complete_bash")
    for typed, offered in (
        ("caption -m Qwen3-VL-4B-Instruct-F", "Qwen3-VL-4B-Instruct-FP8"),
        ("serve 4", "4B"),
        ("caption --backend v", "vllm"),
        ("plan --gpu RTX", "RTX 5060"),
        ("sta", "status"),
    ):
        monkeypatch.setenv("COMP_WORDS", f"vlfit {typed}")
        monkeypatch.setenv("COMP_CWORD", str(len(typed.split())))
        assert offered in vlfit().out.splitlines()


@pytest.mark.parametrize("after", [0.02, 0.06])
def test_ctrl_c_while_it_starts_leaves_no_traceback(after: float) -> None:
    process = subprocess.Popen([sys.executable, "-c", EARLY.format(after)], stderr=subprocess.PIPE)
    assert b"Traceback" not in process.communicate(timeout=60)[1]
    assert process.returncode in (130, -signal.SIGINT)


# Interrupted so many seconds after it began, however slow the computer is.
EARLY = """
import os, signal, threading, vlfit.__main__
timer = threading.Timer({}, os.kill, (os.getpid(), signal.SIGINT))
timer.daemon = True
timer.start()
vlfit.__main__.main()
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["caption"],
        ["ask"],
        ["caption", "a.png", "--nonsense"],
        ["caption", "a.png", "--max-tokens", "many"],
        ["caption", "a.png", "--max-tokens", "-5"],
        ["caption", "a.png", "--max-tokens", "0"],
        ["caption", "a.png", "--temperature", "-1"],
        ["caption", "a.png", "--top-p", "0"],
        ["caption", "a.png", "--context", "0"],
        ["caption", "a.png", "--image-tokens", "-1"],
        ["caption", "a.png", "--server", "http://127.0.0.1:9", "--device", "cpu"],
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_2_before_anything_is_loaded(
    arguments: list[str], vlfit: Vlfit, scripted: ScriptedBackend
) -> None:
    failed(vlfit(*arguments), 2)
    assert scripted.asked == []


@pytest.mark.parametrize(
    ("option", "value"),
    [("--dtype", "int3"), ("--context", 10), ("--image-tokens", 1), ("--model", "nosuch")],
)
def test_what_cannot_be_loaded_is_not_said_to_be_loading(
    option: str, value: object, vlfit: Vlfit, tmp_path: Path
) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png())
    ended = vlfit("caption", path, *(("--model", "mini") if option != "--model" else ()), option, value)
    first = ended.err.splitlines()[0]
    assert first.startswith("error: ")
    assert str(value) in first
    assert "loading" not in ended.err


def test_a_bad_variable_is_named(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLFIT_CONTEXT", "lots")
    assert "VLFIT_CONTEXT" in failed(vlfit("caption", "a.png"), 2)


BAD_PICTURES: dict[str, Callable[[], bytes]] = {
    "not an image": lambda: b"just some text",
    "empty": lambda: b"",
    "HTML": lambda: b"<!doctype html><html><body>404</body></html>",
    "truncated JPEG": lambda: pictures.picture(400, 300, "JPEG")[:2000],
    "GIF of 4 gigapixels in 44 bytes": pictures.gif_claiming_4_gigapixels,
    "20000x20000 PNG": lambda: pictures.png_claiming(20000, 20000),
    "0x0 PNG": lambda: pictures.png_claiming(0, 0),
    "1x20000 PNG": lambda: pictures.picture(1, 20000),
}


@pytest.mark.usefixtures("with_tiny_model")
@pytest.mark.parametrize("kind", BAD_PICTURES)
def test_a_bad_picture_ends_with_1_and_the_next_one_works(kind: str, vlfit: Vlfit, tmp_path: Path) -> None:
    bad, good = tmp_path / "bad.png", tmp_path / "good.png"
    bad.write_bytes(BAD_PICTURES[kind]())
    good.write_bytes(png())
    options = ("-m", "tiny", "--max-tokens", 3)
    alone = failed(vlfit("caption", bad, *options), 1)
    assert "error: " in alone
    assert "hint: " in alone
    both = vlfit("caption", bad, good, *options)
    assert both.code == 1
    assert both.out.startswith(f"{good}: ")
    assert str(bad) in both.err


@pytest.mark.usefixtures("with_tiny_model")
@pytest.mark.parametrize("kind", ["CMYK", "16-bit", "animated WebP", "rotated by EXIF", "palette", "alpha"])
def test_an_odd_but_sound_picture_works(kind: str, vlfit: Vlfit, tmp_path: Path) -> None:
    import numpy as np

    makers: dict[str, Callable[[], bytes]] = {
        "CMYK": pictures.cmyk_jpeg,
        "16-bit": lambda: pictures.deep_png(np.full((40, 60), 30000)),
        "animated WebP": lambda: pictures.animation("WEBP"),
        "rotated by EXIF": lambda: pictures.rotated_by_exif(6),
        "palette": lambda: pictures.encoded(pictures.scene(60, 40).convert("P")),
        "alpha": lambda: pictures.encoded(pictures.half_transparent()),
    }
    path = tmp_path / "odd"
    path.write_bytes(makers[kind]())
    ended = vlfit("caption", path, "-m", "tiny", "--max-tokens", 3, "--json")
    assert ended.code == 0, ended.err
    if kind == "rotated by EXIF":
        assert '"width": 64, "height": 96' in ended.out


def test_names_that_lead_to_no_picture(vlfit: Vlfit, scripted: ScriptedBackend, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{unused.getsockname()[1]}/a.png"
        names = [tmp_path / "missing.png", tmp_path, dead, "data:image/png;base64,!!!", tmp_path / "*.jpg"]
        for name in names:
            said = failed(vlfit("caption", name, "-m", "mini"), 1)
            assert "hint: " in said, name
    assert scripted.asked == []


def test_a_model_that_is_not_there(vlfit: Vlfit, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png())
    for model in (tmp_path / "nowhere", tmp_path, "no/such/model"):
        assert "hint: " in failed(vlfit("caption", path, "-m", model), 1), model


def test_a_server_that_is_not_there(vlfit: Vlfit, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png())
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert "vlfit serve" in failed(vlfit("caption", path, "--server", url), 1)


@pytest.mark.usefixtures("with_tiny_model")
def test_what_does_not_fit_ends_with_3(vlfit: Vlfit) -> None:
    said = failed(vlfit("ask", "word " * 5000, "-m", "tiny"), 3)
    assert "1,024" in said  # tokens, the context that it does not fit


def test_a_fault_of_ours_is_told_in_a_line_and_in_full_when_debugging(
    vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the wheel came off")

    monkeypatch.setattr(client, "VLM", broken)
    path = tmp_path / "a.png"
    path.write_bytes(png())
    said = failed(vlfit("caption", path, "-m", "mini"), 1)
    assert "RuntimeError: the wheel came off" in said
    assert "--debug" in said
    in_full = vlfit("--debug", "caption", path, "-m", "mini")
    assert in_full.code == 1
    assert "Traceback" in in_full.err


def test_debugging_keeps_the_exit_code(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLFIT_DEBUG", "1")
    ended = vlfit("caption", "a.png", "--max-tokens", -5)
    assert ended.code == 2
    assert "Traceback" in ended.err
    assert re.search(r"error: max_tokens.* -5\b", ended.err)


def test_auto_says_what_it_chose(
    vlfit: Vlfit, scripted: ScriptedBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("vlfit.checkpoint.source.local_models", list)  # whoever tests may have real ones
    path = tmp_path / "a.png"
    path.write_bytes(png())
    scripted.answers = ["Red."]
    ended = vlfit("caption", path)
    assert ended.out == "Red.\n"
    assert "mini" in ended.err.splitlines()[0]
    assert "vlfit pull" in ended.err.splitlines()[0]


def test_an_error_while_loading_is_the_error_told(
    vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_gpu(*_: object, **__: object) -> None:
        raise DeviceError("no GPU is there", "use --device cpu")

    monkeypatch.setattr(client, "VLM", no_gpu)
    path = tmp_path / "a.png"
    path.write_bytes(png())
    said = failed(vlfit("caption", path, "-m", "mini", "--device", "cuda"), 1)
    assert "error: no GPU is there\nhint:  use --device cpu" in said


@pytest.mark.parametrize("command", ["batch", "serve", "serve --daemon"])
def test_mini_is_not_used_in_silence(
    command: str, vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("vlfit.checkpoint.source.local_models", list)
    (tmp_path / "a.png").write_bytes(png())
    words = command.split() + ([tmp_path, "-o", tmp_path / "out.jsonl"] if command == "batch" else [])
    said = failed(vlfit(*words), 2)
    assert "-m mini" in said
    assert "vlfit pull" in said
    assert not (tmp_path / "out.jsonl").exists()


def test_a_user_without_a_home_is_told_what_to_set(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR", "VLFIT_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    ended = vlfit("models")
    assert ended.code == 1
    assert "HOME" in ended.err


def test_completion_without_a_place_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").write_text("no folder")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(CannotWrite, match=re.escape(str(tmp_path))):
        app(["--install-completion", "bash"], standalone_mode=False)


@pytest.mark.parametrize(
    ("variables", "styled"),
    [({}, True), ({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_colours_where_they_are_wanted(
    variables: dict[str, str], styled: bool, vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in ({"TERM": "xterm"} | variables).items():
        monkeypatch.setenv(name, value)
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    for words in (("caption", "no.png", "-m", "mini"), ("doctor",)):
        ended = vlfit(*words)
        assert ("\x1b[" in ended.out + ended.err) is styled, words
