"""An engine that sleeps where memory, RAM or files are gone: it waits on, and nothing is lost by it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.sleeping import SLEEPER, held, pretend_gpu, say, settled
from tests.engine.sleeping import backend as backend
from vlfit.backends.native import NativeBackend
from vlfit.engine.memory.sleep import Sleep, _ram
from vlfit.errors import CannotWake, CheckpointError, DoesNotFit, MissingFile, UsageError
from vlfit.loading.loader import Loader
from vlfit.machine.host import read_host
from vlfit.units import GIB


def with_free_ram(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    host = replace(read_host(), ram_available=free)
    monkeypatch.setattr("vlfit.engine.memory.sleep.read_host", lambda: host)


def test_others_have_the_memory(backend: NativeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    words = say(backend)
    settled(backend.sleep())
    budget = backend._loop.engine.passes.budget
    with monkeypatch.context() as patched:
        patched.setattr(budget, "free", lambda: 3 * 1024)
        for _ in range(3):
            with pytest.raises(CannotWake) as caught:
                say(backend)
            assert "3.0 KiB were free" in caught.value.message
            assert "needs" in caught.value.message
            assert caught.value.retry_after > 0
            with pytest.raises(CannotWake):
                settled(backend.wake())
            assert backend.asleep
            assert held(backend) == 0
    assert say(backend) == words
    assert backend.account().counters.failed == 3


def test_a_smaller_pool_where_others_have_some_of_it(
    backend: NativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = say(backend)
    engine = backend._loop.engine
    blocks, least = engine.pool.blocks, engine.pool.blocks_for(512)
    assert least < blocks
    settled(backend.sleep())
    block = engine.runner.cache.block_bytes
    with monkeypatch.context() as patched:
        patched.setattr(engine.passes.budget, "free", lambda: engine.sleep._beside + (least + 5) * block + 1)
        assert say(backend) == words
    assert engine.pool.blocks == least + 5
    # The cap of the plan has no room for what is to stay free, and need not: the card has.
    settled(backend.sleep())
    whole = engine.sleep._beside + blocks * block
    with monkeypatch.context() as patched:
        patched.setattr(engine.passes.budget, "free", lambda: whole)
        patched.setattr(engine.sleep, "_reserve", 7 * block)
        patched.setattr(engine.passes.budget, "device_free", lambda: whole + 5 * block)
        assert say(backend) == words
    assert engine.pool.blocks == blocks - 2
    settled(backend.sleep())
    assert say(backend) == words
    assert engine.pool.blocks == blocks


@pytest.mark.parametrize("park", ["files", "ram"])
@pytest.mark.parametrize("where", ["weights", "pool"])
def test_memory_that_is_gone_halfway(
    backend: NativeBackend, monkeypatch: pytest.MonkeyPatch, park: str, where: str
) -> None:
    """What was taken by then is given back, and the next request tries again."""
    words = say(backend)
    if park == "ram":
        pretend_gpu(backend, monkeypatch)
    settled(backend.sleep())

    def taken(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    with monkeypatch.context() as patched:
        if where == "pool":
            real = Sleep._resize_pool
            patched.setattr(
                Sleep, "_resize_pool", lambda self, blocks: taken() if blocks else real(self, blocks)
            )
        elif park == "files":
            patched.setattr(Loader, "linear", taken)
        else:
            patched.setattr("vlfit.engine.memory.sleep.Parked._fetch", taken)
        for _ in range(3):
            with pytest.raises(CannotWake):
                say(backend)
            assert backend.asleep
            assert held(backend) == 0
    assert say(backend) == words


def test_files_that_are_gone(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it sleeps: then it does not. While it sleeps: then it wakes once they are back."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in tiny("tied").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    [weights] = folder.glob("*.safetensors")
    with NativeBackend.load(folder, SLEEPER) as backend:
        words = say(backend)
        away = weights.rename(tmp_path / "away")
        with pytest.raises(MissingFile, match="gone"):
            settled(backend.sleep())
        assert not backend.asleep
        assert say(backend) == words
        away.rename(weights)
        settled(backend.sleep())
        weights.rename(away)
        with pytest.raises((CheckpointError, OSError)):
            say(backend)
        assert backend.asleep
        away.rename(weights)
        assert say(backend) == words


def test_where_weights_wait(backend: NativeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: in RAM, unless there is too little of it."""
    rest = backend._loop.engine.sleep
    with pytest.raises(UsageError, match="on a CPU"):
        settled(backend.sleep("ram"))
    assert not backend.asleep
    assert rest._place("auto", GIB) == "files"
    monkeypatch.setattr(rest._budget, "device", torch.device("cuda"))
    with_free_ram(monkeypatch, 2 * GIB)
    assert rest._place("auto", GIB) == rest._place("ram", GIB) == "ram"
    assert rest._place("files", GIB) == "files"
    assert rest._place("auto", 2 * GIB) == "files"
    with pytest.raises(DoesNotFit) as caught:
        rest._place("ram", 2 * GIB)
    assert "2.00 GiB of weights do not fit in RAM, of which 2.00 GiB are free" in caught.value.message


def test_ram_that_is_gone_when_it_is_asked_for(
    backend: NativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody chose RAM, so the files do as well."""
    words = say(backend)
    pretend_gpu(backend, monkeypatch)

    def refuse(size: int) -> Any:
        if size > 4096:
            raise MemoryError("made up")
        return _ram(size)

    monkeypatch.setattr("vlfit.engine.memory.sleep._ram", refuse)
    with pytest.raises(DoesNotFit):
        settled(backend.sleep("ram"))
    assert not backend.asleep
    assert say(backend) == words
    rest = settled(backend.sleep())
    assert rest.asleep is not None
    assert rest.asleep.parked == "files"
    assert say(backend) == words
