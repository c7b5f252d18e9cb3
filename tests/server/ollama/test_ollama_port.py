"""``vlfit serve --ollama``: Ollama's port beside the server's own, also behind a relay."""

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.programs import Program, run_program
from vlfit.errors import CannotListen
from vlfit.server.http.listen import bind
from vlfit.server.server_settings import OLLAMA_PORT

URL = f"http://127.0.0.1:{OLLAMA_PORT}"


@pytest.mark.parametrize("flags", [[], ["--restart"]], ids=["alone", "restart"])
def test_both_ports_are_one_server(tiny: Callable[[str], Path], flags: list[str]) -> None:
    try:
        bind("127.0.0.1", OLLAMA_PORT).close()
    except CannotListen:
        pytest.skip("Ollama's port is in use on this computer")
    words = ("serve", tiny("tied"), "--port", "0", "--device", "cpu", "--json", "--ollama", *flags)
    process = Program(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        ready = json.loads(process.stdout.readline())
        assert httpx.get(URL).text == "Ollama is running"
        for url in (URL, ready["url"]):
            [row] = httpx.get(f"{url}/api/tags").json()["models"]
            assert row["name"].startswith(ready["model"])
        body = {
            "model": row["name"],
            "messages": [{"role": "user", "content": "hello"}],
            "options": {"num_predict": 3},
            "stream": False,
        }
        told = httpx.post(f"{URL}/api/chat", json=body, timeout=60).json()
        assert told["eval_count"] == 3
        second = run_program(*words)
        assert second.returncode == 1
        assert "--ollama" in second.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
