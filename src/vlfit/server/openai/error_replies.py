"""Every failure in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}`` and a status.

Knows: what a client may read of an error. Does not know: how errors come about.
"""

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
    "/v1/vlfit/sleep, /v1/vlfit/wake. /docs says more"
)

DISCARDING = 30.0  # seconds in which a body that is not wanted may still come
BACK_AFTER = 10  # seconds until a server that is started again answers; a small model takes less


def encode(value: Any) -> bytes:
    """``value`` as JSON in UTF-8. A lone surrogate, which no UTF-8 can hold, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


class JSONReply(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content)


class StillToCome(RequestTooLarge):
    """As the head of the request says: nothing of its body has been read."""


class EarlyReply(JSONReply):
    """Said at once, while the body still comes, which is read and thrown away: else who is sending it would
    see a broken connection instead of the answer.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        waits = any(name == b"expect" for name, _ in scope["headers"])  # and sends nothing now
        with suppress(TimeoutError):
            async with asyncio.timeout(0 if waits else DISCARDING):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b""})


def error_body(error: Exception) -> dict[str, Any]:
    """What a client is told. Nothing of an error that was not raised on purpose: its text may say too
    much.
    """
    if isinstance(error, VlfitError):
        return _body(error.http_status, _in_one(error.message, error.hint), error.code, error.param)
    return _body(
        500, "the server made a mistake; its log says more under this request's id", "internal_error"
    )


def _in_one(message: str, hint: str) -> str:
    """What happened and what to do, in one line, as OpenAI's shape has room for one text only."""
    if not hint:
        return message
    return f"{message.rstrip('.')}{'. ' if hint[0].isupper() else '; '}{hint}"


def error_status(error: Exception) -> int:
    return error.http_status if isinstance(error, VlfitError) else 500


def error_reply(error: Exception) -> JSONReply:
    status = error_status(error)
    headers = {
        401: {"WWW-Authenticate": "Bearer"},
        408: {"Connection": "close"},
        413: {"Connection": "close"},  # the rest of the body is not waited for
    }
    if isinstance(error, QueueFull | CannotWake):
        headers[status] = {"Retry-After": str(error.retry_after)}
    elif isinstance(error, EngineStopped):
        headers[status] = {"Retry-After": str(BACK_AFTER)}
    kind = EarlyReply if isinstance(error, StillToCome) else JSONReply
    return kind(error_body(error), status, headers.get(status))


async def routing_reply(request: Request, error: Exception) -> Response:
    """404 and 405, which the router raises by itself."""
    if not isinstance(error, HTTPException):
        raise error
    place = f"{request.method} {request.url.path[:200]}"
    allowed = {name.lower(): value for name, value in (error.headers or {}).items()}.get("allow")
    messages = {
        404: (f"there is nothing at {place}. This server has {ROUTES}", "not_found"),
        405: (
            f"{place} is not allowed. Use {allowed or 'another method'}",
            "method_not_allowed",
        ),
    }
    message, code = messages.get(error.status_code, (str(error.detail), "http_error"))
    return JSONReply(_body(error.status_code, message, code), error.status_code, error.headers)


def _body(status: int, message: str, code: str, param: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    if status == 429:
        kind = "rate_limit_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
