"""Ollama's API: its routes, their description, and the form of its errors.

https://github.com/ollama/ollama/blob/main/docs/api.md; docs/ollama.md has what differs.
"""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from vlfit._version import __version__
from vlfit.errors import InvalidRequest, UnknownModel, UsageError, VlfitError
from vlfit.server.chat.validation import parse_body
from vlfit.server.dialect import NDJSON, ApiPath, Dialect
from vlfit.server.error_replies import JSONReply
from vlfit.server.generation import ServerContext, read_body
from vlfit.server.ollama.keep_alive import FOREVER, KeepAlive
from vlfit.server.ollama.model_details import ModelDetails, loaded_row
from vlfit.server.ollama.ollama_generation import OllamaChatEndpoint, OllamaGenerateEndpoint
from vlfit.server.ollama.ollama_replies import ERROR_SCHEMA, encode_line, error_form, timestamp
from vlfit.server.ollama.ollama_schema import (
    CopyRequest,
    DeleteRequest,
    NamedModelRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    PullRequest,
    ShowRequest,
)
from vlfit.server.served_models import is_plain_name
from vlfit.server.server_settings import OLLAMA_PORT
from vlfit.units import KIB

# Clients compare versions to find out what the API can do: the one whose API this is.
OLLAMA_VERSION = "0.13.0"
_BODY_LIMIT = 64 * KIB  # of requests that only name a model
_CENTURIES = timedelta(days=292 * 365)  # how Ollama writes a model that never expires

Named = TypeVar("Named", bound=NamedModelRequest)


class NotOffered(UsageError):
    """Something that Ollama's API lets clients do, and this server does not."""

    http_status = 403
    code = "not_offered"


PATHS = (
    ApiPath(
        "/api/chat",
        "post",
        "Ollama",
        "Chat completion with pictures, tools and structured output.",
        "A message, or lines of pieces if streamed.",
        OllamaChatRequest,
        NDJSON,
    ),
    ApiPath(
        "/api/generate",
        "post",
        "Ollama",
        "Completion of one prompt with pictures.",
        "The response, or lines of pieces if streamed.",
        OllamaGenerateRequest,
        NDJSON,
    ),
    ApiPath("/api/tags", "get", "Ollama", "List the served model.", "Its names, size and details."),
    ApiPath("/api/ps", "get", "Ollama", "The model in memory.", "Its size, and when it will sleep."),
    ApiPath(
        "/api/show",
        "post",
        "Ollama",
        "Describe the served model.",
        "Capabilities, template, details.",
        ShowRequest,
    ),
    ApiPath(
        "/api/pull",
        "post",
        "Ollama",
        "Succeeds for a model that is on this computer; downloads nothing.",
        "The status, or lines of it if streamed.",
        PullRequest,
        NDJSON,
    ),
    ApiPath(
        "/api/delete", "delete", "Ollama", "Not supported: always refused.", "Never returned.", DeleteRequest
    ),
    ApiPath("/api/copy", "post", "Ollama", "Not supported: always refused.", "Never returned.", CopyRequest),
    ApiPath(
        "/api/embed", "post", "Ollama", "Not supported: always 404.", "Never returned.", {"type": "object"}
    ),
    ApiPath(
        "/api/embeddings",
        "post",
        "Ollama",
        "Not supported: always 404.",
        "Never returned.",
        {"type": "object"},
    ),
    ApiPath("/api/version", "get", "Ollama", "The version of Ollama's API.", "The version."),
)


