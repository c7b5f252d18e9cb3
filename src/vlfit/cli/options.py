"""Every option that several commands share or that a variable can set, declared once.

A command lists its options (``takes_options``) and gets one ``CommandOptions``. ``Settings`` in
vlfit/settings.py has the defaults and checks of those with a variable, under the same names. An option of one
command alone, without a variable, is in that command's signature.
"""

import inspect
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from vlfit.errors import UsageError

if TYPE_CHECKING:
    from vlfit.api.engine_options import EngineOptions
    from vlfit.settings import Settings
    from vlfit.tasks.files import MediaOptions


@dataclass(frozen=True, slots=True)
class Declaration:
    """How an option is written and explained.

    ``metavar``: the value's name in the help; None for a flag. ``flags``: as typed; empty for ``--name``.
    ``variable``: True if ``VLFIT_NAME`` sets it too, False if no variable does; a string: how the help
    shows the variable. ``default``: in words; "": the help names none. ``fixed_at_load``: a running server
    cannot change it.
    """

    metavar: str | None
    help: str
    flags: tuple[str, ...] = ()
    variable: bool | str = False
    default: str = ""
    fixed_at_load: bool = False


def option(metavar: str | None, help: str, *flags: str, default: str = "") -> Declaration:
    """Declare an option that only the command line sets. ``metavar``: None for a flag."""
    return Declaration(metavar, help, flags, default=default)


def setting(
    metavar: str | None, help: str, *flags: str, variable: bool | str = True, default: str = ""
) -> Declaration:
    """Declare an option that an environment variable sets, too.

    ``metavar``: None for a flag. ``variable``: see ``Declaration``.
    """
    return Declaration(metavar, help, flags, variable, default)


