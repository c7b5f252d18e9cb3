"""Whatever is wrong with a request: the right status, OpenAI's error shape, and the next request works."""

import gzip
import json
import logging
from collections.abc import Iterator
from typing import Any, cast

import httpx
import openai
import pytest
from openai import OpenAI

from tests.server.harness import Running, running, wait_for
from tests.server.pictures import data_url, png
from tests.server.scripted import ScriptedBackend
from vlfit.errors import DeviceError, DoesNotFit, EngineStopped
from vlfit.server.settings import ServerSettings
from vlfit.units import MIB

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
SAME_LIMITS = {"max_tokens": 9, "max_completion_tokens": 9}


@pytest.fixture(scope="module")
def backend() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture(scope="module")
def server(backend: ScriptedBackend) -> Iterator[Running]:
    with running(backend, ServerSettings(body_limit=16 * MIB, picture_limit=8)) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[OpenAI]:
    with server.openai() as client:
        yield client


@pytest.fixture(autouse=True)
def works_afterwards(client: OpenAI, backend: ScriptedBackend) -> Iterator[None]:
    backend.prepare_error = backend.error = None
    yield
    backend.prepare_error = backend.error = None
    answer = client.chat.completions.create(model="scripted", messages=HELLO)
    assert answer.choices[0].message.content == "A red circle 🙂."


def post(server: Running, body: Any, **options: Any) -> tuple[int, dict[str, Any]]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = httpx.post(f"{server.url}/v1/chat/completions", content=content, timeout=30, **options)
    return answer.status_code, error_of(answer)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in body["error"]["message"]
    return cast(dict[str, Any], body["error"])


TEXT = {"type": "text", "text": "x"}
CALLED = {"id": "a", "type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([HELLO[0]] * 10_001, "messages"),
        ([{"role": "user", "content": [TEXT] * 10_001}], "messages[0].content"),
        ([{"role": "assistant", "content": "x", "tool_calls": [CALLED] * 10_001}], "messages[0].tool_calls"),
        ([{"role": "user", "content": [TEXT] * 5_000}] * 2, "messages"),
    ],
)
def test_more_than_any_context_holds(server: Running, messages: list[Any], param: str) -> None:
    status, error = post(server, {"messages": messages})
    assert (status, error["param"]) == (400, param)
    assert "10000" in error["message"]
    assert len(error["message"]) < 200


def test_more_items_of_a_response_than_any_context_holds(server: Running) -> None:
    answer = httpx.post(f"{server.url}/v1/responses", json={"input": HELLO * 10_000, "instructions": "x"})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "input"


def test_each_of_many_answers_of_tools_belongs_to_a_call_before_it(server: Running) -> None:
    """With a look at all that came before for each, this would hold up everybody for a while."""
    called = {"role": "assistant", "content": None, "tool_calls": [CALLED]}
    later = {**called, "tool_calls": [{**CALLED, "id": "b"}]}
    answer = {"role": "tool", "tool_call_id": "a", "content": "x"}
    messages = [*HELLO, called, *[answer] * 9_000, {**answer, "tool_call_id": "b"}, later]
    status, error = post(server, {"messages": messages})
    assert (status, error["param"]) == (400, "messages[9002].tool_call_id")


