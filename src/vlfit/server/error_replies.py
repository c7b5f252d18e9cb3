"""JSON responses, and errors as responses in the form of the dialect whose route raised them."""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vlfit.errors import (
    CannotWake,
    EngineStopped,
    ModelDownloading,
    QueueFull,
    RequestTooLarge,
    TooManyOpenFiles,
    VlfitError,
    raise_if_out_of_files,
)

DISCARD_SECONDS = 30.0  # how long a refused body is read and discarded
DISCARD_IDLE_SECONDS = 1.0  # without a piece of it: the client has long read the reply
RETRY_AFTER_RESTART = 10  # seconds a restart may take; a small model takes less


@dataclass(frozen=True, slots=True)
class ErrorFacts:
    """What a client learns of an error. ``param``: the request field at fault, if it is known."""

    status: int
    message: str
    code: str
    param: str | None = None


ErrorForm = Callable[[ErrorFacts], dict[str, Any]]  # the body of a response, in a dialect's form


def encode_json(value: Any) -> bytes:
    """Encode ``value`` as JSON in UTF-8; a lone surrogate, invalid in UTF-8, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class EncodedJSON:
    """A reply's JSON that is encoded already: a large one, piece by piece as it came in."""

    data: bytes


class JSONReply(Response):
    """A response of JSON in UTF-8, encoded by ``encode_json`` unless it is ``EncodedJSON``."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode the reply's ``content``; called by Starlette."""
        return content.data if isinstance(content, EncodedJSON) else encode_json(content)


class BodyNotRead(RequestTooLarge):
    """``RequestTooLarge`` by the ``Content-Length`` alone: none of the body has been read."""


class DrainingReply(JSONReply):
    """A reply that is sent at once, and ended only after the rest of the request body was read and discarded.

    For requests that are refused before their body was read: a client that is still sending would
    otherwise see a broken connection instead of the reply. Gives up after ``DISCARD_SECONDS``, or
    ``DISCARD_IDLE_SECONDS`` without a piece of the body.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        expects_continue = any(name == b"expect" for name, _ in scope["headers"])  # so it sends no body
        with suppress(TimeoutError):
            async with asyncio.timeout(0 if expects_continue else DISCARD_SECONDS):
                more = True
                while more:
                    async with asyncio.timeout(DISCARD_IDLE_SECONDS):
                        more = (await receive()).get("more_body", False)
        await send({"type": "http.response.body", "body": b""})


def error_facts(error: Exception) -> ErrorFacts:
    """What clients learn of ``error``.

    An ``OSError`` for want of file descriptors counts as ``TooManyOpenFiles``. Any other error that is no
    ``VlfitError`` becomes a 500 without details, which may be private.
    """
    if not isinstance(error, VlfitError):
        try:
            raise_if_out_of_files(error)
        except TooManyOpenFiles as known:
            error = known
    if isinstance(error, VlfitError):
        return ErrorFacts(error.http_status, _joined(error.message, error.hint), error.code, error.param)
    return ErrorFacts(
        500,
        "internal error. The server's log has the details under this request's id.",
        "internal_error",
    )


def _joined(message: str, hint: str) -> str:
    """Message and hint in one line, since the dialects have a single text field."""
    if not hint:
        return message
    return f"{message.rstrip('.')}{'. ' if hint[0].isupper() else '; '}{hint}"


def error_reply(error: Exception, form: ErrorForm) -> JSONReply:
    """The response for ``error``: status, body, and Retry-After where a retry may help."""
    facts = error_facts(error)
    status = facts.status
    headers = {
        401: {"WWW-Authenticate": "Bearer"},
        408: {"Connection": "close"},
        413: {"Connection": "close"},  # the rest of the body is not read
    }
    if isinstance(error, QueueFull | CannotWake | ModelDownloading):
        headers[status] = {"Retry-After": str(error.retry_after)}
    elif isinstance(error, EngineStopped):
        headers[status] = {"Retry-After": str(RETRY_AFTER_RESTART)}
    kind = DrainingReply if isinstance(error, BodyNotRead) else JSONReply
    return kind(form(facts), status, headers.get(status))


def routing_reply(request: Request, error: HTTPException, form: ErrorForm, routes: str) -> Response:
    """The reply to ``error``, which the router raised: 404 for unknown paths, 405 for wrong methods.

    ``routes``: the existing routes, for the 404's message (``routes_in_words``).
    """
    route = f"{request.method} {request.url.path[:200]}"
    allowed = {name.lower(): value for name, value in (error.headers or {}).items()}.get("allow")
    messages = {
        404: (f"{route} does not exist. This server's routes are {routes}", "not_found"),
        405: (f"{route} is not allowed. Use {allowed or 'another method'}", "method_not_allowed"),
    }
    message, code = messages.get(error.status_code, (str(error.detail), "http_error"))
    return JSONReply(form(ErrorFacts(error.status_code, message, code)), error.status_code, error.headers)
