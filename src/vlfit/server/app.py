"""The server's ASGI application: all routes around one backend."""

from contextlib import suppress
from dataclasses import asdict
from importlib import import_module

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vlfit._version import __version__
from vlfit.backends.base import Backend
from vlfit.errors import DecodersUnavailable
from vlfit.images.decode_pool import DecodeStats
from vlfit.images.media_pool import decoder_stats
from vlfit.server.admin.estimate import EstimateEndpoints
from vlfit.server.admin.folder_search import FolderSearch
from vlfit.server.admin.metrics import MetricsEndpoint, RequestMetrics
from vlfit.server.admin.status import SleepEndpoints, StatusEndpoints
from vlfit.server.dialect import Dialect
from vlfit.server.dialects import DIALECTS, dialect_of
from vlfit.server.error_replies import JSONReply, routing_reply
from vlfit.server.generation import ServerContext
from vlfit.server.http.auth import AuthMiddleware
from vlfit.server.http.disconnect import Shutdown
from vlfit.server.http.watchdog import Watchdog
from vlfit.server.models.all_models import AllModels
from vlfit.server.models.served_models import ServedModel, ServedModels
from vlfit.server.ollama.ollama_api import greeting
from vlfit.server.openai.openai_api import OPENAI
from vlfit.server.openapi import PATHS, docs_routes
from vlfit.server.page.routes import page_routes
from vlfit.server.server_settings import ServerSettings
from vlfit.units import format_bytes

MAX_DECODER_WAIT = 10.0  # seconds; /ready answers 503 if a picture has waited longer to be decoded


# Imported at first use elsewhere. An import that fails as no file descriptor is left would fail for good.
_REQUEST_MODULES = (
    *("vlfit.tasks.fetch", "vlfit.tasks.files", "llguidance"),
    *("encodings.idna", "encodings.punycode"),
)


def import_request_modules() -> None:
    """Import what requests need and the server has not imported yet, so that the first request is not slow.

    Optional packages that are not installed are left out.
    """
    for name in _REQUEST_MODULES:
        with suppress(ImportError):  # an optional package
            import_module(name)


def create_app(backend: Backend, settings: ServerSettings | None = None) -> Starlette:
    """The HTTP API over ``backend``, to be run by ``serve_until_stopped``. ``settings`` None: the defaults.

    ``backend``: of the only model, or ``AllModels``.
    ``app.state.shutdown`` (a ``Shutdown``) drains it; ``app.state.watchdog`` watches the GPU.
    """
    import_request_modules()
    settings = settings or ServerSettings()
    shutdown = Shutdown(settings.drain_seconds)
    metrics = RequestMetrics(restarts=settings.restarts)

    async def health(_: Request) -> Response:
        """Liveness: 200 as long as the process answers."""
        status = "stopping" if shutdown.draining else "ok"
        asleep = {"asleep": backend.asleep} if backend.capabilities.sleep else {}
        return JSONReply({"status": status, "model": backend.model, **asleep})

    async def ready(_: Request) -> Response:
        """Readiness: 200 while requests are accepted, also asleep, since they wake the model.

        503 while no picture of ordinary size can be decoded (``check_decode_workers``).
        """
        shutdown.check_accepting()
        check_decode_workers(decoder_stats())
        return JSONReply({"status": "ready", "model": backend.model})

    async def list_models(_: Request) -> Response:
        return JSONReply(
            {"object": "list", "data": [model_card(each, context.models) for each in context.models.all]}
        )

    async def model(request: Request) -> Response:
        if not request.path_params["model"]:  # /v1/models/
            raise HTTPException(404)
        found = context.models.find(request.path_params["model"])
        return JSONReply(model_card(found, context.models))

    async def routing_error(request: Request, error: Exception) -> Response:
        """The reply to an error of the router, in the form of the dialect whose prefix the path has."""
        if not isinstance(error, HTTPException):
            raise error
        dialect = dialect_of(request.url.path)
        return routing_reply(request, error, dialect.error_form, routes_in_words(dialect))

    models = backend.models if isinstance(backend, AllModels) else None
    context = ServerContext(backend, settings, shutdown, metrics, models)
    status = StatusEndpoints(
        backend,
        settings.expectation,
        shutdown,
        context.admission,
        context.models,
        takes_media=bool(settings.decode_limits.media),
    )
    context.facts = status.facts
    sleep = SleepEndpoints(backend, shutdown, context.models)
    prices = EstimateEndpoints(context)
    search = FolderSearch(context)
    app = Starlette(
        routes=[
            # First, since routes are matched in order and these get most requests.
            *(route for dialect in DIALECTS for route in dialect.routes(context)),
            Route("/v1/vlfit/price", prices.price, methods=["POST"]),
            Route("/v1/vlfit/plan", prices.plan),
            Route("/v1/vlfit/search", search.search),
            Route("/v1/vlfit/search/picture", search.picture),
            *docs_routes(),
            *page_routes(
                backend,
                context.models,
                asks_key=bool(settings.api_keys),
                searches=settings.search is not None,
                greeting=greeting,
            ),
            Route("/health", health),
            Route("/ready", ready),
            Route("/metrics", MetricsEndpoint(status.facts, metrics, decoder_stats).answer),
            Route("/v1/models", list_models),
            Route("/v1/models/{model:path}", model),
            Route("/v1/vlfit/status", status.status),
            Route("/v1/vlfit/ledger", status.ledger),
            Route("/v1/vlfit/sleep", sleep.sleep, methods=["POST"]),
            Route("/v1/vlfit/wake", sleep.wake, methods=["POST"]),
        ],
        exception_handlers={HTTPException: routing_error},
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
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["retry-after", "x-request-id"],
        )
    return app


