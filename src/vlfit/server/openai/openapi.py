"""The HTTP API as an OpenAPI document: paths by hand, bodies from the pydantic models that read them.

Knows: what each path is for and what its body may hold. Does not know: how it is shown (``docs``) or served.
"""

import re
from base64 import b64encode
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from html import escape
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from vlfit._version import __version__
from vlfit.server.openai.chat_schema import ChatRequest
from vlfit.server.openai.completions import CompletionRequest
from vlfit.server.openai.error_replies import JSONReply
from vlfit.server.openai.responses import ResponseRequest

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


# ``/openapi.json``, and ``/docs``: the same for people, one page without scripts or anything from
# elsewhere.
#
# Knows: how a schema is written in words. Does not know: what the API is (``openapi``).


_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 0 auto; padding: 1rem; }
code, pre { font-family: ui-monospace, monospace; font-size: .9em; }
details { border: 1px solid color-mix(in srgb, currentColor 25%, transparent); border-radius: .5rem;
  margin: .5rem 0; padding: .5rem .75rem; }
summary { cursor: pointer; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .25rem .5rem .25rem 0; overflow-wrap: anywhere; }
"""
_POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    f"style-src 'sha256-{b64encode(sha256(_STYLE.encode()).digest()).decode()}'"
)
_HEADERS = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff"}


def docs_routes() -> list[Route]:
    """Both are open to whoever reaches the server: they say what vlfit is, not what it holds."""

    async def schema(_: Request) -> Response:

        return JSONReply(document())

    async def page(_: Request) -> Response:
        return HTMLResponse(_page(), headers=_HEADERS)

    return [Route("/openapi.json", schema), Route("/docs", page)]


@cache
def _page() -> str:

    api = document()
    schemas = api["components"]["schemas"]
    groups: dict[str, list[str]] = {}
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            groups.setdefault(operation["tags"][0], []).append(_operation_html(method, path, operation))
    paths = "".join(f"<h2>{escape(name)}</h2>{''.join(each)}" for name, each in groups.items())
    types = "".join(_type(name, schema) for name, schema in sorted(schemas.items()))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>vlfit: HTTP API</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body><h1>vlfit {escape(api['info']['version'])}: HTTP API</h1>"
        f"<p>{escape(api['info']['description'])} For programs: <a href='/openapi.json'>openapi.json</a>.</p>"
        f"{paths}<h2>types</h2>{types}</body></html>"
    )


def _operation_html(method: str, path: str, operation: dict[str, Any]) -> str:
    gives = operation["responses"]["200"]["description"]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    takes = f"<p>Takes: {_kind(body)}</p>" if body else ""
    return (
        f"<details><summary><code>{method.upper()} {escape(path)}</code> {escape(operation['summary'])}"
        f"</summary>{takes}<p>Gives: {escape(gives)}</p></details>"
    )


def _type(name: str, schema: dict[str, Any]) -> str:
    words = f"<p>{escape(schema['description'])}</p>" if schema.get("description") else ""
    required = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code>{'' if field in required else '?'}</td>"
        f"<td>{_kind(wanted)}</td></tr>"
        for field, wanted in schema.get("properties", {}).items()
    )
    table = f"<table><tr><th>field</th><th>kind</th></tr>{rows}</table>" if rows else ""
    return (
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>{words}{table}</details>'
    )


def _kind(schema: dict[str, Any]) -> str:
    """A schema in words; what it refers to is a link."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}"><code>{name}</code></a>'
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(_kind(each) for each in schema[several])
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(repr(value))}</code>" for value in values)
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}{_bounds(schema)}"
    if schema.get("type") == "object" and schema.get("properties"):
        each_field = schema["properties"].items()
        fields = ", ".join(f"<code>{escape(name)}</code>: {_kind(each)}" for name, each in each_field)
        return f"{{{fields}}}"
    return escape(str(schema.get("type", "anything"))) + _bounds(schema)


def _bounds(schema: dict[str, Any]) -> str:
    names = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
        "minItems": "at least",
        "maxItems": "at most",
        "minLength": "of at least",
        "maxLength": "of at most",
    }
    told = [f"{words} {schema[name]}" for name, words in names.items() if name in schema]
    return f", {', '.join(told)}" if told else ""
