"""Which backend runs a model, by its name: one place that opens any of them.

Knows: their names, and what each needs of what was asked for. Does not know: how a model is chosen or what is
planned for it. A backend's own module is imported only if it is the one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from vlfit.api.engine_options import EngineOptions
from vlfit.backends.base import OpenBackend
from vlfit.checkpoint.source import Checkpoint
from vlfit.errors import UsageError

if TYPE_CHECKING:
    from vlfit.backends.vllm.serve_command import VllmOptions


Kind = Literal["native", "vllm", "transformers", "remote"]
KINDS: tuple[Kind, ...] = get_args(Kind)

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Who is to run which model, and how.

    ``model``: ``mini``, a folder, a hub id or an open checkpoint. For ``remote`` it is the name by which the
    server calls its model, and None means the first that it names.
    ``options``: of the engine; a backend takes of them what it can do and refuses what it cannot.
    ``server``, ``api_key``: of ``remote`` alone, which needs the first. So are ``max_tokens`` of an answer
    whose request names no limit (None: as the server has it), ``at_once``: requests that are sent at a time,
    and ``serves``: it stands behind a server of ours. ``trust_remote_code``: ``transformers`` may run the
    code that comes with a model. ``vllm``: of ``vllm`` alone, how it is found and started.
    """

    kind: Kind = "native"
    model: str | Path | Checkpoint | None = None
    options: EngineOptions = field(default_factory=EngineOptions)
    server: str | None = None
    api_key: str | None = field(default=None, repr=False)
    max_tokens: int | None = None
    at_once: int | None = None
    serves: bool = False
    trust_remote_code: bool = False
    vllm: "VllmOptions | None" = None

    def __post_init__(self) -> None:
        kind_of(self.kind)
        if self.kind == "remote" and self.server is None:
            raise UsageError("--backend remote needs the URL of a server", "write it behind: remote URL")
        if self.kind != "remote" and self.server is not None:
            raise UsageError(
                f"--backend {self.kind} runs a model here, and {self.server} is a server elsewhere",
                "leave one of them out",
            )
        if self.kind != "remote" and self.model is None:
            raise UsageError("no model is named", "name one: mini, a folder or a hub id")


def kind_of(name: str) -> Kind:
    """The backend that is called ``name``. Raises ``UsageError`` for any other word."""
    if name not in KINDS:
        raise UsageError(f"there is no backend {name!r}", f"use one of: {', '.join(KINDS)}", param="backend")
    return name


def open_backend(wanted: Wanted, progress: Progress | None = None) -> OpenBackend:
    """Open it, and load the model if it runs here. ``progress`` is told what is being done and the share of
    it that is done. Close it to give back what it holds.

    Raises what the backend's own constructor raises: errors of ``vlfit.errors``.
    """
    return _OPENERS[wanted.kind](wanted, progress)


def _open_native(wanted: Wanted, progress: Progress | None) -> OpenBackend:
    from vlfit.backends.native import NativeBackend

    return NativeBackend.load(_model(wanted), wanted.options, progress)


def _open_vllm(wanted: Wanted, progress: Progress | None) -> OpenBackend:
    from vlfit.backends.vllm.backend import VllmBackend

    return VllmBackend.load(_model(wanted), wanted.options, wanted.vllm, progress)


def _open_transformers(wanted: Wanted, progress: Progress | None) -> OpenBackend:
    from vlfit.backends.transformers.backend import TransformersBackend

    return TransformersBackend.load(
        _model(wanted), wanted.options, progress, trust_remote_code=wanted.trust_remote_code
    )


def _open_remote(wanted: Wanted, progress: Progress | None) -> OpenBackend:
    from vlfit.backends.remote import AT_ONCE, RemoteBackend

    assert wanted.server is not None  # see __post_init__
    name = wanted.model.name if isinstance(wanted.model, Checkpoint) else wanted.model
    return RemoteBackend(
        wanted.server,
        wanted.api_key,
        None if name is None else str(name),
        max_tokens=wanted.max_tokens,
        at_once=wanted.at_once or AT_ONCE,
        serves=wanted.serves,
    )


def _model(wanted: Wanted) -> str | Path | Checkpoint:
    assert wanted.model is not None  # see __post_init__
    return wanted.model


_OPENERS: dict[Kind, Callable[[Wanted, Progress | None], OpenBackend]] = {
    "native": _open_native,
    "vllm": _open_vllm,
    "transformers": _open_transformers,
    "remote": _open_remote,
}
