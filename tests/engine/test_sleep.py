"""Sleep and wake: the same answers before and after, nothing held in between."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.sleeping import SLEEPER, answer_text, engine_tensor_bytes, pretend_gpu, sleep_result
from tests.engine.sleeping import backend as backend
from vlfit.api.conversation import single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.outputs import Chunk
from vlfit.api.sampling_params import SamplingParams
from vlfit.api.stats import SleepResult
from vlfit.backends.native import NativeBackend
from vlfit.errors import EngineStopped, UsageError


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(12_000):
        if condition():
            return
        time.sleep(0.005)
    pytest.fail("waited in vain")


@pytest.mark.parametrize("park", ["files", "ram"])
@pytest.mark.parametrize("name", ["tied", "fp8", "untied_sharded"])
def test_the_same_words_before_and_after(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str, park: str
) -> None:
    with NativeBackend.load(tiny(name), SLEEPER) as backend:
        if park == "ram":
            pretend_gpu(backend, monkeypatch)
        assert backend.capabilities.sleep
        before, words = engine_tensor_bytes(backend), [answer_text(backend, seed) for seed in range(3)]
        whole = backend.account().memory
        for _ in range(2):
            rest = sleep_result(backend.sleep())
            assert rest.changed
            assert rest.asleep is not None
            assert rest.asleep.level == park
            assert engine_tensor_bytes(backend) == 0
            assert backend.asleep
            account = backend.account()
            assert account.asleep == rest.asleep
            assert set(account.memory.weights.values()) == {0}
            assert (account.memory.kv_cache, account.memory.image_cache) == (0, 0)
            assert rest.asleep.freed_bytes >= before
            assert (rest.asleep.ram_bytes >= sum(whole.weights.values())) == (park == "ram")
            assert [answer_text(backend, seed) for seed in range(3)] == words  # the first of them wakes it
            assert not backend.asleep
            now = backend.account().memory
            assert (now.weights, now.kv_cache) == (whole.weights, whole.kv_cache)


@pytest.mark.parametrize("park", ["files", "ram"])
def test_tables_that_no_file_holds_come_back(
    backend: NativeBackend, monkeypatch: pytest.MonkeyPatch, park: str
) -> None:
    """As the layout's of block numbers, and what graphs read: a graph has them at one address."""
    if park == "ram":
        pretend_gpu(backend, monkeypatch)
    layout = backend._engine_thread.engine.runner.metadata_builder
    table = layout._cached_tensor = torch.arange(5000, dtype=torch.int32).view(50, 100)
    part = table[3]
    sleep_result(backend.sleep())
    assert engine_tensor_bytes(backend) == 0
    sleep_result(backend.wake())
    assert layout._cached_tensor is table
    assert torch.equal(table.flatten(), torch.arange(5000, dtype=torch.int32))
    assert part[0] == 300


