"""``/api/chat`` and ``/api/generate``: what is sent reaches the model, and the answer is in Ollama's form."""

import base64
import json
import threading
import time
from datetime import datetime
from typing import Any

import httpx
import pytest

from tests.server.harness import Running, running, wait_for
from tests.server.pictures import data_url, png
from tests.server.scripted import ScriptedBackend
from vlfit.api.conversation import ImagePart, TextPart
from vlfit.errors import DoesNotFit, OutOfMemory
from vlfit.models.registry import QWEN_THINKING
from vlfit.prompt.reasoning import Thinking, ThinkingSplitter
from vlfit.server.chat.inline_files import MIN_INLINE_FILE, BodyReader, bare_file_url
from vlfit.server.ollama.model_details import ModelDetails
from vlfit.server.server_settings import ServerSettings

TEXT = "A red circle 🙂."
HELLO = [{"role": "user", "content": "Hello"}]
BOTH = [("chat", {"messages": HELLO}), ("generate", {"prompt": "Hello"})]
ASKED = {"model": "scripted", "messages": HELLO}
CALL = '<tool_call>\n{"name": "look", "arguments": {"part": "left", "often": 2}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"part": {"type": "string"}}},
    },
}


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def post(server: Running, route: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/api/{route}", json={"model": "scripted", **fields}, timeout=60)


def whole(server: Running, route: str, **fields: Any) -> dict[str, Any]:
    answer = post(server, route, stream=False, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    body: dict[str, Any] = answer.json()
    return body


def lines(server: Running, route: str, **fields: Any) -> list[dict[str, Any]]:
    answer = post(server, route, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.split("\n")[:-1]]


def refused(server: Running, route: str, status: int = 400, **fields: Any) -> str:
    answer = post(server, route, **fields)
    assert answer.status_code == status, answer.text
    return error_of(answer)


def error_of(answer: httpx.Response) -> str:
    body = answer.json()
    assert set(body) == {"error"}
    assert isinstance(body["error"], str)
    assert body["error"]
    assert "Traceback" not in body["error"]
    return str(body["error"])


# --- answers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("route", "fields"), BOTH)
def test_a_stream_is_lines_of_pieces(
    server: Running, scripted: ScriptedBackend, route: str, fields: dict[str, Any]
) -> None:
    *pieces, end = lines(server, route, **fields)
    assert all(piece["done"] is False and piece["model"] == "scripted" for piece in pieces)
    datetime.fromisoformat(pieces[0]["created_at"])
    text = [piece["message"]["content"] if route == "chat" else piece["response"] for piece in pieces]
    assert "".join(text) == TEXT
    assert len(text) == len(scripted.words)
    assert end["done"] is True
    assert end["done_reason"] == "stop"
    assert (end["prompt_eval_count"], end["eval_count"]) == (2, 5)
    durations = [end[f"{name}_duration"] for name in ("total", "load", "prompt_eval", "eval")]
    assert all(isinstance(each, int) and each >= 0 for each in durations)
    assert end["prompt_eval_duration"] == 9_000_000  # of the scripted timings, in ns
    assert end["eval_duration"] == 4_000_000
    assert end["total_duration"] >= end["load_duration"] > 0


@pytest.mark.parametrize(("route", "fields"), BOTH)
def test_without_a_stream_it_is_one_object(
    server: Running, scripted: ScriptedBackend, route: str, fields: dict[str, Any]
) -> None:
    body = whole(server, route, **fields)
    assert (body["message"] if route == "chat" else {"content": body["response"]})["content"] == TEXT
    assert body["done"] is True
    assert body["eval_count"] == 5
    assert body["vlfit"] == {"images": [], "finish_reasons": ["stop"], "ignored": []}


def test_an_answer_that_is_cut_off_says_so(server: Running, scripted: ScriptedBackend) -> None:
    body = whole(server, "chat", messages=HELLO, options={"num_predict": 2})
    assert body["done_reason"] == "length"
    assert body["message"]["content"] == "A red "
    scripted.finish_reason = "loop"
    body = whole(server, "chat", messages=HELLO)
    assert body["done_reason"] == "stop"
    assert body["vlfit"]["finish_reasons"] == ["loop"]


@pytest.mark.parametrize(("route", "fields"), BOTH)
def test_more_tokens_than_the_context_has(
    server: Running, scripted: ScriptedBackend, route: str, fields: dict[str, Any]
) -> None:
    """As in Ollama, the answer ends where the context does."""
    scripted.words, scripted.context = ("word ",) * 10, 7
    body = whole(server, route, **fields, options={"num_predict": 8192})
    assert scripted.asked[-1][1].max_tokens is None
    assert (body["done_reason"], body["eval_count"]) == ("length", 5)
    for few in (5, 2):
        assert whole(server, route, **fields, options={"num_predict": few})["eval_count"] == few


@pytest.mark.parametrize("as_url", [False, True])
def test_pictures_are_base64(server: Running, scripted: ScriptedBackend, as_url: bool) -> None:
    red, blue = png("red"), png("blue", 600, 400)
    images = [data_url(red), data_url(blue)] if as_url else [b64(red), b64(blue)]
    body = whole(server, "chat", messages=[{"role": "user", "content": "Hello", "images": images}])
    [conversation, _] = scripted.asked[-1]
    first, second, text = conversation[0].parts
    assert isinstance(first, ImagePart)
    assert isinstance(second, ImagePart)
    assert (first.data, second.data, text) == (red, blue, TextPart("Hello"))
    assert len(body["vlfit"]["images"]) == 2
    assert body["prompt_eval_count"] == 162
    whole(server, "generate", prompt="Hello", images=images[:1], system="Be brief.")
    [conversation, _] = scripted.asked[-1]
    assert [message.role for message in conversation] == ["system", "user"]
    assert isinstance(conversation[1].parts[0], ImagePart)


def test_large_pictures_are_taken_out_of_the_body(server: Running, scripted: ScriptedBackend) -> None:
    large = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 1000
    images = [b64(large), b64(png("red")), b64(large)]
    whole(server, "generate", prompt="Hello " * 200, images=images)
    pictures = [part.data for part in scripted.asked[-1][0][0].parts if isinstance(part, ImagePart)]
    assert pictures == [large, png("red"), large]
    reader = BodyReader(bare=True)
    reader.feed(json.dumps({"images": images, "prompt": "x" * 70_000}).encode())
    body = reader.finish()
    assert len(body.files) == 3  # a long text without spaces is taken, too, and put back by parse_request
    assert len(body.reduced()) < MIN_INLINE_FILE
    assert bare_file_url("QUJD").endswith(";base64,QUJD")


def test_a_long_text_like_base64_stays_a_text(server: Running, scripted: ScriptedBackend) -> None:
    text = "A" * 70_000
    assert "17501" in refused(server, "generate", prompt=text)  # tokens: it was not cut
    scripted.context = 10**6
    whole(server, "generate", prompt=text)
    assert scripted.asked[-1][0][0].parts == (TextPart(text),)


def test_options_reach_the_sampler(server: Running, scripted: ScriptedBackend) -> None:
    options = {
        "temperature": 0.25,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.125,
        "seed": 3,
        "stop": ["END"],
        "repeat_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "num_predict": 3.0,
        "num_ctx": 4096,
    }
    body = whole(server, "chat", messages=HELLO, options=options)
    assert body["vlfit"]["ignored"] == []
    sampling = scripted.started[-1]
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.25, 7, 0.5, 0.125)
    assert (sampling.seed, sampling.stop, sampling.max_tokens) == (3, ("END",), 3)
    assert sampling.repetition_penalty == 1.5
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    whole(server, "chat", messages=HELLO, options={"seed": -1, "num_predict": -1, "stop": "END"})
    sampling = scripted.started[-1]
    assert (sampling.seed, sampling.max_tokens, sampling.stop) == (None, None, ("END",))
    whole(server, "chat", messages=HELLO)
    assert scripted.started[-1].temperature == 0.7  # the checkpoint's own


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"options": {"num_gpu": 99, "num_thread": 4}}, ["options.num_gpu", "options.num_thread"]),
        ({"options": {"num_ctx": 2048}}, ["options.num_ctx"]),
        ({"options": {"typical_p": 1.0, "mirostat": 0}}, []),
        ({"options": {"numgpu": 1}, "temprature": 1}, ["temprature", "options.numgpu"]),
        ({"think": False}, ["think"]),
        ({"keep_alive": "5m"}, ["keep_alive"]),  # the scripted backend cannot sleep
        (
            {"messages": [*HELLO, {"role": "assistant", "content": "Hm", "thinking": "a"}, *HELLO]},
            ["messages[1].thinking"],
        ),
    ],
)
def test_what_has_no_effect_is_listed(
    server: Running, scripted: ScriptedBackend, fields: dict[str, Any], names: list[str]
) -> None:
    assert whole(server, "chat", **{"messages": HELLO, **fields})["vlfit"]["ignored"] == names
    assert lines(server, "chat", **{"messages": HELLO, **fields})[-1]["vlfit"]["ignored"] == names


