"""``/v1/embeddings`` over a tiny embedding model: every form of input, errors, limits, other requests."""

import base64
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest
from openai import BadRequestError, RateLimitError

from tests import pictures
from tests.server.harness import Running, running, wait_for
from tests.server.pictures import data_url, png
from tests.server.scripted import ScriptedBackend, ScriptedTicket
from tests.tiny_pooled import INSTRUCTION
from vlfit.api.conversation import ImagePart, TextPart
from vlfit.api.outputs import Chunk
from vlfit.api.pooling import QUERY_INSTRUCTION, Vector
from vlfit.backends.native import NativeBackend
from vlfit.server.chat.inline_files import MIN_INLINE_FILE
from vlfit.server.embeddings.pooled_endpoint import WINDOW
from vlfit.server.openai.openai_embeddings import REFUSED
from vlfit.server.server_settings import ServerSettings
from vlfit.tasks.embeddings import EmbedInput, embed_parts

PICTURE = png("red", 96, 64)
URL = data_url(PICTURE)
CLOSE = 1e-4  # as in tests/engine/test_pooling.py


def post(server: Running, status: int = 200, path: str = "/v1/embeddings", **body: Any) -> Any:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()


def vectors(reply: dict[str, Any]) -> np.ndarray[Any, Any]:
    assert [each["index"] for each in reply["data"]] == list(range(len(reply["data"])))
    return np.array([each["embedding"] for each in reply["data"]], dtype=np.float32)


def vector_of(backend: NativeBackend, text: str = "", *files: ImagePart, instruction: str = "") -> Vector:
    return embed_parts(backend, text, *files, instruction=instruction).vector


def test_a_text_with_the_model_s_instruction(server: Running, embedding: NativeBackend) -> None:
    reply = post(server, input="a lazy dog", model=embedding.model)
    (ours,) = vectors(reply)
    wanted = vector_of(embedding, "a lazy dog", instruction=INSTRUCTION)
    np.testing.assert_allclose(ours, wanted, atol=CLOSE)
    assert reply["model"] == embedding.model
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] > 10
    assert reply["vlfit"]["model_kind"] == "embedding"
    assert "note" not in reply["vlfit"]


def test_every_form_of_input(server: Running, embedding: NativeBackend) -> None:
    picture = ImagePart(PICTURE)
    bare = base64.b64encode(PICTURE).decode()
    part = {"type": "image_url", "image_url": {"url": URL}}
    inputs = [
        "a cat",
        part,
        {"type": "text", "text": "a cat"},
        {"text": "a cat", "image": URL},
        {"image": bare},
        {"content": [part, {"type": "text", "text": "a cat"}]},
    ]
    ours = vectors(post(server, input=inputs))
    text, seen, both = (
        vector_of(embedding, "a cat"),
        vector_of(embedding, "", picture),
        vector_of(embedding, "a cat", picture),
    )
    wanted = np.stack([text, seen, text, both, seen, both])
    np.testing.assert_allclose(ours, wanted, atol=CLOSE)
    assert float(seen @ both) < 1 - CLOSE


def test_large_pictures_leave_the_body_before_it_is_parsed(server: Running, embedding: NativeBackend) -> None:
    picture = pictures.picture(700, 500, seed=1)
    assert len(picture) > 4 * MIN_INLINE_FILE
    for sent in (data_url(picture), base64.b64encode(picture).decode()):
        reply = post(server, input=[{"image": sent}])
        wanted = vector_of(embedding, "", ImagePart(picture))
        np.testing.assert_allclose(vectors(reply)[0], wanted, atol=CLOSE)
    # A text that looks like base64 stays a text.
    told = post(server, 400, input=["a", "x" * (2 * MIN_INLINE_FILE)])
    assert told["error"]["code"] == "context_length_exceeded"


def test_messages_as_vllm_takes_them(server: Running, embedding: NativeBackend) -> None:
    parts = [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "a cat"}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts}]
    wanted = vector_of(embedding, "a cat", ImagePart(PICTURE))
    np.testing.assert_allclose(vectors(post(server, messages=messages))[0], wanted, atol=CLOSE)
    # The form of Qwen's own example for vLLM: an instruction, and the header of an answer.
    messages.insert(0, {"role": "system", "content": [{"type": "text", "text": "Find animals."}]})
    messages.append({"role": "assistant", "content": [{"type": "text", "text": ""}]})
    told = post(server, messages=messages, continue_final_message=True, add_special_tokens=True)
    wanted = vector_of(embedding, "a cat", ImagePart(PICTURE), instruction="Find animals.")
    np.testing.assert_allclose(vectors(told)[0], wanted, atol=CLOSE)


