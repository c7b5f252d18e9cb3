"""From options to an open model: read settings, resolve ``auto``, show loading on stderr.

The model is opened on first use, so that a missing picture is reported before gigabytes are loaded.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Self, TypeVar, cast

import typer

from vlfit.api.progress import LoadProgress
from vlfit.cli.loading import (
    file_selection_for,
    offer_model,
    refuse_mini,
    refuse_without_embedding_model,
    show_loading,
)
from vlfit.cli.models import opening_name, resolve_or_ask, resolve_to_one
from vlfit.cli.options import ANSWERING, ENGINE, CommandOptions, engine_options
from vlfit.cli.printing import Printer, print_error
from vlfit.errors import (
    DoesNotFit,
    NotAPicture,
    PictureError,
    RemoteError,
    UnreadableAnswer,
    UsageError,
    VlfitError,
)

if TYPE_CHECKING:
    from vlfit.api.engine_options import EngineOptions
    from vlfit.api.pooling import ModelKind
    from vlfit.backends.base import Backend
    from vlfit.backends.opening import BackendKind, BackendSpec
    from vlfit.client import VisionModel
    from vlfit.settings import Settings
    from vlfit.tasks.files import FilePart, MediaOptions
    from vlfit.tasks.sampling_options import SamplingOptions


T = TypeVar("T")


class Session:
    """Options, printer and lazily opened model of a command that answers; a context manager.

    Raises ``UsageError`` for options that contradict each other. ``needs_pictures``: the command needs
    pictures, so a text-only model is refused before it is loaded.
    ``needs_real_model``: ``auto`` may not mean mini. ``model_kind``: what the model of ``auto`` is made for.
    """

    def __init__(
        self,
        options: CommandOptions,
        *,
        needs_pictures: bool = False,
        needs_real_model: bool = False,
        model_kind: "ModelKind" = "chat",
    ) -> None:
        self._model_kind = model_kind
        self._needs_pictures = needs_pictures
        self._needs_real_model = needs_real_model
        self.printer = Printer(
            json=options.json, stream=options.stream, quiet=options.quiet, verbose=options.verbose
        )
        self._typed = options
        self._opened: BackendSpec | None = None  # of a native model
        self._settings = options.settings(max_tokens=None)
        self.sampling = self._read_sampling()
        self.kind, self._server = resolve_backend(self._settings, options.backend, options.server)
        if self._server is not None:
            options.refuse_engine_options(self._server)
        else:
            self._engine_options()  # raises for wrong values before anything is loaded

    @cached_property
    def model(self) -> "VisionModel":
        """The model, opened on first use. Raises what ``VLM`` and ``Client`` raise."""
        return self.open(_vision_model)

    def backend_spec(self, *, here: bool = True) -> "BackendSpec":
        """Backend, model and options, for commands that open the model themselves. Resolves ``auto``.

        ``here``: this computer opens the model, so the user must agree to a download; False: other machines
        do (Ray). May download the files of a native model, to see whether it is text-only. Raises
        ``UsageError`` for a text-only model if the command needs pictures, ``DeviceError`` if all GPUs here
        are too old for the native engine, and what ``resolve_or_ask`` raises.
        """
        from vlfit.backends.opening import BackendSpec

        settings, name = self._settings, self._settings.model
        if self.kind == "remote":
            key = settings.server_key or settings.api_key
            api_key = key.get_secret_value() if key else None
            model = None if name == "auto" else name
            return BackendSpec(kind=self.kind, model=model, server=self._server, api_key=api_key)
        if here and self.kind == "native":
            self._check_gpus()
        if name == "auto":
            name = self._auto_model
        trusted = self._typed.trust_remote_code
        files = file_selection_for(self.kind, code=trusted)
        if here:
            # What ``auto`` chose is here, or its download was agreed to.
            agreed = settings.yes or settings.model == "auto"
            name = resolve_or_ask(
                name, self.printer, yes=agreed, backend=self.kind, files=files, device=settings.device
            )
        else:
            one = resolve_to_one(name, self.printer, backend=self.kind, files=files, device=settings.device)
            name = opening_name(name, one)
        if self.kind == "native" and self._needs_pictures:
            _check_vision(name)
        spec = BackendSpec(
            kind=self.kind, model=name, options=self._engine_options(), trust_remote_code=trusted
        )
        if self.kind != "vllm":
            return spec
        from vlfit.cli.serving.serve_vllm import vllm_options

        return replace(spec, vllm=vllm_options(settings))

    def resolve_auto(self, *, here: bool = True) -> None:
        """Choose the model for ``auto`` now instead of on first use; no effect for a named model or a server.

        ``here``: as for ``backend_spec``. Raises ``UsageError`` if only mini is here and the command needs a
        real model, and ``DeviceError`` as ``backend_spec``.
        """
        if here and self.kind == "native":
            self._check_gpus()
        if self.kind != "remote" and self._settings.model == "auto":
            _ = self._auto_model

    def _check_gpus(self) -> None:
        from vlfit.plan.gpus import check_gpus

        check_gpus(self._settings.device, self._settings.kernels)

    @cached_property
    def _auto_model(self) -> str:
        """The model that ``auto`` means. Raises ``UsageError`` for mini if the command needs a real one."""
        from vlfit.client import choose_model

        choice = choose_model(self.kind, self._model_kind, device=self._settings.device)
        if self._model_kind == "embedding":
            refuse_without_embedding_model(choice)
        elif self._needs_real_model:
            refuse_mini(choice)
        return offer_model(choice, self.printer, yes=self._settings.yes)

    def load(self, name: str, media: "MediaOptions | None" = None) -> "FilePart":
        """Load a picture or another file, as ``tasks.files.load_file`` does, before the model is opened.

        Also raises ``NotAPicture`` for a HEIC photo that the model, opened here, could not decode.
        """
        from vlfit.api.conversation import ImagePart
        from vlfit.images.file_kinds import HEIC, decodes_heif, hint_for, kind_of
        from vlfit.images.spooled_file import read_at
        from vlfit.tasks.files import MediaOptions, load_file

        media = media or MediaOptions()
        part = load_file(name, media)
        if isinstance(part, ImagePart):
            if self.kind != "remote" and kind_of(read_at(part.data, 0, 64)) == HEIC and not decodes_heif():
                raise NotAPicture(
                    f"{part.label} is a HEIC photo, whose decoder is not installed", hint_for(HEIC)
                )
            if media.every is not None or media.at:
                self.printer.note_once("  --every and --at are for videos: they change nothing of a picture")
        return part

    def answer_settings(self) -> "dict[str, int | None] | None":
        """``image_tokens`` and ``context``, which change answers, for a batch's record.

        Either is None if not set. None instead of the dict for a remote server, which has its own settings.
        """
        if self.kind == "remote":
            return None
        return {"image_tokens": self._settings.image_tokens, "context": self._settings.context}

    def open(self, opener: "Callable[[BackendSpec, LoadProgress], T]") -> T:
        """Call ``opener`` and return its result; show download and loading on stderr meanwhile.

        ``opener`` gets the ``backend_spec`` and a callback for loading progress.
        """
        from vlfit.backends.startup import StartupTimer
        from vlfit.loading import preload

        spec = self.backend_spec()
        if spec.kind == "remote":
            return opener(spec, lambda what, share: None)
        phases = StartupTimer()
        if spec.kind == "native":
            preload.start_cuda_context(spec.options.device)
        if spec.kind == "vllm":
            from vlfit.cli.serving.serve_vllm import show_start, vllm_options

            with show_start(self.printer, phases) as (tell, progress):
                opened = opener(replace(spec, vllm=vllm_options(self._settings, tell=tell)), progress)
        else:
            files = file_selection_for(spec.kind, code=spec.trust_remote_code)
            with show_loading(str(spec.model), self.printer, phases, files) as progress:
                opened = opener(spec, progress)
        phases.end()
        if phases.has_begun_loading:
            self.printer.detail(f"loaded after {phases.summary()}")
        if spec.kind == "native":
            self._opened = spec
        return opened

    def note_vectors(self, backend: "Backend") -> None:
        """Note it if the vectors of ``backend`` are those of a model that chats."""
        if backend.pooling is not None and backend.pooling.kind == "chat":
            self.printer.note(f"  {backend.model} was trained to chat, not for vectors: expect worse results")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if "model" in self.__dict__:
            self.model.close()
            if kind is None and self._opened is not None:
                self._offer_verification(self._opened)

    def _offer_verification(self, opened: "BackendSpec") -> None:
        """Say once that ``vlfit verify`` checks the model that has just answered."""
        if self._typed.json or not self.printer.on_terminal:
            return
        from vlfit.checkpoint.source import open_checkpoint
        from vlfit.cli.verify_here import offer_verification

        name = str(opened.model)
        weights_format = open_checkpoint(name).weights_format
        offer_verification(name, opened.options.device, "", weights_format, self.printer, json=False)

    def _read_sampling(self) -> "SamplingOptions":
        """Sampling options, checked before anything is loaded."""
        from vlfit.api.sampling_params import SamplingParams
        from vlfit.tasks.sampling_options import apply_options

        # A typed value is checked below, with the same message as in Python and over HTTP.
        max_tokens = self._settings.max_tokens if self._typed.max_tokens is None else self._typed.max_tokens
        values = {
            "max_tokens": max_tokens,
            "temperature": self._typed.temperature,
            "top_p": self._typed.top_p,
            "seed": self._typed.seed,
        }
        sampling = cast(
            "SamplingOptions", {name: value for name, value in values.items() if value is not None}
        )
        apply_options(SamplingParams(), sampling)
        return sampling

    def _engine_options(self) -> "EngineOptions":
        """Engine options from the settings that these commands have options for."""
        return engine_options(self._settings, *(name for name in ENGINE if name in ANSWERING))


def _vision_model(spec: "BackendSpec", progress: "LoadProgress") -> "VisionModel":
    from vlfit.client import VLM, Client

    if spec.kind == "remote":
        assert spec.server is not None
        return Client(spec.server, spec.api_key, model=None if spec.model is None else str(spec.model))
    options = spec.options
    assert isinstance(spec.model, str)
    return VLM(
        spec.model,
        backend=spec.kind,
        trust_remote_code=spec.trust_remote_code,
        vllm=spec.vllm,
        device=options.device,
        dtype=options.dtype,
        context=options.max_model_len,
        kv_dtype=options.kv_dtype,
        sequences=1,  # a command runs one request at a time
        image_tokens=options.image_tokens,
        offload=options.offload,
        speculate=options.speculate,
        kernels=options.kernels,
        progress=progress,
    )


def resolve_backend(
    settings: "Settings", typed_backend: str | None, typed_server: str | None
) -> "tuple[BackendKind, str | None]":
    """The backend to use, and the server's URL for ``remote``, else None.

    ``settings``: from options and environment. ``typed_backend``, ``typed_server``: options as typed, which
    win over the environment: ``--backend native`` loads here whatever VLFIT_SERVER says, and ``--server``
    asks there whatever VLFIT_BACKEND says. Raises ``UsageError`` if they contradict each other, for
    ``remote`` without a server, and for ``--server auto`` if several servers run; ``ServerUnreachable`` for
    ``--server auto`` if none runs.
    """
    kind, server = settings.backend, settings.server
    if typed_backend is None and typed_server is not None:
        kind = "remote"
    elif typed_backend not in (None, "remote") and typed_server is None:
        server = None
    if kind in (None, "remote"):
        if kind is not None and server is None:
            if typed_backend is None:
                raise UsageError(
                    "VLFIT_BACKEND is remote, but no server is given",
                    "Add --server URL, or set VLFIT_SERVER.",
                )
            raise UsageError(
                "--backend remote needs a server", "Write its URL after it: --backend remote URL."
            )
        if server is None:
            return "native", None
        from vlfit.cli.servers import AUTO_SERVER, check_runs, server_url

        if server == AUTO_SERVER:
            server = server_url(settings, hint="Choose one with --server URL.")
            check_runs(server)
        return "remote", server
    if server is not None:
        raise UsageError(
            f"--backend {kind} loads a model here, but {server} is a server", "Leave one of the two out."
        )
    return kind, None


def _check_vision(name: str) -> None:
    """Raise ``UsageError`` for a model without a vision tower. Raises what ``locate_or_download`` raises."""
    from vlfit.checkpoint.config import text_only_error
    from vlfit.checkpoint.source import locate_or_download
    from vlfit.models.registry import read_config

    model, folder = locate_or_download(name)
    if read_config(folder).vision is None:
        raise text_only_error(model, folder)


# Errors of one picture; after any other error the next picture would fail as well.
_PICTURE_ERRORS = (PictureError, DoesNotFit, UnreadableAnswer, RemoteError)


def expand_patterns(patterns: list[str]) -> list[str]:
    """Names of pictures, with globs expanded, in order. Raises ``UsageError`` if ``-`` is given twice."""
    from vlfit.tasks.pictures import expand_globs

    names = expand_globs(patterns)
    if names.count("-") > 1:
        raise UsageError(f"- is given {names.count('-')} times", "Stdin holds one picture: give - once.")
    return names


def named_parts(name: str, parts: "Iterator[FilePart]") -> "Iterator[tuple[str, FilePart]]":
    """Each of ``parts``, which one file was expanded into, with a name to print.

    The name is ``name``, that of the file, if it has one part; else the label of the page or frame.
    """
    first = next(parts, None)
    if first is None:
        return
    second = next(parts, None)
    if second is None:
        yield name, first
        return
    for part in chain((first, second), parts):
        yield part.label, part


def for_each_picture(names: list[str], work: Callable[[str], None]) -> None:
    """Call ``work`` with each of ``names``; if there are several, print the error of one that fails, go on.

    Only errors that concern one picture (``PictureError``, ``DoesNotFit``, ``UnreadableAnswer``,
    ``RemoteError``) are handled so; others are raised. Raises the error of a single picture; exits with code
    1 at the end if any of several failed.
    """
    from vlfit.tasks.pictures import source_label

    failed = 0
    for name in names:
        try:
            work(name)
        except _PICTURE_ERRORS as error:
            if len(names) == 1:
                raise
            print_error(error, about=source_label(name))
            failed += 1
    if failed:
        print_error(VlfitError(f"{failed} of {len(names)} pictures failed"))
        raise typer.Exit(1)
