"""``vlfit serve``: a model behind OpenAI's API, until Ctrl-C.

Knows: the order of starting and stopping, and what a person is told about it. Does not know: routes
(``server``) or how a model runs (``backends/native.py``).
"""

import logging
import os
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from vlfit.cli.printing import Printer
from vlfit.errors import UsageError
from vlfit.units import MIB

if TYPE_CHECKING:
    from vlfit.backends.native import NativeBackend
    from vlfit.backends.phases import Phases
    from vlfit.machine.model import Gpu
    from vlfit.server.settings import ServerSettings
    from vlfit.settings import Settings

CLOSING_SECONDS = 0.7  # what is left of the three seconds of Ctrl-C when all requests are over

Text = str | None
Count = int | None


def serve(
    model_argument: Annotated[
        Text,
        typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False),
    ] = None,
    model: Annotated[
        Text,
        typer.Option(
            "--model",
            "-m",
            metavar="NAME",
            help="auto (the best one here, else mini), mini, a folder, or a hub id.  [env VLFIT_MODEL]",
        ),
    ] = None,
    host: Annotated[
        Text,
        typer.Option(
            metavar="ADDRESS",
            help="Where to listen; 0.0.0.0 lets other computers in.  [default: 127.0.0.1; env VLFIT_HOST]",
        ),
    ] = None,
    port: Annotated[
        Count, typer.Option(metavar="N", help="0 takes any free one.  [default: 8000; env VLFIT_PORT]")
    ] = None,
    device: Annotated[
        Text,
        typer.Option(
            metavar="NAME", help="auto (GPU if there is one), cpu, cuda, cuda:1.  [env VLFIT_DEVICE]"
        ),
    ] = None,
    dtype: Annotated[
        Text, typer.Option(metavar="NAME", help="auto, float32, bfloat16 or float16.  [env VLFIT_DTYPE]")
    ] = None,
    context: Annotated[
        Count,
        typer.Option(metavar="N", help="Most tokens of prompt and answer together.  [env VLFIT_CONTEXT]"),
    ] = None,
    kv: Annotated[
        Text,
        typer.Option(
            metavar="N",
            help="Tokens of the KV cache that all requests share; auto: what free memory leaves."
            "  [default: 2048 for each sequence, at least one context; env VLFIT_KV]",
        ),
    ] = None,
    sequences: Annotated[
        Count,
        typer.Option(
            metavar="N",
            help="Requests that run at once at full context; more wait.  [default: 4; env VLFIT_SEQUENCES]",
        ),
    ] = None,
    queue: Annotated[
        Count,
        typer.Option(
            metavar="N",
            help="Requests that may wait while others run; more are told when to come again (429)."
            "  [default: 8 for each sequence, at least 16; env VLFIT_QUEUE]",
        ),
    ] = None,
    image_tokens: Annotated[
        Count,
        typer.Option(
            metavar="N",
            help="Most tokens of one picture (1024x1024 pixels are 1024); larger ones are scaled down."
            "  [env VLFIT_IMAGE_TOKENS]",
        ),
    ] = None,
    chunk: Annotated[
        Count,
        typer.Option(
            metavar="N",
            help="Most tokens of one pass through the model; fewer take less memory and more time."
            "  [default: 1024; env VLFIT_CHUNK]",
        ),
    ] = None,
    offload: Annotated[
        Text,
        typer.Option(
            metavar="GIB",
            help="Let text layers wait in RAM so that the GPU holds so much less (2, 800MiB); auto: as few as"
            " make it fit. Slow: they are copied for every word.  [env VLFIT_OFFLOAD]",
        ),
    ] = None,
    max_tokens: Annotated[
        Count,
        typer.Option(
            metavar="N", help="Most tokens of an answer whose request names no limit.  [env VLFIT_MAX_TOKENS]"
        ),
    ] = None,
    no_prefix_cache: Annotated[
        bool,
        typer.Option(
            "--no-prefix-cache",
            help="Compute every prompt whole, also if another began alike.  [env VLFIT_PREFIX_CACHE=0]",
        ),
    ] = False,
    idle_sleep: Annotated[
        Text,
        typer.Option(
            metavar="TIME",
            help="Give the GPU back after so long without a request, like 5m: weights wait in RAM, and the"
            " next request wakes it.  [default: never; env VLFIT_IDLE_SLEEP]",
        ),
    ] = None,
    api_key: Annotated[
        Text,
        typer.Option(
            metavar="KEY",
            help="Ask clients for this key. Other users of this computer can read it off the command line;"
            " the variable keeps it to yourself.  [env VLFIT_API_KEY]",
        ),
    ] = None,
    allow_private_urls: Annotated[
        bool | None,
        typer.Option(
            "--allow-private-urls",
            help="Fetch pictures from loopback and private networks too.  [env VLFIT_ALLOW_PRIVATE_URLS]",
            show_default=False,
        ),
    ] = None,
    allow_origin: Annotated[
        Text,
        typer.Option(
            metavar="ORIGIN",
            help="Let scripts of this web page (https://example.org, or *) call the server."
            "  [env VLFIT_ALLOW_ORIGIN]",
        ),
    ] = None,
    json_line: Annotated[
        bool,
        typer.Option(
            "--json",
            help="When ready, print one line of JSON on stdout: url, model, context, device, and the seconds"
            " that it took.",
        ),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Nothing on stderr but warnings and errors.")
    ] = False,
) -> None:
    """Serve a model over HTTP with OpenAI's API: /v1/chat/completions, /v1/models, /health.

    Any OpenAI client can speak to it. The first Ctrl-C lets running answers finish for a moment and stops in
    under three seconds; the second stops at once.

    \b
    Examples:
      vlfit serve
      vlfit serve mini --port 8001
      vlfit serve Qwen/Qwen3-VL-2B-Instruct-FP8 --context 4096
      vlfit serve --idle-sleep 5m
      VLFIT_API_KEY=secret vlfit serve --host 0.0.0.0
      curl http://127.0.0.1:8000/v1/models
    """
    from vlfit.backends.phases import Phases
    from vlfit.engine import head_start
    from vlfit.server.address import bind
    from vlfit.server.host_memory import give_memory_back, keep_what_is_loaded
    from vlfit.settings import read_settings

    if model_argument and model and model_argument != model:
        raise UsageError(f"two models: {model_argument} and --model {model}", "name one")
    settings = read_settings(
        model=model or model_argument,
        host=host,
        port=port,
        device=device,
        dtype=dtype,
        context=context,
        kv=kv,
        sequences=sequences,
        queue=queue,
        prefix_cache=False if no_prefix_cache else None,
        image_tokens=image_tokens,
        chunk=chunk,
        offload=offload,
        max_tokens=max_tokens,
        idle_sleep=idle_sleep,
        api_key=api_key,
        allow_private_urls=allow_private_urls,
        allow_origin=allow_origin,
    )
    phases = Phases()
    printer = Printer(json=json_line, stream=False, quiet=quiet)
    _log_to_stderr(quiet)
    give_memory_back()
    with bind(settings.host, settings.port) as listener:
        gpus = head_start.make_context(settings.device)  # the plan is made for them as they are before it
        backend = _load(settings, printer, phases)
        try:
            from vlfit.server.address import address_of
            from vlfit.server.app import create_app
            from vlfit.server.listen import serve_until_stopped

            server_settings = _server_settings(settings, backend, gpus)
            _tell_ledger(settings, backend, server_settings, printer)
            url = address_of(listener)

            def announce() -> None:
                phases.end()
                _announce(url, backend, printer, phases, json_line)

            app = create_app(backend, server_settings)
            _warn_if_open(settings)
            keep_what_is_loaded()
            serve_until_stopped(app, listener, server_settings.drain_seconds, announce)
        finally:
            _close(backend)
    printer.note("stopped")
    _leave()


