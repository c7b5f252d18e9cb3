"""The door of the server: who may come in, an id and one log line for each request, and no naked failure.

Knows: the API key, headers, seconds. Does not know: what a request asks for.
"""

import hmac
import logging
import time
from urllib.parse import urlsplit
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlfit.errors import ForeignOrigin, VlfitError, WrongApiKey
from vlfit.server.closing import ClientGone
from vlfit.server.failures import error_reply

log = logging.getLogger("vlfit.server")

# Asked every second by programs that watch: not worth a line each.
LOOKS = ("/health", "/v1/vlfit/status", "/v1/vlfit/ledger")
HUNG_UP = 499  # nginx's number for a client that closed the connection; seen in the log only


class Door:
    """ASGI middleware around everything. Puts ``request_id`` and ``note`` into the request's state.

    Whoever answers may set ``note`` to a few words for the log line (tokens, what went wrong).
    """

    def __init__(self, app: ASGIApp, api_key: str = "", allow_origins: tuple[str, ...] = ()) -> None:
        self._app = app
        self._api_key = api_key
        self._allow_origins = allow_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        state = scope.setdefault("state", {})
        state["request_id"] = uuid4().hex
        state["note"] = ""
        status = 0
        whole = False

        async def send_and_note(message: Message) -> None:
            nonlocal status, whole
            whole = message["type"] == "http.response.body" and not message.get("more_body", False)
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = state["request_id"]
            await send(message)

        try:
            self._check_origin(scope)
            self._check_key(scope)
            await self._app(scope, receive, send_and_note)
        except (ClientGone, ClientDisconnect):
            status = HUNG_UP
        except Exception as error:
            self._explain(error, state)
            if not status:
                await error_reply(error)(scope, receive, send_and_note)
            elif not whole:
                raise  # too late for another answer; breaking off tells the client that this one is not whole
        finally:
            self._log(scope, status, time.perf_counter() - started)

    def _check_origin(self, scope: Scope) -> None:
        """A browser says which page a script is of, and sends some requests for any page without asking.

        What only looks is left to the browser, which shows no answer to a page that is not allowed.
        """
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is None or scope["method"] in ("GET", "HEAD", "OPTIONS") or "*" in self._allow_origins:
            return
        if origin in self._allow_origins or urlsplit(origin).netloc == headers.get("host"):
            return
        raise ForeignOrigin(
            f"a page of {origin[:200]} may not use this server",
            f"start it with --allow-origin {origin[:200]} if it should",
        )

    def _check_key(self, scope: Scope) -> None:
        if not self._api_key or not scope["path"].startswith("/v1"):
            return
        given = Headers(scope=scope).get("authorization", "")
        scheme, _, key = given.partition(" ")
        given = f"{scheme.title()} {key}"  # schemes of HTTP are the same in capitals
        expected = f"Bearer {self._api_key}"
        # Headers arrive read as Latin-1. The comparison takes the same time for every guess, so that a clock
        # does not tell how much of one was right.
        if not hmac.compare_digest(given.encode("latin-1"), expected.encode()):
            raise WrongApiKey(
                "the API key is wrong" if given.strip() else "this server asks for an API key",
                "send the header Authorization: Bearer KEY",
            )

    def _explain(self, error: Exception, state: dict[str, str]) -> None:
        if isinstance(error, VlfitError):
            state["note"] = error.message[:200]
        else:
            log.exception("%s failed by a mistake of ours", state["request_id"], exc_info=error)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        quiet = scope["path"] in LOOKS and status in (200, 503)  # a wrong key is worth its line
        level = logging.DEBUG if quiet else logging.INFO
        state = scope["state"]
        note = " ".join(state["note"].split())
        log.log(
            level,
            "%s %s %r %d %.2f s%s",
            state["request_id"][:12],
            scope["method"],
            scope["path"][:200],
            status,
            seconds,
            f" {note}" if note else "",
        )
