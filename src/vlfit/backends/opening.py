"""Open a backend by its name. Only that backend's module is imported."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from vlfit.api.engine_options import EngineOptions
from vlfit.api.progress import LoadProgress
from vlfit.backends.base import Backend
from vlfit.checkpoint.source import Checkpoint, resolve_name
from vlfit.errors import UsageError

if TYPE_CHECKING:
    from vlfit.backends.vllm.serve_command import VllmOptions


BackendKind = Literal["native", "vllm", "transformers", "remote"]
BACKEND_KINDS: tuple[BackendKind, ...] = get_args(BackendKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec:
    """A model and the backend to run it.

    Raises ``UsageError`` if there is no such backend, for a ``server`` without ``remote`` or the reverse, and
    for a missing ``model``. A backend ignores the other fields that are not for it.

    - ``model``: a name (``checkpoint.source.resolve_name``), a folder or an open checkpoint. For ``remote``:
      the model's name on the server; None: the first that the server lists.
    - ``options``: for models that run here, not for ``remote``. ``open_backend`` raises ``UsageError`` for
      options that only the native engine has, such as ``idle_sleep``.

    For ``remote`` alone:

    - ``server``: its URL; required.
    - ``api_key``: None: none is sent.
    - ``max_tokens``: default of requests without a limit; None: the server's.
    - ``max_concurrent``: most requests sent at a time; None: ``remote.MAX_CONCURRENT``.
    - ``behind_server``: requests come from clients of a vlfit server (see ``RemoteBackend``).

    For ``transformers`` alone: ``trust_remote_code``, to run Python code that comes with a model. For
    ``vllm`` alone: ``vllm``, how vLLM is found and started; None: the defaults.
    """

    kind: BackendKind = "native"
    model: str | Path | Checkpoint | None = None
    options: EngineOptions = field(default_factory=EngineOptions)
    server: str | None = None
    api_key: str | None = field(default=None, repr=False)
    max_tokens: int | None = None
    max_concurrent: int | None = None
    behind_server: bool = False
    trust_remote_code: bool = False
    vllm: "VllmOptions | None" = None

    def __post_init__(self) -> None:
        parse_backend_kind(self.kind)
        if self.kind == "remote" and self.server is None:
            raise UsageError(
                "--backend remote needs the URL of a server", "Write its URL after the word remote."
            )
        if self.kind != "remote" and self.server is not None:
            raise UsageError(
                f"--backend {self.kind} runs a model here, and {self.server} is a server elsewhere",
                "Leave one of them out.",
            )
        if self.kind != "remote" and self.model is None:
            raise UsageError("no model is named", "Name one: mini, a folder or a hub id.")


def parse_backend_kind(name: str) -> BackendKind:
    """Return ``name``, checked. Raises ``UsageError`` if there is no such backend."""
    if name not in BACKEND_KINDS:
        raise UsageError(
            f"there is no backend {name!r}", f"Use one of: {', '.join(BACKEND_KINDS)}.", param="backend"
        )
    return name


def open_backend(spec: BackendSpec, progress: LoadProgress | None = None) -> Backend:
    """Open the backend of ``spec``. Downloads the model if necessary and loads it, except for ``remote``.

    For ``remote`` only the server's list of models is fetched. Blocks until requests can be made.
    ``progress``: called with the current phase and the share of it done; None: nobody is told. Raises
    errors of ``vlfit.errors``.
    """
    return _OPENERS[spec.kind](spec, progress)


def _open_native(spec: BackendSpec, progress: LoadProgress | None) -> Backend:
    from vlfit.backends.native import NativeBackend

    return NativeBackend.load(_one_format(spec), spec.options, progress)


def _open_vllm(spec: BackendSpec, progress: LoadProgress | None) -> Backend:
    from vlfit.backends.vllm.backend import VllmBackend
    from vlfit.images.decode_pool import decode_pool

    decode_pool().start()
    return VllmBackend.load(_model(spec), spec.options, spec.vllm, progress)


def _open_transformers(spec: BackendSpec, progress: LoadProgress | None) -> Backend:
    from vlfit.backends.transformers.backend import TransformersBackend

    return TransformersBackend.load(
        _one_format(spec), spec.options, progress, trust_remote_code=spec.trust_remote_code
    )


def _open_remote(spec: BackendSpec, progress: LoadProgress | None) -> Backend:
    from vlfit.backends.remote import MAX_CONCURRENT, RemoteBackend
    from vlfit.images.decode_pool import decode_pool

    assert spec.server is not None  # see __post_init__
    name = spec.model.name if isinstance(spec.model, Checkpoint) else spec.model
    if spec.behind_server:
        decode_pool().start()
    return RemoteBackend(
        spec.server,
        spec.api_key,
        None if name is None else str(name),
        max_tokens=spec.max_tokens,
        max_concurrent=spec.max_concurrent or MAX_CONCURRENT,
        behind_server=spec.behind_server,
    )


def _model(spec: BackendSpec) -> str | Path | Checkpoint:
    assert spec.model is not None  # see __post_init__
    return spec.model


def _one_format(spec: BackendSpec) -> str | Path | Checkpoint:
    """The model; for a name without a weights format (``4B``), the name of the format that fits here."""
    model = _model(spec)
    if isinstance(model, Checkpoint):
        return model
    found = resolve_name(model)
    if len(found) == 1:
        return model
    from vlfit.machine.survey import survey
    from vlfit.plan.model_choice import choose_format
    from vlfit.plan.processors import for_device

    return choose_format(found, for_device(survey(), spec.options.device)).name


_OPENERS: dict[BackendKind, Callable[[BackendSpec, LoadProgress | None], Backend]] = {
    "native": _open_native,
    "vllm": _open_vllm,
    "transformers": _open_transformers,
    "remote": _open_remote,
}
