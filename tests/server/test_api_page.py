"""``/openapi.json``, ``/docs``, price, plan, and routes that do not exist."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from tests.server.harness import Running, running
from tests.server.pictures import data_url, png
from tests.server.scripted import ScriptedBackend
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.held_memory import expected_memory
from vlfit.backends.native import NativeBackend
from vlfit.server.app import create_app
from vlfit.server.openapi import openapi_document
from vlfit.server.server_settings import ServerSettings


@pytest.fixture(scope="module")
def mini() -> Iterator[NativeBackend]:
    with NativeBackend.load("mini", EngineOptions(device="cpu", max_model_len=1024)) as backend:
        yield backend


@pytest.fixture(scope="module")
def server(mini: NativeBackend) -> Iterator[Running]:
    with running(mini, ServerSettings(expectation=expected_memory(mini, ()))) as running_server:
        yield running_server


def test_openapi_references_resolve(server: Running) -> None:
    told = httpx.get(f"{server.url}/openapi.json").json()
    assert told == openapi_document()
    names = set(re.findall(r"#/components/schemas/([A-Za-z_]+)", str(told)))
    assert names <= set(told["components"]["schemas"])
    assert {"ChatRequest", "ResponseRequest", "CompletionRequest", "Error"} <= names


def test_openapi_matches_the_routes() -> None:
    routes = create_app(ScriptedBackend()).routes
    served = {
        (route.path_format, method.lower())
        for route in routes
        if isinstance(route, Route)
        for method in route.methods or ()
    }
    told = {(path, method) for path, methods in openapi_document()["paths"].items() for method in methods}
    assert told <= served
    unsaid = {path for path, method in served - told if path.startswith("/v1/") and method != "head"}
    assert unsaid == set()


def test_docs_page_loads_nothing(server: Running) -> None:
    answer = httpx.get(f"{server.url}/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"(src|href)=.(https?:)?//", answer.text)
    assert "<script" not in answer.text
    for path in openapi_document()["paths"]:
        assert path in answer.text
    links = set(re.findall(r'href="#([^"]+)"', answer.text))
    assert links <= set(re.findall(r'id="([^"]+)"', answer.text))


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": "What is this?"}]
    return {"messages": [{"role": "user", "content": content}], **fields}


def test_price_equals_actual_usage(server: Running, mini: NativeBackend) -> None:
    body = chat({"type": "image_url", "image_url": {"url": data_url(png("red", 300, 200))}}, max_tokens=7)
    steps = mini.account().counters.steps
    price = httpx.post(f"{server.url}/v1/vlfit/price", json={**body, "n": 2}).json()
    assert mini.account().counters.steps == steps, "nothing ran"
    paid = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()
    assert price["prompt_tokens"] == paid["usage"]["prompt_tokens"]
    assert price["image_tokens"] == paid["usage"]["prompt_tokens_details"]["image_tokens"] > 0
    assert price["images"] == paid["vlfit"]["images"]
    assert (price["completions"], price["max_tokens"]) == (2, 7)
    pool = mini.account().pool
    each = -(-(price["prompt_tokens"] + 6) // pool.block_size)
    bytes_of_block = mini.account().memory.kv_cache // pool.blocks
    assert price["kv_cache"]["blocks"] == 2 * each
    assert price["kv_cache"]["bytes"] == 2 * each * bytes_of_block


def test_price_refuses_invalid_requests(server: Running) -> None:
    for body, code in (
        (chat(max_tokens=5000), "context_length_exceeded"),
        (chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}), "invalid_image"),
        ({"messages": []}, "invalid_request"),
    ):
        answer = httpx.post(f"{server.url}/v1/vlfit/price", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


def test_the_plan_adds_up(server: Running, mini: NativeBackend) -> None:
    plan = httpx.get(f"{server.url}/v1/vlfit/plan").json()
    assert plan["model"] == mini.model
    assert plan["settings"]["context"] == 1024
    assert plan["lines"]
    assert plan["total"] == sum(line["bytes"] for line in plan["lines"])
    other = httpx.get(f"{server.url}/v1/vlfit/plan?context=99")
    assert (other.status_code, other.json()["error"]["param"]) == (400, "context")
    ledger = httpx.get(f"{server.url}/v1/vlfit/ledger").json()
    planned = {row["line"]: row["planned"] for row in ledger["ledger"]}
    assert {line["line"]: line["bytes"] for line in plan["lines"]}.items() <= planned.items()
