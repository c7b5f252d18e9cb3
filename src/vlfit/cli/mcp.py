"""``vlfit mcp``: tools for agents that speak the Model Context Protocol."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlfit.cli.options import ANSWERING, SAMPLING, CommandOptions, takes_options
from vlfit.errors import UsageError

if TYPE_CHECKING:
    from vlfit.client import VisionModel
    from vlfit.tasks.search.indexing import Embedder

DEFAULT_PORT = 8765


@takes_options(
    *(name for name in ANSWERING if name not in (*SAMPLING, "stream", "json")),
    "host",
    "port",
    "api_key",
    "allow_anyone",
    host="With --http: address to listen on.  [default: 127.0.0.1]",
    port=f"With --http: port to listen on; 0 takes a free one.  [default: {DEFAULT_PORT}]",
    api_key="With --http: require this key. Other users can read the command line: better set VLFIT_API_KEY.",
    allow_anyone="With --http: serve other computers without a key.",
)
def mcp(
    root: Annotated[
        list[Path] | None,
        typer.Option(
            "--root", metavar="DIR", help="Let tools read files below this folder; may be repeated."
        ),
    ] = None,
    allow_urls: Annotated[
        bool, typer.Option("--allow-urls", help="Let tools fetch pictures from public URLs.")
    ] = False,
    http: Annotated[
        bool, typer.Option("--http", help="Speak streamable HTTP at /mcp, in place of stdin and stdout.")
    ] = False,
    *,
    options: CommandOptions,
) -> None:
    """Offer tools for pictures to agents, by MCP.

    The tools are describe, ask, detect, read_text, compare and search.

    Agents start it by themselves and speak over stdin and stdout. It uses the server that runs on this
    computer, if there is one, and else loads the model when a tool is first called. Only files below --root
    are read; links that lead out of it are refused.

    \b
    Examples:
      claude mcp add vlfit -- vlfit mcp --root ~/Pictures
      vlfit mcp --root ~/Pictures --server http://gpu-box:8000
      vlfit mcp --root ~/Pictures --http --port 8765
    """
    if find_spec("mcp") is None:
        raise UsageError(
            "vlfit mcp needs the package mcp, which is not installed", "pip install 'vlfit[mcp]'"
        )
    from vlfit.server.mcp.allowed_files import AllowedFiles, open_roots
    from vlfit.server.mcp.picture_tools import PictureTools

    models = _Models(options)
    tools = PictureTools(AllowedFiles(open_roots(root or ()), allow_urls), models.open, models.open_embedder)
    if not root and not allow_urls:
        print("vlfit mcp: no --root is named, so no file can be read", file=sys.stderr)
    try:
        if http:
            _serve(tools, options)
        else:
            from vlfit.server.mcp.mcp_server import run_stdio

            run_stdio(tools)
    finally:
        tools.close()


class _Models:
    """The models of the tools: on a server, or here. Options are checked at once, models opened later."""

    def __init__(self, options: CommandOptions) -> None:
        from dataclasses import replace

        from vlfit.cli.servers import AUTO_SERVER, running_servers
        from vlfit.cli.session import Session

        named = options.server is not None or options.settings().server is not None
        loads = any(value is not None for value in (options.model, options.backend, options.device))
        if not named and not loads and running_servers():
            options = replace(options, server=AUTO_SERVER)  # raises if several run
        self._options = options
        self._session = Session(options, needs_pictures=True)

    def open(self) -> "VisionModel":
        return self._session.model

    def open_embedder(self, name: str, opened_as: str | None) -> "Embedder":
        """The model ``name``: on the server if it serves that one; else here, on the CPU.

        The card belongs to the model that answers; a query is one short text.
        """
        from vlfit.api.engine_options import EngineOptions
        from vlfit.backends.opening import BackendSpec, open_backend
        from vlfit.cli.models import resolve_or_ask
        from vlfit.errors import VlfitError
        from vlfit.tasks.search.searching import BackendEmbedder

        if self._session.kind == "remote":
            try:
                spec = self._session.backend_spec()
                remote = BackendSpec(kind="remote", model=name, server=spec.server, api_key=spec.api_key)
                return BackendEmbedder(open_backend(remote, lambda what, share: None))
            except VlfitError:
                if opened_as is None:
                    raise
        if opened_as is None:
            raise UsageError(
                f"the index was made by {name} on a server",
                "Start vlfit mcp with --server URL of one that serves it.",
            )
        model = resolve_or_ask(opened_as, self._session.printer, yes=False, backend="native", device="cpu")
        options = EngineOptions(device="cpu", max_model_len=2048, max_num_seqs=1)
        here = BackendSpec(kind="native", model=model, options=options)
        return BackendEmbedder(open_backend(here, lambda what, share: None))


def _serve(tools: object, options: CommandOptions) -> None:
    import uvicorn

    from vlfit.server.http.listen import bind
    from vlfit.server.mcp.mcp_server import http_app
    from vlfit.server.mcp.picture_tools import PictureTools

    assert isinstance(tools, PictureTools)
    settings = options.settings(port=DEFAULT_PORT if options.port is None else options.port)
    key = settings.api_key.get_secret_value() if settings.api_key else None
    if settings.host not in ("127.0.0.1", "localhost", "::1") and key is None and not settings.allow_anyone:
        raise UsageError(
            f"--host {settings.host} lets other computers in, and no key is set",
            "Set VLFIT_API_KEY, or add --allow-anyone.",
        )
    listener = bind(settings.host, settings.port)
    app = http_app(tools, settings.host, key, trust_any_host=settings.allow_anyone)
    host, port = listener.getsockname()[:2]
    print(f"MCP at http://{host}:{port}/mcp", file=sys.stderr, flush=True)
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=3)
    uvicorn.Server(config).run(sockets=[listener])
