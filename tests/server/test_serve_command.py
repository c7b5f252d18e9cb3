"""``vlfit serve`` as a process, with a tiny checkpoint."""

import json
import logging
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.programs import Program, run_program
from vlfit.cli.serving.serve_here import required_keys
from vlfit.errors import UsageError
from vlfit.server.http.listen import bind
from vlfit.settings import read_settings


def about(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_the_command_serves_and_stops(tiny: Callable[[str], Path]) -> None:
    """With a request under way when Ctrl-C comes."""
    folder = tiny("tied")
    words = (folder, "--port", "0", "--device", "cpu", "--json")
    process = Program("serve", *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        ready = json.loads(process.stdout.readline())
        assert ready["url"].startswith("http://127.0.0.1:")
        assert ready["device"] == "cpu"
        by_path = {"model": str(folder), "messages": about("hello"), "max_tokens": 3}
        assert httpx.post(f"{ready['url']}/v1/chat/completions", json=by_path).status_code == 200
        card = httpx.get(f"{ready['url']}/v1/models").json()["data"][0]
        assert (card["id"], card["max_model_len"]) == (ready["model"], ready["context"])
        long = {
            "messages": about("go on"),
            "ignore_eos": True,
            "max_tokens": ready["context"] - 100,
            "stream": True,
        }
        with httpx.stream("POST", f"{ready['url']}/v1/chat/completions", json=long, timeout=20) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            rest = list(lines)
        assert process.wait(60) == 0
        assert "engine_stopped" in rest[-2] or rest[-2] == "data: [DONE]"
        told = process.stderr.read()
    finally:
        process.kill()
        process.communicate()
    (line,) = [line for line in told.splitlines() if f"{ready['url']}/v1" in line and "curl" not in line]
    assert {ready["model"], "cpu", str(ready["context"])} <= set(re.findall(r"[^\s,]+", line))
    assert "curl" in told
    assert re.search(r"^k +kv_cache +(\d+) +\1 +exact +8192 tokens", told, re.MULTILINE)
    assert "warning" not in told
    assert "Traceback" not in told
    assert told.endswith("stopped\n")


def failing(*arguments: str) -> tuple[int, str]:
    done = run_program("serve", *arguments)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_no_checkpoint(tmp_path: Path) -> None:
    code, told = failing(str(tmp_path), "--port", "0")
    assert code == 1
    assert "config.json" in told


def test_a_port_in_use_fails_before_loading(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        code, told = failing(str(tmp_path), "--port", str(port))
    assert code == 1
    assert f"port {port}" in told
    assert "config.json" not in told


@pytest.mark.parametrize(
    "arguments",
    [
        ("mini", "--model", "other"),
        ("--port", "70000"),
        ("--sequences", "0"),
        ("--kv", "0"),
        ("--kv", "all"),
        ("--host", "0.0.0.0"),
        ("--allow-files", "/no/such/folder"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    code, _ = failing(*arguments)
    assert code == 2


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.2", "::"])
def test_other_computers_need_a_key(host: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UsageError, match=f"--host {host}"):
        required_keys(read_settings(host=host))
    assert required_keys(read_settings(host=host, api_key="secret")) == ("secret",)
    (tmp_path / "keys").write_text("a\nb\n")
    assert required_keys(read_settings(host=host, api_keys=tmp_path / "keys")) == ("a", "b")
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert required_keys(read_settings(host=host, allow_anyone=True)) == ()
    assert host in caplog.text


def test_this_computer_needs_no_key() -> None:
    assert required_keys(read_settings()) == ()
    assert required_keys(read_settings(host="::1")) == ()
    with pytest.raises(UsageError, match=r"\b1\b"):
        required_keys(read_settings(api_key="schlüssel"))