def test_a_schema_is_enforced_and_closed(server: Running, scripted: ScriptedBackend) -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"$ref": "#/$defs/A"},
            "b": {"type": "array", "items": {"properties": {"c": {}}}},
        },
        "$defs": {"A": {"type": "object", "properties": {"d": {"type": "string"}}}},
    }
    whole(server, "chat", messages=HELLO, format=schema)
    grammar = scripted.started[-1].grammar
    assert grammar is not None
    enforced = json.loads(grammar.text)
    assert enforced["additionalProperties"] is False
    assert enforced["properties"]["b"]["items"]["additionalProperties"] is False
    assert enforced["$defs"]["A"]["additionalProperties"] is False
    whole(server, "generate", prompt="Hello", format={"properties": {"a": {}}, "additionalProperties": True})
    grammar = scripted.started[-1].grammar
    assert grammar is not None
    assert json.loads(grammar.text)["additionalProperties"] is True
    whole(server, "generate", prompt="Hello", format="json")
    grammar = scripted.started[-1].grammar
    assert grammar is not None
    assert json.loads(grammar.text) == {"type": "object"}
    whole(server, "generate", prompt="Hello", format="")
    assert scripted.started[-1].grammar is None


def test_tools_are_called_with_an_object(server: Running, scripted: ScriptedBackend) -> None:
    scripted.words = ("Let ", "me see.\n", *(CALL[at : at + 9] for at in range(0, len(CALL), 9)), f"\n{CALL}")
    body = whole(server, "chat", messages=HELLO, tools=[TOOL])
    assert scripted.tools[0].name == "look"
    calls = body["message"]["tool_calls"]
    assert [call["function"]["index"] for call in calls] == [0, 1]
    assert calls[0]["function"]["name"] == "look"
    assert calls[0]["function"]["arguments"] == {"part": "left", "often": 2}
    assert "<tool_call>" not in body["message"]["content"]
    pieces = lines(server, "chat", messages=HELLO, tools=[TOOL])
    streamed = [call for piece in pieces for call in piece["message"].get("tool_calls", ())]
    assert [call["function"] for call in streamed] == [call["function"] for call in calls]
    assert pieces[-1]["done_reason"] == "stop"


