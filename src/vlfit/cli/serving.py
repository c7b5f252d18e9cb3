"""Serving a model in this process: the order of starting and stopping, and what a person is told about it.

Does not know: options (``serve.py``), routes (``server``) or how a model runs (``backends``).
"""

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

from vlfit.cli.printing import Printer
from vlfit.cli.servers import forget, recorded
from vlfit.errors import UsageError, WrongApiKey
from vlfit.units import MIB

if TYPE_CHECKING:
    from vlfit.backends.base import OpenBackend, Phases
    from vlfit.machine.model import Gpu
    from vlfit.server.http.disconnect import Closing
    from vlfit.server.server_settings import ServerSettings
    from vlfit.server.supervisor import Kept
    from vlfit.settings import Settings

    OpenModel = Callable[[Settings, Printer, Phases, Path | None], OpenBackend]

CRASHED = 70  # EX_SOFTWARE of sysexits.h: to be started again
CLOSING_SECONDS = 0.7  # what is left of the three seconds of Ctrl-C when all requests are over


def serve_here(
    settings: "Settings",
    *,
    json_line: bool,
    quiet: bool,
    open_model: "OpenModel | None" = None,
    trust_remote_code: bool = False,
) -> None:
    """Until a signal ends it, and the process with it. ``open_model`` opens the model in another way than
    here; it is given the file in which a server that died may have left word, None where none is kept.
    """
    from vlfit.backends.base import Phases
    from vlfit.loading import preload as head_start
    from vlfit.server.http.listen import address_of, allow_many_connections, bind
    from vlfit.server.http.log import log_to_stderr
    from vlfit.server.http.malloc import give_memory_back, keep_what_is_loaded

    phases = Phases()
    told = LoggedPrinter if settings.log_format == "json" else Printer
    printer = told(json=json_line, stream=False, quiet=quiet)
    log_to_stderr(quiet, settings.log_format)
    keys, folder = keys_of(settings), _folder(settings.allow_files)
    give_memory_back()
    allow_many_connections()
    with bind(settings.host, settings.port) as listener:
        url = address_of(listener)
        kept = _kept(listener) if settings.restart else None
        if kept and kept.restarts:
            phases = Phases()  # those of the one before are over
        # The plan is made for GPUs as they are before the model.
        gpus = head_start.make_context(settings.device) if settings.backend in (None, "native") else ()
        if open_model is None:
            backend = _load(settings, printer, phases, trust_remote_code=trust_remote_code)
        else:
            backend = open_model(settings, printer, phases, kept.word if kept else None)
        try:
            from vlfit.server.app import create_app
            from vlfit.server.http.listen import serve_until_stopped

            server_settings = replace(
                _server_settings(settings, backend, gpus),
                api_keys=keys,
                files=folder,
                restarts=kept.restarts if kept else 0,
            )
            _tell_ledger(settings, backend, server_settings, printer)
            app = create_app(backend, server_settings)
            with ExitStack() as known:

                def goes_on() -> bool:
                    return bool(kept and app.state.closing.crashed)

                def announce() -> None:
                    _watch(backend, app.state.closing)
                    phases.end()
                    keeper = kept.keeper if kept else None
                    known.enter_context(recorded(url, backend.model, settings.drain, keeper, goes_on))
                    if kept:
                        kept.tell_ready()
                    again = bool(kept and kept.restarts)
                    _announce(url, backend, printer, phases, json_line and not again)

                keep_what_is_loaded()
                serve_until_stopped(app, kept.listener if kept else listener, server_settings, announce)
                if kept and goes_on():
                    kept.tell_lost()
        finally:
            _close(backend)
    if app.state.closing.crashed:
        _leave(CRASHED)
    printer.note("stopped")
    _leave()


class LoggedPrinter(Printer):
    """What is said about the work goes into the log, where that is for programs: an object a line."""

    @property
    def lively(self) -> bool:
        return False

    def note(self, text: str) -> None:
        logging.getLogger("vlfit.server").info("%s", text)

    def warn(self, text: str) -> None:
        logging.getLogger("vlfit.server").warning("%s", text)


def _kept(listener: socket.socket) -> "Kept":
    """Returns in the processes that serve; this one stays behind and keeps them."""
    if not hasattr(os, "fork"):
        raise UsageError("this system cannot run a server apart", "leave --restart out")
    from vlfit.server.supervisor import keep

    try:
        return keep(listener)
    except SystemExit:  # of the keeper: it may have been stopped while nobody served
        forget(os.getpid())
        raise


