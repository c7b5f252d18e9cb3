"""Decode graphs: static inputs equal the tensors built for a batch. Capture needs a GPU; on a CPU the
captured functions are run.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.shapes import TEXT
from tests.engine.test_parity import CONVERSATIONS, run
from tests.engine.test_speculative import Oracle, run_all, teach_oracle
from tests.kernels.conftest import ON_GPU, device
from vlfit import kernels
from vlfit.api.conversation import single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine import engine as engines
from vlfit.engine.engine import NativeEngine
from vlfit.engine.execution import cuda_graphs
from vlfit.engine.execution.cuda_graphs import DecodeGraphs, StepInputs
from vlfit.engine.sampling.sampler import SamplingRow, StepOutput, sample_on_host
from vlfit.engine.sampling.verification import verify_draft
from vlfit.engine.scheduling import scheduler
from vlfit.engine.scheduling.sequence import (
    Draft,
    DraftProbabilities,
    PreparedPrompt,
    ScheduledChunk,
    Sequence,
)
from vlfit.errors import InvalidRequest
from vlfit.kernels.attention import paged
from vlfit.kernels.attention.paged import BlockAttentionMetadata
from vlfit.layers.kv_cache import KVCache
from vlfit.loading.pinned import GraphPool
from vlfit.plan.native.cost import capture_sizes

__all__ = ["device"]  # a fixture
SPOKEN = [CONVERSATIONS["picture"], CONVERSATIONS["text"], CONVERSATIONS["text"]]
TOKENS = 3


@pytest.mark.parametrize(
    ("sequences", "sizes"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (4, (1, 2, 4)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))],
)
def test_graphs_are_few_and_one_holds_all(sequences: int, sizes: tuple[int, ...]) -> None:
    assert capture_sizes(sequences) == sizes


class FakeCapturedStep:
    """In place of a captured step: computes what a graph would replay, and counts how often."""

    replays = 0

    def __init__(
        self,
        forward: Callable[[], Tensor],
        sample: Callable[[Tensor], StepOutput],
        pool: object,
    ) -> None:
        self.output = sample(forward())
        self._forward, self._sample = forward, sample

    def forward(self) -> None:
        FakeCapturedStep.replays += 1
        self.logits = self._forward()

    def sample(self) -> None:
        self.output = self._sample(self.logits)


def capture_nothing(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Have kernels interpreted, and what would be captured run at each replay of it.

    Returns what was replayed of prompts and drafts so far.
    """
    replays: list[object] = []

    def capture(device: object, run: Callable[[], Any], pool: object) -> tuple[Callable[[], None], Any]:
        output = run()

        def replay() -> None:
            replays.append(run)
            for old, new in zip(output or (), run() or (), strict=True):
                old.copy_(new)

        return replay, output

    monkeypatch.setattr(kernels, "enabled_on", lambda device: True)
    monkeypatch.setattr(paged, "num_decode_splits", lambda *_: 2)
    monkeypatch.setattr(cuda_graphs, "CapturedStep", FakeCapturedStep)
    monkeypatch.setattr("vlfit.loading.pinned.capture_graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return replays


VOCABULARY = 97
CACHE = KVCache(TEXT.cache_spec, blocks=12, block_size=4, dtype=torch.float32, device=torch.device("cpu"))


def next_token(token: int, position: int, slot: int) -> int:
    """The next token of a model that depends on nothing but these."""
    return (31 * token + 7 * position + slot) % VOCABULARY


def step(token_ids: Tensor, positions: Tensor, plan: BlockAttentionMetadata) -> Tensor:
    rows = zip(token_ids.tolist(), positions[0].tolist(), plan.slot_mapping.tolist(), strict=True)
    return torch.eye(VOCABULARY)[[next_token(*row) for row in rows]]


def decoding(blocks: list[int], tokens: int, **params: Any) -> Sequence:
    """A decoding sequence with ``tokens`` tokens in the KV cache and one new one."""
    prompt = PreparedPrompt(np.arange(tokens), np.arange(0), np.zeros((3, tokens), np.int64), tokens + 5, ())
    completion: Any = None
    sampling = SamplingParams(**params)
    return Sequence(
        *(prompt, sampling, 99, completion, lambda _: None, 0.0),
        seed=tokens,
        num_cached_tokens=tokens,
        generated=[tokens],
        block_table=blocks,
    )


def expected(sequence: Sequence, token: int | None = None, further: int = 0) -> int:
    """The token after the newest one, or after ``token``, ``further`` steps on."""
    at = sequence.num_cached_tokens + further
    slot = sequence.block_table[at // 4] * 4 + at % 4
    newest = sequence.generated[-1] if token is None else token
    chosen = next_token(newest, sequence.position + further, slot)
    draw = SamplingRow(sequence.params, [], [], sequence.seed, sequence.position + further + 1)
    draw = replace(draw, grammar_matcher=sequence.grammar_matcher)
    return sample_on_host(torch.eye(VOCABULARY)[[chosen]], [chosen], None, [draw], str)[0].token_id


class OddTokens:
    """A grammar matcher that always allows odd tokens, and counts calls of ``bitmask``."""

    num_bitmasks = 0

    def bitmask(self) -> Any:
        self.num_bitmasks += 1
        return np.packbits(np.arange(96) % 2 == 1, bitorder="little").view(np.uint32)

    def allows(self, token_id: int) -> bool:
        return token_id % 2 == 1

    def allowed_tokens(self, vocabulary: int) -> Any:
        return (np.arange(vocabulary) % 2 == 1) & (np.arange(vocabulary) < 96)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> DecodeGraphs:
    monkeypatch.setattr(kernels, "enabled_on", lambda device: True)
    monkeypatch.setattr(cuda_graphs, "CapturedStep", FakeCapturedStep)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(FakeCapturedStep, "replays", 0)
    return DecodeGraphs(step, CACHE, GraphPool(CACHE.device), VOCABULARY, 16, 4, 8)


def decode_step(steps: DecodeGraphs, sequences: list[Sequence]) -> int:
    """Run a step as ``step_executor.py`` does, launch the next, and return the number of replays."""
    before = FakeCapturedStep.replays
    wanted = [expected(sequence) for sequence in sequences]
    scores = steps.run(sequences)
    steps.launch_next(sequences)
    assert scores.read() == (
        wanted,
        [True] * len(sequences),
        [not each.params.greedy for each in sequences],
    )
    for sequence, token in zip(sequences, wanted, strict=True):
        sequence.num_cached_tokens += 1
        sequence.generated.append(token)
    return FakeCapturedStep.replays - before


@pytest.mark.skipif(ON_GPU, reason="test_gpu.py compares the words of whole engines")
@pytest.mark.filterwarnings("default::DeprecationWarning")
class TestAhead:
    def test_each_step_is_computed_once(self, steps: DecodeGraphs) -> None:
        both = [decoding([3, 7, 1], 2), decoding([5, 0], 3)]
        assert [decode_step(steps, both) for _ in range(4)] == [2, 1, 1, 1]
        # The last slot of two blocks: the next one is not known, so nothing is launched ahead.
        assert decode_step(steps, both) == 0

    def test_who_draws_goes_on_with_what_was_drawn(self, steps: DecodeGraphs) -> None:
        """One of them draws, as the host would; alone too; and rows that were its own draw no more."""
        drawing, greedy = decoding([3, 7, 1], 2, temperature=1.0, top_k=20), decoding([5, 0, 2], 3)
        assert [decode_step(steps, [drawing, greedy]) for _ in range(2)] == [2, 1]
        assert [decode_step(steps, [drawing]) for _ in range(2)] == [2, 1]
        assert [decode_step(steps, [greedy]) for _ in range(2)] == [2, 1]

    @pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "top_k": 20}], ids=["greedy", "drawn"])
    def test_the_bitmask_is_computed_while_the_next_step_runs(
        self, steps: DecodeGraphs, params: dict[str, Any]
    ) -> None:
        """Once for each token; another beside it has no form, and later comes alone."""
        formed, free = decoding([3, 7, 1], 2, **params), decoding([5, 0, 2], 3)
        formed.grammar_matcher = odd = OddTokens()  # type: ignore[assignment]
        for number in range(4):
            assert decode_step(steps, [formed, free]) == (2 if number == 0 else 1)
            assert steps.is_launched([formed, free])
            assert odd.num_bitmasks == number + 1
        assert all(token % 2 for token in formed.generated[1:])
        assert [decode_step(steps, [free]) for _ in range(2)] == [2, 1]
        assert odd.num_bitmasks == 4

    def test_a_form_without_a_way_on_fails_before_anything_is_chosen(self, steps: DecodeGraphs) -> None:
        formed = decoding([3, 7, 1], 2)
        formed.grammar_matcher = OddTokens()  # type: ignore[assignment]
        assert decode_step(steps, [formed]) == 2

        def fail() -> None:
            raise InvalidRequest("no way on")

        formed.grammar_matcher.bitmask = fail  # type: ignore[union-attr, method-assign]
        with pytest.raises(InvalidRequest):
            steps.run([formed])
        formed.grammar_matcher = None
        assert decode_step(steps, [formed]) == 2

    def test_a_new_block_or_another_token_is_computed_anew(self, steps: DecodeGraphs) -> None:
        one = decoding([3, 7, 1], 2)
        assert [decode_step(steps, [one]) for _ in range(2)] == [2, 1]
        one.block_table = [3, 7, 1, 2]
        assert [decode_step(steps, [one]) for _ in range(2)] == [2, 1]
        one.generated[-1] += 1  # somebody decided otherwise
        assert [decode_step(steps, [one]) for _ in range(2)] == [2, 1]

    def test_a_table_that_grows_with_two_slots_left_holds_up_no_step(self, steps: DecodeGraphs) -> None:
        """One step is in flight for the last but one, and finds the slot of the next in the new table."""
        one, other = decoding([3, 7], 2), decoding([5, 0, 2], 3)
        assert [decode_step(steps, [one, other]) for _ in range(4)] == [2, 1, 1, 1]
        assert one.num_cached_tokens == 6
        one.block_table.append(1)
        assert [decode_step(steps, [one, other]) for _ in range(3)] == [1, 1, 1]
        one.block_table.append(9)  # as the drafts that come next need
        scores = steps.run_verify([ScheduledChunk(one, 2, (10,)), ScheduledChunk(other, 1)])
        assert scores.read()[0] == [expected(one), expected(one, 10, 1), expected(other)]

    @pytest.mark.parametrize("cached", [7, 8])
    def test_a_table_that_grows_later_has_its_next_step_computed_anew(
        self, steps: DecodeGraphs, cached: int
    ) -> None:
        """What was launched has taken the slot of the step after it from the table without the new block."""
        one = decoding([3, 7], 2)
        while one.num_cached_tokens < cached:
            decode_step(steps, [one])
        one.block_table.append(1)
        # The step in flight counts if it was launched with a slot of its own; nothing is launched after it.
        assert [decode_step(steps, [one]) for _ in range(3)] == ([0, 2, 1] if cached == 7 else [2, 1, 1])

    def test_whoever_ends_or_comes_changes_nothing_for_the_others(self, steps: DecodeGraphs) -> None:
        first, second, third = (decoding([block, block + 1, block + 2], 2) for block in (0, 3, 6))
        assert [decode_step(steps, [first, second]) for _ in range(2)] == [2, 1]
        assert [decode_step(steps, [second]) for _ in range(2)] == [2, 1]
        assert [decode_step(steps, [second, third]) for _ in range(2)] == [2, 1]
        assert [decode_step(steps, [third, second]) for _ in range(2)] == [2, 1]

    def test_guesses_are_rows_and_what_was_launched_ahead_is_not_taken_for_them(
        self, steps: DecodeGraphs
    ) -> None:
        one, other = decoding([3, 7, 1], 2), decoding([5, 0], 3, temperature=0.5, top_k=4)
        assert decode_step(steps, [one, other]) == 2
        assert steps.is_launched([one, other])
        assert not steps.is_launched([one])
        batch = [ScheduledChunk(one, 4, (10, 20, 30)), ScheduledChunk(other, 2, (40,))]
        scores = steps.run_verify(batch)
        at = [(one, one.generated[-1], 0), (one, 10, 1), (one, 20, 2), (one, 30, 3)]
        at += [(other, other.generated[-1], 0), (other, 40, 1)]
        # Each row by the parameters of its sequence, at its own position.
        on_device = [False] * 4 + [True] * 2
        assert scores.read() == ([expected(*row) for row in at], [True] * 6, on_device)
        inputs = steps._verify_inputs
        assert inputs is not None
        assert inputs.metadata.query_spans[:6, 2].tolist() == [4, 5, 6, 7, 5, 6]
        assert inputs.metadata.block_tables[:6, :2].tolist() == [[3, 7]] * 4 + [[5, 0]] * 2
        assert (
            inputs.metadata.slot_mapping[6:].tolist()
            == inputs.metadata.query_spans[6:, 2].tolist()
            == [-1, -1]
        )
        assert inputs.metadata.no_store_slots is not None
        assert not steps.is_launched([one, other])
        assert decode_step(steps, [one, other]) == 2

    def test_drawn_drafts_are_accepted_or_replaced_on_the_device(self, steps: DecodeGraphs) -> None:
        """Beside a request with a seed of its own, whose tokens are drawn as without drafts."""
        for seed in range(4):
            one, seeded = (
                decoding(blocks, 2, temperature=1.0, top_k=4, **more)
                for blocks, more in (([3, 7, 1], {}), ([5, 0, 2], {"seed": seed}))
            )
            for sequence in (one, seeded):
                sequence.seed = seed
            token_ids = torch.tensor([[0, 1, 2], [2, 0, 50]])
            drawn_from = DraftProbabilities(token_ids, torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]]))
            batch = [ScheduledChunk(each, 3, (1, 0), drawn_from) for each in (one, seeded)]
            output = steps.run_verify(batch)
            tokens, _, on_device = output.read()
            assert on_device == [True] * 6
            logits = output.logits.float().cpu()
            for row, drafted in ((0, (1,)), (1, (0,))):
                at = SamplingRow(one.params, [], [], seed, one.position + 1 + row)
                draft = Draft(
                    drafted, DraftProbabilities(token_ids[row][None], drawn_from.probabilities[row][None])
                )
                here = logits[row : row + 2]
                (first, *_) = verify_draft(here, [0, 0], [True, True], None, at, draft, str)
                assert tokens[row] == first.token_id
            further = [(one, 0, 2)]
            further += [(seeded, token, row) for row, token in enumerate((seeded.generated[-1], 1, 0))]
            assert tokens[2:] == [expected(*row) for row in further]

    def test_what_moves_is_recorded_and_computed_anew(
        self, steps: DecodeGraphs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one = decoding([3, 7, 1], 2)
        assert [decode_step(steps, [one]) for _ in range(2)] == [2, 1]
        steps.release()
        assert decode_step(steps, [one]) == 2
        (group,) = CACHE._groups
        monkeypatch.setattr(group, "keys", group.keys.new_empty(CACHE.keys.shape[1]))
        assert decode_step(steps, [one]) == 2


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="tests/engine/test_gpu.py runs it on the GPU")
@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # in rows without a token
def test_rows_that_nobody_needs_leave_nothing_behind(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Four rows for three sequences, and for two and one when the others have ended."""
    pytest.importorskip("triton")
    folder = tiny("odd_vocab_one_kv_head")
    options = EngineOptions(device="cpu", max_model_len=256, max_num_seqs=4, cuda_graphs=False)
    expected = run(NativeEngine(open_checkpoint(folder), options), *SPOKEN, tokens=TOKENS)
    capture_nothing(monkeypatch)
    monkeypatch.setattr(cuda_graphs, "capture_sizes", lambda sequences: (sequences,))
    engine = NativeEngine(open_checkpoint(folder), options)
    engine.runner.cache.keys.fill_(torch.nan)
    engine.runner.capture_graphs(engine.context, 4, 16)
    assert engine.runner.cache.keys.isnan().all(), "recording wrote into the cache"
    assert run(engine, *SPOKEN, tokens=TOKENS) == expected


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="tests/engine/test_gpu_speculative.py runs it on the GPU")
@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # in rows without a token
def test_sampled_drafts_by_verify_steps(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole engine with interpreted kernels: two sampled requests, every third draft token wrong."""
    pytest.importorskip("triton")
    folder = tiny("odd_vocab_one_kv_head")
    prompts = [CONVERSATIONS["text"], CONVERSATIONS["system and turns"]]
    sampling = SamplingParams(max_tokens=7, temperature=1.0, top_k=9, seed=4, ignore_eos=True)

    def build(**settings: Any) -> NativeEngine:
        limits = {"max_model_len": 128, "max_num_seqs": 2, "cuda_graphs": False}
        options = EngineOptions(device="cpu", **{**limits, **settings})
        return NativeEngine(open_checkpoint(folder), options)

    monkeypatch.setattr(Oracle, "answers", {}, raising=False)
    monkeypatch.setattr(Oracle, "period", 3)
    monkeypatch.setattr(engines, "NgramProposer", Oracle)
    tokens = teach_oracle(build(speculate=False), prompts, sampling)
    capture_nothing(monkeypatch)
    engine = build()
    engine.runner.capture_graphs(engine.context, 2, 16, 8)
    assert run_all(engine, prompts, sampling)[1] == tokens
    assert engine.counters.accepted_tokens >= 4


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="tests/engine/test_gpu.py has more tokens on the GPU")
@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # in rows without a token
def test_tables_grow_while_steps_are_launched_ahead(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests whose blocks fill up at different steps; inputs are filled when they begin to decode."""
    pytest.importorskip("triton")
    folder, tokens = tiny("tied"), 40
    options = EngineOptions(device="cpu", max_model_len=256, max_num_seqs=2, speculate=False)
    both = [CONVERSATIONS["text"], single_turn("hello world hello")]
    expected = run(NativeEngine(open_checkpoint(folder), options), *both, tokens=tokens)
    capture_nothing(monkeypatch)
    monkeypatch.setattr(cuda_graphs, "capture_sizes", lambda sequences: (sequences,))
    monkeypatch.setattr(scheduler, "LOOKAHEAD_TOKENS", 2)
    fill, filled = StepInputs.fill, []

    def counted(inputs: StepInputs, sequences: list[Sequence]) -> None:
        filled.append(len(sequences))
        fill(inputs, sequences)

    monkeypatch.setattr(StepInputs, "fill", counted)
    engine = NativeEngine(open_checkpoint(folder), replace(options, cuda_graphs=False))
    engine.runner.capture_graphs(engine.context, 2, 16)
    filled.clear()
    assert run(engine, *both, tokens=tokens) == expected
    assert filled == [2]


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="tests/engine/test_gpu.py has more tokens on the GPU")
@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # in rows without a token
@pytest.mark.parametrize("graphs", [False, True])
def test_tables_grow_beside_a_prompt_in_chunks(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    """Passes outside of graphs compare tables with those of the pass before, which have grown since."""
    pytest.importorskip("triton")
    folder, tokens = tiny("tied"), 40
    options = EngineOptions(
        device="cpu", max_model_len=256, max_num_batched_tokens=4, max_num_seqs=2, speculate=False
    )
    both = [single_turn("hello world"), single_turn("hello " * 60)]
    expected = run(NativeEngine(open_checkpoint(folder), options), *both, tokens=tokens)
    capture_nothing(monkeypatch)
    monkeypatch.setattr(cuda_graphs, "capture_sizes", lambda sequences: (sequences,))
    monkeypatch.setattr(scheduler, "LOOKAHEAD_TOKENS", 2)
    engine = NativeEngine(open_checkpoint(folder), replace(options, cuda_graphs=False))
    if graphs:
        engine.runner.capture_graphs(engine.context, 2, 4)
    assert run(engine, *both, tokens=tokens) == expected
