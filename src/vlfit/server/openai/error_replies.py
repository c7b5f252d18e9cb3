"""Errors in OpenAI's shape: a status and ``{"error": {"message", "type", "param", "code"}}``."""

import asyncio
import json
from contextlib import suppress
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vlfit.errors import CannotWake, EngineStopped, QueueFull, RequestTooLarge, VlfitError

ROUTES = (
    "/health, /ready, /metrics, /v1/models, /v1/models/{id}, /v1/chat/completions, /v1/responses, "
    "/v1/completions, /v1/vlfit/status, /v1/vlfit/ledger, /v1/vlfit/plan, /v1/vlfit/price, "
    "/v1/vlfit/sleep, /v1/vlfit/wake. See /docs"
)

DISCARD_SECONDS = 30.0  # how long a refused body is read and discarded
RETRY_AFTER_RESTART = 10  # seconds a restart may take; a small model takes less


def encode(value: Any) -> bytes:
    """Encode ``value`` as JSON in UTF-8; a lone surrogate, invalid in UTF-8, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


class JSONReply(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content)


class BodyNotRead(RequestTooLarge):
    """The headers announce a body that is too large; none of it has been read."""


class DrainingReply(JSONReply):
    """Sent at once, while the request body is read and discarded: a client that is still sending would
    otherwise see a broken connection instead of the reply.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        expects_continue = any(name == b"expect" for name, _ in scope["headers"])  # so it sends no body
        with suppress(TimeoutError):
            async with asyncio.timeout(0 if expects_continue else DISCARD_SECONDS):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b""})


def error_body(error: Exception) -> dict[str, Any]:
    """The body for ``error``. Unexpected errors show no details, which could leak private data."""
    if isinstance(error, VlfitError):
        return _body(error.http_status, _joined(error.message, error.hint), error.code, error.param)
    return _body(
        500,
        "internal error. The server's log has the details under this request's id.",
        "internal_error",
    )


def _joined(message: str, hint: str) -> str:
    """Message and hint in one line, since OpenAI's shape has a single text field."""
    if not hint:
        return message
    return f"{message.rstrip('.')}{'. ' if hint[0].isupper() else '; '}{hint}"


def error_status(error: Exception) -> int:
    return error.http_status if isinstance(error, VlfitError) else 500


def error_reply(error: Exception) -> JSONReply:
    """The response for ``error``: status, body, and Retry-After where a retry may help."""
    status = error_status(error)
    headers = {
        401: {"WWW-Authenticate": "Bearer"},
        408: {"Connection": "close"},
        413: {"Connection": "close"},  # the rest of the body is not read
    }
    if isinstance(error, QueueFull | CannotWake):
        headers[status] = {"Retry-After": str(error.retry_after)}
    elif isinstance(error, EngineStopped):
        headers[status] = {"Retry-After": str(RETRY_AFTER_RESTART)}
    kind = DrainingReply if isinstance(error, BodyNotRead) else JSONReply
    return kind(error_body(error), status, headers.get(status))


async def routing_reply(request: Request, error: Exception) -> Response:
    """Reply to the router's own errors: 404 and 405."""
    if not isinstance(error, HTTPException):
        raise error
    route = f"{request.method} {request.url.path[:200]}"
    allowed = {name.lower(): value for name, value in (error.headers or {}).items()}.get("allow")
    messages = {
        404: (f"{route} does not exist. This server's routes are {ROUTES}", "not_found"),
        405: (f"{route} is not allowed. Use {allowed or 'another method'}", "method_not_allowed"),
    }
    message, code = messages.get(error.status_code, (str(error.detail), "http_error"))
    return JSONReply(_body(error.status_code, message, code), error.status_code, error.headers)


def _body(status: int, message: str, code: str, param: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    if status == 429:
        kind = "rate_limit_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
