"""``vlfit serve --pull``: requests for models of the catalog that are not here download and then get them."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.hub import Hub, running_hub
from tests.programs import Program
from tests.server.harness import wait_for

NAME, OTHER = "Qwen/Qwen3-VL-2B-Instruct-FP8", "Qwen/Qwen3-VL-4B-Instruct-FP8"


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture(scope="module")
def url(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "VLFIT_"))}
    home = str(tmp_path_factory.mktemp("home"))
    words = ("serve", "mini", "--pull", "--json", "--port", "0", "--device", "cpu", "--context", "256")
    variables = {**clean, "HF_HOME": home, "HOME": home, "HF_ENDPOINT": hub.url}
    with Program(*words, env=variables, stdout=subprocess.PIPE) as process:
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()
            process.wait(60)


def ask(url: str, model: str) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


def test_a_request_begins_a_download_and_is_answered_when_it_is_here(
    url: str, hub: Hub, tiny: Callable[[str], Path]
) -> None:
    hub.add(NAME, tiny("tied"))
    first = ask(url, "2B-FP8")
    assert (first.status_code, first.json()["error"]["code"]) == (503, "model_downloading")
    assert int(first.headers["retry-after"]) > 0
    wait_for(lambda: ask(url, "2B-FP8").status_code == 200)
    answer = ask(url, "qwen3-vl:2b")
    assert (answer.status_code, answer.json()["model"]) == (200, NAME)
    listed = [card["id"] for card in httpx.get(f"{url}/v1/models").json()["data"]]
    assert listed == ["mini", NAME]


def test_ollamas_pull_shows_the_progress(url: str, hub: Hub, tiny: Callable[[str], Path]) -> None:
    hub.add(OTHER, tiny("untied_sharded"))
    lines: list[dict[str, Any]] = []
    with httpx.stream("POST", f"{url}/api/pull", json={"model": "4B-FP8"}, timeout=60) as reply:
        assert reply.status_code == 200
        lines += map(json.loads, reply.iter_lines())
    assert (lines[0]["status"], lines[-1]["status"]) == ("pulling manifest", "success")
    assert all(0 <= line["completed"] <= line["total"] for line in lines if "total" in line)
    assert ask(url, "4B-FP8").json()["model"] == OTHER
    again = httpx.post(f"{url}/api/pull", json={"model": "4B-FP8", "stream": False}, timeout=60)
    assert again.json() == {"status": "success"}


def test_only_models_of_the_catalog_are_downloaded(url: str, hub: Hub, tiny: Callable[[str], Path]) -> None:
    hub.add("somebody/something", tiny("tied"))
    before = len(hub.requests)
    for name in ("somebody/something", "no-such-model", "../etc"):
        refused = ask(url, name)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        refused = httpx.post(f"{url}/api/pull", json={"model": name})
        assert refused.status_code == 404
        assert "catalog" in refused.json()["error"], "this server does download, but no such model"
    assert len(hub.requests) == before


def test_a_download_that_fails_is_told(url: str) -> None:
    """The hub does not have it."""
    told = httpx.post(f"{url}/api/pull", json={"model": "8B-FP8", "stream": False}, timeout=60)
    assert told.status_code == 404
    assert "8B" in told.json()["error"]
    streamed = httpx.post(f"{url}/api/pull", json={"model": "8B-FP8"}, timeout=60)
    assert "error" in json.loads(streamed.text.splitlines()[-1])
    assert ask(url, "8B-FP8").status_code == 404
