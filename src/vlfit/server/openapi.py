"""The HTTP API as an OpenAPI document at ``/openapi.json``, and as one page without scripts at ``/docs``.

The dialects describe their own paths, those of the server itself are here; request bodies come from the
pydantic models that parse them.
"""

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from html import escape
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from vlfit._version import __version__
from vlfit.server.chat.chat_schema import ChatRequest
from vlfit.server.dialect import ApiPath, Dialect
from vlfit.server.dialects import DIALECTS, dialect_of
from vlfit.server.error_replies import JSONReply
from vlfit.server.openai.openai_api import OPENAI

_REFERENCE = "#/components/schemas/{model}"


_SLEEP_BODY = {
    "type": "object",
    "properties": {
        "park": {"enum": ["auto", "ram", "files"], "default": "auto"},
        "model": {"type": "string", "description": "one of several; none: all that are in memory"},
    },
    "additionalProperties": False,
}
SERVER_PATHS = (
    ApiPath(
        "/v1/vlfit/price",
        "post",
        "vlfit",
        "Estimate the cost of a chat completion without running it.",
        "Tokens of the prompt and of each picture, KV cache use, and expected seconds if known.",
        ChatRequest,
    ),
    ApiPath("/v1/vlfit/plan", "get", "vlfit", "The memory plan.", "Ledger lines and their sum."),
    ApiPath(
        "/v1/vlfit/ledger",
        "get",
        "vlfit",
        "Planned and actual memory, line by line.",
        "Ledger rows with planned and actual bytes.",
    ),
    ApiPath(
        "/v1/vlfit/status",
        "get",
        "vlfit",
        "The server's status.",
        "Requests, tokens, steps, memory and the ledger.",
    ),
    ApiPath(
        "/v1/vlfit/search",
        "get",
        "vlfit",
        "Search in the folder of --search: q (words), n (how many).",
        "Paths, keys and scores, best first.",
    ),
    ApiPath(
        "/v1/vlfit/search/picture",
        "get",
        "vlfit",
        "A small picture of a result: its path and key.",
        "A JPEG of at most 320 pixels a side.",
        media_type="image/jpeg",
    ),
    ApiPath(
        "/v1/vlfit/sleep",
        "post",
        "vlfit",
        "Free the memory once no request runs; the next request wakes the model.",
        "Where the weights are kept, and how many bytes were freed.",
        _SLEEP_BODY,
    ),
    ApiPath(
        "/v1/vlfit/wake",
        "post",
        "vlfit",
        "Load the weights back into memory.",
        "How long it took.",
        {
            "type": "object",
            "additionalProperties": False,
            "properties": {"model": {"type": "string", "description": "one of several; none: the first"}},
        },
    ),
    ApiPath("/health", "get", "operation", "Liveness check.", "State and model.", needs_key=False),
    ApiPath("/ready", "get", "operation", "Readiness check.", "The model, or 503.", needs_key=False),
    ApiPath(
        "/metrics",
        "get",
        "operation",
        "Metrics for Prometheus.",
        "Prometheus text format 0.0.4.",
        media_type="text/plain; version=0.0.4",
    ),
)
PATHS = (*(path for dialect in DIALECTS for path in dialect.paths), *SERVER_PATHS)


@cache
def openapi_document() -> dict[str, Any]:
    """The API as an OpenAPI 3.1 document, made once; do not change it."""
    models = {path.body for path in PATHS if isinstance(path.body, type)}
    ordered = sorted(models, key=lambda model: model.__name__)
    _, schemas = models_json_schema([(model, "validation") for model in ordered], ref_template=_REFERENCE)
    paths: dict[str, Any] = {}
    for path in PATHS:
        paths.setdefault(path.path, {})[path.method] = _operation(path)
    errors = {_error_name(each): each.error_schema for each in DIALECTS}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "vlfit",
            "version": __version__,
            "description": "Vision-language models on this computer, over the APIs of "
            f"{', '.join(each.name for each in DIALECTS)}.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": {**schemas.get("$defs", {}), **errors},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _error_name(dialect: Dialect) -> str:
    """Name of the schema of its errors; other characters than letters are not allowed everywhere."""
    return "Error" if dialect is OPENAI else f"{re.sub('[^A-Za-z]+', '', dialect.name)}Error"