def test_weights_in_ram_can_be_left_to_the_files(
    backend: NativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = answer_text(backend, 1)
    pretend_gpu(backend, monkeypatch)
    parked = sleep_result(backend.sleep()).asleep
    assert parked is not None
    assert parked.ram_bytes > 0
    left = sleep_result(backend.sleep("files"))
    assert left.changed
    assert left.asleep is not None
    assert (left.asleep.level, left.asleep.ram_bytes) == ("files", 0)
    assert backend.account().asleep == left.asleep
    assert not sleep_result(backend.sleep("files")).changed
    assert answer_text(backend, 1) == words


def test_asked_twice_it_says_so(backend: NativeBackend) -> None:
    assert sleep_result(backend.wake()) == SleepResult(None, False, 0.0)
    first, second = sleep_result(backend.sleep()), sleep_result(backend.sleep())
    assert (first.changed, second.changed) == (True, False)
    assert first.asleep == second.asleep
    assert sleep_result(backend.wake()).changed
    assert not sleep_result(backend.wake()).changed


def test_reading_the_account_does_not_wake_it(backend: NativeBackend) -> None:
    sleep_result(backend.sleep())
    steps = backend.account().counters.steps
    for _ in range(50):
        assert backend.account().asleep
    time.sleep(0.05)
    assert backend.asleep
    assert backend.account().counters.steps == steps


def test_what_runs_and_what_comes_meanwhile_goes_first(backend: NativeBackend) -> None:
    go_on, running = threading.Event(), threading.Event()
    ends: list[object] = []

    def block(event: Chunk | Exception) -> None:
        running.set()
        go_on.wait(60)
        if isinstance(event, Exception) or event.finish_reason:
            ends.append(event)

    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    prepared = backend.prepare(single_turn("hello"), sampling)
    backend.start(prepared, sampling, block)
    assert running.wait(60)
    future = backend.sleep()
    backend.start(prepared, sampling, block)  # the engine's thread is in the middle of a step
    assert not future.done()
    assert not backend.asleep
    go_on.set()
    assert sleep_result(future).asleep
    assert [isinstance(end, Chunk) for end in ends] == [True, True]


def test_a_sleep_call_is_withdrawn(backend: NativeBackend) -> None:
    """By cancelling its future, and by ``wake``."""
    go_on, running = threading.Event(), threading.Event()

    def block(_: object) -> None:
        running.set()
        go_on.wait(60)

    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    backend.start(backend.prepare(single_turn("hello"), sampling), sampling, block)
    assert running.wait(60)
    cancelled, overruled = backend.sleep(), backend.sleep()
    assert cancelled.cancel()
    wake = backend.wake()
    go_on.set()
    assert sleep_result(overruled) == sleep_result(wake) == SleepResult(None, False, 0.0)
    with pytest.raises(CancelledError):
        cancelled.result()
    answer_text(backend)
    assert not backend.asleep


def transitions(caplog: pytest.LogCaptureFixture) -> int:
    """How often the engine has fallen asleep or woken: each is a line in the log."""
    return sum(record.name == "vlfit.engine.engine_thread" for record in caplog.records)


def test_it_falls_asleep_by_itself(tiny: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with NativeBackend.load(tiny("tied"), replace(SLEEPER, idle_sleep=0.2)) as backend:
        words = answer_text(backend)
        for woken in (1, 2):
            wait_for(lambda: backend.asleep)
            assert answer_text(backend) == words
            assert transitions(caplog) - 2 * woken in (0, 1)  # it may be asleep again by now
        # Woken without a request it stays so for as long, too.
        wait_for(lambda: backend.asleep)
        began = time.monotonic()
        sleep_result(backend.wake())
        assert backend._engine_thread._last_active >= began
        wait_for(lambda: backend.asleep)
    assert transitions(caplog) == 4 + 3


def test_never_while_a_request_runs(tiny: Callable[[str], Path]) -> None:
    with NativeBackend.load(tiny("tied"), replace(SLEEPER, idle_sleep=0.02)) as backend:

        def slow(_: object) -> None:
            time.sleep(0.05)
            asleep.append(backend.asleep)

        asleep: list[bool] = []
        sampling = SamplingParams(max_tokens=8, ignore_eos=True)
        backend.start(backend.prepare(single_turn("hello"), sampling), sampling, slow)
        wait_for(lambda: len(asleep) == 8)
        assert not any(asleep)
        wait_for(lambda: backend.asleep)


def test_a_stop_ends_its_sleep(tiny: Callable[[str], Path]) -> None:
    with NativeBackend.load(tiny("tied"), SLEEPER) as backend:
        sleep_result(backend.sleep())
    with pytest.raises(EngineStopped):
        backend.sleep()
    with pytest.raises(EngineStopped):
        backend.wake()


def test_a_pool_that_gave_way_is_not_looked_after_in_its_sleep(
    backend: NativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    engine = backend._engine_thread.engine
    sleep_result(backend.sleep())
    monkeypatch.setattr("vlfit.engine.memory.kv_resize.IDLE_INTERVAL_SECONDS", 0.01)

    def look() -> int:
        looks.append(1)
        return 0

    monkeypatch.setattr(engine.kv_resizer, "_free", look)
    sleep_result(backend.sleep())  # whatever wakes the loop
    time.sleep(0.1)
    assert looks == []
    assert engine.block_manager.num_blocks == 0


def test_idle_sleep_is_a_time() -> None:
    with pytest.raises(UsageError, match="idle_sleep"):
        EngineOptions(idle_sleep=0)
