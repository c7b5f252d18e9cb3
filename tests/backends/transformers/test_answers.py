"""Answers of the backend equal those of transformers' ``generate``, for several architectures."""

import json
from collections.abc import Callable
from io import BytesIO
from typing import Any

import pytest
import torch
from PIL import Image

from tests.backends.transformers.models import FAMILIES
from tests.pictures import picture
from vlfit.api.conversation import Conversation, ImagePart, Message, TextPart, single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import Grammar, SamplingParams
from vlfit.backends.native import NativeBackend
from vlfit.backends.transformers.backend import TransformersBackend

Backends = Callable[[str], TransformersBackend]
Reference = Callable[[str], tuple[Any, Any]]

PICTURES = (picture(120, 80), picture(64, 70, seed=3))


def say(reference: tuple[Any, Any], conversation: Conversation, **options: Any) -> tuple[str, int]:
    """What transformers answers to ``conversation``, and the tokens of its prompt."""
    model, processor = reference
    messages = [
        {
            "role": message.role,
            "content": [
                {"type": "text", "text": part.text}
                if isinstance(part, TextPart)
                else {"type": "image", "image": Image.open(BytesIO(bytes(part.data)))}  # type: ignore[union-attr]
                for part in message.parts
            ],
        }
        for message in conversation
    ]
    inputs = processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    neutral = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    options = {**neutral, "repetition_penalty": 1.0, **options}
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=24, **options)
    length = inputs["input_ids"].shape[1]
    return processor.decode(ids[0, length:], skip_special_tokens=True), length


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_with_pictures_match_generate(
    family: str, backends: Backends, reference: Reference
) -> None:
    conversation = single_turn("What is in these?", *map(ImagePart, PICTURES))
    answer = backends(family).stream(conversation, SamplingParams()).answer()
    text, length = say(reference(family), conversation)
    assert (answer.text, answer.usage.prompt_tokens) == (text, length)
    assert len(set(answer.text)) > 4, "the model says one thing over and over: nothing was compared"
    assert [each.width for each in answer.images] == [120, 64]
    assert sum(each.tokens for each in answer.images) == (answer.usage.image_tokens or 0) > 0


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_turns_and_penalties_match_generate(family: str, backends: Backends, reference: Reference) -> None:
    conversation = (
        *single_turn("What is this?", ImagePart(PICTURES[0])),
        Message("assistant", (TextPart("a red square"),)),
        Message("user", (TextPart("and now?"),)),
    )
    answer = backends(family).stream(conversation, SamplingParams(repetition_penalty=1.3)).answer()
    assert answer.text == say(reference(family), conversation, repetition_penalty=1.3)[0]


def test_mini_matches_the_native_engine() -> None:
    options = EngineOptions(device="cpu", max_model_len=512, max_num_seqs=1)
    conversation = single_turn("Describe this picture in one sentence.", ImagePart(picture(96, 64)))
    sampling = SamplingParams(max_tokens=16)
    with NativeBackend.load("mini", options) as native:
        expected = native.stream(conversation, sampling).answer()
    with TransformersBackend.load("mini", options) as backend:
        answer = backend.stream(conversation, sampling).answer()
    assert (answer.text, answer.usage, answer.images) == (expected.text, expected.usage, expected.images)


def test_seeds_are_reproducible(qwen: TransformersBackend) -> None:
    def words(seed: int) -> str:
        sampling = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, min_p=0.01, seed=seed)
        return qwen.stream(single_turn("hello"), sampling).answer().text

    assert words(1) == words(1) != words(2)


def test_chunks_are_whole_characters(
    qwen: TransformersBackend,
) -> None:
    stream = qwen.stream(
        single_turn("图片里有什么"), SamplingParams(max_tokens=24, temperature=1.0, seed=5, top_logprobs=0)
    )
    chunks = list(stream)
    ids = [logprob.token_id for chunk in chunks for logprob in chunk.logprobs]
    tokenizer = qwen.engine.prompts._tokenizer
    assert "".join(chunk.text for chunk in chunks) == tokenizer.decode(ids, skip_special_tokens=True)
    assert len(ids) == 24


def test_stop_strings(qwen: TransformersBackend) -> None:
    whole = qwen.stream(single_turn("hello"), SamplingParams()).answer().text
    stop = whole[5:8]
    answer = qwen.stream(single_turn("hello"), SamplingParams(stop=(stop,))).answer()
    assert (answer.text, answer.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_logprobs_match_the_model(qwen: TransformersBackend, reference: Reference) -> None:
    answer = qwen.stream(single_turn("hello"), SamplingParams(max_tokens=1, top_logprobs=3)).answer()
    model, processor = reference("qwen2_5_vl")
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    inputs = processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    with torch.no_grad():
        best = model(**inputs).logits[0, -1].log_softmax(-1).topk(3)
    [first] = answer.logprobs
    assert [each.token_id for each in first.top] == best.indices.tolist()
    assert [each.logprob for each in first.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_grammars_are_followed(qwen: TransformersBackend) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    form = Grammar("json", json.dumps(schema | {"additionalProperties": False}))
    answer = qwen.stream(single_turn("JSON"), SamplingParams(grammar=form, max_tokens=60)).answer()
    assert json.loads(answer.text)["a"] in ("x", "y")
    assert answer.finish_reason == "stop"


def test_text_completion(qwen: TransformersBackend, reference: Reference) -> None:
    from vlfit.backends.base import QueuedStream

    prepared = qwen.prepare_text("the quick brown", SamplingParams())
    model, processor = reference("qwen2_5_vl")
    inputs = processor.tokenizer("the quick brown", return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(
            **inputs, max_new_tokens=24, do_sample=False, repetition_penalty=1.0, temperature=None
        )
    expected = processor.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert QueuedStream(qwen, prepared, SamplingParams()).answer().text == expected