class ModelRoutes:
    """Ollama's routes that generate nothing. Requests name the model as ``model`` or ``name``."""

    def __init__(self, context: ServerContext, details: ModelDetails, keep_alive: KeepAlive) -> None:
        self._context = context
        self._details = details
        self._keep_alive = keep_alive

    async def tags(self, _: Request) -> Response:
        """The served models, under each of the names that clients know them by."""
        models = self._context.models.all
        return JSONReply({"models": [row for model in models for row in self._details.rows(model)]})

    async def ps(self, _: Request) -> Response:
        """The models in memory: none while asleep."""
        context = self._context
        if context.backend.asleep:
            return JSONReply({"models": []})
        left = self._keep_alive.expires_in()
        now = datetime.now(UTC)
        expires = timestamp(now + (_CENTURIES if left == FOREVER else timedelta(seconds=left)))
        facts = await context.facts()
        rows = [
            loaded_row(
                self._details.rows(model)[0],
                facts,
                expires_at=expires,
                context=model.context or model.backend.context,
            )
            for model in context.models.all
        ]
        return JSONReply({"models": rows})

    async def show(self, request: Request) -> Response:
        """Details of the model that the body names."""
        params = await self._named(request, ShowRequest)
        return JSONReply(self._details.show(self._context.models.find(params.wanted)))

    async def pull(self, request: Request) -> Response:
        """Success, without doing anything, for a served model and for one that is on this computer.

        Raises ``UnknownModel`` with the command to run for any other.
        """
        params = await self._named(request, PullRequest)
        try:
            self._context.models.find(params.wanted)
        except UnknownModel:
            if not await self._context.prepare_threads.run(_is_here, params.wanted):
                raise UnknownModel(
                    f"{params.wanted[:200]!r} is not on this computer, and this server downloads nothing",
                    f"Run there: vlfit pull {params.wanted[:200]}",
                    param="model",
                ) from None
        if params.stream is False:
            return JSONReply({"status": "success"})
        return StreamingResponse(_pull_lines(), media_type=NDJSON)

    async def delete(self, request: Request) -> Response:
        """Always raises: ``UnknownModel`` for a model not served, else ``NotOffered``."""
        params = await self._named(request, DeleteRequest)
        self._context.models.find(params.wanted)
        raise NotOffered(
            "this server deletes no models", f"Stop it, and run: vlfit models remove {params.wanted[:200]}"
        )

    async def copy(self, request: Request) -> Response:
        """Always raises: ``UnknownModel`` for a model not served, else ``NotOffered``."""
        params = parse_body(CopyRequest, await self._body(request))
        self._context.models.find(params.source)
        raise NotOffered(
            "this server copies no models", "Use the name that /api/tags lists; vlfit convert makes copies."
        )

    async def embed(self, _: Request) -> Response:
        """Always raises ``UnknownModel``: hidden states of a generative model make poor embeddings."""
        raise UnknownModel(
            f"{self._context.backend.model!r} generates text and has no embeddings",
            "Use an embedding model.",
            param="model",
        )

    async def version(self, _: Request) -> Response:
        """The version of Ollama whose API is implemented, and vlfit's own."""
        return JSONReply({"version": OLLAMA_VERSION, "vlfit": __version__})

    async def _named(self, request: Request, kind: type[Named]) -> Named:
        params = parse_body(kind, await self._body(request))
        if not params.wanted:
            raise InvalidRequest("model is missing", "Name the model.", param="model")
        return params

    async def _body(self, request: Request) -> bytes | bytearray:
        self._context.shutdown.check_accepting()
        return await self._context.shutdown.run_until_disconnect(read_body(request, _BODY_LIMIT))


async def _pull_lines() -> AsyncIterator[bytes]:
    for status in ("pulling manifest", "verifying sha256 digest", "writing manifest", "success"):
        yield encode_line({"status": status})


def _is_here(name: str) -> bool:
    """Whether a checkpoint of this name is on this computer, complete."""
    from vlfit.checkpoint.source import resolve_name

    plain = name.removesuffix(":latest")
    if not is_plain_name(plain):
        return False
    try:
        return any(each.local_folder() is not None for each in resolve_name(plain))
    except VlfitError:
        return False


def ollama_routes(context: ServerContext) -> list[Route]:
    """All routes of Ollama's API; they share one ``KeepAlive``."""
    details, keep_alive = ModelDetails(), KeepAlive(context)
    models = ModelRoutes(context, details, keep_alive)
    return [
        Route("/api/chat", OllamaChatEndpoint(context, details, keep_alive), methods=["POST"]),
        Route("/api/generate", OllamaGenerateEndpoint(context, details, keep_alive), methods=["POST"]),
        Route("/api/tags", models.tags),
        Route("/api/ps", models.ps),
        Route("/api/show", models.show, methods=["POST"]),
        Route("/api/pull", models.pull, methods=["POST"]),
        Route("/api/delete", models.delete, methods=["DELETE"]),
        Route("/api/copy", models.copy, methods=["POST"]),
        Route("/api/embed", models.embed, methods=["POST"]),
        Route("/api/embeddings", models.embed, methods=["POST"]),
        Route("/api/version", models.version),
    ]


def greeting(request: Request) -> Response | None:
    """The reply ``Ollama is running`` to a request of ``/`` from a client of Ollama; None to any other.

    Clients of Ollama say so (``User-Agent: ollama-python/0.6``), or call port 11434 without accepting HTML.
    """
    agent, host = request.headers.get("user-agent", ""), request.headers.get("host", "")
    wants_page = "text/html" in request.headers.get("accept", "")
    if agent.lower().startswith("ollama") or (host.endswith(f":{OLLAMA_PORT}") and not wants_page):
        return PlainTextResponse("Ollama is running")
    return None


OLLAMA = Dialect("Ollama", ("/api",), ollama_routes, PATHS, error_form, ERROR_SCHEMA)
