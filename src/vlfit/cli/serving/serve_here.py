"""``vlfit serve`` in this process: start, serve, stop, and what it prints meanwhile."""

import asyncio
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vlfit.cli.options import engine_options
from vlfit.cli.printing import Printer, terminal_width
from vlfit.cli.servers import delete_record, record_server
from vlfit.errors import CannotListen, UsageError, WrongApiKey
from vlfit.units import MIB

if TYPE_CHECKING:
    from vlfit.api.engine_options import EngineOptions
    from vlfit.backends.base import Backend
    from vlfit.backends.startup import StartupTimer
    from vlfit.cli.serving.serve_models import ModelNames
    from vlfit.images.limits import DecodeLimits
    from vlfit.machine.model import Gpu
    from vlfit.server.http.disconnect import Shutdown
    from vlfit.server.models.switched_models import SwitchedModels
    from vlfit.server.server_settings import ServerSettings
    from vlfit.server.supervisor import WorkerContext
    from vlfit.settings import Settings

    OpenModel = Callable[[Settings, Printer, StartupTimer, Path | None], Backend]

CRASHED = 70  # EX_SOFTWARE of sysexits.h: the supervisor restarts it


def serve_here(
    settings: "Settings",
    *,
    json_line: bool,
    quiet: bool,
    open_model: "OpenModel | None" = None,
    trust_remote_code: bool = False,
    models: "ModelNames | None" = None,
) -> None:
    """Load the model and serve it until a signal; then exit the process. Never returns.

    ``json_line``: print one line of JSON on stdout when ready. ``quiet``: log only warnings and errors.
    ``open_model``: opens the backend, in place of the one that ``settings`` name; it gets the supervisor's
    handover file, or None without a supervisor. ``trust_remote_code``: as for ``BackendSpec``.
    ``models``: to serve by name, in place of the one of ``settings``. Raises
    ``UsageError`` for keys (``required_keys``), ``CannotListen`` before the model is loaded, and what
    opening the model raises.
    """
    from vlfit.backends.startup import StartupTimer
    from vlfit.loading import preload
    from vlfit.server.http.listen import bind, raise_open_file_limit, url_of
    from vlfit.server.http.log import log_to_stderr
    from vlfit.server.http.malloc import configure_malloc, freeze_gc, keep_buffers

    phases = StartupTimer()
    printer_class = LogPrinter if settings.log_format == "json" else Printer
    printer = printer_class(json=json_line, stream=False, quiet=quiet)
    log_to_stderr(quiet, settings.log_format)
    keys, folder = required_keys(settings), _folder(settings.allow_files)
    _folder(settings.search, "--search")  # before anything is loaded
    configure_malloc()
    raise_open_file_limit()
    with ExitStack() as sockets:
        listeners = [sockets.enter_context(bind(settings.host, settings.port))]
        url = url_of(listeners[0])
        ollama_url = ""
        if settings.ollama:
            listeners.append(sockets.enter_context(_bind_ollama(settings.host)))
            ollama_url = url_of(listeners[1])
        worker = _fork_worker(listeners) if settings.restart else None
        if worker and worker.restarts:
            phases = StartupTimer()  # a restart: count its own
        # The ledger needs the GPUs as they are before the model is loaded.
        gpus = preload.start_cuda_context(settings.device) if settings.backend in (None, "native") else ()
        if models is not None:
            backend = _load_several(settings, models, gpus, printer, phases)
        elif open_model is None:
            backend = _load(settings, printer, phases, trust_remote_code=trust_remote_code)
        else:
            backend = open_model(settings, printer, phases, worker.handover_file if worker else None)
        try:
            from vlfit.server.app import create_app
            from vlfit.server.http.listen import serve_until_stopped

            server_settings = replace(
                _server_settings(settings, backend, gpus),
                api_keys=keys,
                files=folder,
                restarts=worker.restarts if worker else 0,
            )
            _print_ledger(settings, backend, server_settings, printer)
            switched = _switched_models(backend)
            app = create_app(backend, server_settings)
            with ExitStack() as records:

                def restarts_after_crash() -> bool:
                    return bool(worker and app.state.shutdown.crashed)

                def announce() -> None:
                    _watch(backend, app.state.shutdown)
                    if switched is not None:
                        switched.line.begin()
                    phases.end()
                    pid = worker.supervisor_pid if worker else None
                    records.enter_context(
                        record_server(url, backend.model, settings.drain, pid, restarts_after_crash)
                    )
                    if worker:
                        worker.mark_ready()
                    again = bool(worker and worker.restarts)
                    _announce(url, backend, printer, phases, json_line and not again)
                    if ollama_url:
                        printer.note(f"ollama: {ollama_url}")
                    if not again:
                        _offer_verification(settings, backend, printer, json=json_line)

                freeze_gc()
                keep_buffers(backend.device)
                serve_until_stopped(
                    app, [worker.listener] if worker else listeners, server_settings, announce
                )
                if worker and restarts_after_crash():
                    worker.mark_lost()
        finally:
            _close(backend)
    if app.state.shutdown.crashed:
        _leave(CRASHED)
    printer.note("stopped")
    _leave()