CALL = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
SCHEMA = "response_format.json_schema"


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": []}, "messages", "empty"),
        ({"messages": "hello"}, "messages", "'hello'"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "missing"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "'wizard'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "no message before"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0]", "old way"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0]", "only the"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", ""),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0]", "no type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}]},
            "messages[0].content[0].video_url.url",
            "films",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": 5}]}]},
            "messages[0].content[0].image_url",
            "image_url is 5",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].image_url.url",
            "missing",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video", "frames": []}]}]},
            "messages[0].content[0].frames",
            "",
        ),
        ({"max_tokens": -1}, "max_tokens", "-1"),
        ({"max_tokens": 0}, "max_tokens", "0"),
        ({"max_tokens": "many"}, "max_tokens", "'many'"),
        ({"max_tokens": 2.5}, "max_tokens", "2.5"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "max_completion_tokens is 6"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages", "messages[0].content is empty"),
        ({"messages": [{"role": "user", "content": []}]}, "messages", "messages[0].content is empty"),
        (
            {"messages": [*HELLO, {"role": "user", "content": [{"type": "text", "text": ""}]}]},
            "messages",
            "messages[1].content is empty",
        ),
        ({"temperature": 5}, "temperature", "5"),
        ({"temperature": "0.5"}, "temperature", "0.5"),
        ({"temperature": float("nan")}, "temperature", "nan"),
        ({"top_p": 0}, "top_p", "0"),
        ({"top_k": -2}, "top_k", "-2"),
        ({"presence_penalty": 3}, "presence_penalty", "3"),
        ({"n": 0}, "n", "0"),
        ({"n": 17}, "n", "17"),
        ({"seed": 2**63}, "seed", "9223372036854775808"),
        ({"stop": 5}, "stop", "5"),
        ({"stop": ""}, "stop", "holds an empty string"),
        ({"stop": ["x"] * 17}, "stop", "16"),
        ({"max_completion_tokens": -3}, "max_completion_tokens", "max_completion_tokens is -3"),
        ({"top_logprobs": 2}, "top_logprobs", "without logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21"),
        ({"stream": "yes"}, "stream", "'yes'"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "'yaml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, f"{SCHEMA}.name", "missing"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "which ends"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "'a b'"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name", "second"),
        ({"tools": [CLOCK] * 129}, "tools", "128"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": "often", "tools": [CLOCK]}, "tool_choice", "'often'"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "not among"),
        ({"functions": [{"name": "x"}]}, "functions", "not support"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not support"),
        ({"modalities": ["audio"]}, "modalities", "not support"),
        ({"stop": [1] * 20_000}, "stop", "[1, 1"),
        ({"numbers": [1] * 300_000}, None, "262,144 commas"),
    ],
)
def test_a_wrong_field_is_named(
    server: Running, fields: dict[str, Any], param: str | None, says: str
) -> None:
    status, error = post(server, {"messages": HELLO, **fields})
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert says in error["message"]


@pytest.mark.parametrize(
    "fields",
    [{"response_format": {"type": "text"}}, {"tools": []}, {"tool_choice": "none"}, {"n": None}, SAME_LIMITS],
)
def test_asking_for_nothing_special_is_fine(server: Running, fields: dict[str, Any]) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": HELLO, **fields})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"text"', b"null", b"\xff\xfe", b'{"messages": ' + b"[" * 10_000]
)
def test_a_body_that_is_no_request(server: Running, body: bytes) -> None:
    status, error = post(server, body)
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 300


def test_the_error_class_on_the_clients_side(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="scripted", messages=HELLO, max_tokens=-5)
    assert caught.value.param == "max_tokens"
    assert caught.value.code == "invalid_request"
    assert "at least 1" in caught.value.message


def test_an_unknown_model(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r"this server runs 'scripted'") as caught:
        client.chat.completions.create(model="gpt-4o", messages=HELLO)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("Qwen/Qwen3-VL-2B-Instruct")


@pytest.mark.parametrize(
    "url",
    [
        "/etc/hostname",
        "file:///etc/hostname",
        "FILE:///etc/hostname",
        "ftp://example.org/x.png",
        "",
        " data:,",
        "data:image/png;base64,@@@not-base64@@@",
        "data:image/png;base64",
        data_url(b"<html>no picture</html>", "text/html"),
    ],
)
def test_a_picture_that_is_none(server: Running, url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    status, error = post(server, {"messages": [{"role": "user", "content": [part]}]})
    assert status == 400
    assert error["code"] == "invalid_image"
    assert error["param"] == "messages[0].content[0].image_url.url"


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "169.254.169.254", "10.0.0.1", "0.0.0.0"]
)
def test_private_addresses_are_refused(server: Running, host: str) -> None:
    part = {"type": "image_url", "image_url": {"url": f"http://{host}:9/x.png"}}
    status, error = post(server, {"messages": [{"role": "user", "content": [part]}]})
    assert status == 400
    assert error["code"] == "invalid_image"


def test_too_many_pictures(server: Running) -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(png("red"))}}
    status, error = post(server, {"messages": [{"role": "user", "content": [part] * 9}]})
    assert status == 400
    assert "9 pictures" in error["message"]


def test_the_first_bad_picture_is_the_one_named(server: Running) -> None:
    good = {"type": "image_url", "image_url": {"url": data_url(png("red"))}}
    bad = {"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@"}}
    status, error = post(server, {"messages": [{"role": "user", "content": [good, bad, bad]}]})
    assert status == 400
    assert error["param"] == "messages[0].content[1].image_url.url"


def test_ten_megabytes_of_text(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "x" * 10**7}])
    assert caught.value.code == "context_length_exceeded"
    assert len(caught.value.message) < 500


