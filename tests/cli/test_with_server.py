"""The commands over a running server give the words that they give in process."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Vlfit
from tests.scripted_backend import png
from tests.server.harness import Running, running
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.native import NativeBackend
from vlfit.server.server_settings import ServerSettings


@pytest.fixture(scope="module")
def server(tiny: Callable[[str], Path]) -> Iterator[Running]:
    import torch

    torch.set_num_threads(1)
    options = EngineOptions(device="cpu", max_model_len=1024, max_num_seqs=1)
    with NativeBackend.load(tiny("tied"), options) as backend, running(backend) as server:
        yield server


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "red.png"
    path.write_bytes(png(200, 100))
    return path


@pytest.mark.usefixtures("with_tiny_model")
@pytest.mark.parametrize("command", ["caption", "ask", "chat"])
def test_the_same_answer_as_in_process(command: str, vlfit: Vlfit, server: Running, picture: Path) -> None:
    arguments = [command, picture, *(["What is this?"] if command == "ask" else [])]
    options = ["--json", "--max-tokens", 12, "--temperature", 0]
    here = json.loads(vlfit(*arguments, *options, "-m", "tiny", stdin="What is this?\n").out)
    there = json.loads(vlfit(*arguments, *options, "--server", server.url, stdin="What is this?\n").out)
    assert here.pop("timings")["total_s"] > 0
    assert there.pop("timings")["total_s"] > 0
    assert here == there


def test_the_server_of_the_environment(
    vlfit: Vlfit, server: Running, picture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLFIT_SERVER", server.url)
    ended = vlfit("caption", picture, "--max-tokens", 3)
    assert ended.code == 0
    assert "loading" not in ended.err
    refused = vlfit("caption", picture, "--context", 512)
    assert refused.code == 2
    assert "--context" in refused.err


def test_a_server_that_wants_a_key(
    vlfit: Vlfit, picture: Path, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = EngineOptions(device="cpu", max_model_len=1024, max_num_seqs=1)
    with (
        NativeBackend.load(tiny("tied"), options) as backend,
        running(backend, ServerSettings(api_keys=("sesame",))) as server,
    ):
        refused = vlfit("caption", picture, "--server", server.url)
        assert refused.code == 1
        assert "VLFIT_API_KEY" in refused.err
        monkeypatch.setenv("VLFIT_API_KEY", "sesame")
        assert vlfit("caption", picture, "--server", server.url, "--max-tokens", 3).code == 0


def test_a_model_that_the_server_does_not_run(vlfit: Vlfit, server: Running, picture: Path) -> None:
    ended = vlfit("caption", picture, "--server", server.url, "--model", "another/model")
    assert (ended.code, ended.out) == (1, "")
    assert "another/model" in ended.err


def test_a_bad_picture_is_told_by_the_server(vlfit: Vlfit, server: Running, tmp_path: Path) -> None:
    bad, good = tmp_path / "bad.png", tmp_path / "good.png"
    bad.write_bytes(b"just some text")
    good.write_bytes(png())
    ended = vlfit("caption", bad, good, "--server", server.url, "--max-tokens", 3)
    assert ended.code == 1
    assert ended.out.startswith(f"{good}: ")
    assert f"error: {bad}" in ended.err
