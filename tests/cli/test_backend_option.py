"""``--backend``: who runs the model, for every command that asks one; and a server in front of another."""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.cli.conftest import Vlfit
from tests.scripted_backend import png
from tests.server.harness import Running, running
from tests.server.scripted import ScriptedBackend
from vlfit.cli.options import normalize_server_arguments
from vlfit.cli.session import resolve_backend
from vlfit.errors import UsageError
from vlfit.server.server_settings import ServerSettings
from vlfit.settings import read_settings
from vlfit.tasks.boxes import BOXES_SCHEMA, fenced_json_grammar
from vlfit.tasks.objects import SCENE_SCHEMA

CUPS = '```json\n[{"bbox_2d": [0, 0, 500, 1000], "label": "cup"}]\n```'
URL = "http://127.0.0.1:8000"


@pytest.fixture
def scripted(shared_backend: ScriptedBackend) -> ScriptedBackend:
    """Behind the server, where other commands' tests have a model in this process."""
    shared_backend.reset()
    return shared_backend


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "red.png"
    path.write_bytes(png(640, 480))
    return path


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("caption --backend remote {} a.png", "caption --backend remote --server {} a.png"),
        ("caption a.png --backend=remote {}", "caption a.png --backend=remote --server {}"),
        ("--debug ask --backend remote {} What?", "--debug ask --backend remote --server {} What?"),
        ("chat --backend remote {}", "chat --backend remote --server {}"),
        # A server is named already, so that a URL is a picture's.
        ("caption --server http://a --backend remote {}", None),
        ("caption --backend remote {} --server=http://a", None),
        ("caption --backend remote a.png", None),
        ("caption --backend native {}", None),
        ("caption remote {}", None),
        ("caption --backend remote", None),
        ("serve --backend remote {}", None),
        ("--debug serve --backend remote {}", None),
    ],
)
@pytest.mark.parametrize(
    "url",
    [
        *(URL, "gpu-box:8000", "127.0.0.1:8000/v1", "localhost", "https://a.example/v1"),
        *("localhost:8872/foo", "ftp://a.example", "host:99999"),  # wrong, which is said of a server's URL
    ],
)
def test_a_url_behind_the_word_remote_is_the_server(typed: str, meant: str | None, url: str) -> None:
    words = typed.format(url).split()
    assert normalize_server_arguments(words) == (words if meant is None else meant.format(url).split())


