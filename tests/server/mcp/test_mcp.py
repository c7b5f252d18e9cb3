"""The MCP server by the official client: in process, over stdio, and over HTTP."""

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import uvicorn
from mcp import Client as McpClient
from mcp import StdioServerParameters

from tests.pictures import picture
from tests.server.fixtures import server, server_settings, shared_backend
from tests.server.harness import Running, wait_for
from tests.tasks.search.test_indexing import HashEmbedder
from vlfit.api.conversation import ImagePart
from vlfit.client import Client
from vlfit.errors import PictureNotFound, UsageError
from vlfit.server.http.listen import bind
from vlfit.server.mcp.allowed_files import AllowedFiles, NotAllowed, open_roots
from vlfit.server.mcp.mcp_server import AT_ONCE, MAX_WAITING, http_app, mcp_server
from vlfit.server.mcp.picture_tools import PictureTools
from vlfit.tasks.search.indexing import update_index
from vlfit.tasks.search.vector_index import VectorIndex, index_path

__all__ = ["server", "server_settings", "shared_backend"]

TOOLS = {"describe", "ask", "detect", "read_text", "compare", "search"}
ANSWER = "A red circle 🙂."
T = TypeVar("T")


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "photos"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.png").write_bytes(picture(seed=1))
    (folder / "inner" / "b.png").write_bytes(picture(seed=2))
    (tmp_path / "secret.png").write_bytes(picture(seed=3))
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "out").symlink_to(tmp_path)
    (folder / "text.png").write_text("no picture")
    return folder


@pytest.fixture
def tools(photos: Path, server: Running) -> Iterator[PictureTools]:
    made = PictureTools(
        AllowedFiles(open_roots([photos])),
        lambda: Client(server.url),
        lambda name, opened_as: HashEmbedder(name),
    )
    yield made
    made.close()


def talk(target: Any, work: Callable[[McpClient], Awaitable[T]]) -> T:
    async def run() -> T:
        async with asyncio.timeout(90):
            async with McpClient(target) as client:
                return await work(client)

    return asyncio.run(run())


def call(target: Any, name: str, **arguments: Any) -> Any:
    return talk(target, lambda client: client.call_tool(name, arguments))


def text(result: Any) -> str:
    return "".join(each.text for each in result.content)


def test_every_tool(tools: PictureTools, photos: Path) -> None:
    async def work(client: McpClient) -> None:
        listed = (await client.list_tools()).tools
        assert {tool.name for tool in listed} == TOOLS
        assert all(tool.description for tool in listed)
        calls: dict[str, dict[str, Any]] = {
            "describe": {"picture": "a.png"},
            "ask": {"question": "What?", "pictures": [str(photos / "a.png"), "inner/b.png"]},
            "read_text": {"picture": "a.png"},
            "compare": {"pictures": ["a.png", "inner/b.png"]},
        }
        for name, arguments in calls.items():
            result = await client.call_tool(name, arguments)
            assert not result.is_error, (name, text(result))
            assert text(result) == ANSWER
            assert result.structured_content["model"] == "scripted"

    talk(mcp_server(tools), work)


@pytest.mark.parametrize(
    ("name", "arguments", "code"),
    [
        ("describe", {"picture": "../secret.png"}, "not_allowed"),
        ("describe", {"picture": "link.png"}, "not_allowed"),
        ("describe", {"picture": "out/secret.png"}, "not_allowed"),
        ("describe", {"picture": "/etc/passwd"}, "not_allowed"),
        ("describe", {"picture": "/nowhere/at/all.png"}, "not_allowed"),
        ("describe", {"picture": "a\0.png"}, "not_allowed"),
        ("describe", {"picture": "https://example.org/a.png"}, "not_allowed"),
        ("describe", {"picture": "file:///etc/passwd"}, "not_allowed"),
        ("describe", {"picture": "FILE:etc/passwd"}, "not_allowed"),
        ("describe", {"picture": "file://example.org/a.png"}, "not_allowed"),
        ("describe", {"picture": "file:///%00"}, "not_allowed"),
        ("describe", {"picture": "file://["}, "not_allowed"),
        ("describe", {"picture": "missing.png"}, "invalid_image"),
        ("describe", {"picture": "x" * 3_000}, "invalid_image"),  # longer than any name in a folder
        ("describe", {"picture": "text.png"}, "invalid_image"),
        ("describe", {"picture": "inner"}, "invalid_image"),
        ("ask", {"question": "", "pictures": []}, "invalid_request"),
        ("ask", {"question": "?", "pictures": ["a.png"] * 9}, "invalid_request"),
        ("compare", {"pictures": ["a.png"]}, "invalid_request"),
        ("detect", {"picture": "a.png", "things": " "}, "invalid_request"),
        ("search", {"query": "red"}, "invalid_request"),
        ("search", {"query": "red", "folder": "out"}, "not_allowed"),
        ("search", {"query": "red", "n": 0}, "invalid_request"),
    ],
)
def test_errors_have_a_code(tools: PictureTools, name: str, arguments: dict[str, Any], code: str) -> None:
    result = call(mcp_server(tools), name, **arguments)
    assert result.is_error
    assert result.structured_content["error"]["code"] == code
    assert f"[{code}]" in text(result)
    assert "Traceback" not in text(result)


