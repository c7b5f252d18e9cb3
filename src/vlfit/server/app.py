"""The server's routes, put together around one backend.

Knows: which path leads where. Does not know: how to listen (``listen``) or to load a model (the command
line).
"""

import time
from dataclasses import asdict

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vlfit._version import __version__
from vlfit.backends.base import LocalBackend, Sleeper
from vlfit.errors import UnknownModel
from vlfit.server.admin.estimate import PriceEndpoints
from vlfit.server.admin.metrics import Meters, Metrics
from vlfit.server.admin.status import SleepEndpoints, Status
from vlfit.server.http.auth import Door
from vlfit.server.http.disconnect import Closing
from vlfit.server.http.watchdog import Watchdog
from vlfit.server.openai.chat_completions import ChatEndpoint
from vlfit.server.openai.completions import CompletionsEndpoint
from vlfit.server.openai.error_replies import JSONReply, routing_reply
from vlfit.server.openai.generation import Workshop
from vlfit.server.openai.openapi import docs_routes
from vlfit.server.openai.responses import ResponsesEndpoint
from vlfit.server.page.routes import page_routes
from vlfit.server.server_settings import ServerSettings

# Routes that give words, and what they cost. Knows which path leads to which of them, and no more.


def word_routes(workshop: Workshop) -> list[Route]:
    """All of them; they share ``workshop``."""
    prices = PriceEndpoints(workshop)

    async def embeddings(_: Request) -> Response:
        """A model that was made to write gives vectors of its hidden states, which mean little: none is
        better.
        """
        raise UnknownModel(
            f"{workshop.backend.model!r} writes words and gives no embeddings",
            "ask a model that was made for them",
            param="model",
        )

    return [
        Route("/v1/chat/completions", ChatEndpoint(workshop), methods=["POST"]),
        Route("/v1/completions", CompletionsEndpoint(workshop), methods=["POST"]),
        Route("/v1/responses", ResponsesEndpoint(workshop), methods=["POST"]),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
        Route("/v1/vlfit/price", prices.price, methods=["POST"]),
        Route("/v1/vlfit/plan", prices.plan),
        *docs_routes(),
    ]


def create_app(backend: LocalBackend, settings: ServerSettings | None = None) -> Starlette:
    """The HTTP API over ``backend``. ``app.state.closing`` ends it: see ``Closing``."""
    settings = settings or ServerSettings()
    closing = Closing(settings.drain_seconds)
    meters = Meters(restarts=settings.restarts)
    card = _model_card(backend, settings)

    async def health(_: Request) -> Response:
        """Alive, whatever it does."""
        status = "stopping" if closing.draining else "ok"
        rest = {"asleep": backend.asleep} if isinstance(backend, Sleeper) else {}
        return JSONReply({"status": status, "model": backend.model, **rest})

    async def ready(_: Request) -> Response:
        """Whether it takes requests: asleep, too, as they wake it."""
        closing.check()
        return JSONReply({"status": "ready", "model": backend.model})

    async def models(_: Request) -> Response:
        return JSONReply({"object": "list", "data": [card]})

    async def model(request: Request) -> Response:
        if not request.path_params["model"]:  # a slash too many
            raise HTTPException(404)
        workshop.check_model(request.path_params["model"])
        return JSONReply(card)

    workshop = Workshop(backend, settings, closing, meters)
    status = Status(backend, settings.expectation, closing, workshop.places)
    sleep = SleepEndpoints(backend, closing)
    app = Starlette(
        routes=[
            *word_routes(workshop),  # routes are looked through in turn, and words are what one waits for
            *page_routes(backend, asks_key=bool(settings.api_keys)),
            Route("/health", health),
            Route("/ready", ready),
            Route("/metrics", Metrics(status.facts, meters).answer),
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
    app.state.closing = closing
    app.state.watchdog = Watchdog(backend, closing.judge)
    meters.paths = frozenset(route.path for route in app.routes if isinstance(route, Route))
    app.add_middleware(Door, settings=settings, closing=closing, meters=meters)
    if settings.allow_origins:
        # Outside the door: a browser's preflight request carries no key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["retry-after", "x-request-id"],
        )
    return app


def _model_card(backend: LocalBackend, settings: ServerSettings) -> dict[str, object]:
    """The model as ``/v1/models`` shows it. ``vlfit.default_sampling`` lets our own client know what is
    left open.
    """
    card: dict[str, object] = {
        "id": backend.model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "vlfit",
        "vlfit": {"version": __version__, "default_sampling": asdict(backend.default_sampling())},
    }
    if settings.context is not None:
        card["max_model_len"] = settings.context  # vLLM's name for it
    return card
