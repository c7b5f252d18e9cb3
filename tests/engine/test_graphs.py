"""Decoding by graphs: recorded inputs say of a batch what tensors made for it say. Recording itself needs a
GPU; on a CPU what would be recorded is run.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.kernels.conftest import ON_GPU
from tests.engine.test_parity import CONVERSATIONS, run
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine import graphs, kernels
from vlfit.engine.engine import Engine
from vlfit.engine.graphs import sizes_for
from vlfit.engine.options import EngineOptions
from vlfit.engine.scores import Scores

SPOKEN = [CONVERSATIONS["picture"], CONVERSATIONS["text"], CONVERSATIONS["text"]]
TOKENS = 3


@pytest.mark.parametrize(
    ("sequences", "sizes"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (4, (1, 2, 4)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))],
)
def test_graphs_are_few_and_one_holds_all(sequences: int, sizes: tuple[int, ...]) -> None:
    assert sizes_for(sequences) == sizes


class Rerun:
    """In place of a graph: runs anew what it would replay."""

    def __init__(self, step: Callable[[], Scores], pool: object, device: object) -> None:
        self.scores = step()
        self._step = step

    def replay(self) -> None:
        self.scores = self._step()


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="tests/engine/test_gpu.py runs it on the GPU")
@pytest.mark.filterwarnings("default::DeprecationWarning")
def test_rows_that_nobody_needs_leave_nothing_behind(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Four rows for three sequences, and for two and one when the others have ended."""
    pytest.importorskip("triton")
    folder = tiny("odd_vocab_one_kv_head")
    options = EngineOptions(device="cpu", context=256, sequences=4, graphs=False)
    expected = run(Engine(open_checkpoint(folder), options), *SPOKEN, tokens=TOKENS)
    monkeypatch.setattr(kernels, "used_on", lambda device: True)
    monkeypatch.setattr(kernels.attention, "decode_splits", lambda _: 2)
    monkeypatch.setattr(graphs, "Graph", Rerun)
    monkeypatch.setattr(graphs, "sizes_for", lambda sequences: (sequences,))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    engine = Engine(open_checkpoint(folder), options)
    engine.runner.cache.keys.fill_(torch.nan)
    engine.runner.record_graphs(engine.context, 4)
    assert engine.runner.cache.keys.isnan().all(), "recording wrote into the cache"
    assert run(engine, *SPOKEN, tokens=TOKENS) == expected