def test_a_call_that_was_cut_off_is_text(server: Running, scripted: ScriptedBackend) -> None:
    scripted.words = (CALL[:60],)
    scripted.finish_reason = "length"
    body = whole(server, "chat", messages=HELLO, tools=[TOOL])
    assert "tool_calls" not in body["message"]
    assert '"part"' in body["message"]["content"]
    assert '"part"' in "".join(
        piece["message"]["content"] for piece in lines(server, "chat", messages=HELLO, tools=[TOOL])
    )


def test_results_of_tools_find_their_calls(server: Running, scripted: ScriptedBackend) -> None:
    calls = [{"function": {"name": name, "arguments": {"part": "left"}}} for name in ("look", "listen")]
    messages = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_name": "listen", "content": "silence"},
        {"role": "tool", "content": "a wall"},
    ]
    whole(server, "chat", messages=messages, tools=[TOOL])
    [conversation, _] = scripted.asked[-1]
    assert [message.role for message in conversation] == ["user", "assistant", "tool", "tool"]
    assert [call.name for call in conversation[1].calls] == ["look", "listen"]
    assert json.loads(conversation[1].calls[0].arguments) == {"part": "left"}
    refused(server, "chat", messages=[*HELLO, {"role": "tool", "content": "of nothing"}])


def test_ids_of_results_alone_mean_the_calls_in_order(server: Running, scripted: ScriptedBackend) -> None:
    calls: list[dict[str, Any]]
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("look", "listen")]
    asked = [*HELLO, {"role": "assistant", "content": "", "tool_calls": calls}]
    told = [{"role": "tool", "tool_call_id": f"call_x{index}", "content": "a wall"} for index in range(2)]
    whole(server, "chat", messages=[*asked, *told], tools=[TOOL])
    refused(server, "chat", messages=[*asked, *told, told[0]], tools=[TOOL])
    for index, call in enumerate(calls):
        call["id"] = f"call_{index}"
    refused(server, "chat", messages=[*asked, told[0]], tools=[TOOL])
    told = [{**each, "tool_call_id": f"call_{1 - index}"} for index, each in enumerate(told)]
    whole(server, "chat", messages=[*asked, *told], tools=[TOOL])


