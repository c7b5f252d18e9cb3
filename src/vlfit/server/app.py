"""The server's ASGI application: all routes around one backend."""

import time
from dataclasses import asdict

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vlfit._version import __version__
from vlfit.backends.base import Backend
from vlfit.errors import DecodersUnavailable, UnknownModel
from vlfit.images.decode_pool import DecodeStats, decode_pool
from vlfit.server.admin.estimate import EstimateEndpoints
from vlfit.server.admin.metrics import MetricsEndpoint, RequestMetrics
from vlfit.server.admin.status import SleepEndpoints, StatusEndpoints
from vlfit.server.http.auth import AuthMiddleware
from vlfit.server.http.disconnect import Shutdown
from vlfit.server.http.watchdog import Watchdog
from vlfit.server.openai.chat_completions import ChatEndpoint
from vlfit.server.openai.completions import CompletionsEndpoint
from vlfit.server.openai.error_replies import JSONReply, routing_reply
from vlfit.server.openai.generation import ServerContext
from vlfit.server.openai.openapi import docs_routes
from vlfit.server.openai.responses import ResponsesEndpoint
from vlfit.server.page.routes import page_routes
from vlfit.server.server_settings import ServerSettings

DECODERS_BUSY_SECONDS = 10.0  # with all decode workers busy for so long, /ready answers 503


def generation_routes(context: ServerContext) -> list[Route]:
    """Completions in OpenAI's shapes, and estimates of their cost."""
    prices = EstimateEndpoints(context)

    async def embeddings(_: Request) -> Response:
        """Always 404: hidden states of a generative model make poor embeddings."""
        raise UnknownModel(
            f"{context.backend.model!r} generates text and has no embeddings",
            "Use an embedding model.",
            param="model",
        )

    return [
        Route("/v1/chat/completions", ChatEndpoint(context), methods=["POST"]),
        Route("/v1/completions", CompletionsEndpoint(context), methods=["POST"]),
        Route("/v1/responses", ResponsesEndpoint(context), methods=["POST"]),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
        Route("/v1/vlfit/price", prices.price, methods=["POST"]),
        Route("/v1/vlfit/plan", prices.plan),
        *docs_routes(),
    ]


def create_app(backend: Backend, settings: ServerSettings | None = None) -> Starlette:
    """The HTTP API over ``backend``; ``app.state.shutdown`` stops it (see ``Shutdown``)."""
    settings = settings or ServerSettings()
    shutdown = Shutdown(settings.drain_seconds)
    metrics = RequestMetrics(restarts=settings.restarts)
    card = _model_card(backend, settings)

    async def health(_: Request) -> Response:
        """Liveness: 200 as long as the process answers."""
        status = "stopping" if shutdown.draining else "ok"
        asleep = {"asleep": backend.asleep} if backend.capabilities.sleep else {}
        return JSONReply({"status": status, "model": backend.model, **asleep})

    async def ready(_: Request) -> Response:
        """Readiness: 200 while requests are accepted, also asleep, since they wake the model.

        503 if all decode workers have been busy for ``DECODERS_BUSY_SECONDS`` without one becoming free.
        """
        shutdown.check_accepting()
        check_decoders(decode_pool().stats())
        return JSONReply({"status": "ready", "model": backend.model})

    async def models(_: Request) -> Response:
        return JSONReply({"object": "list", "data": [card]})

    async def model(request: Request) -> Response:
        if not request.path_params["model"]:  # /v1/models/
            raise HTTPException(404)
        context.check_model(request.path_params["model"])
        return JSONReply(card)

    context = ServerContext(backend, settings, shutdown, metrics)
    status = StatusEndpoints(backend, settings.expectation, shutdown, context.admission)
    sleep = SleepEndpoints(backend, shutdown)
    app = Starlette(
        routes=[
            *generation_routes(
                context
            ),  # first, since routes are matched in order and these are the hot ones
            *page_routes(backend, asks_key=bool(settings.api_keys)),
            Route("/health", health),
            Route("/ready", ready),
            Route("/metrics", MetricsEndpoint(status.facts, metrics, decode_pool().stats).answer),
            Route("/v1/models", models),
            Route("/v1/models/{model:path}", model),
            Route("/v1/vlfit/status", status.status),
            Route("/v1/vlfit/ledger", status.ledger),
            Route("/v1/vlfit/sleep", sleep.sleep, methods=["POST"]),
            Route("/v1/vlfit/wake", sleep.wake, methods=["POST"]),
        ],
        exception_handlers={HTTPException: routing_reply},
    )
    app.router.redirect_slashes = False
    app.state.shutdown = shutdown
    app.state.watchdog = Watchdog(backend, shutdown.stop_if_fatal)
    metrics.paths = frozenset(route.path for route in app.routes if isinstance(route, Route))
    app.add_middleware(AuthMiddleware, settings=settings, shutdown=shutdown, metrics=metrics)
    if settings.allow_origins:
        # Outside the authentication: a browser's preflight request carries no key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["retry-after", "x-request-id"],
        )
    return app


def check_decoders(decoders: DecodeStats) -> None:
    """Raise ``DecodersUnavailable`` if none has been free for too long."""
    if decoders.seconds_without_free > DECODERS_BUSY_SECONDS:
        raise DecodersUnavailable(
            f"all {decoders.busy} decode workers have been busy for {decoders.seconds_without_free:.0f} s, "
            f"and {decoders.waiting} pictures wait",
            "Try again later: no picture takes longer than its limit.",
        )


def _model_card(backend: Backend, settings: ServerSettings) -> dict[str, object]:
    """The model as ``/v1/models`` shows it; ``vlfit.default_sampling`` tells our own client the defaults."""
    sampling = asdict(backend.default_sampling())
    sampling["form"] = sampling.pop("grammar")  # the name that clients know
    card: dict[str, object] = {
        "id": backend.model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "vlfit",
        "vlfit": {"version": __version__, "default_sampling": sampling},
    }
    if settings.context is not None:
        card["max_model_len"] = settings.context  # vLLM's name for it
    return card
