"""Speculative decoding on a CUDA device: a captured verify step equals single steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_parity import CONVERSATIONS
from tests.engine.test_speculative import GREEDY, Oracle, hear, learn, oracle
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.engine.execution.cuda_graphs import VerifyInputs

__all__ = ["oracle"]  # a fixture
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SPOKEN = [CONVERSATIONS["picture"], CONVERSATIONS["text"], CONVERSATIONS["system and turns"]]


def build(folder: Path, device: str, **settings: Any) -> NativeEngine:
    options = {
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 64,
        **settings,
    }
    return NativeEngine(open_checkpoint(folder), EngineOptions(device=device, **options))


@pytest.mark.parametrize("period", [1, 4, 10**6], ids=["all wrong", "some wrong", "all right"])
@pytest.mark.parametrize("name", ["tied", "odd_vocab_one_kv_head", "fp8"])
def test_the_words_are_those_of_the_cpu_without_guesses(
    tiny: Callable[[str], Path],
    oracle: type[Oracle],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    period: int,
) -> None:
    """One request alone, and three that share the rows; plain steps that run ahead between guesses."""
    monkeypatch.setattr(oracle, "period", period)
    plain = build(tiny(name), "cpu", speculate=False)
    learn(plain, SPOKEN)
    on_gpu = build(tiny(name), "cuda")
    filled = []
    fill = VerifyInputs.fill_drafts

    def counted(inputs: VerifyInputs, batch: Any) -> int:
        filled.append(len(batch))
        return fill(inputs, batch)

    monkeypatch.setattr(VerifyInputs, "fill_drafts", counted)
    for asked in (SPOKEN[:1], SPOKEN):
        assert hear(on_gpu, asked, GREEDY) == hear(plain, asked, GREEDY)
    assert {1, 3} <= set(filled)
    assert on_gpu.counters.draft_tokens > 0
    if period > 1:
        assert on_gpu.counters.accepted_tokens > on_gpu.counters.tokens / 3


def test_without_graphs_they_are_a_chunk(tiny: Callable[[str], Path], oracle: type[Oracle]) -> None:
    plain = build(tiny("tied"), "cpu", speculate=False)
    learn(plain, SPOKEN)
    on_gpu = build(tiny("tied"), "cuda", cuda_graphs=False)
    assert hear(on_gpu, SPOKEN, GREEDY) == hear(plain, SPOKEN, GREEDY)
    assert on_gpu.counters.accepted_tokens > 0


def test_a_cache_in_fp8_says_the_same_with_guesses(tiny: Callable[[str], Path], oracle: type[Oracle]) -> None:
    plain, guessing = (build(tiny("tied"), "cuda", kv_dtype="fp8", speculate=wish) for wish in (False, True))
    learn(plain, SPOKEN)
    assert hear(guessing, SPOKEN, GREEDY)[1] == hear(plain, SPOKEN, GREEDY)[1]
    assert guessing.counters.accepted_tokens > 0
