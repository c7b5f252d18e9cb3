"""``vlfit serve``: a model behind OpenAI's API, until Ctrl-C.

Knows: what may be asked for, and the ways to run it: here, in the background, by systemd. Does not know: the
order of starting and stopping (``serving.py``), routes (``server``).
"""

import os
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

from vlfit.cli import serve_options as options
from vlfit.cli.options import refuse_engine_options
from vlfit.cli.serve_options import OfServe
from vlfit.errors import UsageError

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
        from vlfit.cli.unit import print_unit

        print_unit(settings, sys.argv[1:])
    elif daemon:
        from vlfit.cli.daemon import start_in_background

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
