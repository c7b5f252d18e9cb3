"""A server in the background: started, shown, ended; and by systemd."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from tests.programs import run_program
from vlfit.cli import servers as records
from vlfit.cli.servers import process_start, record_server, running_servers
from vlfit.cli.serving import serve
from vlfit.cli.serving.serve import quote_for_systemd, systemd_unit, with_absolute_paths
from vlfit.errors import CannotWrite
from vlfit.settings import read_settings


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home of its own, in which no other server runs; what a test leaves running is ended."""
    for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "XDG_STATE_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
        (tmp_path / name.lower()).mkdir()
    yield tmp_path
    for record in running_servers():
        os.kill(record.pid, signal.SIGKILL)


def vlfit(*arguments: str, code: int = 0) -> str:
    done = run_program(*arguments)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def test_a_server_in_the_background(tiny: Callable[[str], Path], home: Path) -> None:
    assert "vlfit serve" in vlfit("status")
    words = ("--port", "0", "--device", "cpu", "--daemon", "--json", "--log-format", "json")
    ready = json.loads(vlfit("serve", str(tiny("tied")), *words))
    assert httpx.get(f"{ready['url']}/ready").status_code == 200
    assert os.getsid(ready["pid"]) == ready["pid"]  # apart from this terminal
    shown = vlfit("status")
    assert ready["url"] in shown
    assert f"process {ready['pid']}" in shown
    assert "ready" in shown
    port = ready["url"].rpartition(":")[2]
    told = json.loads(vlfit("status", "--json", "--port", port))
    assert (told["pid"], told["status"]["model"]) == (ready["pid"], ready["model"])
    for command in ("stop", "status"):
        assert "port 1" in vlfit(command, "--port", "1")
    assert json.loads(vlfit("sleep", "--json"))["changed"]  # on whichever port
    assert json.loads(vlfit("wake", "--port", port, "--json"))["state"] == "ready"
    assert ready["url"] in vlfit("top", "--once", "--interval", "0.1")
    with record_server("http://127.0.0.1:1", "another", 30.0):
        for command in ("sleep", "wake", "top", "stop"):
            told = vlfit(command, code=2)
            assert "--port" in told
            assert ready["url"] in told
            assert "http://127.0.0.1:1" in told
        assert "http://127.0.0.1:1" in vlfit("ask", "hello", "--server", code=2)
    asked = vlfit("ask", "hello", "--max-tokens", "1", "--json", "--server")
    assert json.loads(asked.splitlines()[0])["model"] == ready["model"]
    assert f"at {ready['url']}" in vlfit("stop")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{ready['url']}/health")
    assert running_servers() == []
    said = [json.loads(line)["message"] for line in Path(ready["log"]).read_text().splitlines()]
    assert said[0].startswith("loading ")
    assert any(ready["url"] in words for words in said)
    assert said[-1] == "stopped"


def test_a_server_that_does_not_start_says_why(home: Path) -> None:
    told = vlfit("serve", str(home / "none"), "--port", "0", "--daemon", code=1)
    assert "none" in told.split("hint:")[0]
    assert running_servers() == []


def test_records_of_processes_that_are_gone(home: Path) -> None:
    with record_server("http://127.0.0.1:1", "here", 30.0):
        assert [record.model for record in running_servers()] == ["here"]
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        place = records.records_folders()[0] / f"{os.getpid()}.json"
        facts = json.loads(place.read_text())
        # A number that is no process's, and one that is by now another's.
        for name, pid, start in (("gone", ended.pid, "1"), ("other", os.getpid(), "1")):
            (records.records_folders()[0] / f"{name}.json").write_text(
                json.dumps({**facts, "pid": pid, "began": start})
            )
        (records.records_folders()[0] / "broken.json").write_text("{")
        assert [record.model for record in running_servers()] == ["here"]
        assert {each.name for each in records.records_folders()[0].glob("*.json")} == {
            place.name,
            "broken.json",
        }
    assert running_servers() == []
    assert process_start(ended.pid) is None


@pytest.mark.parametrize("command", ["status", "stop"])
def test_what_is_no_record_is_ignored(home: Path, command: str) -> None:
    """Neither waited for, nor followed: a signal to process -1 would go to all of a user's."""
    folder = records.records_folders()[0]
    folder.mkdir(parents=True)
    os.mkfifo(folder / "pipe.json")
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "deeper.json").write_text('{"url": ' + "[" * 20_000)
    (folder / "folder.json").mkdir()
    (folder / "zero.json").symlink_to("/dev/zero")
    (folder / "large.json").write_bytes(b" " * 2**21 + b"{}")
    sound = {"url": "http://127.0.0.1:1", "model": "x", "pid": os.getpid(), "since": 1.0, "drain": 1.0}
    wrong: tuple[dict[str, Any], ...] = (
        *({"pid": pid, "began": None} for pid in (-1, 0, True, "1", 1.5, None, 10**30)),
        *({"url": url} for url in (5, None, "ftp://x", "x")),
        *({"since": since} for since in ("x", None, float("nan"), 10**400)),
        {"drain": float("inf")},
        {"model": ["x"]},
        {"began": 5},
    )
    for number, change in enumerate(wrong):
        facts = {**sound, "began": process_start(os.getpid()), **change}
        (folder / f"{number}.json").write_text(json.dumps(facts))
    assert running_servers() == []
    vlfit(command)


