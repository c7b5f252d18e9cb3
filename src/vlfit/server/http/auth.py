"""Middleware around every request: API keys, host and origin checks, rate limits, a request id, one log line.

Every error that a route raises becomes a reply here, in the form of the route's dialect.
"""

import hashlib
import hmac
import logging
import re
import time
from contextlib import ExitStack
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlfit.errors import ForeignHost, ForeignOrigin, UsageError, VlfitError, WrongApiKey
from vlfit.server.admin.metrics import RequestMetrics
from vlfit.server.dialects import dialect_of, needs_key
from vlfit.server.error_replies import error_facts, error_reply
from vlfit.server.http.admission import BodyLimiter, RateLimiter
from vlfit.server.http.disconnect import ClientDisconnected, Shutdown
from vlfit.server.server_settings import ServerSettings

log = logging.getLogger("vlfit.server")

# Polled every second by monitoring: logged at debug level only.
MONITORING_PATHS = ("/health", "/ready", "/metrics", "/v1/vlfit/status", "/v1/vlfit/ledger")
_HOST = re.compile(
    r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)\.?)(?::[0-9]{0,5})?"
)
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a closed connection; seen in the log only


class ApiKeys:
    """API keys, numbered from 1 for the log; empty: no key is needed.

    Only hashes are kept, so a memory dump shows no keys. Raises ``UsageError`` for a key that no client
    could send: HTTP headers hold printable ASCII.
    """

    def __init__(self, keys: tuple[str, ...] = ()) -> None:
        for number, key in enumerate(keys, 1):
            if not key or not all("!" <= letter <= "~" for letter in key):
                raise UsageError(
                    f"API key {number} is empty or has characters other than printable ASCII without spaces",
                    "Use letters and digits, such as the output of `openssl rand -hex 24`.",
                )
        self._hashes = [_hash(key.encode("ascii")) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def match(self, authorization: str) -> int | None:
        """Number of the key in an ``Authorization: Bearer KEY`` header, from 1; None if it matches none.

        ``authorization``: the header's value.

        Constant time: every key is compared, and each comparison takes the same time for every guess.
        """
        scheme, _, token = authorization.partition(" ")
        # Starlette decodes headers as Latin-1.
        hashed = _hash(token.strip().encode("latin-1", "replace"))
        matched = None
        for number, known in enumerate(self._hashes, 1):
            if hmac.compare_digest(known, hashed):
                matched = number
        return matched if scheme.lower() == "bearer" else None


def read_keys(file: Path) -> tuple[str, ...]:
    """Read API keys from ``file``: one per line, ``#`` starts a comment.

    Raises ``UsageError`` if it cannot be read or has no key.
    """
    try:
        lines = file.expanduser().read_text("utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read API keys from {file}: {cause}", "Write one key per line.") from None
    keys = tuple(key for line in lines if (key := line.partition("#")[0].strip()))
    if not keys:
        raise UsageError(f"{file} contains no API key", "Write one key per line.")
    return keys


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class AuthMiddleware:
    """ASGI middleware around all routes: checks, limits, error replies, log line (see the module).

    Puts ``request_id``, ``key`` (number of the API key, from 1; None if none was required) and ``note`` into
    the request's state; routes may set ``note`` to a few words for the log line (tokens, what went wrong).
    Rate and body limits apply to methods other than GET, HEAD and OPTIONS.
    """

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, shutdown: Shutdown, metrics: RequestMetrics
    ) -> None:
        self._app = app
        self._keys = ApiKeys(settings.api_keys)
        self._allow_origins = settings.allow_origins
        self._allowed_hosts = settings.allowed_hosts
        self._rate_limiter = RateLimiter(settings.requests_per_minute, settings.concurrent_requests)
        self._body_limiter = BodyLimiter(settings.bodies_limit, settings.body_seconds)
        self._shutdown = shutdown
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        state = scope.setdefault("state", {})
        state["request_id"] = uuid4().hex
        state["note"] = ""
        state["key"] = None
        status = 0
        complete = False
        dialect = dialect_of(scope["path"])

        async def send_and_record(message: Message) -> None:
            nonlocal status, complete
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = state["request_id"]
                if dialect.id_header is not None:
                    headers[dialect.id_header] = state["request_id"]
            await send(message)

        try:
            self._check_host(scope)
            self._check_origin(scope)
            self._check_key(scope)
            await self._forward(scope, receive, send_and_record)
        except (ClientDisconnected, ClientDisconnect):
            status = CLIENT_CLOSED_REQUEST
        except Exception as error:
            self._record_error(error, state)
            if not status:
                await error_reply(error, dialect.error_form)(scope, receive, send_and_record)
            elif not complete:
                raise  # too late for an error reply; closing the connection marks the answer as incomplete
        finally:
            self._metrics.count_response(scope["path"], status)
            self._log(scope, status, time.perf_counter() - started)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as stack:
            if scope["path"] not in MONITORING_PATHS:
                stack.enter_context(self._shutdown.track_request())
            if scope["method"] not in _SAFE_METHODS:
                stack.enter_context(self._rate_limiter.acquire(f"key {scope['state']['key']}"))
                receive = stack.enter_context(self._body_limiter.track(receive))
            await self._app(scope, receive, send)

    def _check_host(self, scope: Scope) -> None:
        """Refuse foreign host names, against DNS rebinding: a page whose own name resolves to this computer
        would be same-origin with this server.
        """
        host = Headers(scope=scope).get("host")
        if self._allowed_hosts is None or host is None or is_own_host(host, self._allowed_hosts):
            return
        raise ForeignHost(
            f"the request's Host is {host[:200]!r}, which is not a known name of this server",
            "Use http://127.0.0.1, or start the server with --allow-host and that name.",
        )

    def _check_origin(self, scope: Scope) -> None:
        """Refuse POST from foreign web pages: browsers send simple POST requests without a CORS preflight.

        GET is left to the browser, which hides the response from pages that are not allowed.
        """
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is None or scope["method"] in _SAFE_METHODS or "*" in self._allow_origins:
            return
        page = _netloc(origin)
        if origin in self._allow_origins or (page and page == headers.get("host")):
            return
        raise ForeignOrigin(
            f"web pages of {origin[:200]} are not allowed to use this server",
            f"To allow them, start the server with --allow-origin {origin[:200]}.",
        )

    def _check_key(self, scope: Scope) -> None:
        if not self._keys or not needs_key(scope["path"]):
            return
        headers = Headers(scope=scope)
        authorization, api_key = headers.get("authorization", ""), headers.get("x-api-key", "")
        number = self._keys.match(authorization)
        if number is None and api_key:  # as Anthropic's clients send it
            number = self._keys.match(f"Bearer {api_key}")
        if number is None:
            is_missing = not authorization.strip() and not api_key
            raise WrongApiKey(
                "this server requires an API key" if is_missing else "the API key is wrong",
                "Send the header Authorization: Bearer KEY, or x-api-key: KEY.",
            )
        scope["state"]["key"] = number

    def _record_error(self, error: Exception, state: dict[str, Any]) -> None:
        facts = error_facts(error)
        self._metrics.count_error(facts.code)
        if not isinstance(error, VlfitError) and facts.status == 500:
            log.exception("%s failed with an internal error", state["request_id"], exc_info=error)
        elif facts.status < 500:
            # Not the message: it quotes the request, which is private. Field names may hold lone surrogates.
            note = " ".join(filter(None, (facts.code, facts.param)))
            state["note"] = note.encode("utf-8", "backslashreplace").decode()
        else:
            state["note"] = (error.message if isinstance(error, VlfitError) else facts.message)[:200]

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        quiet = scope["path"] in MONITORING_PATHS and status in (200, 503)  # a wrong key is logged
        level = logging.DEBUG if quiet else logging.INFO
        state = scope["state"]
        note = " ".join(state["note"].split())
        facts = {
            "request": state["request_id"][:12],
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": status,
            "seconds": round(seconds, 4),
            **({"client": scope["client"][0]} if scope.get("client") else {}),
            **({"key": state["key"]} if state["key"] else {}),
            **({"note": note} if note else {}),
        }
        log.log(
            level,
            "%s %s %r %d %.2f s%s",
            facts["request"],
            facts["method"],
            facts["path"],
            status,
            seconds,
            f" {note}" if note else "",
            extra={"fields": facts},
        )


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:  # such as "http://["
        return ""


def is_own_host(host: str, names: tuple[str, ...]) -> bool:
    """Whether ``host``, a ``Host`` header, is an IP address, ``localhost`` or one of ``names``, on any port.

    Upper and lower case are the same; ``*.localhost`` is accepted too. These names are safe from DNS
    rebinding: no web page can have one of them as its own name.
    """
    match = _HOST.fullmatch(host)  # not urlsplit, which takes evil.com@localhost and localhost/evil too
    if match is None:
        return False
    name = (match["ipv6"] or match["name"]).lower()
    try:
        ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith(".localhost") or name in map(str.lower, names)
    return True
