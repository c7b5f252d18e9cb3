"""``vlfit top`` where no server of ours answers: none at all, one that wants a key, another program's."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.cli.conftest import Vlfit
from tests.cli.test_top import once
from tests.machine.nvml import install
from tests.server.harness import running
from tests.server.scripted import ScriptedBackend
from vlfit.errors import ServerUnreachable
from vlfit.server.server_settings import ServerSettings


@pytest.mark.parametrize("url", ["", "ftp://host", "http://127.0.0.1:99999", "http://[::1"])
def test_what_is_no_url(vlfit: Vlfit, url: str) -> None:
    ended = vlfit("top", "--once", "--url", url or " ")
    assert ended.code == 2, ended
    assert "Traceback" not in ended.err


def test_a_server_that_was_named_must_be_there(vlfit: Vlfit) -> None:
    ended = vlfit("top", "--once", "--url", "127.0.0.1:9")
    assert (ended.code, ended.out) == (ServerUnreachable.exit_code, "")
    assert "http://127.0.0.1:9" in ended.err


@pytest.mark.parametrize("interval", ["0", "-1", "often", "nan"])
def test_intervals_that_make_no_sense(vlfit: Vlfit, interval: str) -> None:
    assert vlfit("top", "--once", "--interval", interval).code == 2


def test_a_server_that_wants_a_key(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(ScriptedBackend(), ServerSettings(api_keys=("sesame",))) as server:
        refused = vlfit("top", "--once", "--url", server.url)
        assert refused.code == 1
        assert "VLFIT_API_KEY" in refused.err
        monkeypatch.setenv("VLFIT_PORT", str(server.port))
        unnamed = vlfit("top", "--once")
        assert unnamed.code == 0  # nobody asked for this server
        assert "x-api-key" in unnamed.out
        assert "scripted" not in unnamed.out
        monkeypatch.setenv("VLFIT_API_KEY", "sesame")
        told = once(vlfit, "--url", server.url)
    assert told["server"]["model"] == "scripted"
    assert told["rates"] is None  # this backend keeps no account


def test_a_backend_without_an_account_has_a_page(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, failure=12)
    with running(ScriptedBackend()) as server:
        ended = vlfit("top", "--once", "--interval", "0.3", "--url", server.url)
    assert ended.code == 0
    assert "scripted" in ended.out
    assert "MiB" not in ended.out  # it does not report its memory


@pytest.fixture(params=[(404, b"{}"), (200, b"<html>"), (200, b"[]"), (200, b'{"status": "ok"}')])
def another(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a server that is no vlfit."""
    status, body = request.param

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_another_program_on_that_port(vlfit: Vlfit, another: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = vlfit("top", "--once", "--url", another)
    assert ended.code == 1
    assert "--url" in ended.err
    monkeypatch.setenv("VLFIT_PORT", another.rpartition(":")[2])
    assert vlfit("top", "--once").code == 0
