"""Drafts, and steps launched ahead, where layers keep states: answers are those of one token at a time."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.test_cuda_graphs import FakeCapturedStep, capture_nothing, decoding
from tests.engine.test_speculative import Oracle, build, oracle, run_all, teach_oracle
from tests.kernels.conftest import ON_GPU, device
from tests.tiny_qwen3_5 import QWEN3_5, HybridSpec, build_qwen3_5
from vlfit import kernels
from vlfit.api.conversation import single_turn
from vlfit.api.sampling_params import SamplingParams
from vlfit.engine.engine import NativeEngine
from vlfit.engine.execution import cuda_graphs
from vlfit.engine.execution.cuda_graphs import DecodeGraphs
from vlfit.engine.execution.drafter import Drafter
from vlfit.engine.scheduling.sequence import Draft, ScheduledChunk, Sequence
from vlfit.engine.scheduling.speculative import ModelProposer
from vlfit.kernels.attention.paged import BlockAttentionMetadata
from vlfit.kernels.recurrent.delta_rule import DeltaRows, DeltaState, DeltaWeights
from vlfit.layers.gated_delta import gated_delta_steps
from vlfit.layers.kv_cache import KVCache
from vlfit.loading.pinned import GraphPool
from vlfit.models.cache_spec import MAX_PENDING_TOKENS, Paged, State, StateTensor

__all__ = ["device", "oracle"]  # fixtures
PROMPTS = [single_turn(text) for text in ("hello", "Describe the quick brown fox. " * 5, "a lazy dog" * 9)]
GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, top_k=12, presence_penalty=0.7, seed=11)


class Hostile(Oracle):
    """Drafts of 0 to 7 tokens, of which any number is right before the first wrong one."""

    def propose(self, generated: list[int], max_tokens: int) -> Draft:
        chance = random.Random(len(generated) * 1009 + self._answer[0])
        tokens = (
            super().propose(generated, chance.choice((max_tokens, chance.randint(0, max_tokens)))).token_ids
        )
        right = chance.choice((0, len(tokens), chance.randint(0, len(tokens))))
        return Draft(tuple(token + (index == right) for index, token in enumerate(tokens)))


@pytest.mark.parametrize(
    ("sampling", "name"),
    [
        pytest.param(GREEDY, "text", id="greedy-text"),
        pytest.param(SEEDED, "large", id="seeded-large"),
        pytest.param(GREEDY, "large", id="greedy-large", marks=pytest.mark.slow),
        pytest.param(SEEDED, "text", id="seeded-text", marks=pytest.mark.slow),
    ],
)
def test_answers_are_those_without_drafts(
    tiny_qwen3_5: Callable[[str], Path],
    oracle: type[Oracle],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    sampling: SamplingParams,
) -> None:
    """All wrong, all right, and every number of accepted tokens; alone, in company, and preempted."""
    monkeypatch.setattr("vlfit.engine.scheduling.scheduler.LOOKAHEAD_TOKENS", 8)
    monkeypatch.setattr("vlfit.engine.engine.NgramProposer", Hostile)
    folder = tiny_qwen3_5(name)
    plain, drafting = (build(folder, speculate=wish) for wish in (False, True))
    tokens = teach_oracle(plain, PROMPTS, sampling)
    accepted = set()
    deliver = NativeEngine._deliver_accepted

    def watched(engine: NativeEngine, done: Any) -> None:
        deliver(engine, done)
        accepted.add((len(done.chunk.draft_tokens), len(done.accepted)))

    monkeypatch.setattr(NativeEngine, "_deliver_accepted", watched)
    for period in (1, 3, 10**6):
        monkeypatch.setattr(Hostile, "period", period)
        assert run_all(drafting, PROMPTS, sampling)[1] == tokens
        assert [run_all(drafting, [each], sampling)[1][0] for each in PROMPTS] == tokens
    most = MAX_PENDING_TOKENS - 1
    assert {(most, 0), (most, most), (1, 0), (1, 1), (0, 0)} <= accepted
    tight = build(folder, speculate=True, max_model_len=160, kv_tokens=160, block_size=4)
    assert run_all(tight, PROMPTS, sampling)[1] == tokens
    assert tight.scheduler.num_preemptions > 0
    assert tight.counters.accepted_tokens > 0


def test_a_failed_verify_step_computes_states_again(
    tiny_qwen3_5: Callable[[str], Path], oracle: type[Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlfit.engine.engine.NgramProposer", Hostile)
    monkeypatch.setattr(Hostile, "period", 10**6)
    plain, drafting = (build(tiny_qwen3_5("text"), speculate=wish) for wish in (False, True))
    tokens = teach_oracle(plain, PROMPTS)[:2]
    expected = [each[:30] for each in tokens]
    forward = drafting.runner.run
    failures: list[int] = []

    def failing(batch: list[ScheduledChunk]) -> Any:
        output = forward(batch)
        if len(batch) > 1 and any(each.draft_tokens for each in batch) and len(failures) < 3:
            failures.append(len(batch))
            raise RuntimeError("a kernel failed")
        return output

    monkeypatch.setattr(drafting.runner, "run", failing)
    assert [each[:30] for each in run_all(drafting, PROMPTS[:2], GREEDY)[1]] == expected
    assert len(failures) == 3


# A model of one layer with a state, whose next token depends on all tokens before: for decode graphs alone.
HEADS, KEY, VALUE, KERNEL = 2, 8, 8, 4
CHANNELS = HEADS * (2 * KEY + VALUE)
VOCABULARY = 97
SPEC = (
    State(
        (
            StateTensor("conv", (CHANNELS, KERNEL - 1)),
            StateTensor("recurrent", (HEADS, KEY, VALUE)),
            StateTensor("pending_rows", (MAX_PENDING_TOKENS, CHANNELS)),
            StateTensor("pending_decay", (MAX_PENDING_TOKENS, HEADS)),
            StateTensor("pending_beta", (MAX_PENDING_TOKENS, HEADS)),
        )
    ),
    Paged(1, 8),
)


class Stateful:
    """Decode graphs of the model, and the reference: every token from the first, without a cache."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.weights = DeltaWeights(draw(CHANNELS, KERNEL), draw(HEADS), draw(HEADS))
        self.qkv, self.a, self.b = (
            draw(VOCABULARY, CHANNELS),
            draw(VOCABULARY, HEADS),
            draw(VOCABULARY, HEADS),
        )
        self.head = draw(HEADS * VALUE, VOCABULARY)
        self.cache = KVCache(SPEC, 16, 4, torch.float32, torch.device("cpu"), sequences=4)
        self.graphs = DecodeGraphs(self.step, self.cache, GraphPool(self.cache.device), VOCABULARY, 40, 4, 8)

    def compute(self, token_ids: Tensor, cache: KVCache, spans: Tensor, *, commit: bool) -> Tensor:
        ids = token_ids.long()
        rows = DeltaRows(self.qkv[ids], self.a[ids], self.b[ids])
        state = DeltaState(**cache.states[0])
        output = gated_delta_steps(rows, self.weights, state, spans, commit=commit)
        return output.flatten(1) @ self.head

    def step(self, token_ids: Tensor, positions: Tensor, metadata: BlockAttentionMetadata) -> Tensor:
        states = metadata.states
        assert states is not None
        assert not states.commit
        return self.compute(token_ids, self.cache, states.table, commit=False)

    def prefill(self, sequence: Sequence, slot: int) -> None:
        sequence.state_slot = slot
        count = sequence.num_cached_tokens
        self.compute(torch.arange(count), self.cache, torch.tensor([[0, count, slot, 1, 0]]), commit=True)

    def next_tokens(self, sequence: Sequence, drafts: tuple[int, ...] = ()) -> list[int]:
        """The tokens after the newest one and after each of ``drafts``."""
        ids = [*range(sequence.prompt.num_tokens), *sequence.generated, *drafts]
        fresh = KVCache(SPEC, 0, 4, torch.float32, torch.device("cpu"), sequences=1)
        spans = torch.tensor([[0, len(ids), 0, 1, 0]])
        logits = self.compute(torch.tensor(ids), fresh, spans, commit=True)
        return logits[-1 - len(drafts) :].argmax(1).tolist()

    def decode(self, sequences: list[Sequence], *, ahead: bool = True) -> int:
        """A decode step, and the next one launched. Returns how many passes ran."""
        before = FakeCapturedStep.replays
        wanted = [self.next_tokens(each)[0] for each in sequences]
        output = self.graphs.run(sequences)
        if ahead:
            self.graphs.launch_next(sequences)
        assert output.read()[0] == wanted
        for sequence, token in zip(sequences, wanted, strict=True):
            sequence.num_cached_tokens += 1
            sequence.generated.append(token)
        return FakeCapturedStep.replays - before

    def verify(self, sequences: list[Sequence], num_right: list[int], num_drafts: int) -> None:
        """A verify step, of whose drafts ``num_right`` of each sequence are right."""
        batch = []
        for sequence, right in zip(sequences, num_right, strict=True):
            drafts: list[int] = []
            while len(drafts) < num_drafts:
                token = self.next_tokens(sequence, tuple(drafts))[-1]
                drafts.append(token if len(drafts) < right else (token + 1) % VOCABULARY)
            batch.append(ScheduledChunk(sequence, 1 + num_drafts, tuple(drafts)))
        wanted = [self.next_tokens(chunk.sequence, chunk.draft_tokens) for chunk in batch]
        tokens = self.graphs.run_verify(batch).read()[0]
        assert tokens == [token for each in wanted for token in each]
        for chunk, right, rows in zip(batch, num_right, wanted, strict=True):
            accepted = min(right, num_drafts)
            chunk.sequence.num_cached_tokens += 1 + accepted
            chunk.sequence.pending_tokens += accepted
            chunk.sequence.generated += rows[: accepted + 1]


