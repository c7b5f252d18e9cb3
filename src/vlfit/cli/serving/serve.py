"""``vlfit serve``: the command, and ways to run it: here, in the background, by systemd."""

import errno
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from vlfit.cli.options import SERVING, CommandOptions, complete_model, one_model, option, takes_options
from vlfit.cli.printing import Printer
from vlfit.cli.servers import running_servers
from vlfit.cli.serving.serve_vllm import VllmServeOptions
from vlfit.errors import CannotListen, CannotWrite, UsageError
from vlfit.units import KIB

if TYPE_CHECKING:
    from vlfit.cli.serving.serve_models import ModelNames
    from vlfit.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(CommandOptions):
    """The options of ``vlfit serve``."""

    dry_run: Annotated[bool, option(None, "With --backend vllm: print the command and exit.")] = False
    no_retry: Annotated[
        bool,
        option(
            None, "With --backend vllm: exit if the start fails, instead of trying the next cheaper plan."
        ),
    ] = False
    daemon: Annotated[
        bool,
        option(
            None,
            "Run in the background, and return when ready. See `vlfit status` and `vlfit stop`.",
        ),
    ] = False
    systemd: Annotated[
        bool,
        option(None, "Print a systemd unit with these options and exit."),
    ] = False


@takes_options(
    *SERVING,
    *("dry_run", "no_retry", "daemon", "systemd", "json", "quiet"),
    backend="native, vllm, transformers, or remote: MODEL is then the URL of a server to forward to.",
    max_tokens="Max tokens per answer, if the request sets no limit.",
    json="When ready, print one line of JSON: url, model, context, device, startup times.",
    quiet="Print only warnings and errors on stderr.",
)
def serve(
    model_argument: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            autocompletion=complete_model,
            help="The same as --model. Several: requests say which.",
            show_default=False,
        ),
    ] = None,
    vllm_args: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]... [-- ARGS...]",
            help="More models. With --backend vllm: options for vLLM itself; they replace planned ones.",
            show_default=False,
        ),
    ] = None,
    *,
    options: ServeOptions,
) -> None:
    """Serve a model with an OpenAI-compatible API.

    Any OpenAI client works: /v1/chat/completions, /v1/models; also /health, /ready, /metrics, and a web page
    at /. Only this computer can connect unless you set --host, which requires a key. The first Ctrl-C stops
    in under three seconds, the second at once. SIGTERM lets running answers finish, for up to --drain.

    \b
    Examples:
      vlfit serve
      vlfit serve mini --port 8001
      vlfit serve 2B-FP8 --context 4096
      vlfit serve 4B-FP8 2B-FP8
      vlfit serve --models all-here
      vlfit serve --idle-sleep 5m
      vlfit serve 4B --backend vllm
      vlfit serve 4B --backend vllm --dry-run -- --seed 3
      vlfit serve --backend remote http://gpu-box:8000 --port 8001
      VLFIT_API_KEY=secret vlfit serve --host 0.0.0.0
      vlfit serve mini --daemon
      vlfit serve --idle-sleep 5m --systemd > ~/.config/systemd/user/vlfit.service
      curl http://127.0.0.1:8000/v1/models
    """
    from vlfit.settings import read_settings

    if options.systemd and options.daemon:
        raise UsageError(
            "--systemd and --daemon exclude each other",
            "Choose one: systemd runs it in the background itself.",
        )
    model_argument, extra_args = _split_vllm_args(model_argument, vllm_args)
    if read_settings(backend=options.backend).backend == "remote":
        settings = options.settings(server=model_argument)
    else:
        settings = options.settings(model=one_model(model_argument, options.model))
    names, extra_args = _several_models(settings, extra_args)
    vllm_serve = VllmServeOptions(extra_args, options.dry_run, not options.no_retry)
    _check_vllm(settings, vllm_serve, detached=options.daemon or options.systemd)
    _check_transformers(settings)
    if settings.backend in (None, "native") and not options.systemd:
        from vlfit.plan.gpus import check_gpus

        check_gpus(settings.device, settings.kernels)
    if settings.backend == "remote":
        options.refuse_engine_options(settings.server or "the URL")
    elif names is not None and not options.systemd:
        names = replace(names, names=_resolved_models(settings, names.names, options))
        settings = settings.model_copy(update={"model": names.names[0]})
    elif not options.systemd:
        settings = _with_resolved_model(settings, options, download=options.daemon)
    if options.systemd:
        print_systemd_unit(settings, sys.argv[1:], () if names is None else names.names)
    elif options.daemon:
        start_in_background(settings, sys.argv[1:], as_json=options.json)
    elif settings.backend == "vllm":
        from vlfit.cli.serving.serve_vllm import serve_vllm

        serve_vllm(settings, vllm_serve, json_line=options.json, quiet=options.quiet)
    else:
        from vlfit.cli.serving.serve_here import serve_here

        serve_here(
            settings,
            json_line=options.json,
            quiet=options.quiet,
            trust_remote_code=options.trust_remote_code,
            models=names,
        )


