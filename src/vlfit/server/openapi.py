"""The HTTP API as an OpenAPI document: paths by hand, bodies from the pydantic models that read them.

Knows: what each path is for and what its body may hold. Does not know: how it is shown (``docs``) or served.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from vlfit._version import __version__
from vlfit.server.completions import CompletionRequest
from vlfit.server.responses import ResponseRequest
from vlfit.server.schemas import ChatRequest

_REFERENCE = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Path:
    """One path of the API. ``body``: the model that reads it, or a schema; None: none is read.

    ``streams``: with ``stream`` it answers in events. ``keyed``: behind the API key, if there is one.
    ``kind``: of what it gives, as HTTP names it.
    """

    path: str
    method: str
    group: str
    summary: str
    gives: str
    body: type[BaseModel] | dict[str, Any] | None = None
    streams: bool = False
    keyed: bool = True
    kind: str = "application/json"


_PARK = {
    "type": "object",
    "properties": {"park": {"enum": ["auto", "ram", "files"], "default": "auto"}},
    "additionalProperties": False,
}
PATHS = (
    Path(
        "/v1/chat/completions",
        "post",
        "OpenAI",
        "Answers a chat with pictures, clips, tools and answers of a given form.",
        "A chat completion. Beside OpenAI's fields it has vlfit: what was seen of each picture, and timings.",
        ChatRequest,
        streams=True,
    ),
    Path(
        "/v1/responses",
        "post",
        "OpenAI",
        "The same by OpenAI's newer API, without its memory: send all of a conversation each time.",
        "A response; streamed, its named events.",
        ResponseRequest,
        streams=True,
    ),
    Path(
        "/v1/completions",
        "post",
        "OpenAI",
        "Goes on with text as it is, without a chat's turns.",
        "A text completion.",
        CompletionRequest,
        streams=True,
    ),
    Path("/v1/models", "get", "OpenAI", "Lists the one model that is served.", "A list of one model."),
    Path("/v1/models/{model}", "get", "OpenAI", "The same alone, by its name.", "The model; else 404."),
    Path(
        "/v1/embeddings",
        "post",
        "OpenAI",
        "Answers 404: a model that writes has no embeddings worth the name.",
        "Nothing: it always fails.",
        {"type": "object"},
    ),
    Path(
        "/v1/vlfit/price",
        "post",
        "vlfit",
        "Says what a chat would cost, without running it.",
        "Tokens of the prompt and of each picture, room in the KV cache, and seconds if they are known.",
        ChatRequest,
    ),
    Path("/v1/vlfit/plan", "get", "vlfit", "The memory that was planned for.", "Lines, and their sum."),
    Path(
        "/v1/vlfit/ledger",
        "get",
        "vlfit",
        "What is planned and held, line by line.",
        "Rows of planned and actual bytes.",
    ),
    Path(
        "/v1/vlfit/status",
        "get",
        "vlfit",
        "All that the server knows of itself.",
        "Requests, tokens, steps, memory, the ledger.",
    ),
    Path(
        "/v1/vlfit/sleep",
        "post",
        "vlfit",
        "Gives the memory back once nothing runs; the next request wakes the model.",
        "Where the weights wait, and how much was given back.",
        _PARK,
    ),
    Path(
        "/v1/vlfit/wake",
        "post",
        "vlfit",
        "Takes the memory again.",
        "How long it took.",
        {"type": "object", "additionalProperties": False},
    ),
    Path("/health", "get", "operation", "Whether the server is alive.", "Its state and model.", keyed=False),
    Path("/ready", "get", "operation", "Whether it takes requests.", "Its model; else 503.", keyed=False),
    Path(
        "/metrics",
        "get",
        "operation",
        "Numbers for Prometheus.",
        "Its text format, 0.0.4.",
        kind="text/plain; version=0.0.4",
    ),
)
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "the field that is wrong"},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


@cache
def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    models = {path.body for path in PATHS if isinstance(path.body, type)}
    ordered = sorted(models, key=lambda model: model.__name__)
    _, schemas = models_json_schema([(model, "validation") for model in ordered], ref_template=_REFERENCE)
    paths: dict[str, Any] = {}
    for path in PATHS:
        paths.setdefault(path.path, {})[path.method] = _operation(path)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "vlfit",
            "version": __version__,
            "description": "Questions about pictures, answered on this computer, over OpenAI's API.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": {**schemas.get("$defs", {}), "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(path: Path) -> dict[str, Any]:
    schema = {"type": "object" if path.kind == "application/json" else "string"}
    content: dict[str, Any] = {path.kind: {"schema": schema}}
    if path.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    operation: dict[str, Any] = {
        "operationId": f"{path.method}_{re.sub(r'[^a-z0-9]+', '_', path.path).strip('_')}",
        "tags": [path.group],
        "summary": path.summary,
        "responses": {
            "200": {"description": path.gives, "content": content},
            "default": {
                "description": "What went wrong, in OpenAI's shape.",
                "content": {"application/json": {"schema": {"$ref": _REFERENCE.format(model="Error")}}},
            },
        },
        **({"security": [{}, {"key": []}]} if path.keyed else {}),
    }
    names = re.findall(r"\{(\w+)\}", path.path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if path.body is not None:
        named = isinstance(path.body, type)
        body = {"$ref": _REFERENCE.format(model=path.body.__name__)} if named else path.body  # type: ignore[union-attr]
        operation["requestBody"] = {"required": named, "content": {"application/json": {"schema": body}}}
    return operation
