"""Waking while memory, RAM or files are missing: the engine stays asleep and loses nothing."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.sleeping import SLEEPER, answer_text, engine_tensor_bytes, pretend_gpu, sleep_result
from tests.engine.sleeping import backend as backend
from vlfit.backends.native import NativeBackend
from vlfit.engine.memory.sleep import Sleeper, _allocate_ram
from vlfit.errors import CannotWake, CheckpointError, DoesNotFit, MissingFile, UsageError
from vlfit.loading.loader import Loader
from vlfit.machine.host import read_host
from vlfit.units import GIB


def with_free_ram(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    host = replace(read_host(), ram_available=free)
    monkeypatch.setattr("vlfit.engine.memory.sleep.read_host", lambda: host)


def test_others_have_the_memory(backend: NativeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    words = answer_text(backend)
    sleep_result(backend.sleep())
    budget = backend._engine_thread.engine.executor.budget
    with monkeypatch.context() as patched:
        patched.setattr(budget, "available_bytes", lambda: 3 * 1024)
        for _ in range(3):
            with pytest.raises(CannotWake) as caught:
                answer_text(backend)
            assert "3.0 KiB" in caught.value.message
            assert caught.value.retry_after > 0
            with pytest.raises(CannotWake):
                sleep_result(backend.wake())
            assert backend.asleep
            assert engine_tensor_bytes(backend) == 0
    assert answer_text(backend) == words
    assert backend.account().counters.failed == 3


def test_a_smaller_pool_where_others_have_some_of_it(
    backend: NativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = answer_text(backend)
    engine = backend._engine_thread.engine
    blocks, least = engine.block_manager.num_blocks, engine.block_manager.blocks_for(512)
    assert least < blocks
    sleep_result(backend.sleep())
    block = engine.runner.cache.block_bytes
    with monkeypatch.context() as patched:
        patched.setattr(
            engine.executor.budget,
            "available_bytes",
            lambda: engine.sleeper._bytes_beside_kv + (least + 5) * block + 1,
        )
        assert answer_text(backend) == words
    assert engine.block_manager.num_blocks == least + 5
    # The cap of the plan has no room for what is to stay free, and need not: the card has.
    sleep_result(backend.sleep())
    whole = engine.sleeper._bytes_beside_kv + blocks * block
    with monkeypatch.context() as patched:
        patched.setattr(engine.executor.budget, "available_bytes", lambda: whole)
        patched.setattr(engine.sleeper, "_reserve", 7 * block)
        patched.setattr(engine.executor.budget, "device_free_bytes", lambda: whole + 5 * block)
        assert answer_text(backend) == words
    assert engine.block_manager.num_blocks == blocks - 2
    sleep_result(backend.sleep())
    assert answer_text(backend) == words
    assert engine.block_manager.num_blocks == blocks


@pytest.mark.parametrize("park", ["files", "ram"])
@pytest.mark.parametrize("where", ["weights", "pool"])
def test_memory_that_is_gone_halfway(
    backend: NativeBackend, monkeypatch: pytest.MonkeyPatch, park: str, where: str
) -> None:
    """What was taken by then is given back, and the next request tries again."""
    words = answer_text(backend)
    if park == "ram":
        pretend_gpu(backend, monkeypatch)
    sleep_result(backend.sleep())

    def taken(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    with monkeypatch.context() as patched:
        if where == "pool":
            real = Sleeper._resize_pool
            patched.setattr(
                Sleeper, "_resize_pool", lambda self, blocks: taken() if blocks else real(self, blocks)
            )
        elif park == "files":
            patched.setattr(Loader, "linear", taken)
        else:
            patched.setattr("vlfit.engine.memory.sleep.OffloadedStorages._copy_back", taken)
        for _ in range(3):
            with pytest.raises(CannotWake):
                answer_text(backend)
            assert backend.asleep
            assert engine_tensor_bytes(backend) == 0
    assert answer_text(backend) == words


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
        words = answer_text(backend)
        away = weights.rename(tmp_path / "away")
        with pytest.raises(MissingFile, match=weights.name):
            sleep_result(backend.sleep())
        assert not backend.asleep
        assert answer_text(backend) == words
        away.rename(weights)
        sleep_result(backend.sleep())
        weights.rename(away)
        with pytest.raises((CheckpointError, OSError)):
            answer_text(backend)
        assert backend.asleep
        away.rename(weights)
        assert answer_text(backend) == words


def test_where_weights_wait(backend: NativeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: in RAM, unless there is too little of it."""
    rest = backend._engine_thread.engine.sleeper
    with pytest.raises(UsageError) as refused:
        sleep_result(backend.sleep("ram"))
    assert refused.value.param == "park"
    assert not backend.asleep
    assert rest._choose_level("auto", GIB) == "files"
    monkeypatch.setattr(rest._budget, "device", torch.device("cuda"))
    with_free_ram(monkeypatch, 2 * GIB)
    assert rest._choose_level("auto", GIB) == rest._choose_level("ram", GIB) == "ram"
    assert rest._choose_level("files", GIB) == "files"
    assert rest._choose_level("auto", 2 * GIB) == "files"
    with pytest.raises(DoesNotFit) as caught:
        rest._choose_level("ram", 2 * GIB)
    assert caught.value.param == "park"
    assert caught.value.message.count("2.00 GiB") == 2


def test_ram_that_is_gone_when_it_is_asked_for(
    backend: NativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody chose RAM, so the files do as well."""
    words = answer_text(backend)
    pretend_gpu(backend, monkeypatch)

    def refuse(size: int) -> Any:
        if size > 4096:
            raise MemoryError("made up")
        return _allocate_ram(size)

    monkeypatch.setattr("vlfit.engine.memory.sleep._allocate_ram", refuse)
    with pytest.raises(DoesNotFit):
        sleep_result(backend.sleep("ram"))
    assert not backend.asleep
    assert answer_text(backend) == words
    rest = sleep_result(backend.sleep())
    assert rest.asleep is not None
    assert rest.asleep.level == "files"
    assert answer_text(backend) == words
