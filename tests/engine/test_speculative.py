"""Answers with speculative decoding equal those without, chunk by chunk, however they end."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.test_parity import CONVERSATIONS
from vlfit.api.conversation import Conversation, ImagePart, single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.outputs import Chunk, Timings
from vlfit.api.sampling_params import Grammar, SamplingParams
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine import engine as engines
from vlfit.engine.engine import NativeEngine
from vlfit.engine.sampling.sampler import DRAFT_WORD, StepOutput, philox_uniform
from vlfit.engine.scheduling.sequence import Draft, DraftProbabilities, PreparedPrompt, ScheduledChunk
from vlfit.plan.native.cost import MAX_DRAFT_ROWS
from vlfit.tasks.describe import CAPTION_SHORT, SCENE

PROMPTS = [CONVERSATIONS["picture"], CONVERSATIONS["text"], CONVERSATIONS["system and turns"]]
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
NOTHING = Timings(0, 0, 0, 0)
PICTURES = Path(__file__).parents[2] / "examples" / "pictures"


class Oracle:
    """Proposes the answer that the same prompt had without speculation, each ``period``-th token wrong."""

    cost = 0.0
    period = 4
    answers: dict[bytes, list[int]]

    def __init__(self, prompt: PreparedPrompt, min_acceptance: float) -> None:
        assert 0 < min_acceptance < 1
        self._answer = self.answers[prompt.token_ids.tobytes()]

    def propose(self, generated: list[int], max_tokens: int) -> Draft:
        if generated != self._answer[: len(generated)]:
            return Draft()
        begin = len(generated)
        upcoming = enumerate(self._answer[begin : begin + max_tokens], begin)
        return Draft(tuple(token + (index % self.period == 0) for index, token in upcoming))

    def record_acceptance(self, num_accepted: int, num_drafts: int) -> None:
        assert 0 <= num_accepted < MAX_DRAFT_ROWS


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> type[Oracle]:
    monkeypatch.setattr(Oracle, "answers", {}, raising=False)
    monkeypatch.setattr(engines, "NgramProposer", Oracle)
    return Oracle


def build(folder: Path, *, speculate: bool, **settings: Any) -> NativeEngine:
    options = {
        "device": "cpu",
        "max_model_len": 512,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 64,
        **settings,
    }
    return NativeEngine(open_checkpoint(folder), EngineOptions(speculate=speculate, **options))


def run_all(
    engine: NativeEngine,
    conversations: list[Conversation],
    sampling: SamplingParams | list[SamplingParams],
) -> tuple[list[list[Chunk]], list[list[int]]]:
    """Run all ``conversations`` at once; the chunks that each listener received, and the tokens."""
    received: list[list[Chunk]] = []
    sequences = []
    each_sampling = sampling if isinstance(sampling, list) else [sampling] * len(conversations)
    for conversation, params in zip(conversations, each_sampling, strict=True):
        chunks: list[Any] = []
        prompt = engine.prepare_prompt(engine.prompts.build(conversation, context=engine.context))
        sequences.append(engine.make_sequence(prompt, params, chunks.append))
        received.append(chunks)
    for sequence in sequences:
        engine.submit(sequence)
    while engine.busy:
        engine.step()
    return [[_timeless(chunk) for chunk in chunks] for chunks in received], [
        one.generated for one in sequences
    ]


def _timeless(chunk: Chunk) -> Chunk:
    """``chunk`` without what depends on timing and on earlier requests."""
    usage = chunk.usage and replace(chunk.usage, cached_tokens=0)
    return replace(chunk, timings=chunk.timings and NOTHING, usage=usage)


def teach_oracle(
    engine: NativeEngine, conversations: list[Conversation], sampling: SamplingParams = GREEDY
) -> list[list[int]]:
    """Give ``Oracle`` the answers of an ``engine`` without speculation; returns their tokens."""
    tokens = run_all(engine, conversations, sampling)[1]
    for conversation, answer in zip(conversations, tokens, strict=True):
        prompt = engine.prepare_prompt(engine.prompts.build(conversation, context=engine.context))
        Oracle.answers[prompt.token_ids.tobytes()] = answer
    return tokens


@pytest.mark.parametrize("period", [1, 4, 10**6], ids=["all wrong", "some wrong", "all right"])
def test_every_ending_is_the_same(
    tiny: Callable[[str], Path], oracle: type[Oracle], monkeypatch: pytest.MonkeyPatch, period: int
) -> None:
    """An answer may end at any token among accepted drafts; listeners receive the same chunks."""
    monkeypatch.setattr(oracle, "period", period)
    plain, speculating = build(tiny("tied"), speculate=False), build(tiny("tied"), speculate=True)
    tokens = teach_oracle(plain, PROMPTS)
    text = "".join(chunk.text for chunk in run_all(plain, PROMPTS[:1], GREEDY)[0][0])
    endings: list[dict[str, Any]] = [
        *({"max_tokens": length} for length in (1, 2, 8, 9, 10)),
        *({"stop_token_ids": (tokens[0][index],)} for index in (3, 20, 21, 22)),
        {"stop": (text[len(text) // 2 : len(text) // 2 + 3],)},
        {"loop_guard": True},
        {"ignore_eos": False},
    ]
    for ending in endings:
        sampling = replace(GREEDY, **ending)
        assert run_all(speculating, PROMPTS, sampling) == run_all(plain, PROMPTS, sampling), ending
    counters, without = speculating.account().counters, plain.account().counters
    num_tokens = (
        without.tokens - sum(map(len, tokens)) - len(tokens[0])
    )  # without the runs that taught the oracle
    assert (counters.tokens, counters.finished) == (num_tokens, len(endings) * len(PROMPTS))
    assert speculating.block_manager.num_free == speculating.block_manager.num_blocks
    if oracle.period == 1:
        assert counters.draft_tokens > 0
        assert counters.accepted_tokens == 0
    else:
        assert counters.accepted_tokens > counters.tokens / 3
        assert counters.steps < 0.75 * counters.tokens / len(PROMPTS) + counters.finished


def test_a_pass_has_no_more_rows_than_were_planned(
    tiny: Callable[[str], Path], oracle: type[Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, speculating = (
        build(tiny("tied"), speculate=wish, max_num_batched_tokens=3, max_num_seqs=1)
        for wish in (False, True)
    )
    teach_oracle(plain, PROMPTS[1:2])
    run, rows = speculating.runner.run, []

    def watched(batch: list[ScheduledChunk]) -> StepOutput:
        rows.append(sum(work.num_tokens for work in batch))
        return run(batch)

    monkeypatch.setattr(speculating.runner, "run", watched)
    assert run_all(speculating, PROMPTS[1:2], GREEDY) == run_all(plain, PROMPTS[1:2], GREEDY)
    assert speculating.account().counters.accepted_tokens > 0
    assert max(rows) == 3


def test_a_context_is_filled_to_its_end(tiny: Callable[[str], Path], oracle: type[Oracle]) -> None:
    plain, speculating = (build(tiny("tied"), speculate=wish, max_model_len=80) for wish in (False, True))
    teach_oracle(plain, PROMPTS[1:2])
    to_the_end = replace(GREEDY, max_tokens=None)
    expected = run_all(plain, PROMPTS[1:2], to_the_end)
    assert run_all(speculating, PROMPTS[1:2], to_the_end) == expected
    usage = expected[0][0][-1].usage
    assert usage is not None
    assert usage.total_tokens == 80


def test_who_is_paused_goes_on_with_the_same_words(
    tiny: Callable[[str], Path], oracle: type[Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody is paused for a guess: it takes no block that its sequence does not hold."""
    monkeypatch.setattr("vlfit.engine.scheduling.scheduler.LOOKAHEAD_TOKENS", 8)
    tight = {"max_model_len": 128, "kv_tokens": 128, "block_size": 8, "max_num_seqs": 4}
    plain, speculating = (build(tiny("tied"), speculate=wish, **tight) for wish in (False, True))
    teach_oracle(plain, PROMPTS)
    both = [*PROMPTS, *PROMPTS]
    assert run_all(speculating, both, GREEDY) == run_all(plain, both, GREEDY)
    assert speculating.account().num_preemptions > 0
    assert speculating.account().num_preemptions <= plain.account().num_preemptions
    # What is left in the blocks is what the next request of the same words takes over.
    again = run_all(speculating, PROMPTS, GREEDY)
    assert again[1] == run_all(plain, PROMPTS, GREEDY)[1]


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "seed": 5},
    {"temperature": 0.6, "top_k": 20, "presence_penalty": 1.5, "seed": 7},
    {"temperature": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "min_p": 0.01, "seed": 1},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
]


