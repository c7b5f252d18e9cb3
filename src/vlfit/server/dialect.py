"""What an API of this server (a dialect) consists of: routes, documentation, and the form of its errors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from starlette.routing import Route

from vlfit.server.error_replies import ErrorForm
from vlfit.server.generation import ServerContext
from vlfit.server.served_models import ServedModel

JSON, EVENT_STREAM, NDJSON = "application/json", "text/event-stream", "application/x-ndjson"


@dataclass(frozen=True, slots=True)
class ApiPath:
    """One path of the API and its description.

    ``returns``: description of the response. ``body``: model or schema of the request body, if any.
    ``stream``: media type of a streamed response, if there are any. ``needs_key``: requires the API key, if
    the server has one.
    """

    path: str
    method: Literal["get", "post", "delete", "head"]
    group: str
    summary: str
    returns: str
    body: type[BaseModel] | dict[str, Any] | None = None
    stream: str | None = None
    needs_key: bool = True
    media_type: str = JSON


def no_model_fields(_: ServedModel) -> dict[str, Any]:
    """``Dialect.model_fields`` of a dialect that adds nothing."""
    return {}


@dataclass(frozen=True, slots=True)
class Dialect:
    """An API that clients speak to this server.

    ``prefixes``: how its paths begin. They need the API key, and errors on them have ``error_form``, also
    those of the router and the middleware; the longest prefix of all dialects counts.
    ``routes``: made for one server. ``paths``: their descriptions.
    ``error_schema``: JSON schema of what ``error_form`` returns.
    ``model_fields``: what it adds to a model's card in ``/v1/models``.
    ``id_header``: the response header that its clients look for the request's id in, beside ``x-request-id``.
    """

    name: str
    prefixes: tuple[str, ...]
    routes: Callable[[ServerContext], list[Route]]
    paths: tuple[ApiPath, ...]
    error_form: ErrorForm
    error_schema: dict[str, Any]
    model_fields: Callable[[ServedModel], dict[str, Any]] = no_model_fields
    id_header: str | None = None
