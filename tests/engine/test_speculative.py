"""Answers with speculative decoding equal those without, chunk by chunk, however they end."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_parity import CONVERSATIONS
from vlfit.api.conversation import Conversation, ImagePart, ask
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

SPOKEN = [CONVERSATIONS["picture"], CONVERSATIONS["text"], CONVERSATIONS["system and turns"]]
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
NOTHING = Timings(0, 0, 0, 0)
PICTURES = Path(__file__).parents[2] / "examples" / "pictures"


class Oracle:
    """Guesses what was said to the same prompt without guesses, but each ``period``-th token wrong."""

    period = 4
    answers: dict[bytes, list[int]]

    def __init__(self, prompt: PreparedPrompt, min_acceptance: float) -> None:
        assert 0 < min_acceptance < 1
        self._answer = self.answers[prompt.token_ids.tobytes()]

    def propose(self, generated: list[int], max_tokens: int) -> tuple[int, ...]:
        if generated != self._answer[: len(generated)]:
            return ()
        begin = len(generated)
        coming = enumerate(self._answer[begin : begin + max_tokens], begin)
        return tuple(token + (place % self.period == 0) for place, token in coming)

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


def hear(
    engine: NativeEngine, conversations: list[Conversation], sampling: SamplingParams
) -> tuple[list[list[Chunk]], list[list[int]]]:
    """What the listener of each conversation hears, all at once, and the tokens behind it."""
    heard: list[list[Chunk]] = []
    sequences = []
    for conversation in conversations:
        chunks: list[Any] = []
        prompt = engine.prepare_prompt(engine.prompts.build(conversation, context=engine.context))
        sequences.append(engine.sequence(prompt, sampling, chunks.append))
        heard.append(chunks)
    for sequence in sequences:
        engine.submit(sequence)
    while engine.busy:
        engine.step()
    return [[_timeless(chunk) for chunk in chunks] for chunks in heard], [one.generated for one in sequences]


def _timeless(chunk: Chunk) -> Chunk:
    """Without what depends on when it was asked, and after whom."""
    usage = chunk.usage and replace(chunk.usage, cached_tokens=0)
    return replace(chunk, timings=chunk.timings and NOTHING, usage=usage)


def learn(engine: NativeEngine, conversations: list[Conversation]) -> list[list[int]]:
    """What ``Oracle`` guesses from: answers of an ``engine`` that does not guess."""
    tokens = hear(engine, conversations, GREEDY)[1]
    for conversation, answer in zip(conversations, tokens, strict=True):
        prompt = engine.prepare_prompt(engine.prompts.build(conversation, context=engine.context))
        Oracle.answers[prompt.token_ids.tobytes()] = answer
    return tokens


@pytest.mark.parametrize("period", [1, 4, 10**6], ids=["all wrong", "some wrong", "all right"])
def test_every_ending_is_the_same(
    tiny: Callable[[str], Path], oracle: type[Oracle], monkeypatch: pytest.MonkeyPatch, period: int
) -> None:
    """At any token of a run of right guesses, and at any length; nobody hears more or less of it."""
    monkeypatch.setattr(oracle, "period", period)
    plain, guessing = build(tiny("tied"), speculate=False), build(tiny("tied"), speculate=True)
    tokens = learn(plain, SPOKEN)
    text = "".join(chunk.text for chunk in hear(plain, SPOKEN[:1], GREEDY)[0][0])
    endings: list[dict[str, Any]] = [
        *({"max_tokens": length} for length in (1, 2, 8, 9, 10)),
        *({"stop_token_ids": (tokens[0][place],)} for place in (3, 20, 21, 22)),
        {"stop": (text[len(text) // 2 : len(text) // 2 + 3],)},
        {"loop_guard": True},
        {"ignore_eos": False},
    ]
    for ending in endings:
        sampling = replace(GREEDY, **ending)
        assert hear(guessing, SPOKEN, sampling) == hear(plain, SPOKEN, sampling), ending
    counters, without = guessing.account().counters, plain.account().counters
    said = without.tokens - sum(map(len, tokens)) - len(tokens[0])  # all but what was learnt
    assert (counters.tokens, counters.finished) == (said, len(endings) * len(SPOKEN))
    assert guessing.block_manager.num_free == guessing.block_manager.num_blocks
    if oracle.period == 1:
        assert counters.draft_tokens > 0
        assert counters.accepted_tokens == 0
    else:
        assert counters.accepted_tokens > counters.tokens / 3
        assert counters.steps < 0.75 * counters.tokens / len(SPOKEN) + counters.finished


def test_a_pass_has_no_more_rows_than_were_planned(
    tiny: Callable[[str], Path], oracle: type[Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, guessing = (
        build(tiny("tied"), speculate=wish, max_num_batched_tokens=3, max_num_seqs=1)
        for wish in (False, True)
    )
    learn(plain, SPOKEN[1:2])
    run, rows = guessing.runner.run, []

    def watched(batch: list[ScheduledChunk]) -> StepOutput:
        rows.append(sum(work.num_tokens for work in batch))
        return run(batch)

    monkeypatch.setattr(guessing.runner, "run", watched)
    assert hear(guessing, SPOKEN[1:2], GREEDY) == hear(plain, SPOKEN[1:2], GREEDY)
    assert guessing.account().counters.accepted_tokens > 0
    assert max(rows) == 3


def test_a_context_is_filled_to_its_end(tiny: Callable[[str], Path], oracle: type[Oracle]) -> None:
    plain, guessing = (build(tiny("tied"), speculate=wish, max_model_len=80) for wish in (False, True))
    learn(plain, SPOKEN[1:2])
    to_the_end = replace(GREEDY, max_tokens=None)
    expected = hear(plain, SPOKEN[1:2], to_the_end)
    assert hear(guessing, SPOKEN[1:2], to_the_end) == expected
    usage = expected[0][0][-1].usage
    assert usage is not None
    assert usage.total_tokens == 80


def test_who_is_paused_goes_on_with_the_same_words(
    tiny: Callable[[str], Path], oracle: type[Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody is paused for a guess: it takes no block that its sequence does not hold."""
    monkeypatch.setattr("vlfit.engine.scheduling.scheduler.LOOKAHEAD_TOKENS", 8)
    tight = {"max_model_len": 128, "kv_tokens": 128, "block_size": 8, "max_num_seqs": 4}
    plain, guessing = (build(tiny("tied"), speculate=wish, **tight) for wish in (False, True))
    learn(plain, SPOKEN)
    both = [*SPOKEN, *SPOKEN]
    assert hear(guessing, both, GREEDY) == hear(plain, both, GREEDY)
    assert guessing.account().num_preemptions > 0
    assert guessing.account().num_preemptions <= plain.account().num_preemptions
    # What is left in the blocks is what the next request of the same words takes over.
    again = hear(guessing, SPOKEN, GREEDY)
    assert again[1] == hear(plain, SPOKEN, GREEDY)[1]


