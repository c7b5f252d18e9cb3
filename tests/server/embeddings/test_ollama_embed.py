"""``/api/embed`` and ``/api/embeddings`` over a tiny embedding model."""

from typing import Any

import httpx
import numpy as np
import pytest

from tests.server.harness import Running
from vlfit.backends.native import NativeBackend
from vlfit.server.ollama.ollama_schema import FIELDS, OllamaEmbeddingsRequest, OllamaEmbedRequest
from vlfit.tasks.embeddings import embed_parts

CLOSE = 1e-4


def post(server: Running, status: int = 200, path: str = "embed", **body: Any) -> Any:
    answer = httpx.post(f"{server.url}/api/{path}", json={"model": "tiny-embedding", **body}, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_texts(server: Running, embedding: NativeBackend) -> None:
    one = post(server, input="a cat")
    several = post(server, input=["a cat", "a dog"])
    assert one["model"] == "tiny-embedding"
    for name in ("total_duration", "load_duration", "prompt_eval_count"):
        assert isinstance(one[name], int)
        assert one[name] > 0
    assert one["total_duration"] >= one["load_duration"]
    wanted = [embed_parts(embedding, text).vector for text in ("a cat", "a dog")]
    np.testing.assert_allclose(several["embeddings"], wanted, atol=CLOSE)
    np.testing.assert_allclose(one["embeddings"], wanted[:1], atol=CLOSE)


def test_the_older_route(server: Running, embedding: NativeBackend) -> None:
    told = post(server, path="embeddings", prompt="a cat")
    assert set(told) == {"embedding"}
    np.testing.assert_allclose(told["embedding"], embed_parts(embedding, "a cat").vector, atol=CLOSE)


def test_dimensions(server: Running) -> None:
    whole = np.array(post(server, input="a cat")["embeddings"][0])
    some = post(server, input="a cat", dimensions=8)["embeddings"][0]
    np.testing.assert_allclose(some, whole[:8] / np.linalg.norm(whole[:8]), atol=CLOSE)
    assert "dimensions" in post(server, 400, input="a", dimensions=999)["error"]


def test_long_texts_are_cut_unless_that_is_forbidden(server: Running) -> None:
    long = "a lazy dog " * 1000
    assert 500 < post(server, input=long)["prompt_eval_count"] < 512
    assert 500 < post(server, input=long, truncate=True)["prompt_eval_count"] < 512
    assert "input" in post(server, 400, input=long, truncate=False)["error"]
    assert post(server, path="embeddings", prompt=long)["embedding"]


def test_without_input_the_model_is_loaded_or_unloaded(server: Running, embedding: NativeBackend) -> None:
    assert post(server) == {"model": "tiny-embedding", "embeddings": []}
    assert post(server, input="", keep_alive=0)["embeddings"] == []
    assert embedding.asleep
    assert post(server, path="embeddings", keep_alive="5m") == {"embedding": []}
    assert not embedding.asleep
    assert post(server, input=[], keep_alive=-1)["embeddings"] == []


def test_a_sleeping_model_wakes(server: Running, embedding: NativeBackend) -> None:
    post(server, keep_alive=0)
    assert embedding.asleep
    assert post(server, input="a cat", keep_alive=-1)["embeddings"]


@pytest.mark.parametrize(
    "body",
    [
        {"input": ["a", ""]},
        {"input": 5},
        {"input": ["a"] * 2049},
        {"input": "a", "truncate": "yes"},
        {"input": "a", "keep_alive": "soon"},
        {"input": "a", "options": {"num_ctx": 100_000}},
        {"input": "a", "model": ""},
    ],
)
def test_what_is_wrong_is_said(server: Running, body: dict[str, Any]) -> None:
    error = post(server, 400, **body)
    assert set(error) == {"error"}
    assert set(body) & {
        word.strip("[]:.,0123456789") for word in error["error"].replace("[", " ").split()
    } or ("num_ctx" in error["error"])


def test_fields_without_effect_are_listed(server: Running) -> None:
    told = post(
        server, input="a", shape="round", options={"temperature": 0.5, "num_ctx": 512, "mirostat_tau": 1}
    )
    assert set(told["vlfit"]["ignored"]) == {"shape", "options.temperature", "options.mirostat_tau"}


@pytest.mark.parametrize(
    ("section", "model"),
    [("/api/embed", OllamaEmbedRequest), ("/api/embeddings", OllamaEmbeddingsRequest)],
)
def test_the_table_and_the_schema_agree(section: str, model: type[Any]) -> None:
    assert set(model.model_fields) == set(FIELDS[section])
    assert all(effect == "honoured" for effect, _ in FIELDS[section].values())


def test_show_says_what_the_model_is_for(server: Running, rerank_server: Running) -> None:
    assert post(server, path="show")["capabilities"] == ["embedding", "vision"]
    told = httpx.post(f"{rerank_server.url}/api/show", json={"model": "tiny-reranker"}).json()
    assert told["capabilities"] == ["vision"]
    chat = {"messages": [{"role": "user", "content": "Hello"}], "stream": False}
    assert "embedding" in post(server, 400, path="chat", **chat)["error"]
