"""What all tests share: one thread, no network, no progress bars, and tiny checkpoints built once."""

import gc
import logging
import os
import shutil
import signal
import ssl
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.compiler_cache import write_caching_compiler
from tests.triton_interpreter import hasten_interpreter
from vlfit.machine.processor import find_c_compiler

# Until all tests are collected: going through the syntax trees of all modules takes longer than making them.
gc.disable()

if TYPE_CHECKING:
    from vlfit.machine.model import Processor

# pytest loads readline, which writes the terminal's size, or 80 x 24, into the environment of C alone: child
# processes, xdist's workers among them, would wrap what they print.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)
    os.unsetenv(_name)
# Before anything imports torch or huggingface_hub: both read their environment only then.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
# Nor does any test read or write what whoever tests has converted, measured or started. Records of running
# servers are each worker's own: `vlfit stop` of one worker's test would end the server of another's. What is
# compiled is shared by all workers, which inherit the folder and the compiler.
_FOLDER = Path(tempfile.gettempdir()) / f"vlfit-tests-{os.getpid()}"
for _name, _folder in {"VLFIT_HOME": "home", "XDG_RUNTIME_DIR": "run", "XDG_STATE_HOME": "state"}.items():
    os.environ[_name] = str(_FOLDER / _folder)
if "PYTEST_XDIST_WORKER" not in os.environ:
    # A home of nobody: no test depends on models that lie in the folders of LM Studio, Ollama, llama.cpp and
    # the hub. What triton compiled for a GPU, which takes minutes, is kept where it was.
    os.environ.setdefault("TRITON_HOME", str(Path.home()))
    for _name, _folder in {"HOME": "user", "XDG_CACHE_HOME": "cache"}.items():
        os.environ[_name] = str(_FOLDER / _folder)
    Path(os.environ["HOME"]).mkdir(parents=True, exist_ok=True)
    for _name in ("OLLAMA_MODELS", "LLAMA_CACHE", "HF_HOME", "HF_HUB_CACHE"):
        os.environ.pop(_name, None)
    if (_compiler := find_c_compiler()) is not None:
        os.environ["CC"] = str(write_caching_compiler(_FOLDER / "compiler", _compiler))
# Before anything imports triton: without an NVIDIA GPU (or WSL2's window to one) its kernels are interpreted.
if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg")):
    os.environ["TRITON_INTERPRET"] = "1"

# A script's background job inherits SIGINT as ignored, and so would the programs that tests interrupt: a
# program starts with the default only where its parent does not ignore the signal.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a checkpoint of ``tests/tiny.py`` by name, built when asked for. Not to be changed."""
    root = tmp_path_factory.mktemp("tiny-checkpoints")

    @cache
    def build(name: str) -> Path:
        from tests.tiny import build_tiny

        return build_tiny(name, root / name)

    return build


@pytest.fixture(scope="session", autouse=True)
def _no_models_of_others() -> Iterator[None]:
    """None of Ollama's service, nor of the users of Windows under WSL2, whose folders no variable names."""
    from vlfit.checkpoint.gguf import places

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(places, "OLLAMA_SERVICE", ())
        patch.setattr(places, "WINDOWS_USERS", Path("/nowhere"))
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Let each worker import test modules from another place on, so that no two compile the same ones.

    Where nothing is compiled yet, as in CI, that takes longer than all else before the first test: in one
    order each worker would compile, and rewrite the asserts of, what the others do at the same moment.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    left_out = {Path(each).absolute() for each in session.config.getoption("ignore") or ()}
    files = [
        file
        for each in session.config.args
        for file in sorted(Path(each.partition("::")[0]).absolute().rglob("test_*.py"))
        if left_out.isdisjoint((file, *file.parents))
    ]
    begin = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for file in (*files[begin:], *files[:begin]):
        # What cannot be imported, or is skipped, is so again when it is collected, which says why.
        with suppress(Exception, pytest.skip.Exception):
            import_module(".".join(file.relative_to(session.config.rootpath).with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where there is none."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_runtest_setup() -> None:
    """Triton's interpreter is imported with the first kernel that is launched."""
    if (interpreter := sys.modules.get("triton.runtime.interpreter")) is not None:
        hasten_interpreter(interpreter)


def pytest_unconfigure() -> None:
    """Remove what tests wrote into their own home."""
    shutil.rmtree(_FOLDER, ignore_errors=True)


def pytest_collection_finish() -> None:
    """What tests have imported, as torch, stays: the collector need not go through it, not even once."""
    gc.freeze()
    gc.enable()
    # Tests make and drop models by the thousand objects.
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture(scope="module")
def few_to_collect() -> None:
    """For tests that ask the collector often: it goes through what they make alone."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def only_its_own_to_collect() -> None:
    """The same for each test, which finds what the ones before have imported and made."""
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_decoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a text-only checkpoint of ``tests/tiny_decoders.py``, likewise."""
    root = tmp_path_factory.mktemp("tiny-decoders")

    @cache
    def build(name: str) -> Path:
        from tests.tiny_decoders import build_decoder

        return build_decoder(name, root / name)

    return build


@pytest.fixture(scope="session")
def tiny_qwen3_5(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a checkpoint of ``tests/tiny_qwen3_5.py``, likewise."""
    root = tmp_path_factory.mktemp("tiny-qwen3-5")

    @cache
    def build(name: str) -> Path:
        from tests.tiny_qwen3_5 import build_qwen3_5

        return build_qwen3_5(name, root / name)

    return build


@pytest.fixture(scope="session", autouse=True)
def _certificates_read_once() -> Iterator[None]:
    """Every client of HTTP reads the world's certificates, which takes longer than most of the tests do."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def _commands_built_once() -> Iterator[None]:
    """A program makes the command line's parser once; each run here would, and most take less time."""
    import typer.main

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield


@pytest.fixture(scope="session", autouse=True)
def _processor_not_measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands that plan without a GPU measure the processor for a second; here all get the same speeds.

    They are kept where no other program finds them. Programs that tests start find them in the cache that all
    share: what they measured beside other tests would not count as quiet, and each would measure again.
    """
    from vlfit.machine.processor import read_processor
    from vlfit.plan import processors

    kept = tmp_path_factory.mktemp("processor") / "cpu.json"

    def measured(processor: "Processor") -> "Processor":
        return replace(
            processor, bandwidth=40 * 10**9, multiplications=600 * 10**9, measured="2026-11-23", quiet=True
        )

    processors.save(measured(read_processor()))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("vlfit.machine.processor.measure", measured)
        patched.setattr("vlfit.plan.processors.speeds_path", lambda _: kept)
        yield


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """A command that serves says where the log of its whole process goes: here that is for one test."""
    loggers = [logging.getLogger(name) for name in ("vlfit", "uvicorn")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture
def full_disk() -> Callable[[], AbstractContextManager[None]]:
    """``with full_disk():`` lets no file grow beyond 100 bytes: writing fails as on a disk that is full.

    Python would cut off the bytecode of modules that are imported meanwhile, and read it later.
    """
    resource = pytest.importorskip("resource", reason="needs limits of processes")

    @contextmanager
    def limited() -> Iterator[None]:
        before, wrote = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        sys.dont_write_bytecode = True
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            sys.dont_write_bytecode = wrote

    return limited
