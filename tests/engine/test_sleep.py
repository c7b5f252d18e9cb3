"""An engine that sleeps: the same words before and after, nothing held in between, nothing lost by it."""

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pictures import picture
from vlfit.backends.base import Sleeper
from vlfit.backends.native import NativeBackend
from vlfit.engine.account import Rest
from vlfit.engine.answer import Chunk
from vlfit.engine.conversation import ImagePart, ask
from vlfit.engine.holdings import bytes_of
from vlfit.engine.loader import Loader
from vlfit.engine.options import EngineOptions, Park
from vlfit.engine.parking import _ram
from vlfit.engine.sampling import SamplingParams
from vlfit.engine.sleep import Sleep
from vlfit.errors import (
    CannotWake,
    CheckpointError,
    DoesNotFit,
    EngineStopped,
    MissingFile,
    UsageError,
)
from vlfit.machine.host import read_host
from vlfit.units import GIB, MIB

OPTIONS = EngineOptions(device="cpu", context=512, sequences=2)


@pytest.fixture
def backend(tiny: Callable[[str], Path]) -> Iterator[NativeBackend]:
    with NativeBackend.load(tiny("tied"), OPTIONS) as loaded:
        yield loaded


def say(backend: NativeBackend, seed: int = 1, tokens: int = 12) -> str:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return backend.stream(ask("what is this?", ImagePart(picture(96, 64, seed=seed))), sampling).answer().text


def settled(wish: "Future[Rest]") -> Rest:
    return wish.result(timeout=20)


def held(backend: NativeBackend) -> int:
    """Bytes of all tensors that the engine has."""
    return bytes_of(backend._loop.engine.runner)


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    pytest.fail("waited in vain")