def test_a_status_that_is_none_is_not_shown(home: Path) -> None:
    """Of another program on the port of a server that is gone."""

    class Other(BaseHTTPRequestHandler):
        answers: ClassVar[list[bytes]] = [b"{}", b'{"state": 5}', b"[" * 100_000, b'{"state": "ready"}', b"5"]

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.answers.pop())

        def log_message(self, *_: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_port}"
        with record_server(url, "here", 30.0):
            while Other.answers:
                assert url in vlfit("status")
        other.shutdown()


def test_a_full_disk_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is where a server would say why it does not start."""
    monkeypatch.setattr(serve, "new_log_path", lambda: Path("/dev/full"))
    with pytest.raises(CannotWrite) as caught:
        serve.start_in_background(read_settings(model="mini", port=0), ["serve", "mini"], as_json=False)
    assert os.strerror(errno.ENOSPC) in caught.value.message
    assert "XDG_STATE_HOME" in caught.value.hint


@pytest.mark.parametrize("limit", [0, 1000])
def test_a_log_without_room_is_told(home: Path, limit: int) -> None:
    """A limit of file sizes stands in for a full disk, at once and after some lines."""
    done = subprocess.run(
        [sys.executable, "-m", "vlfit", "serve", "mini", "--port", "0", "--daemon"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},  # the limit would cut it off
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "XDG_STATE_HOME" in done.stderr
    assert running_servers() == []


def block(folder: Path) -> None:
    """Nothing can be written into ``folder``, by root neither."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("in the way")


def test_a_server_is_recorded_where_there_is_room(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    first, *others = records.records_folders()
    assert first == tmp_path / "runtime" / "vlfit"
    block(first)
    with record_server("http://127.0.0.1:1", "here", 30.0):
        assert [record.model for record in running_servers()] == ["here"]
        assert not caplog.text
    assert running_servers() == []
    assert not [path for folder in others for path in folder.glob("*")]


def test_a_server_that_cannot_be_recorded_says_so(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    for folder in records.records_folders():
        block(folder)
    with record_server("http://127.0.0.1:1", "here", 30.0):
        for folder in records.records_folders():
            assert str(folder) in caplog.text


def test_a_server_in_the_background_that_cannot_be_recorded_says_so(
    tiny: Callable[[str], Path], home: Path
) -> None:
    for folder in records.records_folders():
        block(folder)
    told = vlfit("serve", str(tiny("tied")), "--port", "0", "--device", "cpu", "--daemon", "--json")
    (ready,) = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    try:
        assert f"`kill {ready['pid']}`" in told
        assert httpx.get(f"{ready['url']}/ready").status_code == 200
    finally:
        os.kill(ready["pid"], signal.SIGKILL)


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("there is no systemd here")
    file = tmp_path / "vlfit.service"
    file.write_text(
        systemd_unit(["serve", "my model", "--host", "0.0.0.0", "--allow-origin", "https://a.b/$x%y"], 30.0)
    )
    done = subprocess.run(
        [analyze, "--user", "verify", str(file)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_unit_has_the_options_of_the_command() -> None:
    text = vlfit("serve", "mini", "--port", "8001", "--drain", "5s", "--restart", "--systemd")
    assert f"ExecStart={sys.executable} -m vlfit serve mini --port 8001 --drain 5s --restart\n" in text
    assert "TimeoutStopSec=20" in text


@pytest.mark.parametrize("key", [("--api-key", "hidden-1"), ("--api-key=hidden-1",)])
def test_the_unit_names_no_key_nor_drops_it_without_a_word(key: tuple[str, ...]) -> None:
    text = vlfit("serve", "mini", *key, "--systemd", code=2)
    assert "hidden" not in text
    assert "ExecStart" not in text
    assert "--api-keys FILE" in text


def test_a_key_of_the_environment_is_not_in_the_unit_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLFIT_API_KEY", "hidden-1")
    text = vlfit("serve", "mini", "--systemd")
    assert "hidden" not in text
    assert "VLFIT_API_KEY" in text


def test_paths_in_the_unit_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mini").mkdir()
    Path("keys").write_text("secret\n")
    text = vlfit("serve", "./mini", "--api-keys", "keys", "--allow-files=.", "--systemd")
    expected = f"serve {tmp_path}/mini --api-keys {tmp_path}/keys --allow-files={tmp_path} --restart\n"
    assert expected in text
    assert with_absolute_paths(["--model=./mini"], "./mini") == [f"--model={tmp_path}/mini"]
    assert with_absolute_paths(["serve", "mini"], "mini") == ["serve", "mini"]  # the bundled one
    assert with_absolute_paths(["serve", "not/here"], "not/here") == ["serve", "not/here"]


def test_one_way_into_the_background_is_enough() -> None:
    told = vlfit("serve", "mini", "--daemon", "--systemd", code=2)
    assert "--daemon" in told
    assert "--systemd" in told


@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("plain", "plain"),
        ("two words", '"two words"'),
        ('a"b\\', '"a\\"b\\\\"'),
        ("100%", "100%%"),
        ("$x", "$$x"),
    ],
)
def test_words_as_systemd_reads_them(word: str, written: str) -> None:
    assert quote_for_systemd(word) == written
