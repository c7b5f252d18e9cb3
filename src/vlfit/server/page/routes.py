"""The web page at ``/``: static files, with headers that forbid loading anything from elsewhere."""

from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vlfit.backends.base import Backend
from vlfit.server.error_replies import JSONReply
from vlfit.server.models.served_models import ServedModels
from vlfit.tasks import describe as prompts

_KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_FILES = (
    "page.css",
    "page.js",
    "answers.js",
    "boxes.js",
    "copies.js",
    "keys.js",
    "memory.js",
    "pictures.js",
    "search.js",
    "server.js",
    "icon.svg",
)
# Pictures are data: and blob: URLs of files the user chose; everything else comes from this server.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; media-src 'self' blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def page_routes(
    backend: Backend,
    models: ServedModels,
    *,
    asks_key: bool,
    searches: bool = False,
    greeting: Callable[[Request], Response | None] = lambda _: None,
) -> list[Route]:
    """``/``, its files under ``/page/``, and ``/page/facts.json`` (model, prompts, all models if several).

    ``asks_key``: the page asks for an API key, as the server requires one. ``searches``: it has a search box,
    as the server searches a folder. ``greeting``: called for each request of ``/``; returns a reply to send
    instead of the page, such as for clients that are not browsers, or None for the page.
    """

    async def facts(_: Request) -> Response:
        texts = {"caption": prompts.CAPTION_LONG, "scene": prompts.SCENE, "detect": prompts.DETECT}
        several = {} if len(models.all) < 2 else {"models": [model.name for model in models.all]}
        shown = {"asks_key": asks_key, "searches": searches}
        return JSONReply({"model": backend.model, "prompts": texts, **shown, **several})

    page = _file("index.html")

    async def index(request: Request) -> Response:
        return greeting(request) or await page(request)

    return [
        Route("/", index),
        Route("/page/facts.json", facts),
        *(Route(f"/page/{name}", _file(name)) for name in _FILES),
    ]


def _file(name: str) -> Callable[[Request], Awaitable[Response]]:
    content = (files("vlfit.server") / "page" / name).read_bytes()
    kind = _KINDS[name.rpartition(".")[2]]

    async def send(_: Request) -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return send
