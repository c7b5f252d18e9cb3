"""Ollama's API: its routes, their description, and the form of its errors.

https://github.com/ollama/ollama/blob/main/docs/api.md; docs/ollama.md has what differs.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from vlfit._version import __version__
from vlfit.errors import InvalidRequest, UnknownModel, UsageError, VlfitError
from vlfit.server.chat.validation import parse_body
from vlfit.server.dialect import NDJSON, ApiPath, Dialect
from vlfit.server.error_replies import JSONReply
from vlfit.server.generation import ServerContext, read_body
from vlfit.server.http.disconnect import Shutdown
from vlfit.server.models.served_models import Pull, ServedModel, is_plain_name
from vlfit.server.ollama.keep_alive import FOREVER, KeepAlive
from vlfit.server.ollama.model_details import ModelDetails, loaded_row
from vlfit.server.ollama.ollama_embeddings import OllamaEmbedEndpoint
from vlfit.server.ollama.ollama_generation import OllamaChatEndpoint, OllamaGenerateEndpoint
from vlfit.server.ollama.ollama_replies import ERROR_SCHEMA, encode_line, error_form, timestamp
from vlfit.server.ollama.ollama_schema import (
    CopyRequest,
    DeleteRequest,
    NamedModelRequest,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    PullRequest,
    ShowRequest,
)
from vlfit.server.server_settings import OLLAMA_PORT
from vlfit.units import KIB

# Clients compare versions to find out what the API can do: the one whose API this is.
OLLAMA_VERSION = "0.13.0"
_BODY_LIMIT = 64 * KIB  # of requests that only name a model
_PULL_INTERVAL = 0.5  # seconds between two lines about a download
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
    ApiPath("/api/tags", "get", "Ollama", "List the served models.", "Names, sizes and details."),
    ApiPath("/api/ps", "get", "Ollama", "The models in memory.", "Sizes, and when they will sleep."),
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
        "Download a model, with --pull; else succeeds only for one that is on this computer.",
        "The status, or lines of it if streamed.",
        PullRequest,
        NDJSON,
    ),
    ApiPath(
        "/api/delete", "delete", "Ollama", "Not supported: always refused.", "Never returned.", DeleteRequest
    ),
    ApiPath("/api/copy", "post", "Ollama", "Not supported: always refused.", "Never returned.", CopyRequest),
    ApiPath(
        "/api/embed", "post", "Ollama", "Vectors of texts.", "The vectors, and durations.", OllamaEmbedRequest
    ),
    ApiPath(
        "/api/embeddings",
        "post",
        "Ollama",
        "The vector of one text; the older form of /api/embed.",
        "The vector.",
        OllamaEmbeddingsRequest,
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
        """The models in memory: none while all sleep."""
        loaded = [model for model in self._context.models.all if not model.backend.asleep]
        facts = await self._context.facts() if loaded else {}
        return JSONReply({"models": [self._loaded_row(model, facts) for model in loaded]})

    def _loaded_row(self, model: ServedModel, facts: Mapping[str, Any]) -> dict[str, Any]:
        left = self._keep_alive.expires_in(model)
        expires = datetime.now(UTC) + (_CENTURIES if left == FOREVER else timedelta(seconds=left))
        own = next((row["held"] for row in facts.get("models", ()) if row["model"] == model.name), None)
        return loaded_row(
            self._details.rows(model)[0],
            facts,
            expires_at=timestamp(expires),
            context=model.context or model.backend.context,
            held=own,
        )

    async def show(self, request: Request) -> Response:
        """Details of the model that the body names. Raises ``UnknownModel`` if it is not served."""
        params = await self._named(request, ShowRequest)
        return JSONReply(self._details.show(self._context.models.find(params.wanted)))

    async def pull(self, request: Request) -> Response:
        """Download a model, with ``--pull``; then it is served. Success at once for one that is here.

        Raises ``UnknownModel`` for any other, and errors of the download if the reply is not a stream.
        """
        params = await self._named(request, PullRequest)
        try:
            download = self._context.models.pull(params.wanted)
            if download is not None:
                return await self._download_reply(download, request, streams=params.stream is not False)
        except UnknownModel:
            if not await self._context.prepare_threads.run(_is_here, params.wanted):
                why = (
                    "nor in the catalog, from which this server downloads"
                    if self._context.models.downloads
                    else "and this server downloads nothing"
                )
                raise UnknownModel(
                    f"{params.wanted[:200]!r} is not on this computer, {why}",
                    f"Run there: vlfit pull {params.wanted[:200]}",
                    param="model",
                ) from None
        if params.stream is False:
            return JSONReply({"status": "success"})
        return StreamingResponse(_pull_lines(), media_type=NDJSON)

    async def _download_reply(self, download: Pull, request: Request, *, streams: bool) -> Response:
        if streams:
            return StreamingResponse(_download_lines(download, self._context.shutdown), media_type=NDJSON)
        await self._context.shutdown.run_until_disconnect(download.ended.wait(), request.receive)
        if download.error is not None:
            raise download.error.with_traceback(None)
        return JSONReply({"status": "success"})

    async def delete(self, request: Request) -> Response:
        """Always raises: ``UnknownModel`` for a model not served, else ``NotOffered``."""
        params = await self._named(request, DeleteRequest)
        self._context.models.find(params.wanted)
        raise NotOffered(
            "this server deletes no models", f"Stop it, and run: vlfit models rm {params.wanted[:200]}"
        )

    async def copy(self, request: Request) -> Response:
        """Always raises: ``UnknownModel`` for a model not served, else ``NotOffered``."""
        params = parse_body(CopyRequest, await self._body(request))
        self._context.models.find(params.source)
        raise NotOffered(
            "this server copies no models", "Use the name that /api/tags lists; vlfit convert makes copies."
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


async def _download_lines(download: Pull, shutdown: Shutdown) -> AsyncIterator[bytes]:
    """The progress of a download, as Ollama streams it; a client that leaves does not stop it."""
    yield encode_line({"status": "pulling manifest"})
    digest = hashlib.sha256(download.name.encode()).hexdigest()
    while not (download.ended.is_set() or shutdown.draining):
        if download.total:
            yield encode_line(
                {
                    "status": f"pulling {digest[:12]}",
                    "digest": f"sha256:{digest}",
                    "total": download.total,
                    "completed": download.done,
                }
            )
        with suppress(TimeoutError):
            async with asyncio.timeout(_PULL_INTERVAL):
                await download.ended.wait()
    if download.error is not None or not download.ended.is_set():
        yield encode_line({"error": str(download.error or "the server is stopping")})
        return
    for status in ("verifying sha256 digest", "writing manifest", "success"):
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
        Route("/api/embed", OllamaEmbedEndpoint(context, keep_alive, OllamaEmbedRequest), methods=["POST"]),
        Route(
            "/api/embeddings",
            OllamaEmbedEndpoint(context, keep_alive, OllamaEmbeddingsRequest),
            methods=["POST"],
        ),
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