class LogPrinter(Printer):
    """A printer whose notes and warnings are log lines, for ``--log-format json``."""

    @property
    def on_terminal(self) -> bool:
        """Always False: a log has no progress bars."""
        return False

    def note(self, text: str) -> None:
        """Log ``text`` at level info."""
        logging.getLogger("vlfit.server").info("%s", text)

    def warn(self, text: str) -> None:
        """Log ``text`` at level warning."""
        logging.getLogger("vlfit.server").warning("%s", text)


def _bind_ollama(host: str) -> socket.socket:
    """A socket on Ollama's own port. Raises ``CannotListen``, most often because Ollama runs."""
    from vlfit.server.http.listen import bind
    from vlfit.server.server_settings import OLLAMA_PORT

    try:
        return bind(host, OLLAMA_PORT)
    except CannotListen as error:
        raise CannotListen(
            error.message,
            "Stop Ollama (systemctl stop ollama), or leave --ollama out: its clients can use --port's, too.",
        ) from error


def _fork_worker(listeners: list[socket.socket]) -> "WorkerContext":
    """Fork a worker under a supervisor. Returns in each worker; this process becomes the supervisor."""
    if not hasattr(os, "fork"):
        raise UsageError("--restart needs fork, which this system lacks", "Leave --restart out.")
    from vlfit.server.supervisor import supervise

    try:
        return supervise(*listeners)
    except SystemExit:  # of the supervisor, which may be stopped while no worker runs
        delete_record(os.getpid())
        raise


def _load_several(
    settings: "Settings",
    models: "ModelNames",
    gpus: "tuple[Gpu, ...]",
    printer: Printer,
    phases: "StartupTimer",
) -> "Backend":
    """Plan the models, and load the first. Raises as ``load_models``."""
    from vlfit.cli.serving.serve_models import load_models

    def load_first(name: str, options: "EngineOptions") -> "Backend":
        return _load(settings, printer, phases, trust_remote_code=False, name=name, options=options)

    options = replace(engine_options(settings), enforce_plan=True, even_chunks=True)
    return load_models(settings, models, options, gpus, load_first, takes_media=_takes_media(settings))


def _switched_models(backend: "Backend") -> "SwitchedModels | None":
    """The models of a server of several; None of any other."""
    from vlfit.server.models.all_models import AllModels

    return backend.models if isinstance(backend, AllModels) else None


def _load(
    settings: "Settings",
    printer: Printer,
    phases: "StartupTimer",
    *,
    trust_remote_code: bool,
    name: str | None = None,
    options: "EngineOptions | None" = None,
) -> "Backend":
    """Load the model, and import the server in a thread while the GPU warms up.

    ``name``, ``options``: None: those of ``settings``.
    """
    from vlfit.backends.opening import BackendSpec, open_backend
    from vlfit.cli.loading import file_selection_for, import_in_thread, refuse_mini, show_loading
    from vlfit.client import choose_model

    if settings.backend == "remote":
        return _connect(settings, printer, phases)
    name = name or settings.model
    if name == "auto":
        choice = choose_model(settings.backend or "native", device=settings.device)
        refuse_mini(choice)
        name = choice.model
        printer.note(choice.reason)
    options = options or replace(engine_options(settings), enforce_plan=True, even_chunks=True)
    files = file_selection_for(settings.backend, code=trust_remote_code)
    with show_loading(name, printer, phases, files) as progress:
        server: list[threading.Thread] = []

        def tell(what: str, share: float) -> None:
            progress(what, share)
            if what == "profiling the worst case" and not server:
                server.append(
                    import_in_thread(
                        "vlfit.server.app", "vlfit.server.http.listen", "vlfit.cli.pages.plan_page"
                    )
                )

        spec = BackendSpec(
            kind=settings.backend or "native",
            model=name,
            options=options,
            trust_remote_code=trust_remote_code,
        )
        backend = open_backend(spec, tell)
    phases.begin("server")
    for thread in server:
        thread.join()
    return backend