def test_a_body_over_the_limit(client: OpenAI) -> None:
    """The client hears the answer although it is still sending when the limit is passed."""
    messages: list[Any] = [{"role": "user", "content": "x" * (20 * MIB)}]
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model="scripted", messages=messages)
    assert caught.value.status_code == 413
    assert caught.value.code == "request_too_large"


def test_a_body_over_the_limit_is_refused_from_its_head(server: Running) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 999999999999\r\n\r\n"
    with server.socket() as connection:
        connection.sendall(head)
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")
        connection.sendall(bytes(1000))  # is still taken


def test_a_packed_body_is_refused_in_words(server: Running) -> None:
    packed = gzip.compress(b'{"messages": []}')
    answer = httpx.post(
        f"{server.url}/v1/chat/completions", content=packed, headers={"Content-Encoding": "gzip"}
    )
    assert answer.status_code == 415
    assert "Content-Encoding 'gzip'" in answer.json()["error"]["message"]


def test_a_body_without_end_is_cut_off(server: Running) -> None:
    """Chunked, so that no header gives its size away."""
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while sent < 200:
            sent += 1
            yield bytes(MIB)

    try:
        answer = httpx.post(f"{server.url}/v1/chat/completions", content=endless(), timeout=30)
        assert answer.status_code == 413
    except httpx.WriteError:
        pass  # the connection was closed on us while we were still sending: also an answer
    assert sent < 100


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("POST", "/v1/edits", 404, "not_found"),
        ("POST", "/v1/chat/completions/", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
def test_wrong_routes(server: Running, method: str, path: str, status: int, code: str) -> None:
    answer = httpx.request(method, server.url + path)
    assert answer.status_code == status
    assert error_of(answer)["code"] == code
    if status == 405:
        assert answer.headers["allow"] in error_of(answer)["message"]


def test_what_does_not_fit(client: OpenAI, backend: ScriptedBackend) -> None:
    backend.prepare_error = DoesNotFit("5000 tokens are more than 4096.", "send a smaller picture")
    with pytest.raises(openai.BadRequestError, match=r"more than 4096; send a smaller picture"):
        client.chat.completions.create(model="scripted", messages=HELLO)


def test_the_engine_is_gone(client: OpenAI, backend: ScriptedBackend) -> None:
    backend.prepare_error = EngineStopped("the engine is shutting down", "start it again")
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="scripted", messages=HELLO)
    assert caught.value.status_code == 503
    assert caught.value.type == "server_error"


def test_a_mistake_of_ours_tells_the_log_not_the_client(
    client: OpenAI, backend: ScriptedBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.prepare_error = RuntimeError("secret detail")
    with caplog.at_level(logging.ERROR), pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="scripted", messages=HELLO)
    assert caught.value.status_code == 500
    assert "secret" not in str(caught.value)
    assert "secret detail" in caplog.text


def test_a_failure_before_the_first_word(client: OpenAI, backend: ScriptedBackend) -> None:
    backend.error, backend.error_after = DeviceError("the GPU is out of memory", "send less"), 2
    with pytest.raises(openai.InternalServerError, match="out of memory"):
        client.chat.completions.create(model="scripted", messages=HELLO)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (DeviceError("the GPU is out of memory", "send less"), "the GPU is out of memory; send less"),
        (ValueError("secret detail"), "the server made a mistake"),
    ],
)
def test_a_failure_in_mid_stream_is_an_event(
    client: OpenAI, backend: ScriptedBackend, error: Exception, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vlfit.server")
    backend.error, backend.error_after = error, 2
    words: list[str] = []
    stream = client.chat.completions.create(model="scripted", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError) as caught:
        words.extend(chunk.choices[0].delta.content or "" for chunk in stream)
    assert "".join(words) == "A red "
    assert caught.value.message.startswith(says)
    wait_for(lambda: " 200 " in caplog.text)
    assert str(error).splitlines()[0] in caplog.text
    tracebacks = [record for record in caplog.records if record.exc_info]
    assert len(tracebacks) == (1 if isinstance(error, ValueError) else 0)


def test_a_failing_choice_ends_the_others(client: OpenAI, backend: ScriptedBackend) -> None:
    backend.tickets.clear()
    backend.error, backend.error_after = DeviceError("broken"), 2
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="scripted", messages=HELLO, n=3)
    assert [ticket.cancelled.is_set() for ticket in backend.tickets] == [True] * 3
