"""Anthropic's API over mini: it answers as OpenAI's does, and stop sequences are reported."""

import base64
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.anthropic.test_messages import events_in, rebuilt
from tests.server.harness import Running, running
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.native import NativeBackend
from vlfit.server.server_settings import ServerSettings

PICTURE = Path(__file__).parents[3] / "examples" / "pictures" / "number-25.png"
DATA = base64.b64encode(PICTURE.read_bytes()).decode()
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
ASKED: dict[str, Any] = {
    "model": "mini",
    "max_tokens": 40,
    "temperature": 0,
    "messages": [{"role": "user", "content": [IMAGE, {"type": "text", "text": "What is this?"}]}],
}
SOME: list[Any] = [None, True, 0, -1, 1.5, "", "text", [], {}, [None], [{}], {"type": "text"}, {"type": []}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    options = EngineOptions(device="cpu", max_model_len=512, max_num_seqs=4, max_tokens=4)
    with NativeBackend.load("mini", options) as backend:
        with running(backend, ServerSettings(context=512)) as running_server:
            yield running_server
        assert backend.account().pool.used == 0


def post(server: Running, route: str, body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/v1/{route}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def test_it_says_what_the_chat_says(server: Running) -> None:
    message = post(server, "messages", ASKED)
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DATA}"}}
    content = [url, {"type": "text", "text": "What is this?"}]
    chat = post(server, "chat/completions", {**ASKED, "messages": [{"role": "user", "content": content}]})
    [block] = message["content"]
    assert block["text"] == chat["choices"][0]["message"]["content"]
    usage = message["usage"]
    prompt_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert prompt_tokens == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"]
    assert message["vlfit"]["images"] == chat["vlfit"]["images"]
    counted = {name: ASKED[name] for name in ("model", "messages")}
    assert post(server, "messages/count_tokens", counted) == {"input_tokens": prompt_tokens}
    streamed = httpx.post(f"{server.url}/v1/messages", json={**ASKED, "stream": True}, timeout=60)
    assert rebuilt(events_in(streamed.text))["content"] == message["content"]


def test_the_stop_sequence_is_told(server: Running) -> None:
    [block] = post(server, "messages", ASKED)["content"]
    words = block["text"].split()
    told = post(server, "messages", {**ASKED, "stop_sequences": ["never", words[2]]})
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", words[2])
    assert told["content"][0]["text"].split() == words[:2]


def test_a_large_limit_means_the_rest_of_the_context(server: Running) -> None:
    assert post(server, "messages", {**ASKED, "max_tokens": 100_000})["stop_reason"] == "end_turn"


def test_a_picture_in_a_tool_result(server: Running) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [IMAGE]}
    messages = [
        {"role": "user", "content": "What is there?"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    told = post(server, "messages", {**ASKED, "messages": messages, "tools": tools})
    assert len(told["vlfit"]["images"]) == 1
    assert told["content"]


def test_nothing_that_can_be_sent_is_a_mistake_of_ours(server: Running) -> None:
    """Fields replaced by values of other kinds, at any depth."""
    chance = random.Random(7)
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "x"}]}
    document = {"type": "document", "title": "t", "source": {"type": "text", "data": "x"}}
    body = {
        "model": "mini",
        "max_tokens": 1,
        "system": [{"type": "text", "text": "x"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hello"}, document]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}, call]},
            {"role": "user", "content": [result]},
        ],
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "low"},
        "stop_sequences": ["x"],
        "temperature": 0.5,
        "stream": False,
    }
    llama = {
        "/tokenize": {"content": "Hello", "with_pieces": True, "add_special": False},
        "/detokenize": {"tokens": [1, 2, 3]},
        "/apply-template": {"messages": [{"role": "user", "content": "Hello"}], "chat_template_kwargs": {}},
    }
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for path, whole in (
            *[("/v1/messages", body), ("/v1/messages/count_tokens", body)],
            *llama.items(),
        ):
            for _ in range(150):
                answer = client.post(path, json=changed(whole, chance))
                assert answer.status_code < 500, answer.text
                assert answer.status_code == 200 or "error" in answer.json()


def changed(value: Any, chance: random.Random) -> Any:
    """A copy of ``value`` in which one thing at any depth is another."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = chance.choice(keys)
    copy = dict(value) if isinstance(value, dict) else list(value)
    inner = copy[key]
    if isinstance(inner, dict | list) and inner and chance.random() < 0.7:
        copy[key] = changed(inner, chance)
    else:
        copy[key] = chance.choice(SOME)
    return copy
