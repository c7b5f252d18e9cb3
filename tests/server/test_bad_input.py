"""Requests with an invalid field: status, OpenAI's error format, and the next request works."""

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.server.asking import HELLO, error_of, post
from tests.server.harness import Running
from tests.server.pictures import data_url, png
from vlfit.server.chat.foreign_fields import REFUSED_FIELDS
from vlfit.server.server_settings import ServerSettings

pytestmark = pytest.mark.usefixtures("works_afterwards")
SAME_LIMITS = {"max_tokens": 9, "max_completion_tokens": 9}


@pytest.fixture(scope="module")
def server_settings() -> ServerSettings:
    return ServerSettings(picture_limit=8)


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


def test_tool_messages_must_match_earlier_calls(server: Running) -> None:
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
        ({"messages": []}, "messages", ""),
        ({"messages": "hello"}, "messages", "'hello'"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", ""),
        ({"messages": [{"role": "user"}]}, "messages[0].content", ""),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", ""),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "'wizard'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", ""),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0]", ""),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0]", ""),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", ""),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0]", ""),
        (
            {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}]},
            "messages[0].content[0].video_url.url",
            "",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": 5}]}]},
            "messages[0].content[0].image_url",
            "5",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].image_url.url",
            "",
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
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "6"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages", "messages[0]"),
        ({"messages": [{"role": "user", "content": []}]}, "messages", "messages[0]"),
        (
            {"messages": [*HELLO, {"role": "user", "content": [{"type": "text", "text": ""}]}]},
            "messages",
            "messages[1]",
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
        ({"stop": ""}, "stop", ""),
        ({"stop": ["x"] * 17}, "stop", "16"),
        ({"max_completion_tokens": -3}, "max_completion_tokens", "max_completion_tokens is -3"),
        ({"top_logprobs": 2}, "top_logprobs", ""),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21"),
        ({"stream": "yes"}, "stream", "'yes'"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "'yaml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", ""),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, f"{SCHEMA}.name", ""),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", ""),
        ({"tools": [{"type": "function"}]}, "tools[0].function", ""),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "'a b'"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name", ""),
        ({"tools": [CLOCK] * 129}, "tools", "128"),
        ({"tool_choice": "required"}, "tool_choice", ""),
        ({"tool_choice": "often", "tools": [CLOCK]}, "tool_choice", "'often'"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", ""),
        ({"functions": [{"name": "x"}]}, "functions", ""),
        ({"logit_bias": {"5": 1}}, "logit_bias", ""),
        ({"modalities": ["audio"]}, "modalities", ""),
        ({"stop": [1] * 20_000}, "stop", "[1, 1"),
        ({"numbers": [1] * 300_000}, None, "262,144"),
    ],
)
def test_invalid_fields_are_named(
    server: Running, fields: dict[str, Any], param: str | None, says: str
) -> None:
    status, error = post(server, {"messages": HELLO, **fields})
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert says in error["message"]


FOREIGN: dict[str, Any] = {
    "best_of": 3,
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "x",
    "structured_outputs": {"choice": ["a"]},
    "grammar": "root ::= x",
    "format": "json",
    "regex": "x",
    "min_tokens": 5,
    "use_beam_search": True,
    "length_penalty": 2.0,
    "bad_words": ["x"],
    "echo": True,
    "allowed_token_ids": [1],
    "logit_bias": {"5": 1},
    "prompt_logprobs": 1,
    "truncate_prompt_tokens": 9,
    "chat_template": "x",
    "chat_template_kwargs": {"enable_thinking": False},
    "documents": [{}],
    "continue_final_message": True,
    "add_generation_prompt": False,
    "skip_special_tokens": False,
    "n_predict": 5,
    "options": {"temperature": 0},
    "mm_processor_kwargs": {"max_pixels": 9},
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_fields_of_other_servers_that_would_change_the_answer(server: Running, path: str, name: str) -> None:
    if (path, name) in (("completions", "echo"), ("chat/completions", "chat_template_kwargs")):
        return  # done there
    body = {"messages": HELLO, "prompt": "Hello", "input": "Hello"}
    one = {"chat/completions": "messages", "completions": "prompt", "responses": "input"}[path]
    answer = httpx.post(f"{server.url}/v1/{path}", json={one: body[one], name: FOREIGN[name]})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == name
    assert error_of(answer)["code"] == "invalid_request"


def test_values_of_other_servers_that_change_nothing(server: Running) -> None:
    neutral: dict[str, Any] = {
        "best_of": 2,
        "n": 2,
        "guided_json": None,
        "min_tokens": 0,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "bad_words": [],
        "documents": None,
        "chat_template_kwargs": {},
        "top_a": 0,
        "skip_special_tokens": True,
        "add_generation_prompt": True,
        "echo": False,
        "logit_bias": {},
    }
    ignored = {"priority": 3, "keep_alive": "5m", "temprature": 1}
    body = {"messages": HELLO, **neutral, **ignored, "user": "me"}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert set(answer.json()["vlfit"]["ignored"]) >= set(ignored)
    assert not {"user", "n"} & set(answer.json()["vlfit"]["ignored"])


def test_the_documentation_names_every_refused_field() -> None:
    words = Path("docs/api.md").read_text()
    for name in REFUSED_FIELDS:
        assert f"`{name}`" in words, name


@pytest.mark.parametrize(
    "fields",
    [{"response_format": {"type": "text"}}, {"tools": []}, {"tool_choice": "none"}, {"n": None}, SAME_LIMITS],
)
def test_neutral_values_are_accepted(server: Running, fields: dict[str, Any]) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": HELLO, **fields})
    assert answer.status_code == 200


def test_the_error_class_on_the_clients_side(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="scripted", messages=HELLO, max_tokens=-5)
    assert caught.value.param == "max_tokens"
    assert caught.value.code == "invalid_request"
    assert "1" in caught.value.message


def test_an_unknown_model(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="scripted") as caught:
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
def test_invalid_pictures(server: Running, url: str) -> None:
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
    assert error["param"] == "messages"
    assert "9" in error["message"]


def test_the_first_bad_picture_is_the_one_named(server: Running) -> None:
    good = {"type": "image_url", "image_url": {"url": data_url(png("red"))}}
    bad = {"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@"}}
    status, error = post(server, {"messages": [{"role": "user", "content": [good, bad, bad]}]})
    assert status == 400
    assert error["param"] == "messages[0].content[1].image_url.url"