def _load(
    settings: "Settings", printer: Printer, phases: "Phases", *, trust_remote_code: bool
) -> "OpenBackend":
    """The model, and meanwhile what serves it: while the GPU computes Python has time to import."""
    from vlfit.api.engine_options import EngineOptions
    from vlfit.backends.opening import Wanted, open_backend
    from vlfit.cli.loading import files_for, import_beside, loading
    from vlfit.client import choose_model

    if settings.backend == "remote":
        return _ask_for(settings, printer, phases)
    name = settings.model
    if name == "auto":
        choice = choose_model(settings.backend or "native")
        name = choice.model
        printer.note(choice.reason)
    options = EngineOptions(
        device=settings.device,
        dtype=settings.dtype,
        context=settings.context,
        kv_tokens=settings.kv,
        kv_dtype=settings.kv_dtype,
        keep_to_plan=True,
        even=True,
        sequences=settings.sequences,
        image_tokens=settings.image_tokens,
        chunk=settings.chunk,
        offload=settings.offload,
        prefix_cache=settings.prefix_cache,
        speculate=settings.speculate,
        idle_sleep=settings.idle_sleep,
    )
    if settings.max_tokens is not None:
        options = replace(options, max_tokens=settings.max_tokens)
    files = files_for(settings.backend, code=trust_remote_code)
    with loading(name, printer, phases, files) as progress:
        server: list[threading.Thread] = []

        def tell(what: str, share: float) -> None:
            progress(what, share)
            if what == "rehearsing the worst case" and not server:
                server.append(
                    import_beside("vlfit.server.app", "vlfit.server.http.listen", "vlfit.cli.plan_page")
                )

        wanted = Wanted(
            kind=settings.backend or "native",
            model=name,
            options=options,
            trust_remote_code=trust_remote_code,
        )
        backend = open_backend(wanted, tell)
    phases.begin("server")
    for thread in server:
        thread.join()
    return backend


def _ask_for(settings: "Settings", printer: Printer, phases: "Phases") -> "OpenBackend":
    """The model of another server, which is asked at once whether it is there."""
    from vlfit.backends.opening import Wanted, open_backend

    if settings.server is None:
        raise UsageError(
            "--backend remote stands before another server, and none is named",
            "name its URL: vlfit serve --backend remote http://host:port",
        )
    printer.note(f"asking {settings.server}")
    phases.begin("asking the server")
    key = settings.server_key.get_secret_value() if settings.server_key else None
    name = None if settings.model == "auto" else settings.model
    wanted = Wanted(
        kind="remote",
        model=name,
        server=settings.server,
        api_key=key,
        max_tokens=settings.max_tokens,
        at_once=_sequences(settings),
        serves=True,
    )
    try:
        backend = open_backend(wanted)
    except WrongApiKey as error:
        raise WrongApiKey(error.message, "set VLFIT_SERVER_KEY to the key that it asks for") from None
    phases.begin("server")
    return backend


def _gpus(device: str) -> "tuple[Gpu, ...]":
    from vlfit.machine.gpu import read_gpus

    return () if device == "cpu" else read_gpus()[0]


def _server_settings(
    settings: "Settings", backend: "OpenBackend", gpus: "tuple[Gpu, ...]"
) -> "ServerSettings":
    from vlfit.server.admin.status import expectation_of
    from vlfit.server.server_settings import ServerSettings, is_loopback

    return ServerSettings(
        aliases=(settings.model,),
        context=backend.context,
        places=_sequences(settings, backend) + _queue(settings, backend),
        own_names=_own_names(settings) if is_loopback(settings.host) else None,
        a_minute=settings.key_rate,
        at_once=settings.key_at_once,
        term_seconds=settings.drain,
        allow_private_urls=settings.allow_private_urls,
        allow_origins=(settings.allow_origin,) if settings.allow_origin else (),
        expectation=expectation_of(backend, gpus),
    )


def _own_names(settings: "Settings") -> tuple[str, ...]:
    return (settings.allow_host,) if settings.allow_host else ()


def _queue(settings: "Settings", backend: "OpenBackend") -> int:
    """Requests that may wait. By default each sequence has eight behind it: the last of them waits nine times
    as long as an answer takes. 16 at least, as one request may ask for so many choices.
    """
    return max(8 * _sequences(settings, backend), 16) if settings.queue is None else settings.queue


