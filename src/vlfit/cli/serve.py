"""``vlfit serve``: a model behind OpenAI's API, until Ctrl-C.

Knows: what may be asked for, and the ways to run it: here, in the background, by systemd. Does not know: the
order of starting and stopping (``serving.py``), routes (``server``).
"""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

from vlfit.cli import serve_options as options
from vlfit.cli.options import refuse_engine_options
from vlfit.cli.printing import Printer
from vlfit.cli.serve_options import OfServe, with_more
from vlfit.errors import CannotListen, UsageError

if TYPE_CHECKING:
    from vlfit.settings import Settings


def serve(
    model_argument: options.ModelArgument = None,
    vllm_words: options.VllmWords = None,
    model: options.Model = None,
    backend: options.Backend = None,
    host: options.Host = None,
    port: options.Port = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    context: options.Context = None,
    kv: options.Kv = None,
    kv_dtype: options.KvDtype = None,
    sequences: options.Sequences = None,
    queue: options.Queue = None,
    image_tokens: options.ImageTokens = None,
    chunk: options.Chunk = None,
    offload: options.Offload = None,
    max_tokens: options.MaxTokens = None,
    no_prefix_cache: options.NoPrefixCache = False,
    speculate: options.Speculate = None,
    idle_sleep: options.IdleSleep = None,
    api_key: options.ApiKey = None,
    server_key: options.ServerKey = None,
    trust_remote_code: options.TrustRemoteCode = False,
    api_keys: options.ApiKeys = None,
    allow_anyone: options.AllowAnyone = None,
    key_rate: options.KeyRate = None,
    key_at_once: options.KeyAtOnce = None,
    allow_files: options.AllowFiles = None,
    allow_private_urls: options.AllowPrivateUrls = None,
    allow_origin: options.AllowOrigin = None,
    allow_host: options.AllowHost = None,
    drain: options.Drain = None,
    log_format: options.LogFormat = None,
    restart: options.Restart = None,
    vllm_python: options.VllmPython = None,
    dry_run: options.DryRun = False,
    no_retry: options.NoRetry = False,
    daemon: options.Daemon = False,
    systemd: options.Systemd = False,
    json_line: options.JsonLine = False,
    quiet: options.Quiet = False,
) -> None:
    """Serve a model over HTTP with OpenAI's API: /v1/chat/completions, /v1/models; /health,
    /ready, /metrics; a page for people at /.

    Any OpenAI client can speak to it. Only this computer can reach it, unless --host says otherwise, which
    then takes a key. The first Ctrl-C lets running answers finish for a moment and stops in under three
    seconds; the second stops at once. SIGTERM lets them finish for --drain.

    \b
    Examples:
      vlfit serve
      vlfit serve mini --port 8001
      vlfit serve Qwen/Qwen3-VL-2B-Instruct-FP8 --context 4096
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

    if systemd and daemon:
        raise UsageError("--systemd and --daemon", "choose one: systemd runs it in the background itself")
    model_argument, words = _apart(model_argument, vllm_words)
    typed = read_settings(backend=backend)
    server = model_argument if typed.backend == "remote" else None
    if model_argument and model and server is None and model_argument != model:
        raise UsageError(f"two models: {model_argument} and --model {model}", "name one")
    settings = read_settings(
        model=model or (None if server else model_argument),
        backend=backend,
        server=server,
        host=host,
        port=port,
        device=device,
        dtype=dtype,
        context=context,
        kv=kv,
        kv_dtype=kv_dtype,
        sequences=sequences,
        queue=queue,
        prefix_cache=False if no_prefix_cache else None,
        speculate=speculate,
        image_tokens=image_tokens,
        chunk=chunk,
        offload=offload,
        max_tokens=max_tokens,
        idle_sleep=idle_sleep,
        api_key=api_key,
        server_key=server_key,
        api_keys=api_keys,
        allow_anyone=allow_anyone,
        key_rate=key_rate,
        key_at_once=key_at_once,
        allow_files=allow_files,
        allow_private_urls=allow_private_urls,
        allow_origin=allow_origin,
        allow_host=allow_host,
        drain=drain,
        restart=restart,
        log_format=log_format,
        vllm_python=vllm_python,
    )
    asked = OfServe(words, dry_run, not no_retry)
    _check_vllm(settings, asked, apart=daemon or systemd)
    _check_transformers(settings)
    if settings.backend == "remote":
        refuse_engine_options(
            settings.server or "the URL",
            {
                "device": device,
                "dtype": dtype,
                "context": context,
                "kv": kv,
                "kv_dtype": kv_dtype,
                "image_tokens": image_tokens,
                "chunk": chunk,
                "offload": offload,
                "no_prefix_cache": no_prefix_cache or None,
                "speculate": speculate,
                "idle_sleep": idle_sleep,
            },
        )
    if systemd:
        print_unit(settings, sys.argv[1:])
    elif daemon:
        start_in_background(settings, sys.argv[1:], as_json=json_line)
    elif settings.backend == "vllm":
        from vlfit.cli.serving_vllm import serve_vllm

        serve_vllm(settings, asked, json_line=json_line, quiet=quiet)
    else:
        from vlfit.cli.serving import serve_here

        serve_here(settings, json_line=json_line, quiet=quiet, trust_remote_code=trust_remote_code)


class ServeCommand(TyperCommand):
    """Options that are not vlfit's are vLLM's, where that runs the model: guides have them without ``--``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.ignore_unknown_options = _names_vllm(args)
        return super().parse_args(ctx, args)


