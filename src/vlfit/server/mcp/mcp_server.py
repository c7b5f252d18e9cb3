"""The tools as an MCP server, by the official ``mcp`` package: over stdio, or streamable HTTP.

Over stdio, standard output is the protocol's alone: the package moves the descriptor away before anything
else can write to it.
"""

import asyncio
import hmac
import json
import logging
from collections.abc import Callable
from typing import Annotated, Any, Literal

from mcp.server import MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from mcp.types import CallToolResult, TextContent, ToolAnnotations
from pydantic import Field
from starlette.types import ASGIApp, Receive, Scope, Send

from vlfit._version import __version__
from vlfit.errors import QueueFull, VlfitError
from vlfit.server.error_replies import JSONReply
from vlfit.server.mcp.picture_tools import COMPARE, PictureTools

logger = logging.getLogger(__name__)

AT_ONCE = 4  # tool calls in progress; more wait
MAX_WAITING = 32  # they keep their arguments, pictures in base64 perhaps; more are refused
_INSTRUCTIONS = (
    "Looks at pictures, PDF documents and videos with a local vision-language model. Name files by their "
    "path, pages as report.pdf#2-5. Boxes are in pixels of the picture."
)
_READS = ToolAnnotations(read_only_hint=True, destructive_hint=False, idempotent_hint=True)
_Picture = Annotated[str, Field(description="Path of a picture, PDF or video; or a data: URL.")]
_Pictures = Annotated[list[str], Field(description="Paths of pictures, PDFs or videos.", max_length=64)]


def mcp_server(tools: PictureTools) -> MCPServer[Any]:
    """An MCP server with ``tools``, not started.

    Errors are results with ``isError``, whose text has the message, the hint and the code, as has
    ``structuredContent.error``.
    """
    server: MCPServer[Any] = MCPServer(
        "vlfit", instructions=_INSTRUCTIONS, version=__version__, log_level="ERROR", website_url=None
    )
    turns = asyncio.Semaphore(AT_ONCE)
    num_calls = 0  # running and waiting

    async def take_turn(tool: Callable[..., dict[str, Any]], given: dict[str, Any]) -> dict[str, Any]:
        nonlocal num_calls
        if num_calls >= AT_ONCE + MAX_WAITING:
            raise QueueFull(
                f"{AT_ONCE} calls run and {MAX_WAITING} wait already", "Try again in a few seconds."
            )
        num_calls += 1
        try:
            async with turns:
                return await asyncio.to_thread(tool, **given)
        finally:
            num_calls -= 1

    async def call(tool: Callable[..., dict[str, Any]], **given: Any) -> CallToolResult:
        try:
            told = await take_turn(tool, given)
        except VlfitError as error:
            return _error(error)
        except Exception as error:
            logger.exception("a tool failed")
            return _error(VlfitError(f"vlfit failed: {type(error).__name__}", "This is a bug of vlfit."))
        text = told["text"] if set(told) & {"text"} else json.dumps(told, ensure_ascii=False)
        return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=told)

    async def describe(
        picture: _Picture,
        detail: Annotated[Literal["short", "long"], Field(description="One sentence, or several.")] = "short",
    ) -> CallToolResult:
        """Describe a picture, a PDF document or a video."""
        return await call(tools.describe, picture=picture, detail=detail)

    async def ask(question: str, pictures: _Pictures) -> CallToolResult:
        """Answer a question about one or several pictures, documents or videos."""
        return await call(tools.ask, question=question, pictures=pictures)

    async def detect(
        picture: _Picture, things: Annotated[str, Field(description="What to find: cups, plates.")]
    ) -> CallToolResult:
        """Find things in a picture. Boxes are [left, top, right, bottom] in pixels."""
        return await call(tools.detect, picture=picture, things=things)

    async def read_text(picture: _Picture) -> CallToolResult:
        """Read the text in a picture or document, word for word (OCR)."""
        return await call(tools.read_text, picture=picture)

    async def compare(
        pictures: _Pictures, question: Annotated[str, Field(description="What to compare.")] = COMPARE
    ) -> CallToolResult:
        """Compare two or more pictures."""
        return await call(tools.compare, pictures=pictures, question=question)

    async def search(
        query: Annotated[str, Field(description="What to look for, in words.")] = "",
        folder: Annotated[str | None, Field(description="An indexed folder; else the first root.")] = None,
        like: Annotated[str | None, Field(description="A picture to find similar ones of.")] = None,
        n: Annotated[int, Field(description="How many, 1 to 100.")] = 10,
    ) -> CallToolResult:
        """Find pictures in a folder by words or by another picture. The folder must have been indexed."""
        return await call(tools.search, query=query, folder=folder, like=like, n=n)

    for tool in (describe, ask, detect, read_text, compare, search):
        server.add_tool(tool, annotations=_READS)
    return server


def run_stdio(tools: PictureTools) -> None:
    """Serve over standard input and output until the input ends."""
    mcp_server(tools).run("stdio")


def http_app(tools: PictureTools, host: str, api_key: str | None, *, trust_any_host: bool = False) -> ASGIApp:
    """Streamable HTTP at ``/mcp``. ``api_key``: clients must send it as a bearer token; None: none is needed.

    Without a key only requests for ``localhost`` and ``127.0.0.1`` are answered, so that no web page can call
    it by a name of its own (DNS rebinding), unless ``trust_any_host``.
    """
    local = host in ("127.0.0.1", "localhost", "::1")
    protect = local or (api_key is None and not trust_any_host)
    security = TransportSecuritySettings(
        enable_dns_rebinding_protection=protect,
        allowed_hosts=["127.0.0.1:*", "localhost:*", "[::1]:*"],
        allowed_origins=["http://127.0.0.1:*", "http://localhost:*", "http://[::1]:*"],
    )
    app = mcp_server(tools).streamable_http_app(
        host=host, transport_security=security, stateless_http=False, max_sessions=64
    )
    return app if api_key is None else _WithKey(app, api_key)


class _WithKey:
    """Asks every HTTP request for the key."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._wanted = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            sent = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(sent, self._wanted):
                error = {"code": "invalid_api_key", "message": "the API key is missing or wrong"}
                reply = JSONReply({"error": error}, 401, headers={"WWW-Authenticate": "Bearer"})
                await reply(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _error(error: VlfitError) -> CallToolResult:
    facts = {"code": error.code, "message": error.message, "hint": error.hint}
    text = " ".join(each for each in (f"{error.message.rstrip('.')}.", error.hint, f"[{error.code}]") if each)
    return CallToolResult(
        content=[TextContent(type="text", text=text)], structured_content={"error": facts}, is_error=True
    )
