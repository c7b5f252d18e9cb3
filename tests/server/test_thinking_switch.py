"""A tiny Qwen3.5 behind the HTTP API: reasoning that a request turns off, and tool calls in XML."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.harness import Running, running
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.native import NativeBackend

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Rome", "Oslo"]},
                "days": {"type": "integer", "minimum": 0, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def server(tiny_qwen3_5: Callable[[str], Path]) -> Iterator[Running]:
    options = EngineOptions(device="cpu", max_model_len=1024, max_num_seqs=2)
    with NativeBackend.load(str(tiny_qwen3_5("text")), options) as backend, running(backend) as server:
        yield server


def post(server: Running, path: str, **fields: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}{path}", json={"model": "text", **fields}, timeout=60)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def test_ollama_s_think_decides_whether_the_answer_begins_with_reasoning(server: Running) -> None:
    # Greedy: where tokens are drawn, a made-up model may well end its reasoning at once.
    settings = {"messages": HELLO, "stream": False, "options": {"num_predict": 8, "temperature": 0}}
    for think in (None, True):
        message = post(server, "/api/chat", **settings, think=think)["message"]
        assert message["thinking"]  # the prompt ends inside of it
    answer = post(server, "/api/chat", **settings, think=False)
    assert answer["message"]["content"]
    assert "thinking" not in answer["message"]
    assert "ignored" not in json.dumps(answer.get("vlfit", {})) or not answer["vlfit"]["ignored"]


def test_the_switch_of_the_template_changes_the_prompt(server: Running) -> None:
    tokens = {}
    for value in (True, False):
        kwargs = {"enable_thinking": value}
        body = post(server, "/v1/chat/completions", messages=HELLO, max_tokens=1, chat_template_kwargs=kwargs)
        tokens[value] = body["usage"]["prompt_tokens"]
        assert body["vlfit"]["ignored"] == []
    assert tokens[False] > tokens[True]


def test_tool_calls_in_xml_come_as_json(server: Running) -> None:
    body = post(
        server,
        "/v1/chat/completions",
        messages=HELLO,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=300,
        chat_template_kwargs={"enable_thinking": False},  # random words would never end their reasoning
    )
    [call] = body["choices"][0]["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["city"] in ("Rome", "Oslo")
    assert isinstance(arguments["days"], int)
    talk = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "rain"},
    ]
    again = post(server, "/v1/chat/completions", messages=talk, tools=[TOOL], max_tokens=2)
    assert again["usage"]["prompt_tokens"] > body["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("effort", "reasons"), [("none", False), ("minimal", False), ("low", True), ("high", True)]
)
def test_reasoning_effort_turns_reasoning_off_and_on(server: Running, effort: str, reasons: bool) -> None:
    chat = post(server, "/v1/chat/completions", messages=HELLO, max_tokens=8, reasoning_effort=effort)
    assert bool(chat["choices"][0]["message"].get("reasoning_content")) == reasons
    response = post(server, "/v1/responses", input="hello", max_output_tokens=8, reasoning={"effort": effort})
    assert ("reasoning" in [item["type"] for item in response["output"]]) == reasons
    assert chat["vlfit"]["ignored"] == response["vlfit"]["ignored"] == []


def test_variables_of_the_template_go_before_reasoning_effort(server: Running) -> None:
    kwargs = {"enable_thinking": True}
    fields = {"messages": HELLO, "max_tokens": 8, "reasoning_effort": "none", "chat_template_kwargs": kwargs}
    assert post(server, "/v1/chat/completions", **fields)["choices"][0]["message"]["reasoning_content"]


def test_reasoning_effort_that_is_none_of_openai_s(server: Running) -> None:
    body = {"model": "text", "messages": HELLO, "reasoning_effort": "most"}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reasoning_effort")