def _operation(path: ApiPath) -> dict[str, Any]:
    schema = {"type": "object" if path.media_type == "application/json" else "string"}
    content: dict[str, Any] = {path.media_type: {"schema": schema}}
    if path.stream is not None:
        content[path.stream] = {"schema": {"type": "string"}}
    dialect = dialect_of(path.path)
    operation: dict[str, Any] = {
        "operationId": f"{path.method}_{re.sub(r'[^a-z0-9]+', '_', path.path).strip('_')}",
        "tags": [path.group],
        "summary": path.summary,
        "responses": {
            "200": {"description": path.returns, "content": content},
            "default": {
                "description": f"An error, in {dialect.name}'s format.",
                "content": {
                    "application/json": {"schema": {"$ref": _REFERENCE.format(model=_error_name(dialect))}}
                },
            },
        },
        **({"security": [{}, {"key": []}]} if path.needs_key else {}),
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


# The page at /docs.

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
    """``/openapi.json`` and ``/docs``, without a key: they describe the API, not this server's state."""

    async def schema(_: Request) -> Response:
        return JSONReply(openapi_document())

    async def page(_: Request) -> Response:
        return HTMLResponse(_page(), headers=_HEADERS)

    return [Route("/openapi.json", schema), Route("/docs", page)]


@cache
def _page() -> str:
    api = openapi_document()
    schemas = api["components"]["schemas"]
    groups: dict[str, list[str]] = {}
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            groups.setdefault(operation["tags"][0], []).append(_operation_html(method, path, operation))
    paths = "".join(f"<h2>{escape(name)}</h2>{''.join(each)}" for name, each in groups.items())
    types = "".join(_type_html(name, schema) for name, schema in sorted(schemas.items()))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>vlfit: HTTP API</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body><h1>vlfit {escape(api['info']['version'])}: HTTP API</h1>"
        f"<p>{escape(api['info']['description'])} For programs: <a href='/openapi.json'>openapi.json</a>.</p>"
        f"{paths}<h2>types</h2>{types}</body></html>"
    )


def _operation_html(method: str, path: str, operation: dict[str, Any]) -> str:
    returns = operation["responses"]["200"]["description"]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    accepts = f"<p>Body: {_schema_html(body)}</p>" if body else ""
    return (
        f"<details><summary><code>{method.upper()} {escape(path)}</code> {escape(operation['summary'])}"
        f"</summary>{accepts}<p>Returns: {escape(returns)}</p></details>"
    )


def _type_html(name: str, schema: dict[str, Any]) -> str:
    description = f"<p>{escape(schema['description'])}</p>" if schema.get("description") else ""
    required = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code>{'' if field in required else '?'}</td>"
        f"<td>{_schema_html(field_schema)}</td></tr>"
        for field, field_schema in schema.get("properties", {}).items()
    )
    table = f"<table><tr><th>field</th><th>type</th></tr>{rows}</table>" if rows else ""
    heading = f"<summary><code>{escape(name)}</code></summary>"
    return f'<details id="{escape(name)}">{heading}{description}{table}</details>'


def _schema_html(schema: dict[str, Any]) -> str:
    """A schema as HTML text, with links to the types it references."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}"><code>{name}</code></a>'
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(_schema_html(each) for each in schema[several])
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(repr(value))}</code>" for value in values)
    if schema.get("type") == "array":
        return f"list of {_schema_html(schema.get('items', {}))}{_bounds_text(schema)}"
    if schema.get("type") == "object" and schema.get("properties"):
        each_field = schema["properties"].items()
        fields = ", ".join(f"<code>{escape(name)}</code>: {_schema_html(each)}" for name, each in each_field)
        return f"{{{fields}}}"
    return escape(str(schema.get("type", "anything"))) + _bounds_text(schema)


def _bounds_text(schema: dict[str, Any]) -> str:
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
    bounds = [f"{phrase} {schema[name]}" for name, phrase in names.items() if name in schema]
    return f", {', '.join(bounds)}" if bounds else ""