@pytest.fixture
def stateful(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Stateful:
    kernels_on: Callable[[object], bool] = lambda device: True  # noqa: E731
    monkeypatch.setattr(kernels, "enabled_on", kernels_on)
    monkeypatch.setattr(cuda_graphs, "CapturedStep", FakeCapturedStep)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(FakeCapturedStep, "replays", 0)
    return Stateful()


@pytest.mark.skipif(ON_GPU, reason="test_gpu_speculative.py compares the tokens of whole engines")
@pytest.mark.filterwarnings("default::DeprecationWarning")
class TestGraphs:
    def two(self, stateful: Stateful) -> tuple[Sequence, Sequence]:
        both = decoding([3, 7, 1, 9, 10, 11], 2), decoding([5, 0, 2, 12, 13, 14], 3)
        for slot, sequence in zip((2, 0), both, strict=True):
            stateful.prefill(sequence, slot)
        return both

    def test_a_step_launched_ahead_commits_the_one_before(self, stateful: Stateful) -> None:
        both = list(self.two(stateful))
        assert [stateful.decode(both) for _ in range(4)] == [2, 1, 1, 1]
        assert [each.pending_tokens for each in both] == [0, 0]
        assert stateful.decode(both, ahead=False) == 0
        assert [each.pending_tokens for each in both] == [1, 1]
        assert stateful.decode(both, ahead=False) == 1

    def test_a_discarded_step_harms_nothing(self, stateful: Stateful) -> None:
        """Because one ended, came back, has another block table, or another token was chosen."""
        one, other = self.two(stateful)
        assert stateful.decode([one, other]) == 2
        assert [stateful.decode([one]) for _ in range(2)] == [2, 1]
        assert [stateful.decode([other, one]) for _ in range(3)] == [2, 1, 1]
        one.block_table = [*one.block_table]
        assert [stateful.decode([other, one]) for _ in range(2)] == [2, 1]
        other.generated[-1] += 1
        assert [stateful.decode([other, one]) for _ in range(2)] == [2, 1]
        stateful.graphs.release()
        assert stateful.decode([one, other]) == 2

    def test_verify_steps_commit_what_was_accepted(self, stateful: Stateful) -> None:
        """Every number of accepted tokens, after steps launched ahead or not, and before them."""
        one, other = self.two(stateful)
        stateful.decode([one, other])
        stateful.verify([one, other], [0, 3], 3)
        stateful.verify([one, other], [3, 1], 3)
        stateful.decode([one, other], ahead=False)
        stateful.verify([other], [2], 2)
        stateful.decode([one, other])
        stateful.verify([one], [7], 7)
        stateful.verify([other, one], [0, 2], 2)
        assert (one.pending_tokens, other.pending_tokens) == (3, 1)
        stateful.decode([other, one])


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="tests/engine/test_gpu_speculative.py runs it on the GPU")
@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # in rows without a token
def test_an_engine_with_graphs_and_drafts(
    tiny_qwen3_5: Callable[[str], Path], oracle: type[Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interpreted kernels: steps launched ahead, discarded when one ends, and verify steps."""
    pytest.importorskip("triton")
    assert not QWEN3_5["text"].vision
    folder, prompts = tiny_qwen3_5("text"), PROMPTS[:1] * 2
    sampling = [replace(GREEDY, max_tokens=4), replace(GREEDY, max_tokens=8)]
    limits = {"max_model_len": 128, "max_num_seqs": 2, "cuda_graphs": False}
    plain = build(folder, speculate=False, **limits)
    expected = run_all(plain, prompts, sampling)[1]
    teach_oracle(plain, prompts[:1], sampling[1])
    capture_nothing(monkeypatch)
    for speculate in (False, True):
        engine = build(folder, speculate=speculate, **limits)
        engine.runner.capture_graphs(engine.context, 2, 16, 8)
        assert run_all(engine, prompts, sampling)[1] == expected
        assert (engine.counters.accepted_tokens > 0) == speculate


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="tests/engine/test_gpu_speculative.py runs it on the GPU")
@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # in rows without a token
def test_an_engine_with_graphs_and_a_draft_model(
    tmp_path: Path, oracle: type[Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured steps hand their hidden states to the draft model, also those launched ahead."""
    pytest.importorskip("triton")
    kinds = {"layer_types": ["linear_attention", "full_attention"]}
    monkeypatch.setitem(QWEN3_5, "short", HybridSpec("0.8B", layers=2, mtp=True, more=kinds))
    folder = build_qwen3_5("short", tmp_path)
    sampling = [replace(GREEDY, max_tokens=9), replace(GREEDY, max_tokens=5)]
    limits = {"max_model_len": 128, "max_num_seqs": 2, "cuda_graphs": False}

    class Sometimes(ModelProposer):
        """Two drafts at two of four tokens, of which the first is launched without them already."""

        def propose(self, generated: list[int], max_tokens: int) -> Draft:
            return Draft(wanted=0 if len(generated) % 4 < 2 else min(2, max_tokens))

    monkeypatch.setattr("vlfit.engine.engine.BestProposer", lambda proposers: proposers[-1])
    monkeypatch.setattr("vlfit.engine.engine.ModelProposer", Sometimes)
    plain = build(folder, speculate=False, **limits)
    expected = run_all(plain, PROMPTS[:1] * 2, sampling)[1]
    drafts: list[tuple[list[int], tuple[int, ...]]] = []
    draft = Drafter.draft

    def recorded(drafter: Drafter, batch: list[ScheduledChunk]) -> list[ScheduledChunk]:
        done = draft(drafter, batch)
        drafts.extend((list(chunk.sequence.generated), chunk.draft_tokens) for chunk in done)
        return done

    monkeypatch.setattr(Drafter, "draft", recorded)
    monkeypatch.setattr("vlfit.engine.engine.NgramProposer", lambda *_: None)
    assert run_all(build(folder, speculate=True, **limits), PROMPTS[:1], sampling[:1])[1] == expected[:1]
    of_torch = [each for each in drafts if each[1]]
    drafts.clear()
    replays = capture_nothing(monkeypatch)
    engine = build(folder, speculate=True, **limits)
    engine.runner.capture_graphs(engine.context, 2, 16, 8)
    assert run_all(engine, PROMPTS[:1] * 2, sampling)[1] == expected
    assert replays
    assert engine.counters.model_draft_tokens > 0
    assert any(drafted for _, drafted in drafts)
    for known, drafted in drafts:
        for same, wanted in of_torch:
            assert known != same or drafted == wanted[: len(drafted)]