def _load(settings: "Settings", printer: Printer, phases: "Phases") -> "NativeBackend":
    """The model, and meanwhile what serves it: while the GPU computes Python has time to import."""
    from vlfit.backends.native import NativeBackend
    from vlfit.cli.loading import import_beside, loading
    from vlfit.client import choose_model
    from vlfit.engine.options import EngineOptions

    name = settings.model
    if name == "auto":
        choice = choose_model()
        name = choice.model
        printer.note(choice.reason)
    options = EngineOptions(
        device=settings.device,
        dtype=settings.dtype,
        context=settings.context,
        kv_tokens=settings.kv,
        keep_to_plan=True,
        even=True,
        sequences=settings.sequences,
        image_tokens=settings.image_tokens,
        chunk=settings.chunk,
        offload=settings.offload,
        prefix_cache=settings.prefix_cache,
        idle_sleep=settings.idle_sleep,
    )
    if settings.max_tokens is not None:
        options = replace(options, max_tokens=settings.max_tokens)
    with loading(name, printer, phases) as progress:
        server: list[threading.Thread] = []

        def tell(what: str, share: float) -> None:
            progress(what, share)
            if what == "rehearsing the worst case" and not server:
                server.append(
                    import_beside("vlfit.server.app", "vlfit.server.listen", "vlfit.cli.ledger_page")
                )

        backend = NativeBackend.load(name, options, tell)
    phases.begin("server")
    for thread in server:
        thread.join()
    return backend