PERIODS = {"all wrong": 1, "some wrong": 4, "all right": 10**6}


@pytest.mark.parametrize(
    ("period", "wishes"),
    [
        # All endings with one kind of sampling; the others where some drafts are right and some wrong.
        pytest.param(
            period,
            wishes,
            id=f"{name}-{wishes}",
            marks=() if name == "some wrong" or wishes in SAMPLED[:1] else pytest.mark.slow,
        )
        for name, period in PERIODS.items()
        for wishes in SAMPLED
    ],
)
def test_seeded_answers_are_those_without_drafts(
    tiny: Callable[[str], Path],
    oracle: type[Oracle],
    monkeypatch: pytest.MonkeyPatch,
    wishes: dict[str, Any],
    period: int,
) -> None:
    """Sampled and with penalties, alone and in company, among greedy requests."""
    monkeypatch.setattr(oracle, "period", period)
    plain, speculating = build(tiny("tied"), speculate=False), build(tiny("tied"), speculate=True)
    sampling = replace(GREEDY, **wishes)
    tokens = teach_oracle(plain, PROMPTS, sampling)
    assert tokens != run_all(plain, PROMPTS, GREEDY)[1]
    expected = run_all(plain, PROMPTS, sampling)
    assert run_all(speculating, PROMPTS, sampling) == expected
    assert run_all(speculating, PROMPTS[:1], sampling)[1] == expected[1][:1]
    assert run_all(speculating, PROMPTS, [sampling, GREEDY, sampling]) == run_all(
        plain, PROMPTS, [sampling, GREEDY, sampling]
    )
    counters = speculating.account().counters
    assert counters.draft_tokens > 0
    if period == 1:
        assert counters.accepted_tokens == 0
    else:
        assert counters.accepted_tokens > counters.tokens / 4
    # Endings among accepted tokens.
    endings: list[dict[str, Any]] = [
        {"max_tokens": 9},
        {"stop_token_ids": (tokens[0][21],)},
        {"loop_guard": True},
    ]
    for ending in endings:
        shorter = replace(sampling, **ending)
        assert run_all(speculating, PROMPTS, shorter) == run_all(plain, PROMPTS, shorter), ending


