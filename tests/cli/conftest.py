"""Runs ``vlfit`` in this process, with a scripted model or a real tiny one behind it."""

import io
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from tests.scripted_backend import ScriptedBackend
from tests.server.fixtures import server, server_settings, shared_backend
from vlfit import client
from vlfit.backends.base import Backend
from vlfit.cli.main import main
from vlfit.settings import Settings

__all__ = ["server", "server_settings", "shared_backend"]


@dataclass(frozen=True)
class Ended:
    """How a run of ``vlfit`` ended."""

    code: int
    out: str
    err: str


class Terminal(io.StringIO):
    """Text that believes to be a terminal."""

    def isatty(self) -> bool:
        return True


Vlfit = Callable[..., Ended]


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No setting of whoever runs the tests reaches them, and none leaks from one to the next."""
    for name in Settings.model_fields:
        monkeypatch.setenv(f"VLFIT_{name.upper()}", "")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))  # records of servers
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))  # what verify found


@pytest.fixture(autouse=True)
def _whole_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in this process, whose other tests need all of torch."""
    monkeypatch.setattr("vlfit.loading.preload.defer_meta_registrations", lambda: None)


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    """`vlfit serve` in this process logs to stderr, which is a test's own and closed behind it."""
    loggers = [logging.getLogger(name) for name in ("vlfit", "uvicorn")]
    before = [(logger, list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate


@pytest.fixture
def vlfit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Vlfit:
    """``vlfit("caption", "a.png", stdin=...)``: run the program as the shell would, in this process."""

    def run(*arguments: object, stdin: bytes | str | io.StringIO = b"") -> Ended:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        file = io.TextIOWrapper(io.BytesIO(data)) if isinstance(data, bytes) else data
        monkeypatch.setattr(sys, "argv", ["vlfit", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", file)
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Ended(int(ended.value.code or 0), out, err)

    return run


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> ScriptedBackend:
    """What ``vlfit`` loads instead of a model; put its answers into ``answers``."""
    backend = ScriptedBackend([])
    monkeypatch.setattr(client, "VLM", lambda *_, **__: client.VisionModel(backend))
    return backend


@pytest.fixture(scope="session")
def tiny_model(tiny: Callable[[str], Path]) -> Iterator[client.VLM]:
    """A real model with random weights, loaded once."""
    import torch

    torch.set_num_threads(1)
    with client.VLM(tiny("tied"), device="cpu", context=1024, sequences=1) as model:
        yield model


@pytest.fixture
def with_tiny_model(
    monkeypatch: pytest.MonkeyPatch, tiny_model: client.VLM, tiny: Callable[[str], Path]
) -> None:
    """``vlfit`` gets the loaded model, and cannot close it for the tests after."""
    monkeypatch.setattr(
        client, "VLM", lambda *_, **__: client.VisionModel(cast("Backend", _Lent(tiny_model._backend)))
    )
    for user in ("vlfit.cli.loading", "vlfit.checkpoint.source"):  # "tiny" is no real name
        monkeypatch.setattr(f"{user}.locate_or_download", lambda name, *_: (name, tiny("tied")))
    monkeypatch.setattr("vlfit.cli.session.resolve_or_ask", lambda name, *_, **__: name)


class _Lent:
    def __init__(self, backend: Backend) -> None:
        self.model = backend.model
        self.stream = backend.stream
        self.default_sampling = backend.default_sampling
        self.without_thinking = backend.without_thinking

    def close(self) -> None:
        """The lender closes."""