def _several_models(
    settings: "Settings", extra_args: tuple[str, ...]
) -> "tuple[ModelNames | None, tuple[str, ...]]":
    """The models to serve by name, and what else stands behind the first; None to serve only the first.

    Raises ``UsageError`` for names that make no set, and if the backend cannot serve several.
    """
    more = tuple(takewhile(lambda word: not word.startswith("-"), extra_args))
    if settings.backend == "remote" or not (more or settings.models or settings.pull):
        return None, extra_args
    from vlfit.cli.serving.serve_models import ALL_HERE, ModelNames, check_backend, split_names

    is_typed = settings.model != "auto" or settings.models is None
    names = split_names([settings.model] * is_typed + [*more], settings.models)
    if len(names) == 1 and names[0] != ALL_HERE and not settings.pull:
        return None, extra_args[len(more) :]
    check_backend(settings, names)
    return ModelNames(tuple(names), ALL_HERE in names, settings.pull), extra_args[len(more) :]


def _resolved_models(settings: "Settings", names: tuple[str, ...], options: ServeOptions) -> tuple[str, ...]:
    """Names of models that are here, or that the person agreed to download; these are downloaded."""
    from vlfit.checkpoint.source import locate_or_download
    from vlfit.cli.loading import refuse_mini
    from vlfit.cli.models import resolve_or_ask
    from vlfit.cli.serving.serve_models import names_here
    from vlfit.client import choose_model

    printer = Printer(quiet=options.quiet or options.json)
    resolved = []
    for name in names_here(names, printer, settings.device):
        if name == "auto":
            choice = choose_model("native", device=settings.device)
            refuse_mini(choice)
            resolved.append(choice.model)
            continue
        one = resolve_or_ask(name, printer, yes=settings.yes, device=settings.device)
        locate_or_download(one)
        resolved.append(one)
    return tuple(dict.fromkeys(resolved))


def _with_resolved_model(settings: "Settings", options: ServeOptions, *, download: bool) -> "Settings":
    """``settings`` with the name of a model that is here, or that the person agreed to download.

    Asked before a process without a terminal starts; ``download``: at once. ``auto`` is left as it is, and
    vLLM's plan chooses its model (``serve_vllm``).
    """
    if settings.backend == "vllm":
        return settings
    if settings.model == "auto":
        if download:  # in the background, where nobody would read that there is only mini
            from vlfit.cli.loading import refuse_mini
            from vlfit.client import choose_model

            refuse_mini(choose_model(settings.backend or "native", device=settings.device))
        return settings
    from vlfit.checkpoint.source import locate_or_download
    from vlfit.cli.loading import file_selection_for
    from vlfit.cli.models import resolve_or_ask

    backend = settings.backend or "native"
    files = file_selection_for(settings.backend, code=options.trust_remote_code)
    printer = Printer(quiet=options.quiet or options.json)
    name = resolve_or_ask(
        settings.model, printer, yes=settings.yes, backend=backend, files=files, device=settings.device
    )
    if download:
        locate_or_download(name, None, files)
    return settings.model_copy(update={"model": name})


_OF_PLAN = ("--gpu", "--machine", "--desktop", "--wsl2")  # another computer than this one


class ServeCommand(TyperCommand):
    """With --backend vllm, accepts vLLM's options without ``--`` before them, as guides write them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse ``args`` as click does, but let unknown options through if they name the backend vllm."""
        ctx.ignore_unknown_options = _names_vllm(args)
        return super().parse_args(ctx, args)


def _names_vllm(arguments: list[str]) -> bool:
    named = [after for before, after in pairwise(arguments) if before == "--backend"]
    named += [word.partition("=")[2] for word in arguments if word.startswith("--backend=")]
    return [*named, os.environ.get("VLFIT_BACKEND", "")][0] == "vllm"


def _split_vllm_args(model: str | None, args: list[str] | None) -> tuple[str | None, tuple[str, ...]]:
    """Split arguments into the model and options for vLLM: the model stands first, or last unless that is the
    value of a flag.
    """
    args = args or []
    if model is None or not model.startswith("-"):
        return model, tuple(args)
    *rest, last = [model, *args]
    is_name = len(rest) > 1 and not last.startswith(("-", "{")) and not last[:1].isdigit()
    if is_name and not rest[-1].startswith("-"):
        return last, tuple(rest)
    return None, (*rest, last)


