"""``/v1/rerank``, ``/rerank`` and ``/v2/rerank`` over a tiny reranker."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.harness import Running
from tests.server.pictures import data_url, png
from vlfit.api.conversation import ImagePart
from vlfit.backends.native import NativeBackend
from vlfit.server.rerank.rerank_api import ROUTES
from vlfit.server.rerank.rerank_schema import FIELDS, RerankRequest
from vlfit.tasks.embeddings import EmbedInput, rerank

ROOT = Path(__file__).parents[3]
PICTURE = png("red", 96, 64)
URL = data_url(PICTURE)
DOCUMENTS = ["a lazy dog", "a red square", "the quick brown fox", "hello world"]
CLOSE = 1e-4


def post(server: Running, status: int = 200, path: str = "/v1/rerank", **body: Any) -> Any:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()


def scores(reply: dict[str, Any]) -> dict[int, float]:
    ranked = [each["relevance_score"] for each in reply["results"]]
    assert ranked == sorted(ranked, reverse=True)
    return {each["index"]: each["relevance_score"] for each in reply["results"]}


@pytest.mark.parametrize("path", ROUTES)
def test_documents_by_falling_score(rerank_server: Running, reranker: NativeBackend, path: str) -> None:
    reply = post(rerank_server, path=path, model=reranker.model, query="a dog", documents=DOCUMENTS)
    wanted = rerank(reranker, EmbedInput("a dog"), [EmbedInput(each) for each in DOCUMENTS])
    assert scores(reply) == pytest.approx(dict(enumerate(wanted)), abs=CLOSE)
    assert len(set(wanted)) == len(wanted)
    for each in reply["results"]:
        told = each.get("document")
        assert told == (None if path == "/v2/rerank" else {"text": DOCUMENTS[each["index"]]})
    assert reply["id"].startswith("rerank-")
    assert (reply["object"], reply["model"]) == ("list", reranker.model)
    assert reply["usage"]["total_tokens"] == reply["meta"]["tokens"]["input_tokens"] > 100
    assert reply["meta"]["billed_units"] == {"search_units": 1}
    assert reply["vlfit"]["model_kind"] == "reranker"


def test_pictures_in_queries_and_documents(rerank_server: Running, reranker: NativeBackend) -> None:
    part = {"type": "image_url", "image_url": {"url": URL}}
    documents: list[Any] = [
        {"image": URL},
        {"text": "a cat", "image": URL.partition(",")[2]},
        {"content": [part, {"type": "text", "text": "a cat"}]},
        {"text": "a cat"},
    ]
    reply = post(rerank_server, query={"image": URL, "text": "which animal?"}, documents=documents)
    picture = ImagePart(PICTURE)
    both = EmbedInput("a cat", (picture,))
    wanted = rerank(
        reranker,
        EmbedInput("which animal?", (picture,)),
        [EmbedInput("", (picture,)), both, both, EmbedInput("a cat")],
    )
    assert scores(reply) == pytest.approx(dict(enumerate(wanted)), abs=CLOSE)
    echoes = {each["index"]: each["document"] for each in reply["results"]}
    assert echoes == {0: {}, 1: {"text": "a cat"}, 2: {"text": "a cat"}, 3: {"text": "a cat"}}


def test_the_best_few(rerank_server: Running) -> None:
    whole = scores(post(rerank_server, query="a dog", documents=DOCUMENTS))
    best = post(rerank_server, query="a dog", documents=DOCUMENTS, top_n=2, return_documents=False)
    assert list(scores(best)) == list(whole)[:2]
    assert all("document" not in each for each in best["results"])
    assert len(post(rerank_server, query="a", documents=DOCUMENTS, top_n=99)["results"]) == 4


def test_instructions_change_scores(rerank_server: Running, reranker: NativeBackend) -> None:
    wanted = rerank(reranker, EmbedInput("a"), [EmbedInput("b")], instruction="Find animals")
    for name in ("instruction", "instruct"):
        fields: dict[str, Any] = {name: "Find animals"}
        reply = post(rerank_server, query="a", documents=["b"], **fields)
        assert scores(reply)[0] == pytest.approx(wanted[0], abs=CLOSE)
    plain = scores(post(rerank_server, query="a", documents=["b"]))[0]
    assert abs(plain - wanted[0]) > CLOSE


def test_more_documents_than_the_server_admits_at_once(rerank_server: Running) -> None:
    documents = [f"document {number}" for number in range(50)]
    assert len(scores(post(rerank_server, query="a", documents=documents))) == 50


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": "a"}, "documents"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "a", "documents": ["a", ""]}, "documents[1]"),
        ({"query": "a", "documents": ["a", {}]}, "documents[1]"),
        ({"query": "a", "documents": "a"}, "documents"),
        ({"query": "a", "documents": ["a"] * 2049}, "documents"),
        ({"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        ({"query": "a", "documents": ["a"], "truncate_prompt_tokens": 7}, "truncate_prompt_tokens"),
        ({"query": "a", "documents": [{"image": "not base64"}]}, "documents[0].image_url.url"),
        ({"query": {"image": "file:///etc/passwd"}, "documents": ["a"]}, "query.image_url.url"),
        ({"query": "a", "documents": ["b", "a lazy dog " * 1000]}, "documents[1]"),
    ],
)
def test_what_is_wrong_is_said(rerank_server: Running, body: dict[str, Any], param: str) -> None:
    error = post(rerank_server, 400, **body)
    assert error["param"] == param
    assert error["message"] == error["detail"]


def test_long_documents_are_cut_if_asked_to(rerank_server: Running) -> None:
    for fields in ({"truncation": True}, {"truncate_prompt_tokens": -1}):
        reply = post(rerank_server, query="a", documents=["a lazy dog " * 1000], **fields)
        assert 500 < reply["usage"]["total_tokens"] < 512


def test_the_table_of_fields(rerank_server: Running) -> None:
    """Documented fields are in the schema, refused by name, or listed as ignored."""
    honoured = {name for name, (effect, _) in FIELDS.items() if effect == "honoured"}
    assert honoured == set(RerankRequest.model_fields)
    for name in (name for name, (effect, _) in FIELDS.items() if effect == "refused"):
        assert post(rerank_server, 400, query="a", documents=["b"], **{name: "nonsense"})["param"] == name
    ignored = {name for name, (effect, _) in FIELDS.items() if effect == "ignored"} - {"user"}
    fields: dict[str, Any] = dict.fromkeys(ignored, 3)
    reply = post(rerank_server, query="a", documents=["b"], user="me", **fields)
    assert set(reply["vlfit"]["ignored"]) == ignored


def test_the_table_is_in_the_docs() -> None:
    page = (ROOT / "docs" / "embeddings.md").read_text("utf-8")
    for name, (effect, note) in FIELDS.items():
        assert f"| `{name}` | {effect} | {note} |" in page


def test_models_that_do_not_score_refuse(server: Running, chat_server: Running) -> None:
    for each in (server, chat_server):  # an embedding model; a vocabulary without yes and no
        error = post(each, 400, query="a", documents=["b"])
        assert (error["code"], error["param"]) == ("invalid_request", "model")


def test_a_reranker_does_nothing_else(rerank_server: Running) -> None:
    told = httpx.post(f"{rerank_server.url}/v1/embeddings", json={"input": "a"})
    assert (told.status_code, told.json()["error"]["param"]) == (400, "model")
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    told = httpx.post(f"{rerank_server.url}/v1/chat/completions", json=chat)
    assert (told.status_code, told.json()["error"]["param"]) == (400, "model")


def test_errors_of_the_router_have_this_form_too(rerank_server: Running) -> None:
    told = httpx.get(f"{rerank_server.url}/v1/rerank")
    assert told.status_code == 405
    assert set(told.json()) == {"message", "detail", "code", "param"}
