"""A server without a file descriptor left refuses single requests, and goes on as soon as there are some."""

import http.client
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.pictures import picture
from tests.server.harness import wait_for
from tests.server.pictures import data_url

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prlimit")


@pytest.fixture(scope="module")
def process(tiny: Callable[[str], Path]) -> "Iterator[tuple[subprocess.Popen[str], str]]":
    command = [sys.executable, "-m", "vlfit", "serve", str(tiny("tied"))]
    options = ["--port", "0", "--device", "cpu", "--allow-private-urls", "--json"]
    with subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        try:
            yield server, urlsplit(json.loads(server.stdout.readline())["url"]).netloc
        finally:
            server.kill()


def post(connection: http.client.HTTPConnection, url: str | None, path: str = "chat/completions") -> Any:
    """Status and error code of a chat, with a picture if ``url`` is given."""
    parts: list[Any] = [{"type": "text", "text": "what is this?"}]
    parts += [{"type": "image_url", "image_url": {"url": url}}] if url else []
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    connection.request("POST", f"/v1/{path}", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, json.loads(response.read()).get("error", {}).get("code")


def children(pid: int, module: str = "") -> list[int]:
    """Processes that ``pid`` started; with ``module`` those that run it."""
    found = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [
        each
        for each in found
        if not module or module in Path(f"/proc/{each}/cmdline").read_text().split("\0")
    ]


def take_all_files(pid: int) -> None:
    """Leave no file descriptor for process ``pid`` to open, also once it has closed some."""
    hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))


def kill(pids: list[int]) -> None:
    """Kill processes, and wait until none of them runs."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(runs(pid) for pid in pids))


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_requests_without_a_file_descriptor_are_refused_and_later_ones_are_answered(
    process: "tuple[subprocess.Popen[str], str]",
) -> None:
    server, address = process
    limits = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    connection, other = (http.client.HTTPConnection(address, timeout=60) for _ in range(2))
    assert post(connection, None) == (200, None)
    photo, nowhere = data_url(picture(64, 48), "image/jpeg"), "http://127.0.0.1:9/a.jpg"
    assert post(connection, photo) == (200, None)
    for path in ("chat/completions", "vlfit/price"):
        (fork_server,) = children(server.pid, "vlfit.images.decode_worker")
        workers = children(fork_server)
        kill(workers if path == "vlfit/price" else [fork_server, *workers])  # so that a picture needs another
        take_all_files(server.pid)
        assert post(connection, photo, path) == (503, "decoders_unavailable")
        assert post(connection, nowhere, path) == (503, "too_many_open_files")
        assert post(connection, None, path) == (200, None)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, limits)
        assert post(connection, photo, path) == (200, None)
    assert post(connection, nowhere) == (400, "invalid_image")
    assert post(other, photo) == (200, None)
    connection.close()
    other.close()


def test_a_request_imports_nothing(process: "tuple[subprocess.Popen[str], str]", tmp_path: Path) -> None:
    """An import that fails as no file descriptor is left would fail for good."""
    code = """
import json, sys
from tests.server.asking import HELLO
from tests.server.harness import running
from tests.server.pictures import data_url
from tests.pictures import picture
from vlfit.backends.opening import BackendSpec, open_backend
from vlfit.server.server_settings import ServerSettings
import httpx

def ask(url, parts, **fields):
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1, **fields}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code

backend = open_backend(BackendSpec(kind="native", model="mini"), None)
with running(backend, ServerSettings(allow_private_urls=True)) as server:
    text = {"type": "text", "text": "what is this?"}
    urls = [data_url(picture(64, 48)), data_url(picture(900, 700, "PNG")), "http://127.0.0.1:9/a.jpg",
            "http://ex\\u00e4mple.localhost:9/", data_url(b"%PDF-1.7"), data_url(b"text")]
    ask(server.url, "warm up")
    before = set(sys.modules)
    found = [ask(server.url, [{"type": "image_url", "image_url": {"url": url}}, text]) for url in urls]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    found += [ask(server.url, "hello", response_format=schema), ask(server.url, "hello", stream=True)]
    print(json.dumps([found, sorted(set(sys.modules) - before)]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    statuses, modules = json.loads(done.stdout.splitlines()[-1])
    assert statuses == [200, 200, 400, 400, 400, 400, 200, 200]
    assert modules == []