def check_decode_workers(decoders: DecodeStats) -> None:
    """Raise ``DecodersUnavailable`` if a picture has waited for more than ``MAX_DECODER_WAIT``: for a worker,
    or, if it is of ordinary size (``DecodeStats.memory_wait``), for memory.
    """
    seconds = max(decoders.worker_wait, decoders.memory_wait)
    if seconds <= MAX_DECODER_WAIT:
        return
    if decoders.worker_wait > MAX_DECODER_WAIT:
        what = f"all {decoders.busy} decode workers are busy"
    else:
        what = (
            f"large pictures take {format_bytes(decoders.memory_in_use)} of the "
            f"{format_bytes(decoders.memory_limit)} of RAM that they have together"
        )
    raise DecodersUnavailable(
        f"{what}; {decoders.waiting} pictures wait, one of them for {seconds:.0f} s",
        "Try again later: no picture takes longer than its limit.",
    )


def model_card(model: ServedModel, models: ServedModels) -> dict[str, object]:
    """The model as ``/v1/models`` shows it, with the fields that each dialect adds.

    ``vlfit.default_sampling`` tells vlfit's own client the sampling defaults. ``max_model_len`` is left out
    if the context is unknown. ``vlfit.state``: whether the model is in memory, if there are several.
    """
    sampling = asdict(model.backend.default_sampling())
    sampling["form"] = sampling.pop("grammar")  # the name that clients know
    del sampling["template_variables"]  # a checkpoint has no defaults for them
    state = {"state": models.state(model)} if len(models.all) > 1 else {}
    card: dict[str, object] = {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "vlfit",
        "vlfit": {"version": __version__, "default_sampling": sampling, **state},
    }
    if model.context is not None:
        card["max_model_len"] = model.context  # vLLM's name for it
    for dialect in DIALECTS:
        card |= dialect.model_fields(model)
    return card


def routes_in_words(dialect: Dialect) -> str:
    """Paths that ``dialect`` serves, for the message of a 404: ``/a, /b. See /docs``.

    OpenAI's include those of the server itself, such as ``/health``.
    """
    paths = PATHS if dialect is OPENAI else dialect.paths
    names = [path.path for path in paths if dialect_of(path.path) is dialect]
    return f"{', '.join(dict.fromkeys(names))}. See /docs"