def test_token_ids_have_no_template(server: Running, embedding: NativeBackend) -> None:
    one = vectors(post(server, input=[5, 6, 7]))
    several = vectors(post(server, input=[[5, 6, 7], [8]]))
    assert one.shape == (1, 64)
    np.testing.assert_allclose(one[0], several[0], atol=CLOSE)
    told = post(server, 400, input=[5, 10**6])
    assert told["error"]["code"] == "invalid_request"


def test_instructions(server: Running, embedding: NativeBackend) -> None:
    asked = vector_of(embedding, "a cat", instruction=QUERY_INSTRUCTION)
    forms: list[dict[str, Any]] = [
        {"instruction": QUERY_INSTRUCTION},
        {"instruction": QUERY_INSTRUCTION.rstrip(".")},  # the full stop of training is added
        {"input_type": "query"},
        {"input_type": "search_query"},
        {"task": "retrieval.query"},
    ]
    for fields in forms:
        np.testing.assert_allclose(vectors(post(server, input="a cat", **fields))[0], asked, atol=CLOSE)
    wrong = post(server, 400, input="a cat", input_type="classification")
    assert wrong["error"]["param"] == "input_type"


def test_base64_and_dimensions(server: Running) -> None:
    whole = vectors(post(server, input=["a cat", "a dog"]))
    told = post(server, input=["a cat", "a dog"], encoding_format="base64", dimensions=16)
    decoded = np.stack(
        [np.frombuffer(base64.b64decode(each["embedding"]), dtype="<f4") for each in told["data"]]
    )
    wanted = whole[:, :16] / np.linalg.norm(whole[:, :16], axis=1, keepdims=True)
    np.testing.assert_allclose(decoded, wanted, atol=CLOSE)
    assert post(server, 400, input="a", dimensions=65)["error"]["param"] == "dimensions"
    assert post(server, 400, input="a", dimensions=0)["error"]["param"] == "dimensions"
    assert post(server, 400, input="a", encoding_format="hex")["error"]["param"] == "encoding_format"


def test_the_openai_client(server: Running, embedding: NativeBackend) -> None:
    with server.openai() as client:
        reply = client.embeddings.create(model=embedding.model, input=["a cat", "a dog"], user="me")
        assert len(reply.data) == 2
        np.testing.assert_allclose(reply.data[1].embedding, vector_of(embedding, "a dog"), atol=CLOSE)
        with pytest.raises(BadRequestError) as caught:
            client.embeddings.create(model=embedding.model, input=["a cat", ""])
        assert caught.value.param == "input[1]"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input"),
        ({"messages": []}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": [True]}, "input[0]"),
        ({"input": [{"type": "audio", "audio": "x"}]}, "input[0]"),
        ({"input": [{"image": "not base64"}]}, "input[0].image_url.url"),
        ({"input": [{"image": "file:///etc/passwd"}]}, "input[0].image_url.url"),
        ({"input": [{"image": "http://127.0.0.1:1/x.png"}]}, "input[0].image_url.url"),
        ({"input": ["a", {"image": URL}] * 9}, "input"),  # more pictures than the server takes
        ({"input": ["a", "a lazy dog " * 1000]}, "input[1]"),
        ({"input": "a", "truncate_prompt_tokens": 20}, "truncate_prompt_tokens"),
        ({"input": "a", "dimensions": "16"}, "dimensions"),
        ({"input": "a", "instruction": 5}, "instruction"),
    ],
)
def test_what_is_wrong_is_said(server: Running, body: dict[str, Any], param: str) -> None:
    error = post(server, 400, **body)["error"]
    assert error["param"] == param


def test_fields_of_other_servers(server: Running) -> None:
    for name in REFUSED:
        told = post(server, 400, input="a", **{name: "nonsense"})
        assert told["error"]["param"] == name
    for name, neutral in REFUSED.items():
        for value in neutral:
            post(server, input="a", **{name: value})
    told = post(server, input="a", user="me", temprature=1, priority=3)
    assert told["vlfit"]["ignored"] == ["temprature", "priority"]


def test_a_long_text_is_refused_or_cut(server: Running) -> None:
    told = post(server, 400, input="a lazy dog " * 1000)
    assert told["error"]["code"] == "context_length_exceeded"
    cut = post(server, input="a lazy dog " * 1000, truncate_prompt_tokens=-1)
    assert 500 < cut["usage"]["prompt_tokens"] < 512


def test_more_inputs_than_the_server_admits_at_once(server: Running) -> None:
    texts = [f"text number {number}" for number in range(60)]
    ours = vectors(post(server, input=texts))
    again = vectors(post(server, input=texts[37]))
    np.testing.assert_allclose(ours[37], again[0], atol=CLOSE)
    assert len(np.unique(ours.round(4), axis=0)) == 60