def test_logprobs(server: Running, scripted: ScriptedBackend) -> None:
    body = whole(server, "generate", prompt="Hello", logprobs=True, top_logprobs=2)
    assert [each["token"] for each in body["logprobs"]] == list(scripted.words)
    assert len(body["logprobs"][0]["top_logprobs"]) == 2
    pieces = lines(server, "chat", messages=HELLO, logprobs=True)
    assert [each["token"] for piece in pieces for each in piece.get("logprobs", ())] == list(scripted.words)
    refused(server, "chat", messages=HELLO, top_logprobs=2)


def test_a_raw_prompt_has_no_template(server: Running, scripted: ScriptedBackend) -> None:
    whole(server, "generate", prompt="<s>Hello", raw=True)
    assert scripted.raw == ["<s>Hello"]
    assert not scripted.asked
    refused(server, "generate", prompt="Hello", raw=True, system="Be brief.")
    refused(server, "generate", prompt="Hello", raw=True, images=[b64(png("red"))])


# --- thinking ----------------------------------------------------------------------------------------------


@pytest.fixture
def thinks(monkeypatch: pytest.MonkeyPatch, scripted: ScriptedBackend) -> None:
    monkeypatch.setattr(ModelDetails, "thinking", lambda *_: Thinking(QWEN_THINKING, opened=True))
    scripted.words = ("Let me ", "see.\n</thi", "nk>\n\n", "A red ", "circle.")


@pytest.mark.usefixtures("thinks")
def test_thoughts_are_apart(server: Running) -> None:
    message = whole(server, "chat", messages=HELLO, think=True)["message"]
    assert (message["thinking"], message["content"]) == ("Let me see.", "A red circle.")
    pieces = lines(server, "generate", prompt="Hello", think="high")
    assert "".join(piece.get("thinking", "") for piece in pieces) == "Let me see."
    assert "".join(piece["response"] for piece in pieces) == "A red circle."
    message = whole(server, "chat", messages=HELLO, think=False)["message"]
    assert message == {"role": "assistant", "content": "A red circle."}


