"""The KV cache shrinks when other programs take memory, and running requests keep their tokens."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.engine.test_faults import RecordedRequest, submit_picture_request, three_streams, tokens
from tests.engine.test_faults import undisturbed as undisturbed
from vlfit.api.engine_options import EngineOptions
from vlfit.api.outputs import Chunk
from vlfit.api.sampling_params import SamplingParams
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.engine.engine_thread import EngineThread
from vlfit.engine.memory import kv_resize
from vlfit.engine.memory.kv_resize import KVResizer
from vlfit.errors import OutOfMemory
from vlfit.plan.calibration import RESERVE
from vlfit.units import GIB, MIB


class Card:
    """A device that tells what is free, and counts how often memory is given back to it."""

    def __init__(self) -> None:
        self.free = GIB
        self.released = 0

    def release(self) -> None:
        self.released += 1


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    monkeypatch.setattr(kv_resize, "CHECK_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(kv_resize, "MIN_SHRINK_BYTES", 64 * 1024)  # the pools of tests are small
    return Card()


def engine(tiny: Callable[[str], Path], card: Card, prefix_cache: bool = True) -> NativeEngine:
    options = EngineOptions(
        device="cpu",
        max_model_len=512,
        max_num_batched_tokens=64,
        kv_tokens=4096,
        prefix_cache=prefix_cache,
        enforce_plan=True,
    )
    built = NativeEngine(open_checkpoint(tiny("tied")), options)
    assert built.kv_resizer._free is None  # nobody watches RAM
    built.kv_resizer = KVResizer(
        built.scheduler, built.runner.cache, 512 // 16, lambda: card.free, card.release
    )
    return built


def wait_for(condition: Callable[[], bool]) -> None:
    """Returns once ``condition`` holds; another thread has some seconds to make it so."""
    for _ in range(12_000):
        if condition():
            return
        time.sleep(0.005)
    pytest.fail("waited in vain")


def run(built: NativeEngine) -> None:
    while built.busy:
        built.step()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_blocks_are_given_back_down_to_what_running_requests_need(
    tiny: Callable[[str], Path],
    card: Card,
    undisturbed: list[list[int]],
    caplog: pytest.LogCaptureFixture,
    prefix_cache: bool,
) -> None:
    """At any step: before all have begun, and while they speak."""
    caplog.set_level(logging.INFO)
    built = engine(tiny, card, prefix_cache)
    before = submit_picture_request(built, 70, SamplingParams(max_tokens=30, ignore_eos=True))
    streams = three_streams(built)
    for _ in range(40):
        built.step()
    assert before.has_ended  # the blocks that others hold now are not the first ones
    bytes_before = built.runner.cache.nbytes
    needed = built.block_manager.num_blocks - built.block_manager.num_free
    card.free = RESERVE.bytes - 40 * MIB
    built.step()
    assert built.block_manager.num_blocks == max(needed, 32) < built.kv_resizer.planned_blocks == 256
    assert built.runner.cache.nbytes == bytes_before * built.block_manager.num_blocks // 256
    assert card.released == 2
    assert f"{built.block_manager.num_blocks * 16} of 4096 tokens" in caplog.text
    account = built.account().pool
    assert (account.planned, account.blocks) == (256, built.block_manager.num_blocks)
    num_logged = len(caplog.records)
    for _ in range(5):
        built.step()
    assert len(caplog.records) == num_logged + 1  # that nothing is left to release: once, not at each step
    run(built)
    assert tokens(streams) == undisturbed
    assert built.block_manager.num_free == built.block_manager.num_blocks
    # A request of a whole context still fits, and later all that was planned is there again.
    whole = submit_picture_request(built, 71, SamplingParams(max_tokens=400, ignore_eos=True))
    run(built)
    assert isinstance(whole.received[-1], Chunk)
    card.free = GIB
    again = three_streams(built)
    run(built)
    assert built.block_manager.num_blocks == 256
    assert built.runner.cache.nbytes == bytes_before
    assert "4096 of 4096 tokens" in caplog.messages[-1]
    assert tokens(again) == undisturbed


def test_a_little_at_a_time_and_no_more_than_is_missing(
    tiny: Callable[[str], Path], card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = engine(tiny, card)
    block = built.runner.cache.block_bytes
    assert built.runner.cache.nbytes == 256 * block
    card.free = RESERVE.bytes - 100 * block
    monkeypatch.setattr(kv_resize, "MIN_SHRINK_BYTES", 8 * block)
    built.step()
    assert built.block_manager.num_blocks == 156
    card.free = RESERVE.bytes - 1
    built.step()
    assert built.block_manager.num_blocks == 148
    card.free = RESERVE.bytes
    built.step()
    assert built.block_manager.num_blocks == 148  # enough is free, but not enough to grow
    card.free = 2 * RESERVE.bytes + 9 * block
    built.step()
    assert built.block_manager.num_blocks == 157
    card.free = GIB
    built.step()
    assert built.block_manager.num_blocks == 256


def test_who_runs_keeps_the_pool_from_growing(tiny: Callable[[str], Path], card: Card) -> None:
    """It would be the trip through RAM for nothing that is wanted now."""
    built = engine(tiny, card)
    card.free = 0
    submit_picture_request(built, 1, SamplingParams(max_tokens=20, ignore_eos=True))
    built.step()
    assert built.block_manager.num_blocks == 32
    card.free = GIB
    built.step()
    assert built.block_manager.num_blocks == 32
    run(built)
    built.step()
    assert built.block_manager.num_blocks == 256


def test_others_that_are_faster_cost_what_runs_and_no_more(
    tiny: Callable[[str], Path], card: Card, undisturbed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take what was freed before the smaller pool is there."""
    built = engine(tiny, card)
    streams = three_streams(built)
    for _ in range(20):
        built.step()
    card.free = 0
    empty = Tensor.new_empty

    def taken(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        if 0 not in shape:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return empty(tensor, shape)

    def refused() -> list[RecordedRequest]:
        built.step()
        late = submit_picture_request(built, 9, SamplingParams(max_tokens=4))
        built.step()
        return [late]

    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "new_empty", taken)
        for _ in range(5):
            streams += refused()
    assert len(streams) == 8
    assert all(isinstance(stream.received[-1], OutOfMemory) for stream in streams)
    assert (built.block_manager.num_blocks, built.block_manager.num_free, built.busy) == (0, 0, False)
    assert built.runner.cache.nbytes == 0
    after = three_streams(built)
    built.step()
    assert built.block_manager.num_blocks == 32
    run(built)
    assert tokens(after) == undisturbed


def test_looks_are_seldom(tiny: Callable[[str], Path], card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_resize, "CHECK_INTERVAL_SECONDS", 60.0)
    built = engine(tiny, card)
    looks: list[int] = []

    def look() -> int:
        looks.append(1)
        return card.free

    built.kv_resizer._free = look
    three_streams(built)
    for _ in range(30):
        built.step()
    assert len(looks) == 1


def test_an_idle_engine_gives_back_too(
    tiny: Callable[[str], Path], card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks for anything: the game that was started must not wait for the next request."""
    monkeypatch.setattr(kv_resize, "IDLE_INTERVAL_SECONDS", 0.01)
    card.free = 0
    loop = EngineThread(lambda _: engine(tiny, card))
    try:
        wait_for(lambda: loop.engine.block_manager.num_blocks == 32)
        card.free = GIB
        wait_for(lambda: loop.engine.block_manager.num_blocks == 256)
    finally:
        loop.close()