def _check_transformers(settings: "Settings") -> None:
    """Raise ``UsageError`` for --sequences above 1: transformers runs one request at a time."""
    if settings.backend == "transformers" and "sequences" in settings.model_fields_set:
        from vlfit.plan.transformers.cost_model import check_single_request

        check_single_request(settings.sequences)


def _check_vllm(settings: "Settings", vllm_serve: VllmServeOptions, *, detached: bool) -> None:
    """Raise ``UsageError`` for vLLM's options with another backend, and for those that do not go together."""
    named = {"--dry-run": vllm_serve.dry_run, "--no-retry": not vllm_serve.retry}
    typed = [name for name, is_typed in named.items() if is_typed]
    if settings.backend != "vllm":
        if (
            settings.backend == "remote"
            and vllm_serve.extra_args[:1]
            and not any(word.startswith("-") for word in vllm_serve.extra_args)
        ):
            urls = " and ".join([settings.server or "", *vllm_serve.extra_args])
            raise UsageError(
                f"--backend remote takes one URL, not {urls}",
                "That server has its model already; --model chooses one of several.",
            )
        if typed or vllm_serve.extra_args:
            what = ", ".join([*typed, *vllm_serve.extra_args[:1]])
            instead = "Add --backend vllm."
            if settings.backend in ("remote", "transformers"):
                instead = f"Leave it out, or use --backend vllm in place of {settings.backend}."
            raise UsageError(f"{what} is for vLLM, but the backend is another", instead)
    elif of_plan := [word for word in vllm_serve.extra_args if word.partition("=")[0] in _OF_PLAN]:
        raise UsageError(
            f"{of_plan[0]} is no option of vllm serve, which runs on this computer",
            "Use it with vlfit plan --backend vllm, which plans for another computer.",
        )
    elif any(word.partition("=")[0] == "--direct" for word in vllm_serve.extra_args):
        raise UsageError(
            "--direct was removed: vlfit's server always runs in front of vLLM",
            "Leave it out; for vLLM's own server, run the command that --dry-run prints.",
        )
    elif detached and typed:
        raise UsageError(f"{', '.join(typed)} does not go with --daemon and --systemd", "Leave them out.")


# --- vlfit serve --daemon ---------------------------------------------------------------------------------

LOG_TAIL = 12  # lines of the log, if the server does not start
LOG_ROOM = 64 * KIB  # bytes that the log of a start may take


def _with_flags(arguments: list[str], *flags: str) -> list[str]:
    """``arguments`` with ``flags`` where they are missing, before ``--``: what follows that is vLLM's."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [*arguments[:end], *(flag for flag in flags if flag not in arguments[:end]), *arguments[end:]]


def new_log_path() -> Path:
    """Path for the log of a server in the background, in the user's state folder; nothing is created."""
    base = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    return base / "vlfit" / f"serve-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"


def start_in_background(settings: "Settings", arguments: list[str], *, as_json: bool) -> None:
    """Start ``vlfit`` with ``arguments`` (without ``--daemon``) in the background; when ready, print its URL.

    ``settings``: from the same arguments, so that wrong keys are reported before the start. Raises
    ``CannotListen`` with the end of the server's log if it exits before it is ready, ``CannotWrite`` if there
    is no room for the log.
    """
    from vlfit.cli.serving.serve_here import required_keys

    required_keys(settings)
    log = new_log_path()
    check_room_for_log(log)
    kept = [each for each in arguments if each not in ("--daemon", "--restart")]
    command = [sys.executable, "-m", "vlfit", *_with_flags(kept, "--restart", "--json")]
    with log.open("ab") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # survives the terminal
        )
    assert process.stdout is not None
    try:
        ready = process.stdout.readline()
    except BaseException:  # Ctrl-C while it loads must not leave it behind
        process.terminate()
        raise
    facts: dict[str, Any] = {}
    with suppress(ValueError):
        facts = json.loads(ready)
    if "url" not in facts:
        process.wait()
        end = "\n".join(log.read_text("utf-8", "replace").splitlines()[-LOG_TAIL:])
        check_room_for_log(log)
        raise CannotListen(f"the server did not start:\n{end}", f"The whole log is {log}.")
    printer = Printer(json=as_json)
    if all(record.pid != process.pid for record in running_servers()):
        printer.warn(
            f"vlfit status and stop will not find this server, as its record cannot be written: see {log}."
            f" `kill {process.pid}` stops it."
        )
    if as_json:
        printer.data({**facts, "pid": process.pid, "log": str(log)})
        return
    printer.line(f"ready: {facts['model']} on {facts['device']} at {facts['url']}/v1, process {process.pid}")
    port = str(facts["url"]).rpartition(":")[2]
    printer.note(f"page:  {facts['url']}\nlog:   {log}\nstop:  vlfit stop --port {port}")