def _names_vllm(arguments: list[str]) -> bool:
    named = [after for before, after in pairwise(arguments) if before == "--backend"]
    named += [word.partition("=")[2] for word in arguments if word.startswith("--backend=")]
    return [*named, os.environ.get("VLFIT_BACKEND", "")][0] == "vllm"


def _apart(model: str | None, words: list[str] | None) -> tuple[str | None, tuple[str, ...]]:
    """The model that was named, and words for vLLM: what stands first may be either, and so may be the last,
    if it is no value of the flag before it.
    """
    words = words or []
    if model is None or not model.startswith("-"):
        return model, tuple(words)
    *rest, last = [model, *words]
    is_name = len(rest) > 1 and not last.startswith(("-", "{")) and not last[:1].isdigit()
    if is_name and not rest[-1].startswith("-"):
        return last, tuple(rest)
    return None, (*rest, last)


def _check_transformers(settings: "Settings") -> None:
    """Raises ``UsageError`` for more than the one request that transformers runs at once."""
    if settings.backend == "transformers" and "sequences" in settings.model_fields_set:
        from vlfit.plan.wishes import check_one_at_once

        check_one_at_once(settings.sequences)


def _check_vllm(settings: "Settings", asked: OfServe, *, apart: bool) -> None:
    """Raises ``UsageError`` for what only vLLM has where something else runs the model."""
    named = {"--dry-run": asked.dry_run, "--no-retry": not asked.retry}
    typed = [name for name, is_typed in named.items() if is_typed]
    if settings.backend != "vllm":
        if asked.words and not any(word.startswith("-") for word in asked.words):
            if settings.backend == "remote":
                urls = " and ".join([settings.server or "", *asked.words])
                raise UsageError(
                    f"--backend remote takes one URL, not {urls}",
                    "the server there has its model already; --model chooses one of several",
                )
            raise UsageError(f"more than a model is named: {' '.join(asked.words)}", "name one")
        if typed or asked.words:
            what = ", ".join([*typed, *asked.words[:1]])
            instead = "add --backend vllm"
            if settings.backend in ("remote", "transformers"):
                instead = f"leave it out, or use --backend vllm in place of {settings.backend}"
            raise UsageError(f"{what} is for vLLM, which does not run here", instead)
    elif any(word.partition("=")[0] == "--direct" for word in asked.words):
        raise UsageError(
            "--direct was removed: vlfit's own server always stands before vLLM",
            "leave it out; for vLLM's own server run the command that --dry-run prints",
        )
    elif apart and typed:
        raise UsageError(
            f"{', '.join(typed)} is for a server in this terminal", "leave --daemon and --systemd out"
        )


# ``vlfit serve --daemon``: a server that goes on when the terminal is closed.
#
# Knows: how to start the same command apart from this one, and to wait until it is ready. Does not know
# what it serves.


LAST_LINES = 12  # of the log of a server that did not start


def log_file() -> Path:
    base = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    return base / "vlfit" / f"serve-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"


