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

from vlfit.engine.execution.encoder_graph import REPEATS_BEFORE_CAPTURE, EncoderGraph
from vlfit.engine.execution.step_executor import StepExecutor
from vlfit.engine.memory.budget import is_out_of_memory
from vlfit.loading import pinned as streams
from vlfit.models.interface import LevelOutput

CPU = torch.device("cpu")
GRID, OTHER = (2, 2), (2, 4)


class CaptureStub:
    """Stands in for ``capture_graph``: fails unless ``has_memory``, counts ``tries``."""

    def __init__(self) -> None:
        self.has_memory = True
        self.tries = 0

    def __call__(self, device: torch.device, run: Callable[[], Any], pool: Any) -> tuple[Any, Any]:
        self.tries += 1
        outputs_of_run = run()
        if not self.has_memory:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 96.00 MiB.")
        before, outputs = outputs_of_run
        return lambda: double(before, outputs.__getitem__), outputs_of_run


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> CaptureStub:
    capture = CaptureStub()
    monkeypatch.setattr(streams, "capture_graph", capture)
    monkeypatch.setattr(streams, "graph_pool_bytes", lambda _: 1000)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return capture


def double(hidden: Tensor, output: LevelOutput) -> None:
    """Stands in for the tower's blocks."""
    hidden *= 2
    output(0).copy_(hidden)


def encode(graph: EncoderGraph, grid: tuple[int, int], times: int = 1) -> None:
    """Encode ``times`` different images of ``grid`` and check the output."""
    for number in range(times):
        output = torch.zeros(4, 3)
        graph.forward(grid, torch.full((4, 3), float(number + 1)), lambda _, to=output: to, 1, double)  # type: ignore[misc]
        assert torch.equal(output, torch.full((4, 3), 2.0 * (number + 1)))


def test_a_grid_that_cannot_be_captured_is_encoded_eagerly(
    capture: CaptureStub, caplog: pytest.LogCaptureFixture
) -> None:
    graph = EncoderGraph(CPU, 100)
    encode(graph, OTHER, REPEATS_BEFORE_CAPTURE + 1)
    assert (capture.tries, graph.nbytes) == (1, 1000)
    capture.has_memory = False
    with caplog.at_level(logging.WARNING):
        encode(graph, GRID, REPEATS_BEFORE_CAPTURE + 4)
    assert (capture.tries, graph.nbytes) == (2, 0)
    (message,) = caplog.messages
    assert "2x2" in message
    assert "CUDA out of memory. Tried to allocate 96.00 MiB." in message
    capture.has_memory = True
    encode(graph, GRID, REPEATS_BEFORE_CAPTURE + 1)
    assert capture.tries == 2
    encode(graph, OTHER, REPEATS_BEFORE_CAPTURE + 2)  # other grids are still captured
    assert (capture.tries, graph.nbytes) == (3, 1000)


def test_out_of_memory_frees_captured_graphs(capture: CaptureStub) -> None:
    graph = EncoderGraph(CPU, 100)
    encode(graph, GRID, REPEATS_BEFORE_CAPTURE + 1)
    released: list[int] = []
    runner: Any = SimpleNamespace(encoder_cache={}, encoder_graph=graph)
    budget: Any = SimpleNamespace(release=lambda: released.append(graph.nbytes))
    StepExecutor(runner, budget, lambda _: "")._free_caches()
    assert released == [0]  # gone before spare memory is given back
    encode(graph, GRID, REPEATS_BEFORE_CAPTURE)
    assert capture.tries == 1


class BrokenGraph:
    """A CUDA graph whose capture fails."""

    def capture_begin(self, **_: object) -> None: ...

    def capture_end(self) -> None:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def replay(self) -> None: ...


def test_out_of_memory_during_capture_is_raised_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, stub in (
        ("synchronize", lambda _: None),
        ("CUDAGraph", BrokenGraph),
        ("stream", lambda _: nullcontext()),
    ):
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(streams, "side_stream", lambda _: None)

    def run_out_of_memory() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError) as raised:
        streams.capture_graph(CPU, run_out_of_memory)
    assert is_out_of_memory(raised.value)
    with pytest.raises(RuntimeError, match="previous error"):
        streams.capture_graph(CPU, lambda: None)
