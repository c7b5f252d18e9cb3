"""Recordings that fail: a picture is looked at all the same, and what is said is why. Recording needs a GPU;
here what would be recorded is run.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vlfit.engine.execution import encoder_graph as recorded
from vlfit.engine.execution.encoder_graph import IN_A_ROW, Place, Recorded
from vlfit.engine.execution.step_executor import Passes
from vlfit.engine.memory.budget import is_shortage
from vlfit.loading import pinned as streams

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
    monkeypatch.setattr(recorded, "record", recorder)
    monkeypatch.setattr(recorded, "bytes_of", lambda _: 1000)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return recorder


def double(hidden: Tensor, place: Place) -> None:
    """What the blocks do here."""
    hidden *= 2
    place(0).copy_(hidden)


def see(by: Recorded, grid: tuple[int, int], times: int = 1) -> None:
    """Pictures of ``grid``, each another, are looked at rightly."""
    for number in range(times):
        output = torch.zeros(4, 3)
        by.look(grid, torch.full((4, 3), float(number + 1)), lambda _, to=output: to, 1, double)  # type: ignore[misc]
        assert torch.equal(output, torch.full((4, 3), 2.0 * (number + 1)))


def test_a_grid_that_cannot_be_recorded_is_looked_at_without(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    by = Recorded(CPU, 100)
    see(by, OTHER, IN_A_ROW + 1)
    assert (recorder.tries, by.nbytes) == (1, 1000)
    recorder.room = False
    with caplog.at_level(logging.WARNING):
        see(by, GRID, IN_A_ROW + 4)
    assert (recorder.tries, by.nbytes) == (2, 0)
    assert [record.message for record in caplog.records] == [
        "pictures of 2x2 patches are looked at without a recording: "
        "CUDA out of memory. Tried to allocate 96.00 MiB."
    ]
    recorder.room = True
    see(by, GRID, IN_A_ROW + 1)
    assert recorder.tries == 2
    see(by, OTHER, IN_A_ROW + 2)  # others are
    assert (recorder.tries, by.nbytes) == (3, 1000)


def test_who_is_short_of_memory_takes_the_recording(recorder: Recorder) -> None:
    by = Recorded(CPU, 100)
    see(by, GRID, IN_A_ROW + 1)
    released: list[int] = []
    runner: Any = SimpleNamespace(image_cache={}, recorded=by)
    budget: Any = SimpleNamespace(release=lambda: released.append(by.nbytes))
    Passes(runner, budget, lambda _: "")._make_room()
    assert released == [0]  # gone before spare memory is given back
    see(by, GRID, IN_A_ROW)
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
        streams.record(CPU, short)
    assert is_shortage(raised.value)
    with pytest.raises(RuntimeError, match="previous error"):
        streams.record(CPU, lambda: None)
