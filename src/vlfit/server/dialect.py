"""What an API of this server (a dialect) consists of: routes, documentation, and the form of its errors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from starlette.routing import Route

from vlfit.server.error_replies import ErrorForm
from vlfit.server.generation import ServerContext
from vlfit.server.models.served_models import ServedModel

JSON, EVENT_STREAM, NDJSON = "application/json", "text/event-stream", "application/x-ndjson"


@dataclass(frozen=True, slots=True)
class ApiPath:
    """One method of a path, as ``/openapi.json`` and ``/docs`` describe it. Changes nothing in how it works.

    ``group``: heading on ``/docs``. ``returns``: description of the response. ``body``: pydantic model or
    JSON schema of the request body; None: there is no body. ``media_type``: of a response that is not
    streamed. ``stream``: of a streamed one; None: never streamed. ``needs_key``: whether the path is
    described as taking an API key (``dialects.needs_key`` decides).
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
    """Empty: the ``Dialect.model_fields`` of a dialect that adds nothing to a model's card."""
    return {}


@dataclass(frozen=True, slots=True)
class Dialect:
    """An API that clients speak to this server.

    ``prefixes``: beginnings of its paths; the longest prefix of all dialects decides whose a path is. Such
    paths need the API key, and errors on them have ``error_form``, also those of the router and the
    middleware.
    ``routes``: makes the routes of one server. ``paths``: descriptions of the routes.
    ``error_schema``: JSON schema of what ``error_form`` returns.
    ``model_fields``: returns the fields to add to a model's card in ``/v1/models``.
    ``id_header``: response header for the request's id, beside ``x-request-id``; None: no other.
    """

    name: str
    prefixes: tuple[str, ...]
    routes: Callable[[ServerContext], list[Route]]
    paths: tuple[ApiPath, ...]
    error_form: ErrorForm
    error_schema: dict[str, Any]
    model_fields: Callable[[ServedModel], dict[str, Any]] = no_model_fields
    id_header: str | None = None
