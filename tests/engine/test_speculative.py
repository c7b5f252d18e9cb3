"""Answers with speculative decoding equal those without, chunk by chunk, however they end."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_parity import CONVERSATIONS
from vlfit.api.conversation import Conversation, ImagePart, single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.outputs import Chunk, Timings
from vlfit.api.sampling_params import Grammar, SamplingParams
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine import engine as engines
from vlfit.engine.engine import NativeEngine
from vlfit.engine.sampling.sampler import StepOutput
from vlfit.engine.scheduling.sequence import PreparedPrompt, ScheduledChunk
from vlfit.plan.native.cost import MAX_DRAFT_ROWS
from vlfit.tasks.describe import CAPTION_SHORT, SCENE

PROMPTS = [CONVERSATIONS["picture"], CONVERSATIONS["text"], CONVERSATIONS["system and turns"]]
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
NOTHING = Timings(0, 0, 0, 0)
PICTURES = Path(__file__).parents[2] / "examples" / "pictures"


class Oracle:
    """Proposes the answer that the same prompt had without speculation, each ``period``-th token wrong."""

    period = 4
    answers: dict[bytes, list[int]]

    def __init__(self, prompt: PreparedPrompt, min_acceptance: float) -> None:
        assert 0 < min_acceptance < 1
        self._answer = self.answers[prompt.token_ids.tobytes()]

    def propose(self, generated: list[int], max_tokens: int) -> tuple[int, ...]:
        if generated != self._answer[: len(generated)]:
            return ()
        begin = len(generated)
        upcoming = enumerate(self._answer[begin : begin + max_tokens], begin)
        return tuple(token + (index % self.period == 0) for index, token in upcoming)

    def record_acceptance(self, num_accepted: int) -> None:
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
    engine: NativeEngine, conversations: list[Conversation], sampling: SamplingParams
) -> tuple[list[list[Chunk]], list[list[int]]]:
    """Run all ``conversations`` at once; the chunks that each listener received, and the tokens."""
    received: list[list[Chunk]] = []
    sequences = []
    for conversation in conversations:
        chunks: list[Any] = []
        prompt = engine.prepare_prompt(engine.prompts.build(conversation, context=engine.context))
        sequences.append(engine.make_sequence(prompt, sampling, chunks.append))
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


def teach_oracle(engine: NativeEngine, conversations: list[Conversation]) -> list[list[int]]:
    """Give ``Oracle`` the answers of an ``engine`` without speculation; returns their tokens."""
    tokens = run_all(engine, conversations, GREEDY)[1]
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


@pytest.mark.parametrize(
    "wish", [{"temperature": 1.0, "seed": 3}, {"top_logprobs": 2}, {"repetition_penalty": 1.3}], ids=str
)
def test_who_is_not_plainly_greedy_guesses_nothing(
    tiny: Callable[[str], Path], oracle: type[Oracle], wish: dict[str, Any]
) -> None:
    plain, speculating = (build(tiny("tied"), speculate=each, prefix_cache=False) for each in (False, True))
    teach_oracle(plain, PROMPTS)
    sampling = replace(GREEDY, max_tokens=12, **wish)
    assert run_all(speculating, PROMPTS, sampling) == run_all(plain, PROMPTS, sampling)
    assert speculating.account().counters.draft_tokens == 0


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
        sampling = SamplingParams(max_tokens=150)
        assert run_all(speculating, conversations, sampling) == run_all(plain, conversations, sampling)
    assert speculating.account().counters.steps < 0.85 * plain.account().counters.steps
