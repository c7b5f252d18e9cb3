"""Pictures over HTTP: costly ones are errors of their own; those hung up on leave decoders and queue."""

import json
import os
import re
import socket
import tracemalloc
from collections.abc import Iterator

import httpx
import pytest

from tests.hostile_pictures import KINDS
from tests.pictures import picture
from tests.server.asking import HELLO, post
from tests.server.harness import Running, running, wait_for
from tests.server.pictures import data_url
from tests.server.scripted import ScriptedBackend
from vlfit.api.conversation import Conversation, ImagePart, Tool
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Prepared
from vlfit.errors import DecodersUnavailable
from vlfit.images import decode_pool as pools
from vlfit.images.clips import decode_picture
from vlfit.images.decode_pool import DecodePool, DecodeStats
from vlfit.images.limits import SERVER_FORMATS, DecodeLimits
from vlfit.server import app, generation
from vlfit.server.app import check_decode_workers
from vlfit.server.server_settings import ServerSettings
from vlfit.units import MIB

LIMITS = DecodeLimits(SERVER_FORMATS, cpu_seconds=600, wall_seconds=600.0, yields_when_slow=True)
SLOW = KINDS["bmp-rle8-65000-wide"].file()


class Decoding(ScriptedBackend):
    """A scripted backend that decodes the pictures of a request."""

    def prepare(
        self, conversation: Conversation, sampling: SamplingParams, tools: tuple[Tool, ...] = ()
    ) -> Prepared:
        for message in conversation:
            for part in message.parts:
                if isinstance(part, ImagePart):
                    decode_picture(part, lambda width, height: (32, 32))
        return super().prepare(conversation, sampling, tools)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[DecodePool]:
    """The process's pool, of one worker."""
    pool = DecodePool(1)
    monkeypatch.setattr(pools, "_pool", pool)
    yield pool
    pool.close()


@pytest.fixture
def served(pool: DecodePool) -> Iterator[Running]:
    with running(Decoding(), ServerSettings(decode_limits=LIMITS)) as server:
        yield server


def asking(data: bytes) -> dict[str, object]:
    url = {"type": "image_url", "image_url": {"url": data_url(data)}}
    return {"messages": [{"role": "user", "content": [url]}], "max_tokens": 2}


def hang_on(server: Running, body: object) -> socket.socket:
    """A connection with a request on it that has not been answered."""
    content = json.dumps(body).encode()
    connection = server.socket()
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(content) + content
    )
    return connection


def answers(server: Running, body: object) -> int:
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).status_code


def test_costly_pictures_are_errors_of_their_own(served: Running, pool: DecodePool) -> None:
    hostile = KINDS["avif-frame-larger-than-its-header"].file()
    status, error = post(served, asking(hostile))
    assert (status, error["code"]) == (400, "image_too_costly")
    assert error["param"] == "messages[0].content[0].image_url.url"
    assert re.search(r"\d MiB\b", error["message"])
    assert answers(served, asking(picture())) == 200
    metrics = httpx.get(f"{served.url}/metrics").text
    assert 'vlfit_image_decode_stopped_total{reason="memory"} 1' in metrics
    assert 'vlfit_image_decode_workers{state="busy"} 0' in metrics
    assert "vlfit_image_decode_waiting 0" in metrics


def test_formats_that_servers_do_not_take(served: Running) -> None:
    status, error = post(served, asking(picture(file_format="TIFF")))
    assert (status, error["code"], error["param"]) == (
        400,
        "invalid_image",
        "messages[0].content[0].image_url.url",
    )
    assert "--image-formats" in error["message"]


def test_pictures_that_are_hung_up_on_leave_at_once(served: Running, pool: DecodePool) -> None:
    """While they take all decoders and all threads for pictures, text is answered."""
    connections = [hang_on(served, asking(SLOW)) for _ in range(generation.MAX_PICTURE_THREADS + 4)]
    wait_for(lambda: pool.stats().waiting >= generation.MAX_PICTURE_THREADS - 3)
    wait_for(lambda: pool.stats().memory_in_use > 0)
    assert answers(served, {"messages": HELLO}) == 200
    for connection in connections:
        connection.close()
    assert answers(served, asking(picture())) == 200
    wait_for(lambda: (pool.stats().busy, pool.stats().waiting, pool.stats().memory_in_use) == (0, 0, 0))


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there files stay in memory")
def test_a_large_body_is_never_in_the_servers_memory(served: Running, pool: DecodePool) -> None:
    content = json.dumps(asking(picture() + os.urandom(12 * MIB))).encode()
    assert answers(served, asking(picture())) == 200  # what is loaded once
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    with served.socket() as connection:
        tracemalloc.start()
        try:
            connection.sendall(head % len(content))
            connection.sendall(content)
            reply = connection.recv(15)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert reply == b"HTTP/1.1 200 OK"
    assert peak < 6 * MIB  # the body has 16, its file 12


def test_not_ready_while_no_decoder_is_free(
    served: Running, pool: DecodePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MAX_DECODER_WAIT", 0.05)
    assert httpx.get(f"{served.url}/ready").status_code == 200
    connections = [hang_on(served, asking(SLOW)) for _ in range(4)]
    wait_for(lambda: httpx.get(f"{served.url}/ready").status_code == 503)
    assert httpx.get(f"{served.url}/health").status_code == 200
    for connection in connections:
        connection.close()
    wait_for(lambda: httpx.get(f"{served.url}/ready").status_code == 200)


def test_busy_decoders_that_become_free_are_fine() -> None:
    def stats(worker_wait: float, memory_wait: float) -> DecodeStats:
        return DecodeStats(4, 3, 9, 2**30, 2**30, {}, worker_wait, memory_wait)

    check_decode_workers(stats(9.9, 9.9))
    for waits in ((10.1, 0.0), (0.0, 10.1)):
        with pytest.raises(DecodersUnavailable) as caught:
            check_decode_workers(stats(*waits))
        assert caught.value.http_status == 503
        assert ("workers" in caught.value.message) == (waits[0] > 10)  # it names what is short
