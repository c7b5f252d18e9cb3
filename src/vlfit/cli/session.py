"""From options to a model that answers: settings read, `auto` decided and said, loading shown on stderr.

The model is opened when it is first needed, so that a missing file is reported before gigabytes are loaded.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Self, TypeVar

import typer

from vlfit.cli.loading import Progress, files_for, loading
from vlfit.cli.options import CommonOptions, refuse_engine_options
from vlfit.cli.printing import Printer, print_error
from vlfit.errors import DoesNotFit, PictureError, RemoteError, UnreadableAnswer, UsageError, VlfitError

if TYPE_CHECKING:
    from vlfit.backends.opening import Kind, Wanted
    from vlfit.client import VisionModel
    from vlfit.settings import Settings
    from vlfit.tasks.sampling_options import SamplingOptions


T = TypeVar("T")


class Session:
    """One run of a command. Raises ``UsageError`` at once for options that make no sense together.

    ``looks``: the command is about pictures; a model that reads text only is refused before it is loaded.
    """

    def __init__(self, options: CommonOptions, *, looks: bool = False) -> None:
        from vlfit.settings import read_settings

        self._looks = looks
        self.printer = Printer(json=options.json, stream=options.stream, quiet=options.quiet)
        self._typed = options
        self._settings = read_settings(
            model=options.model,
            backend=options.backend,
            vllm_python=options.vllm_python,
            server=options.server,
            device=options.device,
            dtype=options.dtype,
            context=options.context,
            kv_dtype=options.kv_dtype,
            image_tokens=options.image_tokens,
            offload=options.offload,
            speculate=options.speculate,
        )
        self.sampling = self._read_sampling()
        self.kind, self._server = backend_of(self._settings, options.backend, options.server)
        if self._server is not None:
            names = ("device", "dtype", "context", "kv_dtype", "image_tokens", "offload", "speculate")
            refuse_engine_options(self._server, {name: getattr(options, name) for name in names})
        else:
            self._check_engine_options()

    @cached_property
    def model(self) -> "VisionModel":
        """The model, opened now. Raises what ``VLM`` and ``Client`` raise."""
        return self.open(_vision_model)

    def wanted(self) -> "Wanted":
        """Who is to run which model, and how, for commands that open it in their own way. What ``auto`` means
        is decided and said. Raises ``UsageError`` for a model that cannot look, if the command is to.
        """
        from vlfit.api.engine_options import EngineOptions
        from vlfit.backends.opening import Wanted
        from vlfit.client import choose_model

        settings, name = self._settings, self._settings.model
        if self.kind == "remote":
            key = settings.server_key or settings.api_key
            known = key.get_secret_value() if key else None
            called = None if name == "auto" else name
            return Wanted(kind=self.kind, model=called, server=self._server, api_key=known)
        if name == "auto":
            choice = choose_model(self.kind)
            name = choice.model
            self.printer.note(choice.reason)
        if self.kind == "native" and self._looks:
            _check_eyes(name)
        options = EngineOptions(
            device=settings.device,
            dtype=settings.dtype,
            context=settings.context,
            kv_dtype=settings.kv_dtype,
            image_tokens=settings.image_tokens,
            offload=settings.offload,
            speculate=settings.speculate,
        )
        trusted = self._typed.trust_remote_code
        wanted = Wanted(kind=self.kind, model=name, options=options, trust_remote_code=trusted)
        if self.kind != "vllm":
            return wanted
        from vlfit.cli.serving_vllm import vllm_options

        return replace(wanted, vllm=vllm_options(settings))

    def seen(self) -> "dict[str, int | None] | None":
        """The engine's options that change what is seen and said, None for what it takes by itself; of a
        server, which has its own, nothing.
        """
        if self.kind == "remote":
            return None
        return {"image_tokens": self._settings.image_tokens, "context": self._settings.context}

    def open(self, opener: "Callable[[Wanted, Progress], T]") -> T:
        """What ``opener`` makes of what is wanted; loading is shown meanwhile."""
        from vlfit.backends.base import Phases
        from vlfit.loading import preload as head_start

        wanted = self.wanted()
        if wanted.kind == "remote":
            return opener(wanted, lambda what, share: None)
        phases = Phases()
        if wanted.kind == "native":
            head_start.make_context(wanted.options.device)
        if wanted.kind == "vllm":
            from vlfit.cli.serving_vllm import starting, vllm_options

            with starting(self.printer, phases) as (tell, progress):
                opened = opener(replace(wanted, vllm=vllm_options(self._settings, tell=tell)), progress)
        else:
            files = files_for(wanted.kind, code=wanted.trust_remote_code)
            with loading(str(wanted.model), self.printer, phases, files) as progress:
                opened = opener(wanted, progress)
        phases.end()
        if phases.loaded:
            self.printer.note(f"loaded after {phases.in_words()}")
        return opened

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if "model" in self.__dict__:
            self.model.close()

    def _read_sampling(self) -> "SamplingOptions":
        """What was typed about sampling, checked before anything is loaded."""
        from vlfit.api.sampling_params import SamplingParams
        from vlfit.tasks.sampling_options import with_options

        sampling: SamplingOptions = {}
        # The environment may limit the length of answers; what was typed goes before it, and is checked below
        # with the same words as in Python and over HTTP.
        max_tokens = self._settings.max_tokens if self._typed.max_tokens is None else self._typed.max_tokens
        if max_tokens is not None:
            sampling["max_tokens"] = max_tokens
        if self._typed.temperature is not None:
            sampling["temperature"] = self._typed.temperature
        if self._typed.top_p is not None:
            sampling["top_p"] = self._typed.top_p
        if self._typed.seed is not None:
            sampling["seed"] = self._typed.seed
        with_options(SamplingParams(), sampling)
        return sampling

    def _check_engine_options(self) -> None:
        """What makes no sense is refused before a model is said to be loading."""
        from vlfit.api.engine_options import EngineOptions

        settings = self._settings
        EngineOptions(
            device=settings.device,
            dtype=settings.dtype,
            context=settings.context,
            kv_dtype=settings.kv_dtype,
            image_tokens=settings.image_tokens,
            offload=settings.offload,
        )


def _vision_model(wanted: "Wanted", progress: "Progress") -> "VisionModel":
    from vlfit.client import VLM, Client

    if wanted.kind == "remote":
        assert wanted.server is not None
        return Client(
            wanted.server, wanted.api_key, model=None if wanted.model is None else str(wanted.model)
        )
    options = wanted.options
    assert isinstance(wanted.model, str)
    return VLM(
        wanted.model,
        backend=wanted.kind,
        trust_remote_code=wanted.trust_remote_code,
        vllm=wanted.vllm,
        device=options.device,
        dtype=options.dtype,
        context=options.context,
        kv_dtype=options.kv_dtype,
        sequences=1,  # a command asks one thing at a time: memory for more would lie idle
        image_tokens=options.image_tokens,
        offload=options.offload,
        speculate=options.speculate,
        progress=progress,
    )


def backend_of(
    settings: "Settings", typed_backend: str | None, typed_server: str | None
) -> "tuple[Kind, str | None]":
    """Who runs the model, and the URL if that is a server.

    What was typed goes before the environment: ``--backend native`` loads here whatever VLFIT_SERVER says,
    and ``--server`` asks there whatever VLFIT_BACKEND says. Raises ``UsageError`` where neither does.
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
                    "VLFIT_BACKEND is remote, and no server is named", "add --server URL, or set VLFIT_SERVER"
                )
            raise UsageError(
                "no server is named for --backend remote", "write its URL behind: --backend remote URL"
            )
        return ("native", None) if server is None else ("remote", server)
    if server is not None:
        raise UsageError(
            f"--backend {kind} runs a model here, and {server} is a server", "leave one of the two out"
        )
    return kind, None