def _connect(settings: "Settings", printer: Printer, phases: "StartupTimer") -> "Backend":
    """Connect to the model of another server."""
    from vlfit.backends.opening import BackendSpec, open_backend

    if settings.server is None:
        raise UsageError(
            "--backend remote needs the URL of a server",
            "Write vlfit serve --backend remote http://host:port.",
        )
    printer.note(f"connecting to {settings.server}")
    phases.begin("asking the server")
    key = settings.server_key.get_secret_value() if settings.server_key else None
    name = None if settings.model == "auto" else settings.model
    spec = BackendSpec(
        kind="remote",
        model=name,
        server=settings.server,
        api_key=key,
        max_tokens=settings.max_tokens,
        max_concurrent=_sequences(settings),
        behind_server=True,
    )
    try:
        backend = open_backend(spec)
    except WrongApiKey as error:
        raise WrongApiKey(error.message, "Set VLFIT_SERVER_KEY to its key.") from None
    phases.begin("server")
    return backend


def _gpus(device: str) -> "tuple[Gpu, ...]":
    from vlfit.machine.gpu import read_gpus

    return () if device == "cpu" else read_gpus()[0]


def _server_settings(settings: "Settings", backend: "Backend", gpus: "tuple[Gpu, ...]") -> "ServerSettings":
    from vlfit.backends.held_memory import expected_memory
    from vlfit.server.server_settings import ServerSettings, is_loopback

    decode_limits = _decode_limits(settings)
    return ServerSettings(
        aliases=(settings.model,),
        context=backend.context,
        max_completions=_sequences(settings, backend) + _queue(settings, backend),
        allowed_hosts=_own_names(settings) if is_loopback(settings.host) else None,
        requests_per_minute=settings.key_rate,
        concurrent_requests=settings.key_at_once,
        term_seconds=settings.drain,
        allow_private_urls=settings.allow_private_urls,
        search=_folder(settings.search, "--search"),
        decode_limits=decode_limits,
        allow_origins=(settings.allow_origin,) if settings.allow_origin else (),
        expectation=expected_memory(backend, gpus, takes_media=bool(decode_limits.media)),
    )


def _takes_media(settings: "Settings") -> bool:
    return bool(_decode_limits(settings).media)


def _decode_limits(settings: "Settings") -> "DecodeLimits":
    from vlfit.images.limits import CLIENT_PICTURES, FORMATS
    from vlfit.images.media_kinds import MEDIA_EXTENSIONS

    names = settings.image_formats.split(",")
    every = "all" in names
    media = tuple(kind for kind in MEDIA_EXTENSIONS if every or kind in names)
    return replace(CLIENT_PICTURES, formats=FORMATS if every else CLIENT_PICTURES.formats, media=media)


def _own_names(settings: "Settings") -> tuple[str, ...]:
    return (settings.allow_host,) if settings.allow_host else ()


def _queue(settings: "Settings", backend: "Backend") -> int:
    """Max requests waiting. Default: eight per sequence, so that the last one waits for about nine answers;
    at least 16, as one request may ask for that many choices.
    """
    return max(8 * _sequences(settings, backend), 16) if settings.queue is None else settings.queue


def _sequences(settings: "Settings", backend: "Backend | None" = None) -> int:
    """Max requests running at once: with vLLM as planned, with transformers 1, with another server
    ``MAX_CONCURRENT`` unless set.
    """
    if settings.backend == "transformers":
        return 1
    if settings.backend == "vllm":
        return int(getattr(backend, "sequences", settings.sequences))
    if settings.backend == "remote" and "sequences" not in settings.model_fields_set:
        from vlfit.backends.remote import MAX_CONCURRENT

        return MAX_CONCURRENT
    return settings.sequences


def _print_ledger(
    settings: "Settings", backend: "Backend", server_settings: "ServerSettings", printer: Printer
) -> None:
    """Print planned and held memory, as ``/v1/vlfit/ledger`` has it, and the lines that differ."""
    from vlfit.backends.held_memory import engine_gpu, ledger_rows
    from vlfit.cli.pages.ledger_page import ledger_differences, ledger_page
    from vlfit.cli.pages.plan_page import MAX_WIDTH
    from vlfit.server.admin.status import ledger_json

    if not backend.capabilities.account:
        printer.note(server_settings.expectation.no_lines_reason)
        return
    account, expectation = backend.account(), server_settings.expectation
    gpu = engine_gpu(account, _gpus(settings.device))
    rows = ledger_rows(account, gpu, expectation)
    total = ledger_json(rows, expectation, account)["total"]
    place = f"of {gpu.total / MIB:,.0f} on {gpu.name}" if gpu else "of this process's RAM"
    width = terminal_width(MAX_WIDTH, on_terminal=sys.stderr.isatty())
    printer.note(ledger_page(rows, total, place, width))
    more, less = ledger_differences(rows)
    for words in more:
        logging.getLogger("vlfit.server").warning("warning: %s", words)
    for words in [*less, expectation.no_lines_reason]:
        if words:
            printer.note(words)


