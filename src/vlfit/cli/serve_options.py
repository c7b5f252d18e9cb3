"""Options of ``vlfit serve``, as they are written and explained. Knows nothing of what they do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

_Text = str | None
_Count = int | None


@dataclass(frozen=True, slots=True)
class OfServe:
    """What only ``vlfit serve --backend vllm`` is asked: ``words`` of vLLM's own, ``dry_run``: print the
    command and end, ``retry``: go on after a start that failed.
    """

    words: tuple[str, ...] = ()
    dry_run: bool = False
    retry: bool = True


ALONE = OfServe()
ModelArgument = Annotated[
    _Text,
    typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False),
]
Model = Annotated[
    _Text,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME",
        help="auto (the best one here, else mini), mini, a folder, or a hub id.  [env VLFIT_MODEL]",
    ),
]
Backend = Annotated[
    _Text,
    typer.Option(
        metavar="NAME",
        help="Who runs the model: native, vllm, transformers, or remote; MODEL is then the URL of another"
        " server, which this one stands before.  [default: native; env VLFIT_BACKEND]",
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="With --backend transformers: run the code that comes with the model. Only for a model whose"
        " makers you trust.",
    ),
]
VllmWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- WORDS...]",
        help="With --backend vllm: options of vLLM's own, which go before planned ones.",
        show_default=False,
    ),
]
VllmPython = Annotated[
    _Text,
    typer.Option(
        metavar="FILE",
        help="With --backend vllm: the Python that has vLLM, its environment's folder, or the program vllm."
        "  [default: the one beside vlfit, else on PATH; env VLFIT_VLLM_PYTHON]",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="With --backend vllm: print the command with its environment, and end."),
]
NoRetry = Annotated[
    bool,
    typer.Option(
        "--no-retry",
        help="With --backend vllm: end when a start fails, instead of taking the next cheaper plan.",
    ),
]
ServerKey = Annotated[
    _Text,
    typer.Option(
        metavar="KEY",
        help="With --backend remote, what that server asks for; the variable keeps it to yourself. Clients"
        " never see it, and their keys never go there.  [env VLFIT_SERVER_KEY]",
    ),
]
Host = Annotated[
    _Text,
    typer.Option(
        metavar="ADDRESS",
        help="Where to listen; 0.0.0.0 lets other computers in.  [default: 127.0.0.1; env VLFIT_HOST]",
    ),
]
Port = Annotated[
    _Count, typer.Option(metavar="N", help="0 takes any free one.  [default: 8000; env VLFIT_PORT]")
]
Device = Annotated[
    _Text,
    typer.Option(metavar="NAME", help="auto (GPU if there is one), cpu, cuda, cuda:1.  [env VLFIT_DEVICE]"),
]
Dtype = Annotated[
    _Text, typer.Option(metavar="NAME", help="auto, float32, bfloat16 or float16.  [env VLFIT_DTYPE]")
]
Context = Annotated[
    _Count,
    typer.Option(metavar="N", help="Most tokens of prompt and answer together.  [env VLFIT_CONTEXT]"),
]
Kv = Annotated[
    _Text,
    typer.Option(
        metavar="N",
        help="Tokens of the KV cache that all requests share; auto: what free memory leaves."
        "  [default: 2048 for each sequence, at least one context; env VLFIT_KV]",
    ),
]
KvDtype = Annotated[
    _Text,
    typer.Option(
        metavar="NAME",
        help="Of the KV cache: auto (as computed), bf16, or fp8: half the bytes, rounded."
        "  [env VLFIT_KV_DTYPE]",
    ),
]
Sequences = Annotated[
    _Count,
    typer.Option(
        metavar="N",
        help="Requests that run at once at full context (with --backend remote: that are sent on); more wait."
        "  [default: 4, of another server 64; env VLFIT_SEQUENCES]",
    ),
]
Queue = Annotated[
    _Count,
    typer.Option(
        metavar="N",
        help="Requests that may wait while others run; more are told when to come again (429)."
        "  [default: 8 for each sequence, at least 16; env VLFIT_QUEUE]",
    ),
]
ImageTokens = Annotated[
    _Count,
    typer.Option(
        metavar="N",
        help="Most tokens of one picture (1024x1024 pixels are 1024); larger ones are scaled down."
        "  [env VLFIT_IMAGE_TOKENS]",
    ),
]
Chunk = Annotated[
    _Count,
    typer.Option(
        metavar="N",
        help="Most tokens of one pass through the model; fewer take less memory and more time."
        "  [default: 1024; env VLFIT_CHUNK]",
    ),
]
Offload = Annotated[
    _Text,
    typer.Option(
        metavar="GIB",
        help="Let text layers wait in RAM so that the GPU holds so much less (2, 800MiB); auto: as few as"
        " make it fit. Slow: they are copied for every word.  [env VLFIT_OFFLOAD]",
    ),
]
MaxTokens = Annotated[
    _Count,
    typer.Option(
        metavar="N", help="Most tokens of an answer whose request names no limit.  [env VLFIT_MAX_TOKENS]"
    ),
]
NoPrefixCache = Annotated[
    bool,
    typer.Option(
        "--no-prefix-cache",
        help="Compute every prompt whole, also if another began alike.  [env VLFIT_PREFIX_CACHE=0]",
    ),
]
Speculate = Annotated[
    bool | None,
    typer.Option(
        "--speculate/--no-speculate",
        help="Check several tokens at once where text before tells what may come: the same words."
        "  [default: speculate; env VLFIT_SPECULATE]",
        show_default=False,
    ),
]
IdleSleep = Annotated[
    _Text,
    typer.Option(
        metavar="TIME",
        help="Give the GPU back after so long without a request, like 5m: weights wait in RAM, and the"
        " next request wakes it.  [default: never; env VLFIT_IDLE_SLEEP]",
    ),
]
ApiKey = Annotated[
    _Text,
    typer.Option(
        metavar="KEY",
        help="Ask clients for this key. Other users of this computer can read it off the command line;"
        " the variable keeps it to yourself.  [env VLFIT_API_KEY]",
    ),
]
ApiKeys = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Ask clients for one of the keys in this file, one a line.  [env VLFIT_API_KEYS]",
        show_default=False,
    ),
]
AllowAnyone = Annotated[
    bool | None,
    typer.Option(
        "--allow-anyone",
        help="Serve other computers without asking for a key.  [env VLFIT_ALLOW_ANYONE]",
        show_default=False,
    ),
]
KeyRate = Annotated[
    _Count,
    typer.Option(
        metavar="N", help="Requests that each key may begin in a minute.  [default: any; env VLFIT_KEY_RATE]"
    ),
]
KeyAtOnce = Annotated[
    _Count,
    typer.Option(
        metavar="N", help="Requests that each key may have running.  [default: any; env VLFIT_KEY_AT_ONCE]"
    ),
]
AllowFiles = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Let requests name pictures in this folder as file:///folder/name.  [env VLFIT_ALLOW_FILES]",
        show_default=False,
    ),
]
AllowPrivateUrls = Annotated[
    bool | None,
    typer.Option(
        "--allow-private-urls",
        help="Fetch pictures from loopback and private networks too.  [env VLFIT_ALLOW_PRIVATE_URLS]",
        show_default=False,
    ),
]
AllowOrigin = Annotated[
    _Text,
    typer.Option(
        metavar="ORIGIN",
        help="Let scripts of this web page (https://example.org, or *) call the server."
        "  [env VLFIT_ALLOW_ORIGIN]",
    ),
]
AllowHost = Annotated[
    _Text,
    typer.Option(
        metavar="NAME",
        help="Let browsers on this computer call the server by this name, too: that of a proxy before it."
        "  [env VLFIT_ALLOW_HOST]",
    ),
]
Drain = Annotated[
    _Text,
    typer.Option(
        metavar="TIME",
        help="Time that SIGTERM leaves to requests that run.  [default: 30s; env VLFIT_DRAIN]",
    ),
]
LogFormat = Annotated[
    _Text,
    typer.Option(
        metavar="NAME", help="text, or json: an object a line.  [default: text; env VLFIT_LOG_FORMAT]"
    ),
]
Restart = Annotated[
    bool | None,
    typer.Option(
        "--restart",
        help="Serve from a process of its own: if it dies, requests get 503 and it is started again."
        " So do --daemon and --systemd.  [env VLFIT_RESTART]",
        show_default=False,
    ),
]
Daemon = Annotated[
    bool,
    typer.Option(
        "--daemon",
        help="Serve in the background, and come back when it is ready. `vlfit status` shows it, `vlfit stop`"
        " ends it.",
    ),
]
Systemd = Annotated[
    bool,
    typer.Option(
        "--systemd",
        help="Print a unit with these options for systemd, which keeps the server running, and end.",
    ),
]
JsonLine = Annotated[
    bool,
    typer.Option(
        "--json",
        help="When ready, print one line of JSON on stdout: url, model, context, device, and the seconds"
        " that it took.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Nothing on stderr but warnings and errors.")]


def with_more(arguments: list[str], *more: str) -> list[str]:
    """``arguments`` of the program and ``more`` of its own: what stands behind ``--`` is another's."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [*arguments[:end], *(word for word in more if word not in arguments[:end]), *arguments[end:]]