def check_room_for_log(log: Path) -> None:
    """Create the file ``log`` if need be, and check that ``LOG_ROOM`` more bytes can be written to it.

    Leaves its content as it was. Raises ``CannotWrite``: a server without a log could not say why it does not
    start.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            try:
                written = file.write(bytes(LOG_ROOM))
                os.fsync(file.fileno())  # network drives find only here that they are full
            finally:
                with suppress(OSError):
                    file.truncate(size)
        if written < LOG_ROOM:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise CannotWrite(
            f"the server's log cannot be written to {log}: {error.strerror or error}",
            "Free some disk space, or set XDG_STATE_HOME to a folder on another disk.",
        ) from None


# --- vlfit serve --systemd --------------------------------------------------------------------------------

_DROPPED_FLAGS = ("--systemd", "--restart")
_PATH_FLAGS = ("--api-keys", "--allow-files", "--vllm-python")
ENVIRONMENT = "~/.config/vlfit/environment"
NOTES = """\
# vlfit: a server for Qwen3-VL. As a user's own service:
#   mkdir -p ~/.config/systemd/user
#   {command} > ~/.config/systemd/user/vlfit.service
#   systemctl --user daemon-reload
#   systemctl --user enable --now vlfit
#   journalctl --user -u vlfit -f
# To run without being logged in: loginctl enable-linger
"""


def print_systemd_unit(settings: "Settings", arguments: list[str], models: tuple[str, ...] = ()) -> None:
    """Print a systemd unit that runs ``vlfit`` with ``arguments``, their paths made absolute.

    ``settings``: from the same arguments; ``models``: all that they name, if there are several. Raises
    ``UsageError`` for a key among the arguments, since everybody can read a unit, and what ``required_keys``
    raises.
    """
    from vlfit.cli.serving.serve_here import required_keys

    for flag, instead in (("--api-key", ", or use --api-keys FILE"), ("--server-key", "")):
        if any(each.partition("=")[0] == flag for each in arguments):
            variable = f"VLFIT_{flag[2:].replace('-', '_').upper()}"
            raise UsageError(
                f"{flag} would be in the unit, which everybody can read",
                f"Write {variable}=... into {ENVIRONMENT}{instead}.",
            )
    required_keys(settings)
    printer = Printer()
    absolute = with_absolute_paths(arguments, settings.model, *models)
    printer.line(systemd_unit(absolute, settings.drain).rstrip("\n"))
    if settings.api_key:
        printer.note(f"note: VLFIT_API_KEY is not in the unit: write it into {ENVIRONMENT}")


def with_absolute_paths(arguments: list[str], *models: str) -> list[str]:
    """``arguments`` with absolute paths, in options that take one and for those ``models`` that are one."""
    from vlfit.checkpoint.source import MINI

    folders = [model for model in models if model != MINI and Path(model).expanduser().exists()]
    whole: list[str] = []
    for each in arguments:
        name, sign, value = each.partition("=")
        if each in folders or (whole and whole[-1] in _PATH_FLAGS):
            whole.append(_absolute(each))
        elif sign and (name in _PATH_FLAGS or (name == "--model" and value in folders)):
            whole.append(f"{name}={_absolute(value)}")
        else:
            whole.append(each)
    return whole


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def systemd_unit(arguments: list[str], drain: float) -> str:
    """A systemd unit that runs ``vlfit`` with ``arguments``, less ``--systemd``; ``drain`` in seconds."""
    kept = [each for each in arguments if each not in _DROPPED_FLAGS]
    start = " ".join(map(quote_for_systemd, [sys.executable, "-m", "vlfit", *_with_flags(kept, "--restart")]))
    return f"""{NOTES.format(command="vlfit serve ... --systemd")}
[Unit]
Description=vlfit: pictures and words over an OpenAI-compatible API
After=network.target

[Service]
Type=exec
ExecStart={start}
# Keys and other settings, one VLFIT_NAME=value a line; chmod 600 it.
EnvironmentFile=-%h/.config/vlfit/environment
# SIGTERM lets running answers finish for {drain:g} s; the rest is for freeing the GPU.
KillSignal=SIGTERM
KillMode=mixed
TimeoutStopSec={int(drain) + 15}
Restart=on-failure
RestartSec=2
# 2: wrong usage, 3: does not fit. A restart would not help.
RestartPreventExitStatus=2 3
NoNewPrivileges=yes
ProtectSystem=full
PrivateTmp=yes

[Install]
WantedBy=default.target
"""


def quote_for_systemd(argument: str) -> str:
    """Quote an argument for systemd, and escape % and $."""
    plain = argument.replace("%", "%%").replace("$", "$$")
    if plain and all(letter.isalnum() or letter in "-_=/.,:+@%$" for letter in plain):
        return plain
    escaped = plain.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
