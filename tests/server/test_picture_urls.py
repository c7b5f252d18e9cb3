"""Pictures that the server fetches itself, from a local web server."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.server.harness import running
from tests.server.pictures import png
from tests.server.scripted import ScriptedBackend
from vlfit.api.conversation import ImagePart
from vlfit.server.server_settings import ServerSettings

OPEN = ServerSettings(allow_private_urls=True)


class Gallery(BaseHTTPRequestHandler):
    """``/red.png`` and the like; ``/together/red.png`` once six such are asked for; ``/page`` is HTML."""

    together = threading.Barrier(6)

    def do_GET(self) -> None:
        if self.path.endswith(".png"):
            if self.path.startswith("/together/"):
                self.together.wait(timeout=60)
            self.answer(200, "image/png", png(self.path.rpartition("/")[2][:-4]))
        elif self.path == "/page":
            self.answer(200, "text/html", b"<!doctype html><html>Sign in</html>")
        else:
            self.answer(404, "text/plain", b"no such picture")

    def answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def gallery() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Gallery) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def showing(*urls: str) -> list[ChatCompletionMessageParam]:
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return cast(list[ChatCompletionMessageParam], [{"role": "user", "content": parts}])


def test_pictures_are_fetched_concurrently_in_order(gallery: str) -> None:
    colours = ["red", "blue", "green", "white", "black", "orange"]
    urls = [f"{gallery}/together/{colour}.png" for colour in colours]
    backend = ScriptedBackend()
    with running(backend, OPEN) as server, server.openai() as client:
        client.chat.completions.create(model="scripted", messages=showing(*urls))
    parts = backend.asked[0][0][0].parts
    assert [part.data for part in parts if isinstance(part, ImagePart)] == [png(colour) for colour in colours]


def test_private_addresses_are_refused_by_default(gallery: str) -> None:
    with (
        running(ScriptedBackend()) as server,
        server.openai() as client,
        pytest.raises(openai.BadRequestError) as caught,
    ):
        client.chat.completions.create(model="scripted", messages=showing(f"{gallery}/red.png"))
    assert caught.value.code == "invalid_image"
    assert "private" in caught.value.message


@pytest.mark.parametrize("path", ["/page", "/missing", "/"])
def test_what_is_not_a_picture(gallery: str, path: str) -> None:
    with running(ScriptedBackend(), OPEN) as server, server.openai() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="scripted", messages=showing(gallery + path))
        assert caught.value.code == "invalid_image"
        assert path in caught.value.message
        client.chat.completions.create(model="scripted", messages=showing(f"{gallery}/red.png"))


def test_a_dead_address(gallery: str) -> None:
    with (
        running(ScriptedBackend(), OPEN) as server,
        server.openai() as client,
        pytest.raises(openai.BadRequestError) as caught,
    ):
        client.chat.completions.create(model="scripted", messages=showing("http://127.0.0.1:9/x.png"))
    assert caught.value.code == "invalid_image"
    assert "http://127.0.0.1:9/x.png" in caught.value.message