def _first_request(backend: "Backend") -> str:
    """Path and body of a request that the model answers, as arguments of curl."""
    if backend.capabilities.generates:
        return """/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello"}]}'"""
    if backend.capabilities.embeds:
        return """/v1/embeddings -d '{"input": "Hello"}'"""
    return """/v1/rerank -d '{"query": "a greeting", "documents": ["Hello", "a cat"]}'"""


def _announce(
    url: str, backend: "Backend", printer: Printer, phases: "StartupTimer", json_line: bool
) -> None:
    context = f", context {backend.context} tokens" if backend.context else ""
    switched = _switched_models(backend)
    first = backend if switched is None else switched.all[0].backend
    printer.note(
        f"ready: {backend.model} on {backend.device}{context}, at {url}/v1\n"
        f"after {phases.summary()}\n"
        f"page:  {url}\n"
        f"try:   curl {url}{_first_request(first)}"
    )
    names = [] if switched is None else [model.name for model in switched.all]
    if names:
        printer.note(f"models by name: {', '.join(names)}")
    if json_line:
        facts: dict[str, object] = {
            "url": url,
            "model": backend.model,
            "context": backend.context,
            "device": backend.device,
            **({"models": names} if names else {}),
        }
        took = {name: round(seconds, 3) for name, seconds in phases.seconds_by_phase.items()}
        printer.data({**facts, "ready_s": round(phases.total_seconds, 3), "phases_s": took})


def _offer_verification(settings: "Settings", backend: "Backend", printer: Printer, *, json: bool) -> None:
    """Say once that ``vlfit verify`` checks the model that runs here."""
    from vlfit.checkpoint.source import Checkpoint
    from vlfit.cli.verify_here import offer_verification

    switched = _switched_models(backend)
    loaded = backend if switched is None else switched.all[0].backend
    if loaded.kind != "native" or not loaded.capabilities.account:
        return
    if not isinstance(loaded.checkpoint, Checkpoint):
        return
    running = loaded.account().settings
    typed = settings.model if switched is None and settings.model != "auto" else loaded.model
    offer_verification(
        typed, running.device, running.gpu_uuid, loaded.checkpoint.weights_format, printer, json=json
    )


def required_keys(settings: "Settings") -> tuple[str, ...]:
    """API keys to require from clients, of ``--api-key`` and ``--api-keys``; empty: no key is required.

    Raises ``UsageError`` for keys that no client can send. If there are none and other computers can connect,
    raises ``UsageError`` too, or, with ``--allow-anyone``, logs a warning.
    """
    from vlfit.server.http.auth import ApiKeys, read_keys
    from vlfit.server.server_settings import is_loopback

    keys: tuple[str, ...] = (settings.api_key.get_secret_value(),) if settings.api_key else ()
    if settings.api_keys is not None:
        keys += read_keys(settings.api_keys)
    ApiKeys(keys)
    if keys or is_loopback(settings.host):
        return keys
    if not settings.allow_anyone:
        raise UsageError(
            f"--host {settings.host} lets other computers use this server without a key",
            "Set VLFIT_API_KEY or --api-keys FILE, or allow it with --allow-anyone.",
        )
    logging.getLogger("vlfit.server").warning(
        "warning: anyone who can reach %s can use this server: it requires no key", settings.host
    )
    return keys


def _folder(path: Path | None, option: str = "--allow-files") -> Path | None:
    if path is None or path.expanduser().is_dir():
        return path and path.expanduser().resolve()
    raise UsageError(f"{option} {path} is not a folder", "Name a folder of pictures that requests may read.")


def _watch(backend: "Backend", shutdown: "Shutdown") -> None:
    """Stop the server when the backend's own process dies, even without requests. Call in the event loop."""
    if backend.capabilities.own_process:
        loop = asyncio.get_running_loop()

        def stop(error: Exception) -> None:
            loop.call_soon_threadsafe(shutdown.stop_if_fatal, error)

        backend.when_lost(stop)


def _close(backend: "Backend") -> None:
    """Close the backend, waiting only briefly: a running forward pass cannot be stopped."""
    closing = threading.Thread(target=backend.close, daemon=True)
    closing.start()
    closing.join(backend.closing_seconds)


def _leave(code: int = 0) -> None:
    """Exit without Python's shutdown, in which torch can take a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
