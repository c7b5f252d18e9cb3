"""llama.cpp's routes: properties, slots, tokens, templates, and what ``/v1/models`` adds for its clients."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.server.harness import Running, running, wait_for
from tests.server.pictures import data_url, png
from tests.server.scripted import ScriptedBackend
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.native import NativeBackend
from vlfit.server.llama_cpp import llama_cpp_api
from vlfit.server.server_settings import ServerSettings

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def mini() -> Iterator[NativeBackend]:
    options = EngineOptions(device="cpu", max_model_len=1024, max_num_seqs=3)
    with NativeBackend.load("mini", options) as backend:
        yield backend


@pytest.fixture(scope="module")
def server(mini: NativeBackend) -> Iterator[Running]:
    with running(mini, ServerSettings(context=1024)) as running_server:
        yield running_server


def post(server: Running, route: str, status: int = 200, **fields: Any) -> Any:
    answer = httpx.post(f"{server.url}/{route}", json=fields, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()


def error_of(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"code", "message", "type"}
    assert body["error"]["code"] == answer.status_code
    error: dict[str, Any] = body["error"]
    return error


# --- properties --------------------------------------------------------------------------------------------


def test_properties(server: Running, mini: NativeBackend) -> None:
    for query in ("", "?model=mini"):
        told = httpx.get(f"{server.url}/props{query}").json()
        assert told["default_generation_settings"]["n_ctx"] == 1024
        assert told["default_generation_settings"]["params"]["temperature"] == 0
        assert told["total_slots"] == 3
        assert told["model_alias"] == "mini"
        assert told["model_path"] == str(mini.checkpoint.folder)
        assert told["modalities"] == {"vision": True, "audio": False}
        assert "<|im_start|>" in told["chat_template"]
        assert told["chat_template_caps"] == {"supports_tools": True, "supports_tool_calls": True}
        assert told["eos_token"] == "<|im_end|>"
        assert isinstance(told["bos_token"], str)
        assert told["media_marker"]
        assert "vlfit" in told["build_info"]
        assert told["is_sleeping"] is False
    answer = httpx.get(f"{server.url}/props?model=llama")
    assert (answer.status_code, error_of(answer)["type"]) == (404, "not_found_error")


def test_properties_of_a_model_elsewhere() -> None:
    with running(ScriptedBackend(), ServerSettings(max_completions=7)) as server:
        told = httpx.get(f"{server.url}/props").json()
        assert (told["model_path"], told["chat_template"], told["total_slots"]) == ("", "", 7)
        for route, fields in (
            ("tokenize", {"content": "a"}),
            ("detokenize", {"tokens": [1]}),
            ("apply-template", {"messages": HELLO}),
        ):
            answer = httpx.post(f"{server.url}/{route}", json=fields)
            assert (answer.status_code, error_of(answer)["type"]) == (501, "not_supported_error")
        assert "meta" not in httpx.get(f"{server.url}/v1/models").json()["data"][0]


def test_the_card_of_the_model(server: Running, mini: NativeBackend) -> None:
    text = mini.checkpoint.config.text
    [card] = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert card["meta"] == {
        "n_ctx": 1024,
        "n_ctx_train": text.max_position_embeddings,
        "n_vocab": text.vocab_size,
        "n_embd": text.hidden_size,
        "n_params": mini.checkpoint.parameter_count,
        "size": mini.checkpoint.weight_bytes,
    }


def test_slots(server: Running) -> None:
    told = httpx.get(f"{server.url}/slots?fail_on_no_slot=1").json()
    assert [slot["id"] for slot in told] == [0, 1, 2]
    assert all(slot["n_ctx"] == 1024 and slot["is_processing"] is False for slot in told)


def test_slots_in_use() -> None:
    backend = ScriptedBackend(go_on=threading.Event())
    with running(backend, ServerSettings(max_completions=2)) as server:
        threads = [
            threading.Thread(target=post, args=(server, "v1/chat/completions"), kwargs={"messages": HELLO})
            for _ in range(2)
        ]
        threads[0].start()
        wait_for(lambda: len(backend.started) == 1)
        assert [slot["is_processing"] for slot in httpx.get(f"{server.url}/slots").json()] == [True, False]
        threads[1].start()
        wait_for(lambda: len(backend.started) == 2)
        answer = httpx.get(f"{server.url}/slots?fail_on_no_slot=1")
        assert (answer.status_code, error_of(answer)["type"]) == (503, "unavailable_error")
        assert backend.go_on is not None
        backend.go_on.set()
        for thread in threads:
            thread.join()


# --- tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["Hello, world!", "", "á 🙂\n", "<|im_end|> a"])
def test_tokens_and_back(server: Running, mini: NativeBackend, text: str) -> None:
    ids = post(server, "tokenize", content=text)["tokens"]
    assert ids == mini.engine.prompts.tokenizer.encode(text, add_special_tokens=False).ids
    assert post(server, "detokenize", tokens=ids) == {"content": text}
    pieces = post(server, "tokenize", content=text, with_pieces=True)["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    spelled = b"".join(
        piece["piece"].encode() if isinstance(piece["piece"], str) else bytes(piece["piece"])
        for piece in pieces
    )
    assert spelled.decode() == text


def test_control_tokens_as_text(server: Running) -> None:
    parsed = post(server, "tokenize", content="<|im_end|>")["tokens"]
    plain = post(server, "tokenize", content="<|im_end|>", parse_special=False, add_special=True)["tokens"]
    assert len(parsed) == 1 < len(plain)
    assert post(server, "detokenize", tokens=plain)["content"] == "<|im_end|>"


def test_a_long_text_leaves_the_server_answering(server: Running, mini: NativeBackend) -> None:
    """Tokens and their JSON took seconds, in which nothing else ran; several at once took gigabytes."""
    text = " a1" * 100_000
    ids = mini.engine.prompts.tokenizer.encode(text, add_special_tokens=False).ids
    with ThreadPoolExecutor(4) as pool:
        long = [
            pool.submit(lambda: post(server, "tokenize", content=text, with_pieces=True)) for _ in range(3)
        ]
        while not all(each.done() for each in long):
            assert httpx.get(f"{server.url}/health", timeout=60).json()["status"] == "ok"
    for each in long:
        assert [piece["id"] for piece in each.result()["tokens"]] == ids
    plain = post(server, "tokenize", content=text, parse_special=False)
    assert plain == {"tokens": ids}


def test_more_waiting_texts_than_there_is_room_for_are_refused(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp_api, "MOST_PENDING", 0)
    answer = httpx.post(f"{server.url}/tokenize", json={"content": "a"})
    assert answer.status_code == 429
    assert error_of(answer)["code"] == 429


@pytest.mark.parametrize(
    ("route", "fields", "name"),
    [
        ("tokenize", {}, "content"),
        ("tokenize", {"content": 7}, "content"),
        ("tokenize", {"content": "a", "with_pieces": 1}, "with_pieces"),
        ("detokenize", {"tokens": [10**9]}, "1000000000"),
        ("detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("detokenize", {"tokens": "a"}, "tokens"),
        ("apply-template", {"messages": []}, "messages"),
        ("apply-template", {"messages": [{"role": "user", "content": [{"type": "no"}]}]}, "messages[0]"),
        ("apply-template", {"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "messages"),
        ("apply-template", {"messages": HELLO, "chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
    ],
)
def test_what_is_refused_is_named(server: Running, route: str, fields: dict[str, Any], name: str) -> None:
    answer = httpx.post(f"{server.url}/{route}", json=fields)
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert error["type"] == "invalid_request_error"
    assert name in error["message"]


def test_other_models_and_routes(server: Running) -> None:
    for route, fields in (("tokenize", {"content": "a"}), ("apply-template", {"messages": HELLO})):
        answer = httpx.post(f"{server.url}/{route}", json={**fields, "model": "llama"})
        assert (answer.status_code, error_of(answer)["type"]) == (404, "not_found_error")
    assert httpx.get(f"{server.url}/tokenize").status_code == 405
    assert error_of(httpx.post(f"{server.url}/props", json={}))["code"] == 405
    assert error_of(httpx.post(f"{server.url}/slots/0", json={}))["code"] == 404
    too_large = httpx.post(f"{server.url}/tokenize", json={"content": "a" * 3_000_000})
    assert error_of(too_large)["code"] == 413
    assert httpx.get(f"{server.url}/health").json()["status"] == "ok"


def test_keys() -> None:
    with running(ScriptedBackend(), ServerSettings(api_keys=("first",))) as server:
        for path in ("props", "slots"):
            answer = httpx.get(f"{server.url}/{path}")
            assert (answer.status_code, error_of(answer)["type"]) == (401, "authentication_error")
            headers = {"authorization": "Bearer first"}
            assert httpx.get(f"{server.url}/{path}", headers=headers).status_code == 200


# --- templates ---------------------------------------------------------------------------------------------


def test_a_prompt_as_text(server: Running) -> None:
    image = {"type": "image_url", "image_url": {"url": data_url(png("red"))}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [image, {"type": "text", "text": "What is this?"}]},
    ]
    marker = httpx.get(f"{server.url}/props").json()["media_marker"]
    told = post(server, "apply-template", messages=messages)
    assert told == {
        "prompt": "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\n{marker}What is this?<|im_end|>\n<|im_start|>assistant\n"
    }
    told = post(server, "apply-template", messages=HELLO, add_generation_prompt=False)
    assert told == {"prompt": "<|im_start|>user\nHello<|im_end|>\n"}
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    calls = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}]
    messages = [*HELLO, {"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "a wall"}]
    prompt = post(server, "apply-template", messages=messages, tools=[tool])["prompt"]
    assert '"name": "look"' in prompt
    assert "<tool_response>\na wall\n</tool_response>" in prompt


def test_a_rendered_prompt_has_the_tokens_of_the_chat(server: Running) -> None:
    prompt = post(server, "apply-template", messages=HELLO)["prompt"]
    ids = post(server, "tokenize", content=prompt)["tokens"]
    told = post(server, "v1/chat/completions", messages=HELLO, max_tokens=1)
    assert len(ids) == told["usage"]["prompt_tokens"]