def test_a_model_that_does_not_think_says_so(server: Running, scripted: ScriptedBackend) -> None:
    assert "scripted" in refused(server, "chat", messages=HELLO, think=True)
    refused(server, "chat", messages=HELLO, think="a lot")


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize(
    ("opened", "text", "thought", "answer"),
    [
        (True, "a < b\n</think>\n\nSo: c", "a < b", "So: c"),
        (True, "never ends </thin", "never ends </thin", ""),
        (False, "<think>\na\n</think>\n\nb", "a", "b"),
        (False, "\n<think>\n\n</think>\n\nb", "", "b"),
        (False, "<thing> b", "", "<thing> b"),
        (False, "b </think> c", "", "b </think> c"),
    ],
)
def test_splitting(opened: bool, text: str, thought: str, answer: str, size: int) -> None:
    splitter = ThinkingSplitter(Thinking(QWEN_THINKING, opened))
    pieces = [splitter.add(text[at : at + size]) for at in range(0, len(text), size)]
    pieces.append(splitter.add("", last=True))
    assert "".join(piece[0] for piece in pieces) == thought
    assert "".join(piece[1] for piece in pieces) == answer


# --- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": "Hello"}, "messages"),
        ({"messages": [{"content": "Hello"}]}, "messages[0].role"),
        ({"messages": [{"role": "judge", "content": "Hello"}]}, "judge"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "x", "images": ["https://a.b/c.png"]}]}, "images[0]"),
        ({"messages": [{"role": "user", "content": "x", "images": ["!"]}]}, "messages[0].images[0]"),
        ({"messages": HELLO, "options": {"num_ctx": 100_000}}, "4096"),
        ({"messages": HELLO, "options": {"mirostat": 2}}, "mirostat"),
        ({"messages": HELLO, "options": {"typical_p": 0.5}}, "typical_p"),
        ({"messages": HELLO, "options": {"temperature": 9}}, "options.temperature"),
        ({"messages": HELLO, "options": {"temperature": "warm"}}, "options.temperature"),
        ({"messages": HELLO, "options": {"repeat_penalty": -1}}, "options.repeat_penalty"),
        ({"messages": HELLO, "options": {"num_predict": -7}}, "options.num_predict"),
        ({"messages": HELLO, "options": {"stop": [""]}}, "options.stop"),
        ({"messages": HELLO, "format": "yaml"}, "yaml"),
        ({"messages": HELLO, "keep_alive": "soon"}, "soon"),
        ({"messages": HELLO, "tools": [{"type": "function"}]}, "tools[0].function"),
        ({"messages": HELLO, "model": ""}, "model"),
        ({"messages": HELLO, "stream": "yes"}, "stream"),
    ],
)
def test_invalid_chats_are_refused(
    server: Running, scripted: ScriptedBackend, fields: dict[str, Any], says: str
) -> None:
    assert says in refused(server, "chat", **fields)
    assert not scripted.started


@pytest.mark.parametrize(
    "fields",
    [
        {"suffix": "x"},
        {"template": "{{ .Prompt }}"},
        {"context": [1, 2, 3]},
        {"width": 512},
        {"height": 512},
        {"steps": 4},
    ],
)
def test_fields_that_cannot_be_honoured_are_refused_by_name(
    server: Running, scripted: ScriptedBackend, fields: dict[str, Any]
) -> None:
    assert next(iter(fields)) in refused(server, "generate", prompt="Hello", **fields)
    assert not scripted.started


def test_neutral_values_pass(server: Running, scripted: ScriptedBackend) -> None:
    whole(server, "generate", prompt="Hello", suffix="", template="", context=[], raw=False, system="")


def test_unknown_models_are_named_with_those_that_are_there(server: Running) -> None:
    answer = httpx.post(f"{server.url}/api/chat", json={"model": "llama3", "messages": HELLO})
    assert answer.status_code == 404
    assert "scripted" in error_of(answer)


