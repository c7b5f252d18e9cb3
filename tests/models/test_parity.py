"""Text-only decoders against transformers, in float32 on the CPU: one for each way in which they differ (see
``tests/tiny_decoders.py``), with the tolerances of Qwen3-VL's own test.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from tests.engine.test_parity import GREEDY, NEW_TOKENS, TIE, TOLERANCE, relative, run
from tests.tiny_decoders import DECODERS, decoder_reference
from vlfit.api.conversation import Conversation, Message, TextPart, single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine

# The prompts of the first are shorter than the 64 tokens in which "phi3_long" was first trained, with what
# comes after them; those of the others are longer, with what the templates add.
SHORT = "the fox"
CONVERSATIONS: dict[str, Conversation] = {
    "question": single_turn("Describe the quick brown fox, how it jumps, and what the lazy dog says. " * 2),
    "system and turns": (
        Message("system", (TextPart("You are a helpful assistant."),)),
        Message("user", (TextPart("how many cats are there in this image?"),)),
        Message("assistant", (TextPart("a red square, a blue circle and a green triangle"),)),
        Message("user", (TextPart("and 3 dogs? 图片 🙂"),)),
    ),
}
Pair = tuple[NativeEngine, Any]


@pytest.fixture(scope="module", params=DECODERS)
def pair(
    request: pytest.FixtureRequest,
    tiny_decoder: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Pair:
    """The engine and the reference on the same files."""
    folder = tiny_decoder(request.param)
    reference = decoder_reference(folder, tmp_path_factory.mktemp("wide"))
    reference.generation_config = GenerationConfig()  # the checkpoint's own would stop at its end token
    return NativeEngine(
        open_checkpoint(folder), EngineOptions(device="cpu", max_model_len=1024, max_num_batched_tokens=48)
    ), reference


def expected_tokens(
    engine: NativeEngine, reference: Any, conversation: Conversation, tokens: int
) -> list[int]:
    """The reference's greedy tokens, of which none is a matter of the last bit."""
    ids = engine.prompts.build(conversation).token_ids
    settings = GenerationConfig(**{**GREEDY.to_dict(), "max_new_tokens": tokens})
    with torch.inference_mode():
        output = reference.generate(input_ids=torch.tensor([ids]), generation_config=settings)
    best, second = torch.stack(output.scores)[:, 0].topk(2).values.unbind(-1)
    assert (best - second).min() > TIE, "the reference itself hangs on the last bit: take another seed"
    found: list[int] = output.sequences[0, len(ids) :].tolist()
    return found


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_greedy_tokens_equal_the_reference(pair: Pair, name: str) -> None:
    engine, reference = pair
    expected = expected_tokens(engine, reference, CONVERSATIONS[name], NEW_TOKENS)
    assert run(engine, CONVERSATIONS[name]) == [expected]
    assert len(expected) == NEW_TOKENS
    assert len(set(expected)) > 5, "the reference says the same few tokens over and over: a weak test"


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_logits_equal_the_reference(pair: Pair, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, reference = pair
    ids = engine.prompts.build(CONVERSATIONS[name]).token_ids
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([ids])).logits[0, -1]
    outputs: list[torch.Tensor] = []
    forward = engine.runner.text.__class__.__call__

    def recorded(*arguments: Any) -> torch.Tensor:
        outputs.append(forward(*arguments))
        return outputs[-1]

    monkeypatch.setattr(engine.runner.text.__class__, "__call__", recorded)
    run(engine, CONVERSATIONS[name], tokens=1)
    assert relative(outputs[-1][0], expected) < TOLERANCE


@pytest.mark.parametrize("name", ["qwen2", "llama3", "phi3", "phi3_long"])
def test_tokens_do_not_depend_on_batch_chunks_or_blocks(
    tiny_decoder: Callable[[str], Path], name: str
) -> None:
    checkpoint = open_checkpoint(tiny_decoder(name))
    conversations = [*CONVERSATIONS.values(), single_turn("the dog"), single_turn("hello world")]
    plain = NativeEngine(
        checkpoint, EngineOptions(device="cpu", max_model_len=1024, max_num_batched_tokens=1024)
    )
    alone = [run(plain, conversation)[0] for conversation in conversations]
    options = EngineOptions(
        device="cpu", max_model_len=1024, max_num_batched_tokens=7, block_size=4, max_num_seqs=4
    )
    assert run(NativeEngine(checkpoint, options), *conversations) == alone


def test_longrope_uses_short_factors_in_a_short_context(
    tiny_decoder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny_decoder("phi3_long")
    checkpoint = open_checkpoint(folder)
    reference = decoder_reference(folder, tmp_path)
    reference.generation_config = GenerationConfig()
    usual = NativeEngine(checkpoint, EngineOptions(device="cpu"))
    assert usual.context == 64  # in which it was first trained: longer ones cost exactness
    tokens = 24
    prompt = len(usual.prompts.build(single_turn(SHORT)).token_ids)
    assert prompt + tokens <= 64
    expected = expected_tokens(usual, reference, single_turn(SHORT), tokens)
    assert run(usual, single_turn(SHORT), tokens=tokens) == [expected]
    longer = NativeEngine(checkpoint, EngineOptions(device="cpu", max_model_len=1024))
    assert run(longer, single_turn(SHORT), tokens=tokens) != [expected]
