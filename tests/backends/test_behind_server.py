"""A vlfit server in front of another: what passes through, unknown counts, and failures of both."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import httpx
import openai
import pytest

from tests.backends.other_server import DONE, USAGE, other_server, scripted_reply
from tests.server.harness import Running, running, wait_for
from tests.server.pictures import png
from tests.server.scripted import ScriptedBackend
from vlfit.backends.held_memory import expected_memory
from vlfit.backends.openai_wire import data_url
from vlfit.backends.remote import RemoteBackend
from vlfit.client import Client
from vlfit.errors import CannotWake, DoesNotFit, QueueFull, ServerUnreachable, WrongApiKey
from vlfit.server.server_settings import ServerSettings

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
PICTURE: list[Any] = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What?"},
            {"type": "image_url", "image_url": {"url": data_url(png("red"))}},
        ],
    }
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "How it is",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}


@contextmanager
def in_front(behind: Running, **options: Any) -> Iterator[Running]:
    with RemoteBackend(behind.url, behind_server=True, **options) as backend:
        settings = ServerSettings(expectation=expected_memory(backend, ()))
        with running(backend, settings) as server:
            yield server


@pytest.fixture(scope="module")
def behind(server: Running) -> Running:
    return server


@pytest.fixture(scope="module")
def shared_front(behind: Running) -> Iterator[Running]:
    with in_front(behind) as server:
        yield server


@pytest.fixture
def front(shared_front: Running, scripted: ScriptedBackend) -> Running:
    return shared_front


def post(server: Running, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=20)


def chat(server: Running, **wishes: Any) -> dict[str, Any]:
    reply = post(server, "/v1/chat/completions", {"messages": HELLO, **wishes})
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def test_answers_match_the_server_behind(front: Running, behind: Running) -> None:
    for wishes in ({"messages": PICTURE}, {"messages": HELLO, "n": 2, "logprobs": True, "top_logprobs": 2}):
        here, there = chat(front, **wishes), chat(behind, **wishes)
        assert here["usage"] == there["usage"]
        assert here["usage"]["prompt_tokens"] > 0
        assert here["vlfit"] == there["vlfit"]
        assert here["choices"] == there["choices"]


def test_streams_end_with_usage(front: Running) -> None:
    stream = front.openai().chat.completions.create(
        model="scripted", messages=PICTURE, stream=True, stream_options={"include_usage": True}
    )
    *pieces, last = list(stream)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == "A red circle 🙂."
    assert len(pieces) > 3, "they came one by one"
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (82, 5)
    assert (last.model_extra or {})["vlfit"]["images"][0]["width"] == 640


def test_other_request_forms(front: Running, behind: Running, scripted: ScriptedBackend) -> None:
    asked = {"prompt": ["one", "seven"], "n": 2, "logprobs": 1}
    here, there = (post(each, "/v1/completions", asked).json() for each in (front, behind))
    assert sorted(map(str, scripted.raw[:4])) == ["one", "one", "seven", "seven"]
    for reply in (here, there):
        for choice in reply["choices"]:
            choice["logprobs"].pop("text_offset")
    assert (here["choices"], here["usage"]) == (there["choices"], there["usage"])
    here, there = (post(each, "/v1/responses", {"input": "Hello"}).json() for each in (front, behind))
    assert here["usage"] == there["usage"]
    assert [item["content"] for item in here["output"]] == [item["content"] for item in there["output"]]
    assert post(front, "/v1/completions", {"prompt": [5, 6, 7]}).status_code == 200
    assert scripted.raw[-1] == (5, 6, 7)


def test_tool_calls_are_parsed_again(front: Running, scripted: ScriptedBackend) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"town": "Ulm – \\"neu\\""}}\n</tool_call>'
    scripted.words = ("Let me see.", *call[:40], call[40:], "\n", call)
    answer = chat(front, tools=[WEATHER])
    message = answer["choices"][0]["message"]
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert message["content"] == "Let me see."
    calls = message["tool_calls"]
    assert [json.loads(each["function"]["arguments"]) for each in calls] == [{"town": 'Ulm – "neu"'}] * 2
    assert scripted.tools[0].name == "weather"
    assert scripted.tools[0].parameters == WEATHER["function"]["parameters"]  # type: ignore[index]
    result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "rain"}
    other = {"role": "tool", "tool_call_id": calls[1]["id"], "content": "sun"}
    scripted.words = ("It rains.",)
    chat(front, tools=[WEATHER], messages=[*HELLO, message, result, other])
    arrived = scripted.asked[-1][0]
    assert [each.role for each in arrived] == ["user", "assistant", "tool", "tool"]
    assert [call.name for call in arrived[1].calls] == ["weather"] * 2


@pytest.mark.parametrize(
    "wishes",
    [
        {"response_format": {"type": "json_object"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "null"}},
            }
        },
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "null"}, "fenced": True},
            }
        },
        {"tools": [WEATHER], "tool_choice": "required"},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"tools": [WEATHER], "parallel_tool_calls": False},
        {"tools": [WEATHER], "response_format": {"type": "json_object"}},
        {
            "temperature": 0.5,
            "top_k": 3,
            "stop": ["END"],
            "seed": 7,
            "max_completion_tokens": 3,
            "min_p": 0.1,
        },
        {"tools": [WEATHER], "tool_choice": "none"},
    ],
)
def test_all_params_reach_the_server_behind(
    wishes: dict[str, Any], front: Running, behind: Running, scripted: ScriptedBackend
) -> None:
    chat(behind, **wishes)
    chat(front, **wishes)
    there, here = scripted.started
    assert here == there
    assert len(scripted.asked[0][0]) == len(scripted.asked[1][0])


def test_broken_pictures_are_not_sent_on(front: Running, scripted: ScriptedBackend) -> None:
    broken = [{"type": "image_url", "image_url": {"url": data_url(png("red")[:60])}}]
    reply = post(front, "/v1/chat/completions", {"messages": [{"role": "user", "content": broken}]})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "invalid_image"
    assert reply.json()["error"]["param"] == "messages[0].content[0].image_url.url"
    assert scripted.asked == []


def test_client_disconnect_cancels_the_request_behind(front: Running, scripted: ScriptedBackend) -> None:
    scripted.words, scripted.delay = ("word ",) * 600, 0.05
    stream = front.openai().chat.completions.create(model="scripted", messages=HELLO, stream=True)
    assert [next(stream).choices[0].delta.content for _ in range(2)] == ["", "word "]
    stream.close()
    wait_for(scripted.tickets[0].cancelled.is_set)


def test_unknown_counts_are_null(front: Running, behind: Running) -> None:
    ledger = httpx.get(f"{front.url}/v1/vlfit/ledger").json()
    assert ledger["backend"] == "remote"
    assert ledger["device"] == f"{behind.url}/v1"
    assert ledger["note"]
    assert "ledger" not in ledger
    price = post(front, "/v1/vlfit/price", {"messages": PICTURE, "max_tokens": 9}).json()
    assert (price["prompt_tokens"], price["images"], price["max_tokens"]) == (None, None, 9)
    assert price["note"]
    plan = httpx.get(f"{front.url}/v1/vlfit/plan").json()
    assert (plan["backend"], plan["lines"]) == ("remote", [])
    assert plan["note"]
    refused = post(front, "/v1/vlfit/sleep", {})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "invalid_request"
    metrics = httpx.get(f"{front.url}/metrics").text
    assert "vlfit_places" in metrics


def test_refusals_keep_their_class(front: Running, scripted: ScriptedBackend) -> None:
    """A full queue behind is not waited for: the client gets its Retry-After."""
    for error, status, code in (
        (DoesNotFit("9000 tokens are more than 4096", "send less"), 400, "context_length_exceeded"),
        (QueueFull("64 run or wait", "later", retry_after=7), 429, "queue_full"),
        (CannotWake("others have the memory", retry_after=4), 503, "cannot_wake"),
    ):
        scripted.prepare_error = error
        for streaming in (False, True):
            reply = post(front, "/v1/chat/completions", {"messages": HELLO, "stream": streaming, "n": 2})
            assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
            assert error.message in reply.text
            if status != 400:
                assert "retry-after" in reply.headers


def test_refused_server_key_is_a_server_error(scripted: ScriptedBackend) -> None:
    with running(scripted, ServerSettings(api_keys=("upstream",))) as behind:
        with pytest.raises(WrongApiKey):
            RemoteBackend(behind.url, behind_server=True)
        with in_front(behind, api_key="upstream") as front:
            assert chat(front)["choices"]
            scripted.prepare_error = WrongApiKey("the key was taken back")
            reply = post(front, "/v1/chat/completions", {"messages": HELLO})
    assert reply.status_code == 502
    assert "VLFIT_SERVER_KEY" in reply.text
    assert "upstream" not in reply.text


def test_recovers_when_the_server_behind_is_back(scripted: ScriptedBackend) -> None:
    with running(scripted) as behind:
        port = behind.port
        with RemoteBackend(behind.url, behind_server=True) as backend, running(backend) as front:
            assert chat(front)["choices"]
            scripted.words, scripted.delay = ("word ",) * 600, 0.05
            stream = front.openai().chat.completions.create(model="scripted", messages=HELLO, stream=True)
            first = next(iter(stream))
            behind.server.force_exit = behind.server.should_exit = True
            with pytest.raises(openai.APIError):
                list(stream)
            assert first.choices
            behind.loop_thread.join(10)
            reply = post(front, "/v1/chat/completions", {"messages": HELLO})
            assert reply.status_code == 502
            assert reply.json()["error"]["code"] == ServerUnreachable.code
            assert f"http://127.0.0.1:{port}" in reply.text
            assert httpx.get(f"{front.url}/health").json()["status"] == "ok"
            scripted.reset()
            with running(scripted, port=port):
                assert chat(front)["choices"][0]["message"]["content"] == "A red circle 🙂."


def test_tasks_send_their_grammar_to_vllm() -> None:
    """The grammar allows fenced JSON, as the model was trained to write it."""
    asked: list[str] = []

    def answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        asked.append(body.get("structured_outputs", {}).get("grammar", ""))
        found = [{"bbox_2d": [100, 100, 500, 500], "label": "fox"}]
        whole = {"summary": "A fox.", "objects": found, "text": []} if len(asked) == 2 else found
        said = f"```json\n{json.dumps(whole)}\n```" if "```json" in asked[-1] else "[]"
        word = {"choices": [{"index": 0, "delta": {"content": said}, "finish_reason": "stop"}]}
        scripted_reply(word, USAGE, DONE)(handler, body)

    models = {"data": [{"id": "mini", "owned_by": "vllm"}]}
    with (
        other_server(answer, models) as url,
        RemoteBackend(url, behind_server=True, llguidance=True) as backend,
    ):
        settings = ServerSettings(expectation=expected_memory(backend, ()))
        with running(backend, settings) as server, Client(server.url) as client:
            assert [each.label for each in client.detect(png("red"), ["fox", "owl"]).objects] == ["fox"]
            scene = client.scene(png("red"))
            assert [each.label for each in scene.objects] == ["fox"]
            assert scene.usage.image_tokens is None  # vLLM does not tell them apart
            usage = chat(server, messages=PICTURE)["usage"]
            assert usage["prompt_tokens_details"]["image_tokens"] is None
    assert len(asked) == 3
