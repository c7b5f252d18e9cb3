"""Every example runs with mini; those over HTTP against a real server."""

import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server.harness import running
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.native import NativeBackend

EXAMPLES = Path(__file__).parents[1] / "examples"
# The owner's own names. Each is a page at most, because an example is read before it is run.
OVER_HTTP = ("client.py", "caption_image.py", "vqa.py", "analyze_scene.py")
DIRECT = ("inference_direct.py", "caption_image_direct.py", "vqa_direct.py")
MOST_LINES = 29

Run = Callable[..., str]


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    import torch

    torch.set_num_threads(1)
    options = EngineOptions(device="cpu", max_model_len=2048, max_num_seqs=1)
    with NativeBackend.load("mini", options) as backend, running(backend) as server:
        yield server.url


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run an example in this process, which saves the seconds that importing torch takes."""
    monkeypatch.setattr("vlfit.checkpoint.source.local_models", list)  # whoever tests may have real ones

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", OVER_HTTP)
def test_over_http(name: str, run: Run, server_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLFIT_SERVER", server_url)
    by_itself = run(name)
    assert len(by_itself.split()) > 3
    picture = sorted((EXAMPLES / "pictures").glob("*.png"))[-1]
    assert run(name, str(picture)) != by_itself


@pytest.mark.parametrize("name", DIRECT)
def test_direct(name: str, run: Run) -> None:
    by_itself = run(name)
    assert len(by_itself.split()) > 3
    picture = sorted((EXAMPLES / "pictures").glob("*.png"))[-1]
    assert run(name, str(picture)) != by_itself


@pytest.mark.parametrize("name", OVER_HTTP)
def test_without_a_server(name: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLFIT_SERVER", "http://127.0.0.1:9")
    with pytest.raises(SystemExit) as ended:
        run(name)
    assert "error: " in str(ended.value.code)
    assert "http://127.0.0.1:9" in str(ended.value.code)


@pytest.mark.parametrize("name", DIRECT)
def test_with_a_picture_that_is_not_there(name: str, run: Run) -> None:
    with pytest.raises(SystemExit) as ended:
        run(name, "nowhere.png")
    assert "error: nowhere.png" in str(ended.value.code)


def test_the_same_words_over_http_and_direct(
    run: Run, server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLFIT_SERVER", server_url)
    assert run("caption_image.py") == run("caption_image_direct.py")
    assert run("vqa.py") == run("vqa_direct.py")


def test_start_server() -> None:
    command = [sys.executable, str(EXAMPLES / "start_server.py"), "mini", "--port", "0", "--json"]
    process = subprocess.Popen(
        [*command, "--device", "cpu"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ)
    )
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert ready["model"] == "mini"
    assert ready["url"].startswith("http://127.0.0.1:")
    assert process.returncode == 0, said
    assert b"Traceback" not in said


def test_the_examples_are_short_and_all_are_tested() -> None:
    found = {path.name: path.read_text() for path in EXAMPLES.glob("*.py")}
    assert set(found) == {*OVER_HTTP, *DIRECT, "start_server.py"}
    for name, text in found.items():
        assert len(text.splitlines()) <= MOST_LINES, name
