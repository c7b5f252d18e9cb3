"""mini35, a trained Qwen3.5: the reference's words about pictures, reuse of them, and drafts that come true.

Untrained weights say the same whatever they are shown, and draft what nobody says; these do not.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.test_parity import TIE, reference_inputs
from tests.engine.test_shared_prefixes import engine as build
from tests.models.test_mtp import Always
from tests.tiny_qwen3_5 import qwen3_5_reference
from vlfit.api.conversation import Conversation, ImagePart, Message, TextPart, single_turn
from vlfit.api.sampling_params import SamplingParams
from vlfit.engine.engine import NativeEngine
from vlfit.tasks.describe import CAPTION_LONG, CAPTION_SHORT

MINI35 = Path(__file__).parents[1] / "mini35"
SHOWN = Path(__file__).parents[2] / "examples" / "pictures"
GREEDY = SamplingParams(max_tokens=48)


def picture(name: str) -> ImagePart:
    return ImagePart((SHOWN / name).read_bytes())


CONVERSATIONS = {
    "caption": single_turn(CAPTION_SHORT, picture("shop.png")),
    "description": single_turn(CAPTION_LONG, picture("tractor-and-cat.png")),
    "question": single_turn("What colour is the background?", picture("animals.png")),
    "two pictures": single_turn("What is different?", picture("number-25.png"), picture("motorcycles.png")),
    "number": single_turn("What number is it?", picture("number-25.png")),
    "talk": single_turn("Who are you?"),
}


def ask(engine: NativeEngine, conversation: Conversation, sampling: SamplingParams = GREEDY) -> list[int]:
    prompt = engine.prepare_prompt(engine.prompts.build(conversation, context=engine.context))
    sequence = engine.make_sequence(prompt, sampling, lambda event: None)
    engine.submit(sequence)
    while engine.busy:
        engine.step()
    return sequence.generated


@pytest.fixture(scope="module")
def plain() -> NativeEngine:
    return build(MINI35, max_model_len=1024, speculate=False, prefix_cache=False)


@pytest.fixture(scope="module")
def answers(plain: NativeEngine) -> dict[str, list[int]]:
    return {name: ask(plain, conversation) for name, conversation in CONVERSATIONS.items()}


def test_words_are_those_of_transformers(plain: NativeEngine, answers: dict[str, list[int]]) -> None:
    from transformers import GenerationConfig

    reference = qwen3_5_reference(MINI35)
    compared = 0
    for name, conversation in CONVERSATIONS.items():
        prompt = plain.prompts.build(conversation, context=plain.context)
        inputs = reference_inputs(plain, prompt)
        greedy = GenerationConfig(
            do_sample=False, max_new_tokens=len(answers[name]), pad_token_id=0, output_scores=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        with torch.inference_mode():
            output = reference.generate(**inputs, generation_config=greedy)
        best, second = torch.stack(output.scores)[:, 0].topk(2).values.unbind(-1)
        # What two floating-point orders may decide otherwise is no difference, nor what follows it.
        ties = (best - second < TIE).nonzero().flatten().tolist()
        sure = ties[0] if ties else len(answers[name])
        tokens = output.sequences[0, len(prompt.token_ids) :].tolist()
        assert answers[name][:sure] == tokens[:sure], name
        compared += sure
    assert compared > 60


def test_pictures_decide_what_is_said(plain: NativeEngine) -> None:
    said = {
        name: tuple(ask(plain, single_turn(CAPTION_SHORT, picture(name))))
        for name in ("shop.png", "animals.png", "tractor-and-cat.png")
    }
    assert len(set(said.values())) == 3
    assert "25" in plain.prompts.tokenizer.decode(ask(plain, CONVERSATIONS["number"]))
    assert all(tokens[-1] in plain.generation.eos_token_ids for tokens in said.values())


def test_a_second_question_reuses_the_picture_and_is_answered_alike(plain: NativeEngine) -> None:
    warm = build(MINI35, max_model_len=1024, speculate=False)
    shown = picture("shop.png")
    turns = [
        single_turn(CAPTION_SHORT, shown),
        single_turn(CAPTION_LONG, shown),
        (
            Message("user", (shown, TextPart(CAPTION_SHORT))),
            Message("assistant", (TextPart("A phone and a chair."),)),
            Message("user", (TextPart("What colour is the background?"),)),
        ),
    ]
    cached = []
    for conversation in turns:
        chunks: list[object] = []
        prompt = warm.prepare_prompt(warm.prompts.build(conversation, context=warm.context))
        sequence = warm.make_sequence(prompt, GREEDY, chunks.append)
        warm.submit(sequence)
        while warm.busy:
            warm.step()
        assert sequence.generated == ask(plain, conversation)
        cached.append(chunks[-1].usage.cached_tokens)  # type: ignore[attr-defined]
    assert cached[0] == 0
    assert min(cached[1:]) > 64, "the picture's tokens come from a snapshot"


def test_drafts_come_true(plain: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer that drafts was trained: most of its drafts are accepted, and nothing said changes."""
    monkeypatch.setattr("vlfit.engine.engine.BestProposer", lambda proposers: proposers[-1])
    monkeypatch.setattr("vlfit.engine.engine.ModelProposer", Always)
    monkeypatch.setattr(Always, "count", 1)
    drafting = build(MINI35, max_model_len=1024, speculate=True)
    sampled = replace(GREEDY, temperature=0.7, top_k=20, seed=3)
    tokens = 0
    for name in ("shop.png", "animals.png", "tractor-and-cat.png"):
        conversation = single_turn(CAPTION_LONG, picture(name))
        for sampling in (GREEDY, sampled):
            said = ask(drafting, conversation, sampling)
            assert said == ask(plain, conversation, sampling)
            tokens += len(said)
    counters = drafting.account().counters
    assert counters.model_draft_tokens > 60
    assert counters.model_accepted_tokens > 0.5 * counters.model_draft_tokens
    assert counters.decode_steps < 0.7 * tokens