def pretend_gpu(backend: NativeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights may be parked in RAM: as on a GPU, where that frees something."""
    monkeypatch.setattr(Sleep, "_place", lambda *_: "ram")


def with_free_ram(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    host = replace(read_host(), ram_available=free)
    monkeypatch.setattr("vlfit.engine.sleep.read_host", lambda: host)


@pytest.mark.parametrize("park", ["files", "ram"])
@pytest.mark.parametrize("name", ["tied", "fp8", "untied_sharded"])
def test_the_same_words_before_and_after(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str, park: str
) -> None:
    with NativeBackend.load(tiny(name), OPTIONS) as backend:
        if park == "ram":
            pretend_gpu(backend, monkeypatch)
        assert isinstance(backend, Sleeper)
        before, words = held(backend), [say(backend, seed) for seed in range(3)]
        whole = backend.account().holdings
        for _ in range(2):
            rest = settled(backend.sleep())
            assert rest.changed
            assert rest.asleep is not None
            assert rest.asleep.parked == park
            assert held(backend) == 0
            assert backend.asleep
            account = backend.account()
            assert account.asleep == rest.asleep
            assert set(account.holdings.weights.values()) == {0}
            assert (account.holdings.kv_cache, account.holdings.image_cache) == (0, 0)
            assert rest.asleep.freed >= before
            assert (rest.asleep.ram >= sum(whole.weights.values())) == (park == "ram")
            assert [say(backend, seed) for seed in range(3)] == words  # the first of them wakes it
            assert not backend.asleep
            now = backend.account().holdings
            assert (now.weights, now.kv_cache) == (whole.weights, whole.kv_cache)


@pytest.mark.parametrize("park", ["files", "ram"])
def test_tables_that_no_file_holds_come_back(
    backend: NativeBackend, monkeypatch: pytest.MonkeyPatch, park: str
) -> None:
    """As the layout's of block numbers, and what graphs read: a graph has them at one address."""
    if park == "ram":
        pretend_gpu(backend, monkeypatch)
    layout = backend._loop.engine.runner.layout
    table = layout._table = torch.arange(5000, dtype=torch.int32).view(50, 100)
    part = table[3]
    settled(backend.sleep())
    assert held(backend) == 0
    settled(backend.wake())
    assert layout._table is table
    assert torch.equal(table.flatten(), torch.arange(5000, dtype=torch.int32))
    assert part[0] == 300


def test_asked_twice_it_says_so(backend: NativeBackend) -> None:
    assert settled(backend.wake()) == Rest(None, False, 0.0)
    first, second = settled(backend.sleep()), settled(backend.sleep())
    assert (first.changed, second.changed) == (True, False)
    assert first.asleep == second.asleep
    assert settled(backend.wake()).changed
    assert not settled(backend.wake()).changed


def test_looking_wakes_nobody(backend: NativeBackend) -> None:
    settled(backend.sleep())
    steps = backend.account().counters.steps
    for _ in range(50):
        assert backend.account().asleep
    time.sleep(0.05)
    assert backend.asleep
    assert backend.account().counters.steps == steps


def test_what_runs_and_what_comes_meanwhile_goes_first(backend: NativeBackend) -> None:
    go_on, heard = threading.Event(), threading.Event()
    ends: list[object] = []

    def listen(arrival: Chunk | Exception) -> None:
        heard.set()
        go_on.wait(20)
        if isinstance(arrival, Exception) or arrival.finish_reason:
            ends.append(arrival)

    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    prepared = backend.prepare(ask("hello"), sampling)
    backend.start(prepared, sampling, listen)
    assert heard.wait(20)
    wish = backend.sleep()
    backend.start(prepared, sampling, listen)  # the engine's thread is in the middle of a step
    assert not wish.done()
    assert not backend.asleep
    go_on.set()
    assert settled(wish).asleep
    assert [isinstance(end, Chunk) for end in ends] == [True, True]


def test_a_wish_is_withdrawn(backend: NativeBackend) -> None:
    """By whoever had it, and by whoever wants it awake."""
    go_on, heard = threading.Event(), threading.Event()

    def listen(_: object) -> None:
        heard.set()
        go_on.wait(20)

    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    backend.start(backend.prepare(ask("hello"), sampling), sampling, listen)
    assert heard.wait(20)
    cancelled, overruled = backend.sleep(), backend.sleep()
    assert cancelled.cancel()
    wake = backend.wake()
    go_on.set()
    assert settled(overruled) == settled(wake) == Rest(None, False, 0.0)
    with pytest.raises(CancelledError):
        cancelled.result()
    say(backend)
    assert not backend.asleep


def test_it_falls_asleep_by_itself(tiny: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with NativeBackend.load(tiny("tied"), replace(OPTIONS, idle_sleep=0.2)) as backend:
        words = say(backend)
        for _ in range(2):
            wait_for(lambda: backend.asleep)
            assert say(backend) == words
            assert not backend.asleep
        # Woken without a request it stays so for as long, too.
        wait_for(lambda: backend.asleep)
        began = time.monotonic()
        settled(backend.wake())
        assert backend._loop._active >= began
        wait_for(lambda: backend.asleep)
    assert caplog.text.count("asleep: ") == 4
    assert caplog.text.count("awake again") == 3


def test_never_while_a_request_runs(tiny: Callable[[str], Path]) -> None:
    with NativeBackend.load(tiny("tied"), replace(OPTIONS, idle_sleep=0.02)) as backend:

        def slow(_: object) -> None:
            time.sleep(0.05)
            asleep.append(backend.asleep)

        asleep: list[bool] = []
        sampling = SamplingParams(max_tokens=8, ignore_eos=True)
        backend.start(backend.prepare(ask("hello"), sampling), sampling, slow)
        wait_for(lambda: len(asleep) == 8)
        assert not any(asleep)
        wait_for(lambda: backend.asleep)


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
            patched.setattr("vlfit.engine.parking.Parked._fetch", taken)
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
    with NativeBackend.load(folder, OPTIONS) as backend:
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

    monkeypatch.setattr("vlfit.engine.parking._ram", refuse)
    with pytest.raises(DoesNotFit):
        settled(backend.sleep("ram"))
    assert not backend.asleep
    assert say(backend) == words
    rest = settled(backend.sleep())
    assert rest.asleep is not None
    assert rest.asleep.parked == "files"
    assert say(backend) == words


def test_a_stop_ends_its_sleep(tiny: Callable[[str], Path]) -> None:
    with NativeBackend.load(tiny("tied"), OPTIONS) as backend:
        settled(backend.sleep())
    with pytest.raises(EngineStopped):
        backend.sleep()
    with pytest.raises(EngineStopped):
        backend.wake()


def test_a_pool_that_gave_way_is_not_looked_after_in_its_sleep(
    backend: NativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    engine = backend._loop.engine
    settled(backend.sleep())
    monkeypatch.setattr("vlfit.engine.pressure.IDLE_SECONDS", 0.01)

    def look() -> int:
        looks.append(1)
        return 0

    monkeypatch.setattr(engine.pressure, "_free", look)
    settled(backend.sleep())  # whatever wakes the loop
    time.sleep(0.1)
    assert looks == []
    assert engine.pool.blocks == 0


def test_idle_sleep_is_a_time() -> None:
    with pytest.raises(UsageError, match="idle_sleep"):
        EngineOptions(idle_sleep=0)


# --- on a GPU ----------------------------------------------------------------------------------------------


@pytest.fixture
def gpu() -> Iterator[None]:
    """With nothing left of tests before, and no cap for those behind."""
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, torch.cuda.current_device())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("park", ["ram", "files"])
@pytest.mark.parametrize("name", ["tied", "fp8"])
def test_on_a_gpu_nothing_but_the_context_is_left(tiny: Callable[[str], Path], name: str, park: Park) -> None:
    """Graphs, workspaces and all; and what is computed afterwards is what it was."""
    elsewhere = torch.cuda.memory_reserved()
    options = EngineOptions(device="cuda", dtype="bfloat16", context=512, sequences=2, kv_tokens=200_000)
    with NativeBackend.load(tiny(name), options) as backend:
        words = [say(backend, seed, tokens=40) for seed in range(3)]
        for _ in range(3):
            account = backend.account().holdings
            before = torch.cuda.memory_reserved()
            rest = settled(backend.sleep(park))
            assert rest.asleep is not None
            assert rest.asleep.parked == park
            assert rest.asleep.freed == before - torch.cuda.memory_reserved()
            assert rest.asleep.freed >= sum(account.weights.values()) + account.kv_cache
            assert torch.cuda.memory_reserved() - elsewhere <= 4 * MIB
            assert [say(backend, seed, tokens=40) for seed in range(3)] == words
            assert torch.cuda.memory_reserved() <= before + 32 * MIB


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("park", ["ram", "files"])
def test_on_a_gpu_an_allocation_truly_fails_halfway(tiny: Callable[[str], Path], park: Park) -> None:
    """As if others took the rest after it was counted: what was there is given back, then all is there."""
    options = EngineOptions(device="cuda", dtype="bfloat16", context=512, sequences=2, kv_tokens=200_000)
    with NativeBackend.load(tiny("tied"), options) as backend:
        words = say(backend)
        held = backend.account().holdings
        size = sum(held.weights.values()) + held.kv_cache
        settled(backend.sleep(park))
        asleep = torch.cuda.memory_reserved()
        whole = torch.cuda.get_device_properties(0).total_memory
        for share in (0.01, 0.5, 0.9):  # before weights, in the pool's keys, in its values
            torch.cuda.set_per_process_memory_fraction((asleep + share * size) / whole)
            with pytest.raises(CannotWake):
                say(backend)
            assert backend.asleep
            assert torch.cuda.memory_reserved() <= asleep + 4 * MIB
        torch.cuda.set_per_process_memory_fraction(1.0)
        assert say(backend) == words