def test_errors_of_the_middleware_and_the_router(server: Running) -> None:
    broken = httpx.post(f"{server.url}/api/chat", content=b"{")
    assert broken.status_code == 400
    error_of(broken)
    missing = httpx.get(f"{server.url}/api/create")
    assert missing.status_code == 404
    assert "/api/chat" in error_of(missing)
    wrong = httpx.get(f"{server.url}/api/chat")
    assert wrong.status_code == 405
    error_of(wrong)
    foreign = httpx.get(f"{server.url}/api/tags", headers={"host": "evil.example"})
    assert foreign.status_code == 403
    error_of(foreign)
    # Those of other paths keep OpenAI's form.
    assert set(httpx.get(f"{server.url}/v1/create").json()["error"]) == {"message", "type", "param", "code"}


def test_keys_and_limits() -> None:
    settings = ServerSettings(api_keys=("secret",), max_completions=1, body_limit=2000)
    backend = ScriptedBackend(go_on=threading.Event())
    with running(backend, settings) as server:
        for path in ("/api/tags", "/api/version", "/api/nothing"):
            answer = httpx.get(f"{server.url}{path}")
            assert answer.status_code == 401
            error_of(answer)
        key = {"authorization": "Bearer secret"}
        with httpx.Client(base_url=server.url, headers=key, timeout=60) as client:
            assert client.get("/api/tags").status_code == 200
            long = client.post("/api/chat", json={"model": "scripted", "messages": HELLO * 200})
            assert long.status_code == 413
            error_of(long)
            with client.stream("POST", "/api/chat", json=ASKED) as first:
                assert first.status_code == 200
                full = client.post("/api/chat", json=ASKED)
                assert full.status_code == 429
                assert int(full.headers["retry-after"]) > 0
                error_of(full)
                assert backend.go_on is not None
                backend.go_on.set()
                assert json.loads(first.read().splitlines()[-1])["done"] is True


def test_a_failure_in_mid_stream_is_the_last_line(server: Running, scripted: ScriptedBackend) -> None:
    scripted.error = OutOfMemory("no memory is left", "Try again.")
    answer = post(server, "chat", messages=HELLO)
    assert answer.status_code == 200
    *_, last = [json.loads(line) for line in answer.text.splitlines()]
    assert set(last) == {"error"}
    assert post(server, "chat", messages=HELLO, stream=False).status_code == 503
    scripted.prepare_error = DoesNotFit("too long", "Send less.")
    refused(server, "chat", messages=HELLO)


def test_a_silent_stream_has_empty_pieces() -> None:
    backend = ScriptedBackend(go_on=threading.Event())
    with (
        running(backend, ServerSettings(ping_seconds=0.05)) as server,
        httpx.stream("POST", f"{server.url}/api/chat", json=ASKED) as answer,
    ):
        received = answer.iter_lines()
        pieces = [json.loads(next(received)) for _ in range(4)]
        assert [piece["message"]["content"] for piece in pieces] == ["A ", "", "", ""]
        assert not any(piece["done"] for piece in pieces)
        assert backend.go_on is not None
        backend.go_on.set()
        assert json.loads(list(received)[-1])["done"] is True


def test_a_client_that_hangs_up_frees_the_model(server: Running, scripted: ScriptedBackend) -> None:
    scripted.words, scripted.delay = ("word ",) * 1000, 0.02
    with httpx.stream("POST", f"{server.url}/api/chat", json=ASKED) as answer:
        next(answer.iter_lines())
    wait_for(lambda: scripted.tickets[-1].cancelled.is_set())


def test_a_piece_costs_little(scripted: ScriptedBackend) -> None:
    """The target is 0.02 ms a token; the limit has room for a busy machine."""
    from vlfit.api.outputs import Chunk
    from vlfit.server.ollama.ollama_replies import OllamaWriter

    prepared = scripted.prepare((), scripted.default_sampling())
    writer = OllamaWriter("x", prepared, is_chat=True, started=0, ignored=(), with_logprobs=False)
    best = 1.0
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(1000):
            writer.events(0, Chunk("word "))
        best = min(best, (time.perf_counter() - began) / 1000)
    assert best < 200e-6


def test_a_picture_of_generate_is_named(server: Running) -> None:
    answer = refused(server, "generate", prompt="x", system="y", images=[b64(png("red")), "!"])
    assert answer.startswith("images[1]")