@pytest.mark.parametrize(
    ("environment", "typed", "expected"),
    [
        ({}, (None, None), ("native", None)),
        ({}, ("native", None), ("native", None)),
        ({}, ("remote", URL), ("remote", URL)),
        ({}, (None, URL), ("remote", URL)),
        ({"SERVER": URL}, (None, None), ("remote", URL)),
        ({"SERVER": URL}, ("remote", None), ("remote", URL)),
        ({"SERVER": URL}, ("native", None), ("native", None)),
        ({"SERVER": URL}, ("transformers", None), ("transformers", None)),
        ({"SERVER": "http://other"}, ("remote", URL), ("remote", URL)),
        ({"BACKEND": "transformers"}, (None, None), ("transformers", None)),
        ({"BACKEND": "transformers"}, (None, URL), ("remote", URL)),
        ({"BACKEND": "remote", "SERVER": URL}, (None, None), ("remote", URL)),
        ({}, ("native", URL), UsageError),
        ({}, ("remote", None), UsageError),
        ({"BACKEND": "remote"}, (None, None), UsageError),
        ({"BACKEND": "native", "SERVER": URL}, (None, None), UsageError),
    ],
)
def test_what_is_typed_goes_before_the_environment(
    environment: dict[str, str],
    typed: tuple[str | None, str | None],
    expected: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(f"VLFIT_{name}", value)
    settings = read_settings(backend=typed[0], server=typed[1])
    if expected is UsageError:
        with pytest.raises(UsageError):
            resolve_backend(settings, *typed)
    else:
        assert resolve_backend(settings, *typed) == expected


def test_every_command_asks_the_server(
    vlfit: Vlfit, server: Running, scripted: ScriptedBackend, picture: Path
) -> None:
    remote = ("--backend", "remote", server.url)
    assert vlfit("caption", *remote, picture).out == "A red circle 🙂.\n"
    assert vlfit("ask", picture, *remote, "What is it?").out == "A red circle 🙂.\n"
    talked = vlfit("chat", *remote, "--quiet", stdin="Hello\nAnd now?\n")
    assert talked.out == "A red circle 🙂.\n" * 2
    assert len(scripted.asked[-1][0]) == 3, "with memory"
    scripted.words = (CUPS,)
    [found] = json.loads(vlfit("detect", *remote, picture, "cups", "--json").out)["objects"]
    assert found["box"] == [0, 0, 320, 480]
    told = json.loads(vlfit("scene", picture, *remote, "--json").out)
    assert [thing["label"] for thing in told["objects"]] == ["cup"]
    forms = [started.grammar for started in scripted.started[-2:]]
    assert forms == [fenced_json_grammar(BOXES_SCHEMA), fenced_json_grammar(SCENE_SCHEMA)], (
        "as a model here is held to"
    )


def test_a_backend_that_there_is_not(vlfit: Vlfit, picture: Path) -> None:
    ended = vlfit("caption", "--backend", "llama", picture)
    assert ended.code == 2
    for word in ("llama", "native", "--backend", "VLFIT_BACKEND"):
        assert word in ended.err


def test_serve_refuses_what_cannot_act_on_another_server(
    vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = vlfit(
        "serve", "--backend", "remote", URL, "--context", 512, "--no-speculate", "--idle-sleep", "5m"
    )
    assert ended.code == 2
    for word in ("--context", "--no-speculate", "--idle-sleep", URL):
        assert word in ended.err
    monkeypatch.setenv("VLFIT_BACKEND", "remote")
    nowhere = vlfit("caption", "a.png")
    assert nowhere.code == 2
    for word in ("VLFIT_BACKEND", "--server", "VLFIT_SERVER"):
        assert word in nowhere.err
    monkeypatch.delenv("VLFIT_BACKEND")
    without = vlfit("serve", "--backend", "remote")
    assert without.code == 2
    assert "--backend remote http://host:port" in without.err
    unit = vlfit("serve", "--backend", "remote", URL, "--server-key", "secret", "--systemd")
    assert unit.code == 2
    assert "VLFIT_SERVER_KEY" in unit.err


def test_a_server_in_front_of_another_with_keys_of_its_own(
    scripted: ScriptedBackend, tmp_path: Path, vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process: what it says, whom it lets in, and that its clients' keys stay with it."""
    with running(scripted, ServerSettings(api_keys=("upstream",), context=4096)) as behind:
        command = [sys.executable, "-m", "vlfit", "serve", "--backend", "remote", behind.url, "--port", "0"]
        keys = {"VLFIT_API_KEY": "mine", "VLFIT_SERVER_KEY": "upstream", "PATH": "", "HOME": str(tmp_path)}
        process = subprocess.Popen(
            [*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=keys
        )
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            assert (ready["model"], ready["device"]) == ("scripted", f"{behind.url}/v1")
            body = {"messages": [{"role": "user", "content": "Hello"}]}
            refused = httpx.post(
                f"{ready['url']}/v1/chat/completions", json=body, headers={"Authorization": "Bearer upstream"}
            )
            assert refused.status_code == 401
            taken = httpx.post(
                f"{ready['url']}/v1/chat/completions", json=body, headers={"Authorization": "Bearer mine"}
            )
            assert taken.json()["choices"][0]["message"]["content"] == "A red circle 🙂."
            monkeypatch.setenv("VLFIT_API_KEY", "mine")
            watched = vlfit("top", "--url", ready["url"], "--once").out
            assert "scripted" in watched
            assert "MiB" not in watched, "numbers that nobody told"
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 0
            assert process.stderr is not None
            told = process.stderr.read()
        finally:
            process.kill()
            process.communicate()
        assert f"{behind.url}/v1" in told
        assert "upstream" not in told
        wrong = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=keys | {"VLFIT_SERVER_KEY": "no"},
            timeout=60,
            check=False,
        )
        assert wrong.returncode == 1
        assert "VLFIT_SERVER_KEY" in wrong.stderr


def test_nobody_there(vlfit: Vlfit, picture: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    for command in (["caption", "--backend", "remote", url, picture], ["serve", "--backend", "remote", url]):
        ended = vlfit(*command)
        assert ended.code == 1
        assert url in ended.err
