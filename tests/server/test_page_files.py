"""The page's static files: served without a key, with a strict content security policy."""

import re
from collections.abc import Iterator
from importlib.resources import files

import httpx
import pytest

from tests.server.harness import Running, running
from tests.server.scripted import ScriptedBackend
from vlfit.server.server_settings import ServerSettings


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(ScriptedBackend(), ServerSettings(api_keys=("secret",))) as server:
        yield server


def test_page_files_are_served_without_a_key(server: Running) -> None:
    start = httpx.get(server.url)
    assert start.headers["content-type"] == "text/html; charset=utf-8"
    named = set(re.findall(r'(?:src|href)="(page/[^"]+)"', start.text))
    scripts = [path.name for path in (files("vlfit.server") / "page").iterdir() if path.name.endswith(".js")]
    for name in (*named, *(f"page/{script}" for script in scripts)):
        reply = httpx.get(f"{server.url}/{name}")
        assert reply.status_code == 200, name
        assert "text/javascript" in reply.headers["content-type"] or not name.endswith(".js")
    facts = httpx.get(f"{server.url}/page/facts.json").json()
    assert "{}" in facts["prompts"]["detect"]


def test_content_security_policy(server: Running) -> None:
    reply = httpx.get(server.url)
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"https?:", policy)
    page = files("vlfit.server") / "page"
    for path in (each for each in page.iterdir() if each.is_file() and not each.name.endswith(".py")):
        addresses = re.findall(r"https?://[^\s\"'`)]+", path.read_text(encoding="utf-8"))
        assert all(address.startswith("http://www.w3.org/") for address in addresses), path.name
    assert not re.search(r"<script>|<style| style=| on\w+=", reply.text)
