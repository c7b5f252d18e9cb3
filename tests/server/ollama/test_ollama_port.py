"""``vlfit serve --ollama``: Ollama's port beside the server's own, also behind a relay."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from vlfit.errors import CannotListen
from vlfit.server.http.listen import bind
from vlfit.server.server_settings import OLLAMA_PORT

VLFIT = [sys.executable, "-c", "from vlfit.cli.main import main; main()", "serve"]
URL = f"http://127.0.0.1:{OLLAMA_PORT}"


@pytest.mark.parametrize("flags", [[], ["--restart"]], ids=["alone", "restart"])
def test_both_ports_are_one_server(tiny: Callable[[str], Path], flags: list[str]) -> None:
    try:
        bind("127.0.0.1", OLLAMA_PORT).close()
    except CannotListen:
        pytest.skip("Ollama's port is in use on this computer")
    command = [*VLFIT, str(tiny("tied")), "--port", "0", "--device", "cpu", "--json", "--ollama", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
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
        second = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert second.returncode == 1
        assert "--ollama" in second.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