def engine_setting(
    metavar: str | None, help: str, *flags: str, variable: bool | str = True, default: str = ""
) -> Declaration:
    """Declare a setting of the engine, which a running server cannot change. Parameters as for
    ``setting``.
    """
    return Declaration(metavar, help, flags, variable, default, fixed_at_load=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOptions:
    """Options as typed. None: not typed, so that the environment variable or the default counts."""

    # Which model, and what runs it.
    model: Annotated[
        str | None,
        setting(
            "NAME",
            "auto (the best that fits, else mini), mini, a folder, a GGUF file, a hub id, ollama:NAME, or a"
            " short name such as 4B or 4B-FP8.",
            "--model",
            "-m",
        ),
    ] = None
    mmproj: Annotated[
        Path | None,
        option(
            "FILE",
            "GGUF file of the vision tower that belongs to the model's file.",
            default="the one beside it that fits",
        ),
    ] = None
    yes: Annotated[
        bool | None, setting(None, "Download the model without asking if it is not here.", "--yes", "-y")
    ] = None
    backend: Annotated[
        str | None,
        setting(
            "NAME",
            "native, vllm, transformers, or remote followed by the URL of a running server.",
            default="native",
        ),
    ] = None
    server: Annotated[
        str | None,
        setting(
            "URL",
            "Use a running server instead of loading a model: same as --backend remote URL. Without a URL, or"
            " auto: the one on this computer. Its key goes into VLFIT_API_KEY.",
        ),
    ] = None
    server_key: Annotated[
        str | None,
        setting(
            "KEY",
            "With --backend remote: API key of that server; never shown to clients. Other users can read the"
            " command line: better set the variable.",
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        option(
            None,
            "With --backend transformers: run code that comes with the model. Only if you trust its authors.",
        ),
    ] = False
    vllm_python: Annotated[
        str | None,
        setting(
            "PATH",
            "With --backend vllm: the Python that has vLLM, its environment, or the program vllm.",
            default="beside vlfit, else on PATH",
        ),
    ] = None
    url: Annotated[
        str | None,
        setting(
            "URL",
            "Server to ask. Its key goes into VLFIT_API_KEY.",
            variable="VLFIT_SERVER",
            default="the one on this computer",
        ),
    ] = None

    # The engine.
    device: Annotated[
        str | None, engine_setting("NAME", "auto (GPU if there is one), cpu, cuda, or cuda:1.")
    ] = None
    dtype: Annotated[
        str | None, engine_setting("NAME", "Compute dtype: auto, float32, bfloat16, or float16.")
    ] = None
    context: Annotated[int | None, engine_setting("N", "Max tokens of prompt and answer together.")] = None
    kv: Annotated[
        str | None,
        engine_setting(
            "N",
            "KV cache size in tokens, shared by all requests; auto: as many as free memory allows.",
            default="2048 per sequence, at least one context",
        ),
    ] = None
    kv_dtype: Annotated[
        str | None,
        engine_setting(
            "NAME", "KV cache dtype: auto (as computed), bf16, or fp8 (half the size, less exact)."
        ),
    ] = None
    image_tokens: Annotated[
        int | None,
        engine_setting("N", "Max tokens per picture (1024x1024 pixels: 1024); larger ones are scaled down."),
    ] = None
    chunk: Annotated[
        int | None,
        engine_setting(
            "N", "Max tokens per forward pass; fewer need less memory and more time.", default="1024"
        ),
    ] = None
    offload: Annotated[
        str | None,
        engine_setting(
            "GIB",
            "Keep text layers of this size in RAM (2, 800MiB); auto: as few as make the model fit. Slow: they"
            " are copied to the GPU for every token.",
        ),
    ] = None
    no_prefix_cache: Annotated[
        bool | None,
        engine_setting(
            None, "Do not reuse the KV cache of earlier prompts.", variable="VLFIT_PREFIX_CACHE=0"
        ),
    ] = None
    speculate: Annotated[
        bool | None,
        engine_setting(
            None,
            "Speculative decoding by prompt lookup and multi-token prediction; answers stay the same.",
            "--speculate/--no-speculate",
            default="speculate, without multi-token prediction where that does not fit",
        ),
    ] = None
    kernels: Annotated[
        str | None,
        engine_setting(
            "WHICH",
            "auto, or plain: PyTorch in place of vlfit's own kernels, of all or of some"
            " (plain:attention,rows). Slow; a way around a kernel that `vlfit verify` finds wrong here.",
        ),
    ] = None
    idle_sleep: Annotated[
        str | None,
        engine_setting(
            "TIME",
            "Sleep after so long without a request, e.g. 5m: weights move to RAM, and the next request wakes"
            " the server.",
            default="never",
        ),
    ] = None

    # Answers.
    max_tokens: Annotated[int | None, setting("N", "Max tokens per answer.")] = None
    temperature: Annotated[float | None, option("T", "Sampling temperature, 0 (greedy) to 2.")] = None
    top_p: Annotated[
        float | None, option("P", "Sample from the most likely tokens that add up to this probability.")
    ] = None
    seed: Annotated[int | None, option("N", "Seed: makes sampled answers repeatable.")] = None

    # A server.
    host: Annotated[
        str | None,
        setting("ADDRESS", "Address to listen on; 0.0.0.0 lets other computers in.", default="127.0.0.1"),
    ] = None
    port: Annotated[int | None, setting("N", "Port to listen on; 0 takes a free one.", default="8000")] = None
    ollama: Annotated[
        bool | None, setting(None, "Listen on Ollama's port 11434, too; its API is on every port.")
    ] = None
    models: Annotated[
        str | None,
        setting(
            "NAMES",
            "Serve these too, by name: 4B-FP8,2B-FP8, or all-here (all on this computer that fit). Those that"
            " do not fit together take turns.",
        ),
    ] = None
    pull: Annotated[
        bool | None,
        setting(None, "Let requests download models of the catalog that are not here, and serve them."),
    ] = None
    sequences: Annotated[
        int | None,
        setting(
            "N",
            "Max requests running at once, each at full context; more wait.",
            default="4, with --backend remote 64",
        ),
    ] = None
    queue: Annotated[
        int | None,
        setting(
            "N",
            "Max requests waiting; more get 429 with Retry-After.",
            default="8 per sequence, at least 16",
        ),
    ] = None
    api_key: Annotated[
        str | None,
        setting(
            "KEY",
            "Require this key from clients. Other users can read the command line: better set the variable.",
        ),
    ] = None
    api_keys: Annotated[
        Path | None, setting("FILE", "Require one of the keys in this file, one per line.")
    ] = None
    allow_anyone: Annotated[bool | None, setting(None, "Serve other computers without a key.")] = None
    key_rate: Annotated[
        int | None, setting("N", "Max requests per minute for each key.", default="no limit")
    ] = None
    key_at_once: Annotated[
        int | None, setting("N", "Max requests running at once for each key.", default="no limit")
    ] = None
    allow_files: Annotated[
        Path | None,
        setting("FOLDER", "Let requests name pictures in this folder as file:///folder/name."),
    ] = None
    search: Annotated[
        Path | None,
        setting(
            "FOLDER",
            "Let the page search in this folder, which `vlfit search FOLDER` has indexed with a model that is"
            " served.",
        ),
    ] = None
    allow_private_urls: Annotated[
        bool | None, setting(None, "Fetch pictures from loopback and private networks, too.")
    ] = None
    image_formats: Annotated[
        str | None,
        setting(
            "NAME",
            "Files to decode: default (JPEG, PNG, WebP, GIF, BMP, AVIF, HEIC), with any of pdf, raw and video"
            " (default,pdf); or all (TIFF, JPEG 2000, PPM and QOI, too, whose decoders are slower).",
        ),
    ] = None
    allow_origin: Annotated[
        str | None,
        setting("ORIGIN", "Let scripts of this web page call the server (CORS): https://example.org, or *."),
    ] = None
    allow_host: Annotated[
        str | None,
        setting("NAME", "Let browsers call the server by this host name, too, e.g. behind a reverse proxy."),
    ] = None
    drain: Annotated[
        str | None, setting("TIME", "Time for running requests to finish after SIGTERM.", default="30s")
    ] = None
    log_format: Annotated[
        str | None, setting("NAME", "text, or json (one object per line).", default="text")
    ] = None
    restart: Annotated[
        bool | None,
        setting(
            None,
            "Run the engine in a process of its own and restart it if it dies; requests get 503 meanwhile."
            " Implied by --daemon and --systemd.",
        ),
    ] = None

    # Which machine to plan for.
    machine: Annotated[
        Path | None,
        option("FILE", "A machine saved by `vlfit machine --save` instead of this one; - reads stdin."),
    ] = None
    gpu: Annotated[
        str | None,
        option(
            "NAME",
            'This computer with another card, e.g. "RTX 5060", or with several: "2x RTX 3090"; vlfit machine'
            " --cards lists them.",
        ),
    ] = None
    desktop: Annotated[
        str | None,
        option("SIZE", "With --gpu: memory that other programs hold, e.g. 951MiB.", default="a typical one"),
    ] = None
    wsl2: Annotated[bool, option(None, "With --gpu: used under WSL2.")] = False

    # Files that hold more than one picture.
    every: Annotated[
        str | None,
        option(
            "TIME",
            "Videos and animations: a frame every TIME, such as 2s.",
            default="0.5s, less of long ones",
        ),
    ] = None
    at: Annotated[
        list[str] | None,
        option(
            "TIME",
            "Videos and animations: only the frame at TIME, such as 0:35, as a picture; may be repeated.",
        ),
    ] = None
    clip: Annotated[bool, option(None, "Animated GIF, WebP and PNG: the clip, not its first frame.")] = False

    # Output.
    json: Annotated[bool, option(None, "Print JSON.")] = False
    stream: Annotated[
        bool | None,
        option(
            None,
            "Print the answer as it is generated.",
            "--stream/--no-stream",
            default="on a terminal",
        ),
    ] = None
    quiet: Annotated[bool, option(None, "Print only errors on stderr.", "--quiet", "-q")] = False
    verbose: Annotated[
        bool, option(None, "Print picture sizes, tokens and speed on stderr, too.", "--verbose", "-v")
    ] = False

    def settings(self, **instead: object) -> "Settings":
        """The settings: what was typed, else the environment, else the default.

        ``instead``: settings that replace typed ones, such as a model typed as an argument. Raises
        ``UsageError`` with the option and the variable of every wrong value.
        """
        from vlfit.settings import read_settings

        typed = {name: getattr(self, name) for name in SETTINGS}
        typed["prefix_cache"] = False if self.no_prefix_cache else None
        found = read_settings(**{**typed, **instead})
        if self.mmproj is None:
            return found
        from vlfit.checkpoint.gguf.file_names import with_mmproj

        return found.model_copy(update={"model": with_mmproj(found.model, self.mmproj)})

    def refuse_engine_options(self, server: str) -> None:
        """Raise ``UsageError`` if engine options were typed: ``server`` runs already, with its own.

        ``server``: its URL, for the message.
        """
        typed = [
            f"--{'no-' if getattr(self, name) is False else ''}{name.replace('_', '-')}"
            for name in ENGINE
            if getattr(self, name) is not None
        ]
        if typed:
            raise UsageError(
                f"{', '.join(typed)} cannot change the running server at {server}",
                "Pass it to `vlfit serve`, or load the model here, without --server and VLFIT_SERVER.",
            )


def declarations(record: type[CommandOptions]) -> dict[str, Declaration]:
    """The declaration of every option of ``record``, by field name."""
    return {field.name: get_args(field.type)[1] for field in fields(record)}


SETTINGS = tuple(name for name, each in declarations(CommandOptions).items() if each.variable is True)
ENGINE = tuple(name for name, each in declarations(CommandOptions).items() if each.fixed_at_load)
_MODEL = ("model", "mmproj", "yes", "backend", "server", "trust_remote_code", "vllm_python")
_LOADED = ("device", "dtype", "context", "kv_dtype", "image_tokens", "offload", "speculate", "kernels")
SAMPLING = ("max_tokens", "temperature", "top_p", "seed")
ANSWERING = (
    *_MODEL,
    *_LOADED,
    *SAMPLING,
    "json",
    "stream",
    "quiet",
    "verbose",
)  # caption, ask, scene, detect, chat
MEDIA = ("every", "at", "clip")
MACHINE = ("machine", "gpu", "desktop", "wsl2")
SERVING = (
    *(
        "model",
        "mmproj",
        "yes",
        "backend",
        "host",
        "port",
        "ollama",
        "models",
        "pull",
        "device",
        "dtype",
        "context",
        "kv",
        "kv_dtype",
        "sequences",
    ),
    *("queue", "image_tokens", "chunk", "offload", "max_tokens", "no_prefix_cache", "speculate", "kernels"),
    *("idle_sleep", "api_key", "server_key", "trust_remote_code", "api_keys", "allow_anyone", "key_rate"),
    *(
        "key_at_once",
        "allow_files",
        "search",
        "allow_private_urls",
        "image_formats",
        "allow_origin",
        "allow_host",
        "drain",
    ),
    *("log_format", "restart", "vllm_python"),
)


def takes_options(
    *names: str, planned: tuple[str, ...] = (), **helps: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator that adds the options ``names`` to a command, which gets them as one record ``options``.

    The options are listed in the help in this order. The record's class is the annotation of ``options``:
    ``CommandOptions`` or a subclass with the command's own. A name may also be a parameter of the command, to
    place it; parameters not named come first. ``planned``: options that ``vlfit plan`` plans for; their
    help names neither variable nor default. ``helps``: help that differs for this command.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = dict(inspect.signature(command).parameters)
        record: type[CommandOptions] = own.pop("options").annotation
        declared = declarations(record)
        types = {field.name: get_args(field.type)[0] for field in fields(record)}
        defaults = {field.name: field.default for field in fields(record)}
        parameters = {name: own[name] for name in own if name not in names}
        for name in names:
            parameters[name] = own.get(name) or inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults[name],
                annotation=Annotated[
                    types[name],
                    _as_typer(name, declared[name], types[name], helps.get(name), noted=name not in planned),
                ],
            )

        @wraps(command)
        def run(**values: Any) -> None:
            options = record(**{name: values.pop(name) for name in names if name not in own})
            command(**values, options=options)

        run.__dict__["__signature__"] = inspect.Signature(
            [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters.values()]
        )
        return run

    return decorate


def _as_typer(name: str, declared: Declaration, kind: Any, text: str | None, *, noted: bool) -> Any:
    """The option as typer takes it; ``noted``: its help ends with the default and the variable."""
    variable = f"VLFIT_{name.upper()}" if declared.variable is True else declared.variable
    notes = [f"default: {declared.default}"] if declared.default else []
    notes += [f"env {variable}"] if variable else []
    text = text or declared.help
    if notes and noted:
        text += f"  [{'; '.join(notes)}]"
    is_flag = kind is bool or bool in get_args(kind)
    flags = declared.flags or ((f"--{name.replace('_', '-')}",) if is_flag else ())
    completed = COMPLETED.get(name)
    return typer.Option(
        *flags, metavar=declared.metavar, help=text, show_default=False, autocompletion=completed
    )


# --- completion in the shell -------------------------------------------------------------------------------


def complete_model(incomplete: str) -> list[str]:
    """Names of models that begin with ``incomplete``: all that ``vlfit models`` lists, then the catalog's.

    Each in its short forms, too: ``4B``, ``4B-FP8``, ``Qwen3-VL-4B-Instruct-FP8``.
    """
    from vlfit.checkpoint.catalog import entries
    from vlfit.checkpoint.gguf.places import found_models
    from vlfit.plan.recommend import short_family, short_name

    names = ["auto", *complete_local_model(""), *(name for model in found_models() for name in model.names)]
    for entry in entries():
        names += [
            entry.name,
            short_family(entry.family),
            short_name(entry.name),
            entry.name.rpartition("/")[2],
        ]
    return _beginning(incomplete, names)


def complete_local_model(incomplete: str) -> list[str]:
    """Names that begin with ``incomplete``, short ones too, of the models here that are in safetensors."""
    from vlfit.checkpoint.source import local_models
    from vlfit.plan.recommend import short_name

    names = [each for model in local_models() for each in (model.name, short_name(model.name))]
    return _beginning(incomplete, names)


def complete_removable(incomplete: str) -> list[str]:
    """Names that begin with ``incomplete``, of what ``vlfit models rm`` removes."""
    from vlfit.checkpoint.removal import removable_names

    return _beginning(incomplete, [*complete_local_model(""), *removable_names()])


def complete_backend(incomplete: str) -> list[str]:
    """Names of backends that begin with ``incomplete``."""
    return _beginning(incomplete, ["native", "vllm", "transformers", "remote"])


def complete_card(incomplete: str) -> list[str]:
    """Names of cards, without "GeForce", that begin with ``incomplete``."""
    from vlfit.machine.cards import CARDS

    return _beginning(incomplete, [card.name.removeprefix("GeForce ") for card in CARDS])


def _beginning(incomplete: str, names: list[str]) -> list[str]:
    """``names`` that begin with ``incomplete``, in any case; each once."""
    return [name for name in dict.fromkeys(names) if name.lower().startswith(incomplete.lower())]


COMPLETED = {"model": complete_model, "backend": complete_backend, "gpu": complete_card}


def engine_options(settings: "Settings", *names: str) -> "EngineOptions":
    """Engine options from ``settings``.

    ``names``: use only these settings, and defaults for the others; without names, use all. Raises
    ``UsageError`` for wrong values.
    """
    from vlfit.api.engine_options import EngineOptions

    if names:
        others = {
            name: field.default for name, field in type(settings).model_fields.items() if name not in names
        }
        settings = settings.model_copy(update=others)
    options = EngineOptions(
        device=settings.device,
        dtype=settings.dtype,
        max_model_len=settings.context,
        max_num_seqs=settings.sequences,
        kv_tokens=settings.kv,
        kv_dtype=settings.kv_dtype,
        max_num_batched_tokens=settings.chunk,
        image_tokens=settings.image_tokens,
        offload=settings.offload,
        prefix_cache=settings.prefix_cache,
        speculate=settings.speculate,
        idle_sleep=settings.idle_sleep,
        kernels=settings.kernels,
    )
    return options if settings.max_tokens is None else replace(options, max_tokens=settings.max_tokens)


def media_options(options: CommandOptions) -> "MediaOptions":
    """What to take of videos and animations, by ``--every``, ``--at`` and ``--clip``.

    Who chooses frames wants more of an animation than its first: ``--every`` and ``--at`` imply ``--clip``.
    Raises ``UsageError`` for values that are no times, and for ``--every`` with ``--at``.
    """
    from vlfit.tasks.files import MediaOptions, parse_frame_distance, parse_times

    every = None if options.every is None else parse_frame_distance(options.every, "--every")
    at = parse_times(options.at or ())
    if every is not None and at:
        raise UsageError("--every and --at are two ways to choose frames", "Leave one out.")
    return MediaOptions(every, at, clip=options.clip or every is not None or bool(at))


def one_model(argument: str | None, option: str | None) -> str | None:
    """The model, named by the argument or by ``--model``; None if by neither.

    Raises ``UsageError`` if they differ.
    """
    if argument and option and argument != option:
        raise UsageError(f"two models: {argument} and --model {option}", "Name one.")
    return option or argument


def normalize_server_arguments(arguments: list[str]) -> list[str]:
    """Rewrite ``--backend remote URL`` with ``--server URL``, and a bare ``--server`` as ``--server auto``.

    click gives an option one value, so it would take the URL for a picture. If ``--server`` or VLFIT_SERVER
    names the server, the URL is indeed a picture; ``vlfit serve`` takes it as its MODEL.
    """
    arguments = _with_auto_server(arguments)
    has_server = any(each.partition("=")[0] == "--server" for each in arguments) or os.environ.get(
        "VLFIT_SERVER"
    )
    command = next((each for each in arguments if not each.startswith("-")), "")
    if command == "serve" or has_server:
        return arguments
    for index, word in enumerate(arguments):
        is_remote = word == "--backend=remote" or (
            word == "remote" and arguments[index - 1 : index] == ["--backend"]
        )
        if is_remote and _looks_like_url(*arguments[index + 1 : index + 2]):
            return [*arguments[: index + 1], "--server", *arguments[index + 1 :]]
    return arguments


def _with_auto_server(arguments: list[str]) -> list[str]:
    """``--server auto`` in place of ``--server`` before another option, a file, or nothing."""
    whole: list[str] = []
    for index, word in enumerate(arguments):
        whole.append(word)
        following = arguments[index + 1 : index + 2]
        if word == "--server" and (not following or following[0].startswith("-") or _is_file(following[0])):
            whole.append("auto")
    return whole


def _is_file(word: str) -> bool:
    try:
        return Path(word).is_file()
    except (OSError, ValueError):  # too long for a name, or with characters that none may have
        return False


def _looks_like_url(word: str = "") -> bool:
    """Whether ``word`` looks like a server's URL: ``http://box``, ``127.0.0.1:8000``, ``localhost``.

    True for a malformed URL as well: the error is then about the URL, not about a missing picture.
    """
    return bool(re.match(r"[a-z][a-z0-9+.-]*://|[A-Za-z0-9.-]+:\d+(/|$)|localhost(/|$)", word, re.IGNORECASE))
