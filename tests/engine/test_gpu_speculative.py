"""Speculative decoding on a CUDA device: a captured verify step equals single steps."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.test_parity import CONVERSATIONS
from tests.engine.test_speculative import (
    GREEDY,
    SAMPLED,
    DrawnDrafts,
    Oracle,
    oracle,
    run_all,
    teach_oracle,
)
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine import engine as engines
from vlfit.engine.engine import NativeEngine
from vlfit.engine.execution.cuda_graphs import VerifyInputs
from vlfit.engine.scheduling.sequence import Draft
from vlfit.engine.scheduling.speculative import ModelProposer

__all__ = ["oracle"]  # a fixture
pytestmark = pytest.mark.gpu
PROMPTS = [CONVERSATIONS["picture"], CONVERSATIONS["text"], CONVERSATIONS["system and turns"]]


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
    teach_oracle(plain, PROMPTS)
    on_gpu = build(tiny(name), "cuda")
    filled = []
    fill = VerifyInputs.fill_drafts

    def counted(inputs: VerifyInputs, batch: Any) -> int:
        filled.append(len(batch))
        return fill(inputs, batch)

    monkeypatch.setattr(VerifyInputs, "fill_drafts", counted)
    for prompts in (PROMPTS[:1], PROMPTS):
        assert run_all(on_gpu, prompts, GREEDY) == run_all(plain, prompts, GREEDY)
    assert {1, 3} <= set(filled)
    assert on_gpu.counters.draft_tokens > 0
    if period > 1:
        assert on_gpu.counters.accepted_tokens > on_gpu.counters.tokens / 3


@pytest.mark.parametrize("wishes", SAMPLED, ids=str)
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
def test_seeded_answers_are_those_without_drafts(
    tiny: Callable[[str], Path], oracle: type[Oracle], wishes: dict[str, Any], graphs: bool
) -> None:
    """Alone, in company and among greedy requests. In float32; on the CPU the same tokens come out."""
    sampling = replace(GREEDY, **wishes)
    plain = build(tiny("tied"), "cuda", speculate=False, cuda_graphs=graphs)
    on_cpu = build(tiny("tied"), "cpu", speculate=False)
    assert teach_oracle(plain, PROMPTS, sampling) == run_all(on_cpu, PROMPTS, sampling)[1]
    speculating = build(tiny("tied"), "cuda", cuda_graphs=graphs)
    for prompts in (PROMPTS[:1], PROMPTS):
        assert run_all(speculating, prompts, sampling) == run_all(plain, prompts, sampling)
    mixed = [sampling, GREEDY, sampling]
    assert run_all(speculating, PROMPTS, mixed) == run_all(plain, PROMPTS, mixed)
    assert speculating.counters.accepted_tokens > speculating.counters.tokens / 4


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
def test_drawn_drafts_are_as_on_the_cpu(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    """Rejection sampling by the kernel and on the host, one request after another."""
    monkeypatch.setattr(engines, "NgramProposer", DrawnDrafts)
    monkeypatch.setattr(DrawnDrafts, "token_ids", np.array([7, 8, 9]), raising=False)
    monkeypatch.setattr("vlfit.engine.engine.secrets.randbits", lambda bits: 17)
    sampling = replace(GREEDY, temperature=2.0, top_k=60)
    answers = []
    for device in ("cpu", "cuda"):
        engine = build(tiny("tied"), device, cuda_graphs=graphs)
        answers.append([run_all(engine, [prompt], sampling)[1] for prompt in PROMPTS])
        assert engine.counters.draft_tokens > 30
    assert answers[0] == answers[1]


def test_without_graphs_they_are_a_chunk(tiny: Callable[[str], Path], oracle: type[Oracle]) -> None:
    plain = build(tiny("tied"), "cpu", speculate=False)
    teach_oracle(plain, PROMPTS)
    on_gpu = build(tiny("tied"), "cuda", cuda_graphs=False)
    assert run_all(on_gpu, PROMPTS, GREEDY) == run_all(plain, PROMPTS, GREEDY)
    assert on_gpu.counters.accepted_tokens > 0


def test_a_cache_in_fp8_says_the_same_with_guesses(tiny: Callable[[str], Path], oracle: type[Oracle]) -> None:
    plain, speculating = (
        build(tiny("tied"), "cuda", kv_dtype="fp8", speculate=wish) for wish in (False, True)
    )
    teach_oracle(plain, PROMPTS)
    assert run_all(speculating, PROMPTS, GREEDY)[1] == run_all(plain, PROMPTS, GREEDY)[1]
    assert speculating.counters.accepted_tokens > 0


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
@pytest.mark.parametrize("count", [1, 3])
def test_states_and_a_draft_model(
    tiny_qwen3_5: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, graphs: bool, count: int
) -> None:
    """Qwen3.5: its own drafts at two of four tokens, steps launched ahead between them, three in company."""

    class Sometimes(ModelProposer):
        def propose(self, generated: list[int], max_tokens: int) -> Draft:
            return Draft(wanted=0 if len(generated) % 4 < 2 else min(count, max_tokens))

    monkeypatch.setattr(engines, "BestProposer", lambda proposers: proposers[-1])
    monkeypatch.setattr(engines, "ModelProposer", Sometimes)
    plain = build(tiny_qwen3_5("large"), "cpu", speculate=False)
    on_gpu = build(tiny_qwen3_5("large"), "cuda", cuda_graphs=graphs)
    on_cpu = build(tiny_qwen3_5("large"), "cpu")
    for prompts in (PROMPTS[:1], PROMPTS):
        expected = run_all(plain, prompts, GREEDY)
        assert run_all(on_gpu, prompts, GREEDY) == expected
        assert run_all(on_cpu, prompts, GREEDY) == expected
    on_device, on_host = on_gpu.counters, on_cpu.counters
    assert on_device.model_draft_tokens > 0
    if not graphs:  # with graphs steps are launched ahead, which shifts where drafts are wanted
        assert on_device.model_accepted_tokens == on_host.model_accepted_tokens
    assert (on_gpu.runner.draft_graph is not None) == graphs