@pytest.mark.parametrize(
    "wish",
    [
        {"top_logprobs": 2},
        {"temperature": 1.0, "seed": 4, "top_logprobs": 0},
        {"temperature": 1.0, "seed": 4},
    ],
    ids=["logprobs", "sampled with logprobs", "sampled with a grammar"],
)
def test_logprobs_and_sampled_grammars_get_no_drafts(
    tiny: Callable[[str], Path], oracle: type[Oracle], wish: dict[str, Any]
) -> None:
    plain, speculating = (build(tiny("tied"), speculate=each, prefix_cache=False) for each in (False, True))
    grammar = None if "top_logprobs" in wish else Grammar("json", '{"type": "string"}')
    sampling = replace(GREEDY, max_tokens=12, grammar=grammar, **wish)
    teach_oracle(plain, PROMPTS, sampling)
    assert run_all(speculating, PROMPTS, sampling) == run_all(plain, PROMPTS, sampling)
    assert speculating.account().counters.draft_tokens == 0


class DrawnDrafts:
    """Proposes one token of three, drawn by the random number that its position has for it."""

    shares = np.array([0.6, 0.3, 0.1])
    token_ids: np.ndarray[tuple[int], np.dtype[np.int64]]

    def __init__(self, prompt: PreparedPrompt, min_acceptance: float) -> None:
        self._next_position = prompt.next_position
        self.seed = 0

    def propose(self, generated: list[int], max_tokens: int) -> Draft:
        if not max_tokens:
            return Draft()
        uniform = philox_uniform(self.seed, self._next_position + len(generated), DRAFT_WORD)
        drawn = self.token_ids[(self.shares.cumsum() <= uniform).sum()]
        tokens, shares = torch.from_numpy(self.token_ids), torch.from_numpy(self.shares)
        return Draft((int(drawn),), DraftProbabilities(tokens[None], shares[None]))

    def record_acceptance(self, num_accepted: int, num_drafts: int) -> None:
        assert num_accepted in (0, 1)