def test_errors_of_files_are_told_in_words_of_these_tools(photos: Path) -> None:
    files = AllowedFiles(open_roots([photos]))
    for name in ("missing.png", "inner", "in ner.png", "file:///" + str(photos / "missing.png")[1:]):
        with pytest.raises(PictureNotFound) as caught:
            files.load(name)
        assert name in caught.value.message
        assert "--allow-files" not in caught.value.hint
        assert "%20" not in caught.value.message
    with pytest.raises(NotAllowed):
        files.load("\ud800.png")  # JSON may have half a character


def test_file_urls_below_a_root(photos: Path) -> None:
    files = AllowedFiles(open_roots([photos]))
    (photos / "a b.png").write_bytes((photos / "a.png").read_bytes())
    for url in (
        (photos / "a b.png").as_uri(),
        f"FILE://localhost{photos}/a%20b.png",
        f"file:{photos}/a b.png",
    ):
        part = files.load(url)
        assert isinstance(part, ImagePart)
        assert part.data == (photos / "a.png").read_bytes()


def test_private_urls_stay_private(photos: Path) -> None:
    files = AllowedFiles(open_roots([photos]), urls=True)
    for url in ("http://127.0.0.1:1/a.png", "http://169.254.169.254/latest"):
        with pytest.raises(NotAllowed):
            files.load(url)
    with pytest.raises(UsageError):
        open_roots([photos / "a.png"])


def test_search_in_an_indexed_folder(tools: PictureTools, photos: Path) -> None:
    embedder = HashEmbedder("fake")
    with VectorIndex(index_path(photos), photos) as index:
        update_index(index, photos, lambda: embedder)
    result = call(mcp_server(tools), "search", like="inner/b.png", n=1)
    assert not result.is_error, text(result)
    (hit,) = result.structured_content["results"]
    assert hit["path"] == str(photos / "inner" / "b.png")
    words = call(mcp_server(tools), "search", query="anything")
    assert len(words.structured_content["results"]) >= 2


def test_of_many_calls_some_are_refused(tools: PictureTools, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    running: list[str] = []

    def describe(picture: str, detail: str) -> dict[str, Any]:
        running.append(picture)
        assert go.wait(60)
        return {"text": ANSWER}

    monkeypatch.setattr(tools, "describe", describe)

    async def work(client: McpClient) -> None:
        limit = AT_ONCE + MAX_WAITING
        calls = [
            asyncio.ensure_future(client.call_tool("describe", {"picture": "a.png"}))
            for _ in range(limit + 5)
        ]
        try:
            refused = []
            for done in asyncio.as_completed(calls):
                refused.append(await done)
                if len(refused) == 5:
                    break
            assert [text(each).endswith("[queue_full]") for each in refused] == [True] * 5
            while len(running) < AT_ONCE:
                await asyncio.sleep(0.01)
            assert len(running) == AT_ONCE
        finally:
            go.set()
        told = await asyncio.gather(*calls)
        assert sum(not each.is_error for each in told) == limit
        assert not (await client.call_tool("describe", {"picture": "a.png"})).is_error

    talk(mcp_server(tools), work)


def test_stdio_is_the_protocols_alone(photos: Path, server: Running) -> None:
    program = StdioServerParameters(
        command=sys.executable,
        args=["-m", "vlfit", "mcp", "--root", str(photos), "--server", server.url],
    )

    async def work(client: McpClient) -> None:
        assert {tool.name for tool in (await client.list_tools()).tools} == TOOLS
        assert text(await client.call_tool("describe", {"picture": "a.png"})) == ANSWER
        refused = await client.call_tool("describe", {"picture": "/etc/passwd"})
        assert refused.is_error
        assert refused.structured_content is not None
        assert refused.structured_content["error"]["code"] == "not_allowed"

    talk(program, work)


def test_http_with_a_key_and_without(tools: PictureTools) -> None:
    with served(tools, None) as url:
        assert text(call(url, "describe", picture="a.png")) == ANSWER
        foreign = httpx.post(url, json={}, headers={"host": "evil.example"}, timeout=30)
        assert foreign.status_code in (403, 421)
    with served(tools, "secret") as url:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            refused = httpx.post(url, json={}, headers=headers, timeout=30)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        allowed = httpx.post(url, json={}, headers={"authorization": "Bearer secret"}, timeout=30)
        assert allowed.status_code != 401


class served:  # noqa: N801  (a context manager)
    """The HTTP app of ``tools`` on a free port."""

    def __init__(self, tools: PictureTools, key: str | None) -> None:
        self._listener = bind("127.0.0.1", 0)
        app = http_app(tools, "127.0.0.1", key)
        self._server = uvicorn.Server(
            uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1)
        )
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listener]}, daemon=True
        )

    def __enter__(self) -> str:
        self._thread.start()
        wait_for(lambda: self._server.started)
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}/mcp"

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=60)
        self._listener.close()
