"""Encoder graphs whose capture fails: the image is encoded without a graph, and the reason is logged.

Capture needs a GPU; here the captured function is run.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vlfit.engine.execution import encoder_graph
from vlfit.engine.execution.encoder_graph import REPEATS_BEFORE_CAPTURE, EncoderGraph
from vlfit.engine.execution.step_executor import StepExecutor
from vlfit.engine.memory.budget import is_out_of_memory
from vlfit.loading import pinned as streams
from vlfit.models.base import LevelOutput

CPU = torch.device("cpu")
GRID, OTHER = (2, 2), (2, 4)


class Recorder:
    """Records where there is ``room``, and counts."""

    def __init__(self) -> None:
        self.room = True
        self.tries = 0

    def __call__(self, device: torch.device, run: Callable[[], Any], pool: Any) -> tuple[Any, Any]:
        self.tries += 1
        found = run()
        if not self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 96.00 MiB.")
        before, outputs = found
        return lambda: double(before, outputs.__getitem__), found


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(encoder_graph, "capture_graph", recorder)
    monkeypatch.setattr(encoder_graph, "graph_pool_bytes", lambda _: 1000)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return recorder


def double(hidden: Tensor, place: LevelOutput) -> None:
    """What the blocks do here."""
    hidden *= 2
    place(0).copy_(hidden)


def see(by: EncoderGraph, grid: tuple[int, int], times: int = 1) -> None:
    """Pictures of ``grid``, each another, are looked at rightly."""
    for number in range(times):
        output = torch.zeros(4, 3)
        by.forward(grid, torch.full((4, 3), float(number + 1)), lambda _, to=output: to, 1, double)  # type: ignore[misc]
        assert torch.equal(output, torch.full((4, 3), 2.0 * (number + 1)))


def test_a_grid_that_cannot_be_recorded_is_looked_at_without(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    by = EncoderGraph(CPU, 100)
    see(by, OTHER, REPEATS_BEFORE_CAPTURE + 1)
    assert (recorder.tries, by.nbytes) == (1, 1000)
    recorder.room = False
    with caplog.at_level(logging.WARNING):
        see(by, GRID, REPEATS_BEFORE_CAPTURE + 4)
    assert (recorder.tries, by.nbytes) == (2, 0)
    (message,) = caplog.messages
    assert "2x2" in message
    assert "CUDA out of memory. Tried to allocate 96.00 MiB." in message
    recorder.room = True
    see(by, GRID, REPEATS_BEFORE_CAPTURE + 1)
    assert recorder.tries == 2
    see(by, OTHER, REPEATS_BEFORE_CAPTURE + 2)  # others are
    assert (recorder.tries, by.nbytes) == (3, 1000)


def test_who_is_short_of_memory_takes_the_recording(recorder: Recorder) -> None:
    by = EncoderGraph(CPU, 100)
    see(by, GRID, REPEATS_BEFORE_CAPTURE + 1)
    released: list[int] = []
    runner: Any = SimpleNamespace(encoder_cache={}, encoder_graph=by)
    budget: Any = SimpleNamespace(release=lambda: released.append(by.nbytes))
    StepExecutor(runner, budget, lambda _: "")._free_caches()
    assert released == [0]  # gone before spare memory is given back
    see(by, GRID, REPEATS_BEFORE_CAPTURE)
    assert recorder.tries == 1


class Broken:
    """A graph whose recording broke off."""

    def capture_begin(self, **_: object) -> None: ...

    def capture_end(self) -> None:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def replay(self) -> None: ...


def test_a_shortage_while_recording_is_told_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, stand_in in (
        ("synchronize", lambda _: None),
        ("CUDAGraph", Broken),
        ("stream", lambda _: nullcontext()),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(streams, "side_stream", lambda _: None)

    def short() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError) as raised:
        streams.capture_graph(CPU, short)
    assert is_out_of_memory(raised.value)
    with pytest.raises(RuntimeError, match="previous error"):
        streams.capture_graph(CPU, lambda: None)