def test_drawn_drafts_leave_the_distribution_of_answers(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second token of an answer, over 800 seeds: as often each as without drafts."""
    monkeypatch.setattr(engines, "NgramProposer", DrawnDrafts)
    plain, speculating = (build(tiny("tied"), speculate=each) for each in (False, True))
    prompt = plain.prepare_prompt(plain.prompts.build(PROMPTS[1], context=plain.context))

    def second_tokens(engine: NativeEngine) -> Counter[int]:
        sequences = []
        for seed in range(800):
            params = SamplingParams(max_tokens=3, temperature=1.0, top_k=4, ignore_eos=True)
            sequence = engine.make_sequence(prompt, params, lambda _: None)
            sequence.seed = seed
            if isinstance(sequence.proposer, DrawnDrafts):
                sequence.proposer.seed = seed
            sequences.append(sequence)
            engine.submit(sequence)
        while engine.busy:
            engine.step()
        return Counter(sequence.generated[1] for sequence in sequences)

    without = second_tokens(plain)
    DrawnDrafts.token_ids = np.array([token for token, _ in without.most_common(3)])
    drafted = second_tokens(speculating)
    counters = speculating.account().counters
    assert counters.draft_tokens > 400  # none beside a prompt
    assert 0.2 < counters.accepted_tokens / counters.draft_tokens < 0.8
    for token, count in without.items():
        if count > 20:
            assert abs(drafted[token] - count) < 4 * (drafted[token] + count) ** 0.5
    assert len(without) > 4


def test_drafts_that_a_grammar_does_not_allow(tiny: Callable[[str], Path], oracle: type[Oracle]) -> None:
    """Draft tokens ignore the grammar: a token that it does not allow is never part of the answer."""
    plain, speculating = (build(tiny("tied"), speculate=each) for each in (False, True))
    form = Grammar("json", '{"type": "array", "items": {"type": "string"}, "minItems": 2}')
    sampling = SamplingParams(max_tokens=30, grammar=form)
    expected = run_all(plain, PROMPTS, sampling)
    for conversation, answer in zip(PROMPTS, expected[1], strict=True):
        prompt = plain.prepare_prompt(plain.prompts.build(conversation, context=plain.context))
        Oracle.answers[prompt.token_ids.tobytes()] = answer
    assert run_all(speculating, PROMPTS, sampling) == expected
    assert speculating.account().counters.draft_tokens > 0


def test_no_drafts_after_a_listener_failed(tiny: Callable[[str], Path], oracle: type[Oracle]) -> None:
    """A listener that raises among accepted draft tokens ends its request there."""
    speculating = build(tiny("tied"), speculate=True)
    teach_oracle(build(tiny("tied"), speculate=False), PROMPTS[:1])
    received: list[object] = []

    def fail_at_seventh(event: object) -> None:
        received.append(event)
        if len(received) == 7:
            raise RuntimeError("gone")

    prompt = speculating.prepare_prompt(speculating.prompts.build(PROMPTS[0], context=speculating.context))
    speculating.submit(speculating.make_sequence(prompt, GREEDY, fail_at_seventh))
    while speculating.busy:
        speculating.step()
    assert len(received) == 7
    assert speculating.block_manager.num_free == speculating.block_manager.num_blocks


def test_mini_answers_the_same_in_fewer_steps() -> None:
    """Without an oracle: drafts come from the prompt and the answer so far."""
    picture = ImagePart((PICTURES / "animals.png").read_bytes())
    plain, speculating = (
        NativeEngine(open_checkpoint("mini"), EngineOptions(device="cpu", max_model_len=1024, speculate=wish))
        for wish in (False, True)
    )
    for question in (SCENE, CAPTION_SHORT):
        conversations = [single_turn(question, picture)]
        for sampling in (SamplingParams(max_tokens=150), SamplingParams(max_tokens=99, **SAMPLED[2])):
            assert run_all(speculating, conversations, sampling) == run_all(plain, conversations, sampling)
    both = [single_turn(question, picture) for question in (SCENE, CAPTION_SHORT)]
    in_company = SamplingParams(max_tokens=60, **SAMPLED[2])
    assert run_all(speculating, both, in_company) == run_all(plain, both, in_company)
    assert speculating.account().counters.steps < 0.85 * plain.account().counters.steps