def start_in_background(settings: "Settings", arguments: list[str], *, as_json: bool) -> None:
    """Start ``vlfit`` with ``arguments``, less ``--daemon``, and wait for it to be ready.

    Raises ``CannotListen``, with the end of its log, if it ends instead. ``settings`` were read from the same
    arguments, so that mistakes in them are told here.
    """
    from vlfit.cli.serving import keys_of

    keys_of(settings)
    log = log_file()
    log.parent.mkdir(parents=True, exist_ok=True)
    kept = [each for each in arguments if each not in ("--daemon", "--restart")]
    command = [sys.executable, "-m", "vlfit", *with_more(kept, "--restart", "--json")]
    with log.open("ab") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # what ends this terminal does not end it
        )
    assert process.stdout is not None
    try:
        ready = process.stdout.readline()
    except BaseException:  # Ctrl-C while it loads: nobody would know that it goes on
        process.terminate()
        raise
    facts: dict[str, Any] = {}
    with suppress(ValueError):
        facts = json.loads(ready)
    if "url" not in facts:
        process.wait()
        end = "\n".join(log.read_text("utf-8", "replace").splitlines()[-LAST_LINES:])
        raise CannotListen(f"the server did not start:\n{end}", f"all that it said is in {log}")
    printer = Printer(json=as_json)
    if as_json:
        printer.data({**facts, "pid": process.pid, "log": str(log)})
        return
    printer.line(f"ready: {facts['model']} on {facts['device']} at {facts['url']}/v1, process {process.pid}")
    port = str(facts["url"]).rpartition(":")[2]
    printer.note(f"log:   {log}\nstop:  vlfit stop --port {port}")


# ``vlfit serve --systemd``: a unit by which systemd starts the server, and starts it again if it falls.
#
# Knows: what a unit says, and how systemd quotes. Does not know what is served.


_OURS = ("--systemd", "--restart")
_PATHS = ("--api-keys", "--allow-files", "--vllm-python")
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


def print_unit(settings: "Settings", arguments: list[str]) -> None:
    """With the options of this command, and the paths in them whole: systemd starts programs elsewhere.

    Raises ``UsageError`` for a key among them: units can be read by everybody.
    """
    from vlfit.cli.serving import keys_of

    for option, way in (("--api-key", ", or use --api-keys FILE"), ("--server-key", "")):
        if any(each.partition("=")[0] == option for each in arguments):
            variable = f"VLFIT_{option[2:].replace('-', '_').upper()}"
            raise UsageError(
                f"a unit can be read by everybody, and {option} would stand in it",
                f"write {variable}=... into {ENVIRONMENT}{way}",
            )
    keys_of(settings)
    printer = Printer()
    printer.line(unit(with_whole_paths(arguments, settings.model), settings.drain).rstrip("\n"))
    if settings.api_key:
        printer.note(f"note: VLFIT_API_KEY is not in the unit: write it into {ENVIRONMENT}")


def with_whole_paths(arguments: list[str], model: str) -> list[str]:
    """``arguments``, of which files, folders, and a ``model`` that is one, mean the same everywhere."""
    from vlfit.checkpoint.source import MINI

    folder = model if model != MINI and Path(model).expanduser().is_dir() else None
    whole: list[str] = []
    for each in arguments:
        name, sign, value = each.partition("=")
        if each == folder or (whole and whole[-1] in _PATHS):
            whole.append(_whole(each))
        elif sign and (name in _PATHS or (name == "--model" and value == folder)):
            whole.append(f"{name}={_whole(value)}")
        else:
            whole.append(each)
    return whole


def _whole(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def unit(arguments: list[str], drain: float) -> str:
    """The unit for ``vlfit`` with ``arguments``, less ``--systemd``; ``drain`` in seconds."""
    kept = [each for each in arguments if each not in _OURS]
    start = " ".join(map(quoted, [sys.executable, "-m", "vlfit", *with_more(kept, "--restart")]))
    return f"""{NOTES.format(command="vlfit serve ... --systemd")}
[Unit]
Description=vlfit: pictures and words over an OpenAI-compatible API
After=network.target

[Service]
Type=exec
ExecStart={start}
# Keys and other settings, one VLFIT_NAME=value a line; chmod 600 it.
EnvironmentFile=-%h/.config/vlfit/environment
# SIGTERM lets running answers finish for {drain:g} s; the rest is for giving the GPU back.
KillSignal=SIGTERM
KillMode=mixed
TimeoutStopSec={int(drain) + 15}
Restart=on-failure
RestartSec=2
# 2: wrong usage, 3: does not fit. Starting again would change neither.
RestartPreventExitStatus=2 3
NoNewPrivileges=yes
ProtectSystem=full
PrivateTmp=yes

[Install]
WantedBy=default.target
"""


def quoted(argument: str) -> str:
    """As systemd reads a word of a command line: quotes, and no meaning for % and $."""
    plain = argument.replace("%", "%%").replace("$", "$$")
    if plain and all(letter.isalnum() or letter in "-_=/.,:+@%$" for letter in plain):
        return plain
    escaped = plain.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