def _gpus(device: str) -> "tuple[Gpu, ...]":
    from vlfit.machine.gpu import read_gpus

    return () if device == "cpu" else read_gpus()[0]


def _server_settings(
    settings: "Settings", backend: "NativeBackend", gpus: "tuple[Gpu, ...]"
) -> "ServerSettings":
    from vlfit.server.settings import ServerSettings
    from vlfit.server.status import expectation_of

    return ServerSettings(
        aliases=(settings.model,),
        context=backend.context,
        places=settings.sequences + _queue(settings),
        api_key=settings.api_key.get_secret_value() if settings.api_key else "",
        allow_private_urls=settings.allow_private_urls,
        allow_origins=(settings.allow_origin,) if settings.allow_origin else (),
        expectation=expectation_of(backend, gpus),
    )


def _queue(settings: "Settings") -> int:
    """Requests that may wait. By default each sequence has eight behind it: the last of them waits nine times
    as long as an answer takes. 16 at least, as one request may ask for so many choices.
    """
    return max(8 * settings.sequences, 16) if settings.queue is None else settings.queue


def _tell_ledger(
    settings: "Settings", backend: "NativeBackend", server_settings: "ServerSettings", printer: Printer
) -> None:
    """What was planned and what is held, as ``/v1/vlfit/ledger`` has it, and which lines differ."""
    from vlfit.cli.ledger_page import differences, ledger_page
    from vlfit.server.status import gpu_of, ledger_facts, ledger_rows

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


def _announce(
    url: str, backend: "NativeBackend", printer: Printer, phases: "Phases", json_line: bool
) -> None:
    printer.note(
        f"ready: {backend.model} on {backend.device}, context {backend.context} tokens, at {url}/v1\n"
        f"after {phases.in_words()}\n"
        f"try:   curl {url}/v1/chat/completions "
        """-d '{"messages": [{"role": "user", "content": "Hello"}]}'"""
    )
    if json_line:
        facts = {"url": url, "model": backend.model, "context": backend.context, "device": backend.device}
        took = {name: round(seconds, 3) for name, seconds in phases.seconds.items()}
        printer.data({**facts, "ready_s": round(phases.total, 3), "phases_s": took})


def _warn_if_open(settings: "Settings") -> None:
    from vlfit.server.settings import is_loopback

    if settings.api_key is None and not is_loopback(settings.host):
        logging.getLogger("vlfit.server").warning(
            "warning: anyone who can reach %s may use this server: it asks for no key (set VLFIT_API_KEY)",
            settings.host,
        )


def _log_to_stderr(quiet: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    for name, level in (
        ("vlfit", logging.WARNING if quiet else logging.INFO),
        ("uvicorn", logging.WARNING),
    ):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False


def _close(backend: "NativeBackend") -> None:
    """Give the memory back. A forward pass under way cannot be stopped, and is not waited for very long."""
    closing = threading.Thread(target=backend.close, daemon=True)
    closing.start()
    closing.join(CLOSING_SECONDS)


def _leave() -> None:
    """End the process now: taking torch apart can last a second, while the person at Ctrl-C waits."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