def _sequences(settings: "Settings", backend: "OpenBackend | None" = None) -> int:
    """Requests that run at once: of another server, which has its own idea of it, are as many sent on as
    nobody minds to wait for at once, unless a number was asked for. vLLM's are the plan's, and
    transformers runs one.
    """
    if settings.backend == "transformers":
        return 1
    if settings.backend == "vllm":
        return int(getattr(backend, "sequences", settings.sequences))
    if settings.backend == "remote" and "sequences" not in settings.model_fields_set:
        from vlfit.backends.remote import AT_ONCE

        return AT_ONCE
    return settings.sequences


def _tell_ledger(
    settings: "Settings", backend: "OpenBackend", server_settings: "ServerSettings", printer: Printer
) -> None:
    """What was planned and what is held, as ``/v1/vlfit/ledger`` has it, and which lines differ."""
    from vlfit.backends.base import Accountable
    from vlfit.cli.plan_page import differences, ledger_page
    from vlfit.server.admin.status import gpu_of, ledger_facts, ledger_rows

    if not isinstance(backend, Accountable):
        printer.note(server_settings.expectation.why_not)
        return
    account, expectation = backend.account(), server_settings.expectation
    gpu = gpu_of(account, _gpus(settings.device))
    found = ledger_rows(account, gpu, expectation)
    total = ledger_facts(found, expectation, account)["total"]
    place = f"of {gpu.total / MIB:,.0f} on {gpu.name}" if gpu else "of this process's RAM"
    printer.note(ledger_page(found, total, place))
    more, less = differences(found)
    for words in more:
        logging.getLogger("vlfit.server").warning("warning: %s", words)
    for words in [*less, expectation.why_not]:
        if words:
            printer.note(words)


def _announce(url: str, backend: "OpenBackend", printer: Printer, phases: "Phases", json_line: bool) -> None:
    context = f", context {backend.context} tokens" if backend.context else ""
    printer.note(
        f"ready: {backend.model} on {backend.device}{context}, at {url}/v1\n"
        f"after {phases.in_words()}\n"
        f"try:   curl {url}/v1/chat/completions "
        """-d '{"messages": [{"role": "user", "content": "Hello"}]}'"""
    )
    if json_line:
        facts = {"url": url, "model": backend.model, "context": backend.context, "device": backend.device}
        took = {name: round(seconds, 3) for name, seconds in phases.seconds.items()}
        printer.data({**facts, "ready_s": round(phases.total, 3), "phases_s": took})


def keys_of(settings: "Settings") -> tuple[str, ...]:
    """The keys that clients are asked for. Raises ``UsageError`` for one that cannot be sent, and if there is
    none although others than this computer can reach the server.
    """
    from vlfit.server.http.auth import Keys, read_keys
    from vlfit.server.server_settings import is_loopback

    keys: tuple[str, ...] = (settings.api_key.get_secret_value(),) if settings.api_key else ()
    if settings.api_keys is not None:
        keys += read_keys(settings.api_keys)
    Keys(keys)
    if keys or is_loopback(settings.host):
        return keys
    if not settings.allow_anyone:
        raise UsageError(
            f"--host {settings.host} lets others use this server, and it asks for no key",
            "set VLFIT_API_KEY or --api-keys FILE; or say --allow-anyone",
        )
    logging.getLogger("vlfit.server").warning(
        "warning: anyone who can reach %s may use this server: it asks for no key", settings.host
    )
    return keys


def _folder(path: Path | None) -> Path | None:
    if path is None or path.expanduser().is_dir():
        return path and path.expanduser().resolve()
    raise UsageError(f"--allow-files {path} is no folder", "name one whose pictures requests may read")


def _watch(backend: "OpenBackend", closing: "Closing") -> None:
    """A model that dies in a process of its own ends the server, also while nobody asks. Called in its
    loop.
    """
    from vlfit.backends.base import Perishable

    if isinstance(backend, Perishable):
        loop = asyncio.get_running_loop()

        def tell(why: Exception) -> None:
            loop.call_soon_threadsafe(closing.judge, why)

        backend.when_lost(tell)


def _close(backend: "OpenBackend") -> None:
    """Give the memory back. A forward pass under way cannot be stopped, and is not waited for very long."""
    from vlfit.backends.base import Perishable

    closing = threading.Thread(target=backend.close, daemon=True)
    closing.start()
    closing.join(backend.closing_seconds if isinstance(backend, Perishable) else CLOSING_SECONDS)


def _leave(code: int = 0) -> None:
    """End the process now: taking torch apart can last a second, while the person at Ctrl-C waits."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
