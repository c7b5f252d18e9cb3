"""What a request held is free when it is over: no circle of references leaves it to the garbage collector.

In a process with torch's objects the collector looks at its oldest generation every few hundred requests, and
each of them held its pictures until then: a server grew by 700 MiB.
"""

import gc
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.pictures import picture
from tests.server.harness import Running, running, wait_for
from tests.server.pictures import data_url
from vlfit.api.conversation import ImagePart
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.native import NativeBackend
from vlfit.engine.scheduling.sequence import PreparedPrompt, Sequence
from vlfit.errors import VlfitError
from vlfit.models.interface import PreparedImage
from vlfit.server.chat.chat_schema import ChatRequest
from vlfit.server.server_settings import ServerSettings

OF_A_REQUEST = (ImagePart, PreparedImage, PreparedPrompt, Sequence, ChatRequest, VlfitError)
URL = data_url(picture(300, 200, seed=1))
LARGE = data_url(picture(300, 200, seed=3) + bytes(range(256)) * 8 * 1024)
CUT_OFF = data_url(picture(300, 200, seed=2)[:900])


@pytest.fixture(scope="module")
def server(tiny: Callable[[str], Path]) -> Iterator[Running]:
    options = EngineOptions(device="cpu", max_model_len=512, max_num_seqs=2)
    with (
        NativeBackend.load(tiny("tied"), options) as backend,
        running(backend, ServerSettings(context=backend.context)) as running_server,
    ):
        yield running_server


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> Counter[str]:
    """Of what belongs to one request, how many there are of each kind."""
    return Counter(kind.__name__ for kind in map(type, gc.get_objects()) if issubclass(kind, OF_A_REQUEST))


def body(*urls: str, **wishes: Any) -> dict[str, Any]:
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    parts.append({"type": "text", "text": "what is this?"})
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, "ignore_eos": True} | wishes


@pytest.mark.parametrize(
    ("wanted", "status"),
    [
        (body(URL, URL), 200),
        (body(URL, stream=True), 200),
        (body(URL, CUT_OFF), 400),
        (body(URL, "data:image/png;base64,bm90aGluZw=="), 400),
        (body(URL, "data:,"), 400),
        (body(URL, max_tokens=5000), 400),
        (body(URL, temperature=-1), 400),
    ],
    ids=["answered", "streamed", "cut off", "no picture", "empty", "too long", "refused"],
)
def test_requests_leave_no_reference_cycles(
    server: Running, wanted: dict[str, Any], status: int, no_collector: None
) -> None:
    before = alive()
    for _ in range(2):
        assert httpx.post(f"{server.url}/v1/chat/completions", json=wanted, timeout=30).status_code == status
    wait_for(lambda: alive() == before)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are listed there")
@pytest.mark.parametrize(
    ("wishes", "status"),
    [({}, 200), ({"temperature": -1}, 400), ({"max_tokens": 5000}, 400), ({"messages": [LARGE]}, 400)],
    ids=["answered", "refused", "too long", "invalid"],
)
def test_large_files_of_requests_are_freed(
    server: Running, wishes: dict[str, Any], status: int, no_collector: None
) -> None:
    before = spooled_files()
    wanted = body(LARGE, CUT_OFF if status == 400 else URL) | wishes
    assert httpx.post(f"{server.url}/v1/chat/completions", json=wanted, timeout=30).status_code == status
    wait_for(lambda: spooled_files() == before)


def spooled_files() -> int:
    """How many anonymous files with pictures this process has open."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            count += "vlfit-picture" in os.readlink(link)
    return count


def test_disconnects_leave_no_reference_cycles(server: Running, no_collector: None) -> None:
    before = alive()
    content = json.dumps(body(URL, stream=True, max_tokens=400)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {server.host}\r\nContent-Type: application/json\r\n"
    with server.socket() as connection:
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        assert connection.recv(15).startswith(b"HTTP/1.1 200")
    wait_for(lambda: alive() == before)
