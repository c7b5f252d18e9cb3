"""The options that caption, ask, scene and chat have in common, written down once.

Knows their names, types and help. Does not know what they do: ``session.py`` carries them out.
"""

import inspect
import os
import re
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, fields
from functools import wraps
from typing import Annotated, Any, get_args

import typer

from vlfit.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonOptions:
    """What was typed. None: not typed, so the environment or a default decides (``vlfit.settings``)."""

    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="NAME",
            help="auto (the best one here, else mini), mini, a folder, or a hub id.  [env VLFIT_MODEL]",
        ),
    ] = None
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend",
            metavar="NAME",
            help="Who runs the model: native, vllm, transformers, or remote and behind it the URL of a"
            " running server.  [default: native; env VLFIT_BACKEND]",
        ),
    ] = None
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            metavar="URL",
            help="The same as --backend remote URL: ask a running server instead of loading a model here; its"
            " key goes into VLFIT_API_KEY.  [env VLFIT_SERVER]",
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="With --backend transformers: run the code that comes with the model. Only for a model whose"
            " makers you trust.",
        ),
    ] = False
    vllm_python: Annotated[
        str | None,
        typer.Option(
            "--vllm-python",
            metavar="PATH",
            help="With --backend vllm: the Python that has vLLM, or the folder of its environment."
            "  [env VLFIT_VLLM_PYTHON]",
        ),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="NAME",
            help="auto (GPU if there is one), cpu, cuda, cuda:1.  [env VLFIT_DEVICE]",
        ),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", metavar="NAME", help="auto, float32, bfloat16 or float16.  [env VLFIT_DTYPE]"
        ),
    ] = None
    context: Annotated[
        int | None,
        typer.Option(
            "--context", metavar="N", help="Most tokens of prompt and answer together.  [env VLFIT_CONTEXT]"
        ),
    ] = None
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            "--kv-dtype",
            metavar="NAME",
            help="Of the KV cache: auto (as computed), bf16, or fp8: half the bytes, rounded."
            "  [env VLFIT_KV_DTYPE]",
        ),
    ] = None
    image_tokens: Annotated[
        int | None,
        typer.Option(
            "--image-tokens",
            metavar="N",
            help="Most tokens of one picture (1024x1024 pixels are 1024); larger ones are scaled down."
            "  [env VLFIT_IMAGE_TOKENS]",
        ),
    ] = None
    offload: Annotated[
        str | None,
        typer.Option(
            "--offload",
            metavar="GIB",
            help="Let text layers wait in RAM so that the GPU holds so much less (2, 800MiB); auto: as few as"
            " make it fit. Slow: they are copied for every word.  [env VLFIT_OFFLOAD]",
        ),
    ] = None
    speculate: Annotated[
        bool | None,
        typer.Option(
            "--speculate/--no-speculate",
            help="Check several tokens at once where text before tells what may come: the same words."
            "  [default: speculate; env VLFIT_SPECULATE]",
            show_default=False,
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", metavar="N", help="Most tokens of an answer.  [env VLFIT_MAX_TOKENS]"),
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature", metavar="T", help="0 always takes the likeliest word; up to 2 is ever freer."
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p", metavar="P", help="Choose among the likeliest words that make up this share."
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="N", help="Makes sampled words repeatable."),
    ] = None
    json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print each answer as one line of JSON, with sizes seen, tokens and times."
        ),
    ] = False
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Print words as they come.  [default: on a terminal]",
            show_default=False,
        ),
    ] = None
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", help="Nothing on stderr but errors."),
    ] = False


def takes_common_options(
    command: Callable[..., None], *, without: tuple[str, ...] = (), **helps: str
) -> Callable[..., None]:
    """Give ``command`` the common options: typer sees each, ``command`` gets one record, ``options``.

    ``without``: names of those that it has no use for. ``helps``: what an option does where that is not what
    it does elsewhere, by its name.
    """
    own = list(inspect.signature(command).parameters.values())
    shared = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=_explained(field.type, helps[field.name]) if field.name in helps else field.type,
        )
        for field in fields(CommonOptions)
        if field.name not in without
    ]

    @wraps(command)
    def with_options(**typed: Any) -> None:
        common = {option.name: typed.pop(option.name) for option in shared}
        command(**typed, options=CommonOptions(**common))

    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in own
        if parameter.name != "options"
    ]
    with_options.__dict__["__signature__"] = inspect.Signature([*parameters, *shared])
    return with_options


def _explained(option: Any, text: str) -> Any:
    """``option``, an annotated type, with ``text`` for its help."""
    kind, info = get_args(option)
    info = copy(info)
    info.help = text
    return Annotated[kind, info]


def refuse_engine_options(server: str, typed: Mapping[str, object]) -> None:
    """A server's engine is what it is: an option that cannot act must not be accepted in silence.

    ``typed``: options of the engine by their names; None: not typed. Raises ``UsageError``.
    """
    named = [
        f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
        for name, value in typed.items()
        if value is not None
    ]
    if named:
        raise UsageError(
            f"{', '.join(named)} cannot change the server at {server}",
            "give it to `vlfit serve`; or load the model here, without --server and VLFIT_SERVER",
        )


def server_behind_backend(arguments: list[str]) -> list[str]:
    """``--backend remote URL`` as ``--backend remote --server URL``, which is what it means.

    An option takes one word, so a URL behind it would be read as a picture's. That is what it is where a
    server is named by ``--server`` or the environment; and ``vlfit serve`` takes the URL as its MODEL.
    """
    named = any(each.partition("=")[0] == "--server" for each in arguments) or os.environ.get("VLFIT_SERVER")
    command = next((each for each in arguments if not each.startswith("-")), "")
    if command == "serve" or named:
        return arguments
    for place, word in enumerate(arguments):
        is_remote = word == "--backend=remote" or (
            word == "remote" and arguments[place - 1 : place] == ["--backend"]
        )
        if is_remote and is_server(*arguments[place + 1 : place + 2]):
            return [*arguments[: place + 1], "--server", *arguments[place + 1 :]]
    return arguments


def is_server(word: str = "") -> bool:
    """Whether ``word`` is meant for a server's URL, with or without a scheme: ``127.0.0.1:8000``, ``http://box``.

    Also one that is wrong, so that its fault is named, and not that of a picture that is not there.
    """
    return bool(re.match(r"[a-z][a-z0-9+.-]*://|[A-Za-z0-9.-]+:\d+(/|$)|localhost(/|$)", word, re.IGNORECASE))