def test_one_bad_input_of_many_fails_the_request_and_nothing_else(server: Running) -> None:
    texts: list[Any] = [f"text {number}" for number in range(20)]
    post(server, 400, input=[*texts, {"image": data_url(b"no picture" * 10)}, *texts])
    assert len(post(server, input=texts)["data"]) == 20


def test_an_embedding_model_writes_no_text(server: Running, embedding: NativeBackend) -> None:
    with server.openai() as client, pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model=embedding.model, messages=[{"role": "user", "content": "Hello"}])
    assert caught.value.param == "model"
    completion = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hello"})
    assert completion.status_code == 400


def test_a_chat_model_gives_vectors_and_says_what_they_are(
    chat_server: Running, chatting: NativeBackend
) -> None:
    told = post(chat_server, input="a cat")
    assert told["vlfit"]["model_kind"] == "chat"
    assert told["vlfit"]["note"]
    np.testing.assert_allclose(vectors(told)[0], vector_of(chatting, "a cat"), atol=CLOSE)


def test_vectors_beside_answers(chat_server: Running, chatting: NativeBackend) -> None:
    """Requests of both kinds share the engine; a greedy answer does not change by that."""
    messages: Any = [{"role": "user", "content": "the quick brown fox"}]

    def answer() -> str | None:
        with chat_server.openai() as client:
            told = client.chat.completions.create(
                model=chatting.model,
                messages=messages,
                temperature=0,
                max_tokens=40,
                extra_body={"ignore_eos": True},
            )
            return told.choices[0].message.content

    alone = answer()
    answers: list[str | None] = []
    thread = threading.Thread(target=lambda: answers.append(answer()))
    thread.start()
    ours = vectors(post(chat_server, input=["a cat", {"image": URL}] * 8))
    thread.join()
    assert answers == [alone]
    np.testing.assert_allclose(ours[::2], np.repeat(ours[:1], 8, axis=0), atol=CLOSE)


def test_a_backend_without_vectors_refuses() -> None:
    with running(ScriptedBackend()) as server:
        error = post(server, 400, input="a")["error"]
        assert (error["code"], error["param"]) == ("invalid_request", "model")
        assert post(server, 404, input="a", model="nobody/nothing")["error"]["code"] == "model_not_found"


def test_keys_and_limits_are_those_of_other_routes(embedding: NativeBackend) -> None:
    with running(embedding, ServerSettings(api_keys=("secret",))) as server:
        assert post(server, 401, input="a")["error"]["code"] == "invalid_api_key"
        with server.openai("secret") as client:
            assert client.embeddings.create(model=embedding.model, input="a").data


class HeldBackend(ScriptedBackend):
    """Gives vectors, but only once told to."""

    def __init__(self, embedding: NativeBackend) -> None:
        super().__init__()
        self.capabilities = replace(embedding.capabilities, account=False, sleep=False)
        self.pooling = embedding.pooling
        self.listeners: list[Any] = []

    def prepare_pooled(self, prompt: Any, pooling: Any) -> Any:
        return self.prepare_text("x", self.default_sampling())

    def start(self, prepared: Any, sampling: Any, listener: Any) -> Any:
        self.listeners.append(listener)
        return ScriptedTicket()

    def has_started(self, number: int) -> bool:
        return len(self.listeners) > number


def test_requests_run_in_a_window_and_a_full_queue_refuses(embedding: NativeBackend) -> None:
    held = HeldBackend(embedding)
    with running(held, ServerSettings(max_completions=WINDOW)) as server, server.openai() as client:
        thread = threading.Thread(target=lambda: post(server, input=["a"] * (WINDOW + 3)))
        thread.start()
        wait_for(lambda: len(held.listeners) == WINDOW)
        with pytest.raises(RateLimitError):
            client.embeddings.create(model="scripted", input="b")
        done = Chunk("", finish_reason="stop", pooled=np.zeros(4, dtype=np.float32))
        held.listeners[0](done)
        wait_for(lambda: len(held.listeners) == WINDOW + 1)  # the next takes its place
        with pytest.raises(RateLimitError):
            client.embeddings.create(model="scripted", input="b")
        for number in range(1, WINDOW + 3):
            wait_for(partial(held.has_started, number))
            held.listeners[number](done)
        thread.join()


def test_inputs_are_pictures_first(embedding: NativeBackend) -> None:
    parts = EmbedInput("a cat", (ImagePart(PICTURE),)).parts
    assert [type(each) for each in parts] == [ImagePart, TextPart]
    assert [type(each) for each in EmbedInput().parts] == [TextPart]
