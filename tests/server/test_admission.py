"""Admission: slots are limited, released once, and refusals say when to retry."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.server.harness import Running, running, slowly, wait_for
from tests.server.pictures import data_url, png
from tests.server.scripted import ScriptedBackend
from vlfit.api.conversation import single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.api.stats import Counters
from vlfit.backends.base import Capabilities
from vlfit.backends.native import NativeBackend
from vlfit.backends.remote import RemoteBackend
from vlfit.backends.startup import StartupTimer
from vlfit.cli.printing import Printer
from vlfit.cli.serving.serve_here import _load, _server_settings
from vlfit.errors import InvalidRequest, QueueFull, UsageError
from vlfit.server.http.admission import MAX_RETRY_AFTER, AdmissionQueue
from vlfit.server.server_settings import ServerSettings
from vlfit.settings import read_settings

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


class Paced(ScriptedBackend):
    """Says of itself that it has done ``finished`` requests in ``seconds``."""

    capabilities = Capabilities(account=True)
    checkpoint: Any = None
    finished: int = 10
    seconds: float = 30.0

    def account(self) -> Any:
        return SimpleNamespace(counters=Counters(seconds=self.seconds, finished=self.finished))


def refused(places: AdmissionQueue, count: int = 1) -> int:
    with pytest.raises(QueueFull) as caught, places.acquire(count):
        pass
    return caught.value.retry_after


def test_slots_are_released_once() -> None:
    places = AdmissionQueue(ScriptedBackend(), 3)
    with places.acquire(2) as held:
        with places.acquire(1):
            refused(places)
        assert refused(places, 2) >= 1
        for _ in range(5):
            held.release_one()
        with places.acquire(3):
            refused(places)
    assert places.in_use == 0


def test_held_slots_stay_taken() -> None:
    places = AdmissionQueue(ScriptedBackend(), 4)
    with places.acquire(2) as held:
        held.hold()
    assert places.in_use == 2
    held.release_hold()
    assert places.in_use == 0
    with places.acquire(2) as held:
        held.hold()
        held.release_hold()
        assert places.in_use == 2
    assert places.in_use == 0


def test_a_failed_request_releases_its_slots() -> None:
    places = AdmissionQueue(ScriptedBackend(), 2)
    with pytest.raises(ValueError, match="broken"), places.acquire(2):
        raise ValueError("broken")
    assert places.in_use == 0


def test_more_than_the_limit_is_an_invalid_request() -> None:
    places = AdmissionQueue(ScriptedBackend(), 2)
    with pytest.raises(InvalidRequest, match=r"n is 3; .* 2 ") as caught, places.acquire(3):
        pass
    assert caught.value.param == "n"


def test_retry_after_follows_pace_and_earlier_refusals() -> None:
    now = 1000.0
    places = AdmissionQueue(Paced(), 1, clock=lambda: now)  # one completion ends every three seconds
    with places.acquire(1):
        assert [refused(places) for _ in range(3)] == [3, 6, 9]
        now += 8
        assert refused(places) == 4  # 12 seconds from the start
        now += 100
        assert refused(places) == 3  # nobody who was told before is still to come
        assert [refused(places) for _ in range(100)][-1] == MAX_RETRY_AFTER


@pytest.mark.parametrize(("finished", "seconds", "wait"), [(0, 0.0, 1), (0, 20.0, 20), (1000, 10.0, 1)])
def test_retry_after_before_any_completion(finished: int, seconds: float, wait: int) -> None:
    backend = Paced()
    backend.finished, backend.seconds = finished, seconds
    places = AdmissionQueue(backend, 1, clock=lambda: 0.0)
    with places.acquire(1):
        assert refused(places) == wait


def test_no_limit_is_no_limit() -> None:
    places = AdmissionQueue(ScriptedBackend(), None)
    with places.acquire(10**6):
        pass
    with pytest.raises(UsageError):
        ServerSettings(max_completions=0)


# Over HTTP


def busy(server: Running, backend: ScriptedBackend, count: int) -> list[threading.Thread]:
    """``count`` requests that have begun, each in a thread of its own."""
    begun = len(backend.started)

    def one() -> None:
        with server.openai() as client:
            client.chat.completions.create(model="scripted", messages=HELLO)

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(backend.started) == begun + count)
    return threads


def finish(backend: ScriptedBackend, threads: list[threading.Thread]) -> None:
    """What ``busy`` began comes to its end, and so does what comes after it."""
    assert backend.go_on is not None
    backend.go_on.set()
    for thread in threads:
        thread.join()


def test_a_full_queue_gives_429_before_pictures_are_fetched() -> None:
    backend = Paced(go_on=threading.Event())
    with running(backend, ServerSettings(max_completions=2)) as server:
        threads = busy(server, backend, 2)
        asked = len(backend.asked)
        url = f"{server.url}/v1/chat/completions"
        parts = [{"type": "image_url", "image_url": {"url": data_url(png("red"))}}]
        waits: list[int] = []
        for stream in (False, True):
            body = {"messages": [{"role": "user", "content": parts}], "stream": stream}
            reply = httpx.post(url, json=body)
            assert reply.status_code == 429
            error = reply.json()["error"]
            assert (error["code"], error["type"], error["param"]) == ("queue_full", "rate_limit_error", None)
            assert "2 completions" in error["message"]
            waits.append(int(reply.headers["retry-after"]))
        assert waits[0] == 3
        assert 3 <= waits[1] <= 6  # after the first, and what that one was told runs out with time
        assert len(backend.asked) == asked
        too_many = httpx.post(url, json={"messages": HELLO, "n": 3})
        assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "n")
        finish(backend, threads)
        assert httpx.post(url, json={"messages": HELLO, "n": 2}).status_code == 200


def test_status_shows_the_slots() -> None:
    backend = ScriptedBackend(go_on=threading.Event())
    with running(backend, ServerSettings(max_completions=2)) as server:
        threads = busy(server, backend, 2)
        for _ in range(3):
            httpx.post(f"{server.url}/v1/chat/completions", json={"messages": HELLO})
        status = httpx.get(f"{server.url}/v1/vlfit/status").json()
        assert status["places"] == {"limit": 2, "taken": 2, "refused": 3}
        finish(backend, threads)


def test_the_openai_package_retries() -> None:
    backend = Paced(words=("word ",) * 10, go_on=threading.Event())
    backend.seconds = 10.0
    with running(backend, ServerSettings(max_completions=1)) as server:
        threads = busy(server, backend, 1)
        with (
            OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as hasty,
            pytest.raises(openai.RateLimitError) as caught,
        ):
            hasty.chat.completions.create(model="scripted", messages=HELLO)
        assert caught.value.code == "queue_full"
        refused: list[int] = []

        def look(response: Any) -> None:
            if response.status_code == 429:
                refused.append(429)
                finish(backend, threads)

        with (
            openai.DefaultHttpxClient(event_hooks={"response": [look]}, timeout=60) as watched,
            OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=watched) as patient,
        ):
            completion = patient.chat.completions.create(model="scripted", messages=HELLO)
        assert refused == [429]
        assert completion.choices[0].message.content == "word " * 10


def with_sleep(sleep: Callable[[float], Awaitable[None]]) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(asyncio), "sleep": sleep})


def test_our_client_retries_after_the_given_time(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Paced(words=("word ",) * 10, go_on=threading.Event())
    backend.seconds = 10.0
    slept: list[float] = []
    threads: list[threading.Thread] = []

    async def watched(seconds: float) -> None:
        slept.append(seconds)
        await asyncio.to_thread(finish, backend, threads)

    with (
        running(backend, ServerSettings(max_completions=1)) as server,
        RemoteBackend(server.url) as remote,
    ):
        threads += busy(server, backend, 1)
        monkeypatch.setattr("vlfit.backends.remote.asyncio", with_sleep(watched))
        answer = remote.stream(single_turn("hello"), SamplingParams()).answer()
        assert answer.text == "word " * 10
        assert slept == [1.0]


def test_our_client_gives_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Paced(go_on=threading.Event())
    slept: list[float] = []
    monkeypatch.setattr("vlfit.server.generation.AdmissionQueue", partial(AdmissionQueue, clock=lambda: 0.0))

    async def not_at_all(seconds: float) -> None:
        slept.append(seconds)

    with running(backend, ServerSettings(max_completions=1)) as server, RemoteBackend(server.url) as remote:
        hold = remote.stream(single_turn("hello"), SamplingParams())
        wait_for(lambda: bool(backend.started))
        monkeypatch.setattr("vlfit.backends.remote.asyncio", with_sleep(not_at_all))
        with pytest.raises(QueueFull) as caught:
            remote.stream(single_turn("hello"), SamplingParams())
        assert caught.value.code == "queue_full"
        hold.close()
    assert slept == [3.0, 6.0, 9.0, 12.0, 15.0, 18.0, 21.0]


def test_slots_are_free_once_generation_ends() -> None:
    backend = Paced(words=("x" * 2**20,) * 40)  # more than the buffers on the way hold
    with running(backend, ServerSettings(max_completions=1)) as server, server.socket() as connection:
        body = b'{"messages": [{"role": "user", "content": "hello"}], "stream": true}'
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: [::]\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_for(lambda: bool(backend.tickets) and backend.tickets[0].ended.is_set())
        with server.openai() as client:

            def answered() -> bool:
                try:
                    client.chat.completions.create(model="scripted", messages=HELLO, max_tokens=1)
                except openai.RateLimitError:
                    return False
                return True

            wait_for(answered)


def test_a_disconnect_releases_the_slot(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """With our own engine: the place and the blocks."""
    options = EngineOptions(device="cpu", max_model_len=512, max_num_seqs=1)
    with (
        NativeBackend.load(tiny("tied"), options) as backend,
        running(backend, ServerSettings(max_completions=1)) as server,
    ):
        slowly(backend, monkeypatch)
        with server.openai() as client:
            stream = client.chat.completions.create(
                model=backend.model,
                messages=HELLO,
                max_tokens=400,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            next(iter(stream))
            with pytest.raises(openai.RateLimitError) as caught:
                client.chat.completions.create(model=backend.model, messages=HELLO)
            assert int(cast(httpx.Response, caught.value.response).headers["retry-after"]) >= 1
            stream.close()
        with OpenAI(base_url=f"{server.url}/v1", api_key="none") as patient:
            patient.chat.completions.create(model=backend.model, messages=HELLO, max_tokens=2)


def test_command_line_limits_reach_the_server(tiny: Callable[[str], Path]) -> None:
    printer = Printer(json=False, stream=False, quiet=True)
    folder = str(tiny("tied"))
    typed = {"model": folder, "device": "cpu", "context": 128, "sequences": 2}
    for wishes, places, remembers in (
        ({}, 2 + 16, True),
        ({"sequences": 5}, 5 + 40, True),
        ({"queue": 0, "prefix_cache": False}, 2, False),
    ):
        settings = read_settings(**{**typed, **wishes})
        with closing(_load(settings, printer, StartupTimer(), trust_remote_code=False)) as backend:
            assert isinstance(backend, NativeBackend)
            assert _server_settings(settings, backend, ()).max_completions == places
            assert (backend._engine_thread.engine.scheduler.prefix_cache is not None) is remembers
    with pytest.raises(UsageError, match="queue"):
        read_settings(queue=-1)