@pytest.mark.parametrize(
    "wish", [{"temperature": 1.0, "seed": 3}, {"top_logprobs": 2}, {"repetition_penalty": 1.3}], ids=str
)
def test_who_is_not_plainly_greedy_guesses_nothing(
    tiny: Callable[[str], Path], oracle: type[Oracle], wish: dict[str, Any]
) -> None:
    plain, guessing = (build(tiny("tied"), speculate=each, prefix_cache=False) for each in (False, True))
    learn(plain, SPOKEN)
    sampling = replace(GREEDY, max_tokens=12, **wish)
    assert hear(guessing, SPOKEN, sampling) == hear(plain, SPOKEN, sampling)
    assert guessing.account().counters.draft_tokens == 0


def test_an_answer_of_a_given_form_keeps_to_it(tiny: Callable[[str], Path], oracle: type[Oracle]) -> None:
    """Guesses know nothing of the form: what it does not allow is never said, though the model said so."""
    plain, guessing = (build(tiny("tied"), speculate=each) for each in (False, True))
    form = Grammar("json", '{"type": "array", "items": {"type": "string"}, "minItems": 2}')
    sampling = SamplingParams(max_tokens=30, grammar=form)
    expected = hear(plain, SPOKEN, sampling)
    for conversation, answer in zip(SPOKEN, expected[1], strict=True):
        prompt = plain.prepare_prompt(plain.prompts.build(conversation, context=plain.context))
        Oracle.answers[prompt.token_ids.tobytes()] = answer
    assert hear(guessing, SPOKEN, sampling) == expected
    assert guessing.account().counters.draft_tokens > 0


def test_one_that_is_told_of_a_failure_says_no_guess(
    tiny: Callable[[str], Path], oracle: type[Oracle]
) -> None:
    """A listener that fails in the middle of a run ends its request there."""
    guessing = build(tiny("tied"), speculate=True)
    learn(build(tiny("tied"), speculate=False), SPOKEN[:1])
    heard: list[object] = []

    def listen(arrival: object) -> None:
        heard.append(arrival)
        if len(heard) == 7:
            raise RuntimeError("gone")

    prompt = guessing.prepare_prompt(guessing.prompts.build(SPOKEN[0], context=guessing.context))
    guessing.submit(guessing.sequence(prompt, GREEDY, listen))
    while guessing.busy:
        guessing.step()
    assert len(heard) == 7
    assert guessing.block_manager.num_free == guessing.block_manager.num_blocks


def test_mini_says_the_same_of_a_picture_in_fewer_passes() -> None:
    """Without an oracle: what is known are the words of the request, and what it has said itself."""
    picture = ImagePart((PICTURES / "animals.png").read_bytes())
    plain, guessing = (
        NativeEngine(open_checkpoint("mini"), EngineOptions(device="cpu", max_model_len=1024, speculate=wish))
        for wish in (False, True)
    )
    for question in (SCENE, CAPTION_SHORT):
        conversations = [ask(question, picture)]
        sampling = SamplingParams(max_tokens=150)
        assert hear(guessing, conversations, sampling) == hear(plain, conversations, sampling)
    assert guessing.account().counters.steps < 0.85 * plain.account().counters.steps
