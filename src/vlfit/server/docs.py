"""``/openapi.json``, and ``/docs``: the same for people, one page without scripts or anything from elsewhere.

Knows: how a schema is written in words. Does not know: what the API is (``openapi``).
"""

from base64 import b64encode
from functools import cache
from hashlib import sha256
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from vlfit.server.failures import JSONReply

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
        from vlfit.server.openapi import document

        return JSONReply(document())

    async def page(_: Request) -> Response:
        return HTMLResponse(_page(), headers=_HEADERS)

    return [Route("/openapi.json", schema), Route("/docs", page)]


@cache
def _page() -> str:
    from vlfit.server.openapi import document

    api = document()
    schemas = api["components"]["schemas"]
    groups: dict[str, list[str]] = {}
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            groups.setdefault(operation["tags"][0], []).append(_operation(method, path, operation))
    paths = "".join(f"<h2>{escape(name)}</h2>{''.join(each)}" for name, each in groups.items())
    types = "".join(_type(name, schema) for name, schema in sorted(schemas.items()))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>vlfit: HTTP API</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body><h1>vlfit {escape(api['info']['version'])}: HTTP API</h1>"
        f"<p>{escape(api['info']['description'])} For programs: <a href='/openapi.json'>openapi.json</a>.</p>"
        f"{paths}<h2>types</h2>{types}</body></html>"
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
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
