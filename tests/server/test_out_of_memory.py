"""A request that runs out of memory gets a 503 with the numbers; the next one succeeds."""

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.pictures import picture
from tests.server.harness import Running, running
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.native import NativeBackend


@pytest.fixture
def backend(tiny: Callable[[str], Path]) -> Iterator[NativeBackend]:
    with NativeBackend.load(tiny("tied"), EngineOptions(device="cpu", max_model_len=512)) as loaded:
        yield loaded


@pytest.fixture
def short_of_memory(backend: NativeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no memory for any picture."""

    def encode(_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ...")

    monkeypatch.setattr(backend._engine_thread.engine.runner, "encode_image", encode)


def body(**more: Any) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(picture(96, 64)).decode()
    parts = [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 3, "ignore_eos": True, **more}


def post(server: Running, content: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json=content, timeout=20)


@pytest.mark.usefixtures("short_of_memory")
def test_out_of_memory_fails_one_request_only(backend: NativeBackend) -> None:
    words = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": True}
    with running(backend) as server:
        for _ in range(3):
            refused = post(server, body())
            assert refused.status_code == 503
            error = refused.json()["error"]
            assert (error["code"], error["type"]) == ("out_of_memory", "server_error")
            assert "20.0 MiB" in error["message"]
            streamed = post(server, body(stream=True))
            last = streamed.text.strip().split("\n\n")[-1].removeprefix("data: ")
            assert json.loads(last)["error"]["code"] == "out_of_memory"
            answered = post(server, words)
            assert answered.status_code == 200
            assert answered.json()["usage"]["completion_tokens"] == 3
        requests = httpx.get(f"{server.url}/v1/vlfit/status").json()["requests"]
    assert (requests["failed"], requests["finished"], requests["running"]) == (6, 3, 0)