def _check_eyes(name: str) -> None:
    """Raises ``UsageError`` for a model without a vision tower, and what ``locate`` raises for no model."""
    from vlfit.checkpoint.config import ModelConfig, no_eyes
    from vlfit.checkpoint.source import locate

    called, folder = locate(name)
    if ModelConfig.read(folder).vision is None:
        raise no_eyes(called)


# Pictures as they are named on a command line: globs, URLs, ``-``; one failing among many.
#
# Knows which failures concern one picture and which concern them all.


# The next picture may well work after one of these; after any other error it would fail alike.
_OF_ONE_PICTURE = (PictureError, DoesNotFit, UnreadableAnswer, RemoteError)


def named_pictures(patterns: list[str]) -> list[str]:
    """The pictures that ``patterns`` mean, in order. Raises ``UsageError`` when ``-`` stands there twice."""
    from vlfit.tasks.pictures import expand_pictures

    names = expand_pictures(patterns)
    if names.count("-") > 1:
        raise UsageError(
            f"- is given {names.count('-')} times", "standard input holds one picture: give - once"
        )
    return names


def for_each_picture(names: list[str], work: Callable[[str], None]) -> None:
    """Do ``work`` for every picture. With several, one that fails is reported and the others go on.

    Raises the error itself for a lone picture, and ends with exit code 1 if any of several failed.
    """
    from vlfit.tasks.pictures import name_of

    failed = 0
    for name in names:
        try:
            work(name)
        except _OF_ONE_PICTURE as error:
            if len(names) == 1:
                raise
            print_error(error, about=name_of(name))
            failed += 1
    if failed:
        print_error(VlfitError(f"{failed} of {len(names)} pictures failed"))
        raise typer.Exit(1)
