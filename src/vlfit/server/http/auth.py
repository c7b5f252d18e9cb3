"""The door of the server: who may come in, an id and one log line for each request, and no naked failure.

Knows: keys, names, headers, seconds. Does not know: what a request asks for.
"""

import hashlib
import hmac
import logging
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
from vlfit.server.admin.metrics import Meters
from vlfit.server.http.admission import Bodies, Limits
from vlfit.server.http.disconnect import ClientGone, Closing
from vlfit.server.openai.error_replies import error_body, error_reply
from vlfit.server.server_settings import ServerSettings

# API keys: who may come in, and by which number they are called in logs.
#
# Knows: hashes, and that a comparison must not tell by its time how much of a guess was right. Does not
# know requests. Keys themselves are not kept: whatever is printed or dumped of a running server shows
# hashes.


class Keys:
    """``keys`` in order: the first is ``key 1``. None: everybody may come in.

    Raises ``UsageError`` for a key that no client could send: HTTP headers hold printable ASCII.
    """

    def __init__(self, keys: tuple[str, ...] = ()) -> None:
        for number, key in enumerate(keys, 1):
            if not key or not all("!" <= letter <= "~" for letter in key):
                raise UsageError(
                    f"API key {number} is empty or holds more than printable ASCII without spaces",
                    "make one of letters and digits, such as that of `openssl rand -hex 24`",
                )
        self._hashes = [_hash(key.encode("ascii")) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def number(self, authorization: str) -> int | None:
        """Which key an ``Authorization`` header holds, 1 for the first; None if it holds none of them.

        Every key is looked at, whichever fits, and each comparison takes the same time for every guess.
        """
        scheme, _, given = authorization.partition(" ")
        # Headers arrive read as Latin-1.
        guess = _hash(given.strip().encode("latin-1", "replace"))
        found = None
        for number, known in enumerate(self._hashes, 1):
            if hmac.compare_digest(known, guess):
                found = number
        return found if scheme.lower() == "bearer" else None


def read_keys(file: Path) -> tuple[str, ...]:
    """The keys in ``file``: one a line; empty lines and what follows a ``#`` say nothing.

    Raises ``UsageError`` if it cannot be read or holds none.
    """
    try:
        lines = file.expanduser().read_text("utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"the keys in {file} cannot be read: {why}", "write one key a line") from None
    keys = tuple(key for line in lines if (key := line.partition("#")[0].strip()))
    if not keys:
        raise UsageError(f"{file} holds no key", "write one key a line")
    return keys


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


log = logging.getLogger("vlfit.server")

# Asked every second by programs that watch: not worth a line each.
LOOKS = ("/health", "/ready", "/metrics", "/v1/vlfit/status", "/v1/vlfit/ledger")
HUNG_UP = 499  # nginx's number for a client that closed the connection; seen in the log only


class Door:
    """ASGI middleware around everything. Puts ``request_id`` and ``note`` into the request's state.

    Whoever answers may set ``note`` to a few words for the log line (tokens, what went wrong).
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, closing: Closing, meters: Meters) -> None:
        self._app = app
        self._keys = Keys(settings.api_keys)
        self._allow_origins = settings.allow_origins
        self._own_names = settings.own_names
        self._limits = Limits(settings.a_minute, settings.at_once)
        self._bodies = Bodies(settings.bodies_limit, settings.body_seconds)
        self._closing = closing
        self._meters = meters

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
        whole = False

        async def send_and_note(message: Message) -> None:
            nonlocal status, whole
            whole = message["type"] == "http.response.body" and not message.get("more_body", False)
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = state["request_id"]
            await send(message)

        try:
            self._check_host(scope)
            self._check_origin(scope)
            self._check_key(scope)
            await self._let_in(scope, receive, send_and_note)
        except (ClientGone, ClientDisconnect):
            status = HUNG_UP
        except Exception as error:
            self._explain(error, state)
            if not status:
                await error_reply(error)(scope, receive, send_and_note)
            elif not whole:
                raise  # too late for another answer; breaking off tells the client that this one is not whole
        finally:
            self._meters.answered(scope["path"], status)
            self._log(scope, status, time.perf_counter() - started)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as held:
            if scope["path"] not in LOOKS:
                held.enter_context(self._closing.running())
            if scope["method"] == "POST":
                held.enter_context(self._limits.take(f"key {scope['state']['key']}"))
                receive = held.enter_context(self._bodies.reading(receive))
            await self._app(scope, receive, send)

    def _check_host(self, scope: Scope) -> None:
        """A page can have its own name lead to this computer, and is then one with us to the browser."""
        host = Headers(scope=scope).get("host")
        if self._own_names is None or host is None or is_own_name(host, self._own_names):
            return
        raise ForeignHost(
            f"this server was called by the name {host[:200]!r}, which is not known to be its own",
            "use http://127.0.0.1, or start it with --allow-host and that name",
        )

    def _check_origin(self, scope: Scope) -> None:
        """A browser says which page a script is of, and sends some requests for any page without asking.

        What only looks is left to the browser, which shows no answer to a page that is not allowed.
        """
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is None or scope["method"] in ("GET", "HEAD", "OPTIONS") or "*" in self._allow_origins:
            return
        page = _netloc(origin)
        if origin in self._allow_origins or (page and page == headers.get("host")):
            return
        raise ForeignOrigin(
            f"a page of {origin[:200]} may not use this server",
            f"start it with --allow-origin {origin[:200]} if it should",
        )

    def _check_key(self, scope: Scope) -> None:
        if not self._keys or not (scope["path"].startswith("/v1") or scope["path"] == "/metrics"):
            return
        given = Headers(scope=scope).get("authorization", "")
        number = self._keys.number(given)
        if number is None:
            raise WrongApiKey(
                "the API key is wrong" if given.strip() else "this server asks for an API key",
                "send the header Authorization: Bearer KEY",
            )
        scope["state"]["key"] = number

    def _explain(self, error: Exception, state: dict[str, Any]) -> None:
        told = error_body(error)["error"]
        self._meters.refused(told["code"])
        if not isinstance(error, VlfitError):
            log.exception("%s failed by a mistake of ours", state["request_id"], exc_info=error)
        elif error.http_status < 500:
            # The message quotes what was sent, which is nobody's business: its sender has it, and the id.
            # A field that a client made up may hold what no text in UTF-8 can.
            said = " ".join(filter(None, (told["code"], told["param"])))
            state["note"] = said.encode("utf-8", "backslashreplace").decode()
        else:
            state["note"] = error.message[:200]

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        quiet = scope["path"] in LOOKS and status in (200, 503)  # a wrong key is worth its line
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
    except ValueError:  # "http://[": no browser sends it, and it is no page of ours
        return ""


def is_own_name(host: str, names: tuple[str, ...]) -> bool:
    """Whether a ``Host`` header is one that only we can have: no page's owner can let an IP address or
    ``localhost`` lead elsewhere. ``names`` are ours as well, on any port.
    """
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    try:
        ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith(".localhost") or name in map(str.lower, names)
    return True
