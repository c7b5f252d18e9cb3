"""Requests with a common prefix share its computation and answer as without sharing."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.pictures import picture
from vlfit.api.conversation import Conversation, ImagePart, Message, TextPart, VideoPart, single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.outputs import Chunk
from vlfit.api.sampling_params import SamplingParams
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.engine.sampling.sampler import StepOutput, select_tokens
from vlfit.engine.scheduling.sequence import ScheduledChunk
from vlfit.errors import ModelFailed
from vlfit.prompt.builder import Prompt

SAMPLING = SamplingParams(max_tokens=16, ignore_eos=True)


def engine(folder: Path | str, **options: object) -> NativeEngine:
    settings: dict[str, object] = {"device": "cpu", "max_model_len": 512, "image_cache_bytes": 0, **options}
    return NativeEngine(open_checkpoint(folder), EngineOptions(**settings))  # type: ignore[arg-type]


def answer(
    engine: NativeEngine, conversation: Conversation, sampling: SamplingParams = SAMPLING
) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt came from the prefix cache."""
    return answer_prompt(engine, engine.prompts.build(conversation), sampling)


def answer_prompt(
    engine: NativeEngine, prompt: Prompt, sampling: SamplingParams = SAMPLING
) -> tuple[str, int]:
    received: list[Chunk | Exception] = []
    engine.submit(engine.make_sequence(engine.prepare_prompt(prompt), sampling, received.append))
    while engine.busy:
        engine.step()
    chunks = [chunk for chunk in received if isinstance(chunk, Chunk)]
    assert len(chunks) == len(received), received[-1]
    usage = chunks[-1].usage
    assert usage is not None
    assert engine.block_manager.num_free == engine.block_manager.num_blocks
    return "".join(chunk.text for chunk in chunks), usage.cached_tokens


@pytest.fixture
def count_encodings(monkeypatch: pytest.MonkeyPatch) -> Callable[[NativeEngine], list[bytes]]:
    """Returns a list to which the keys of pictures are added as an engine encodes them."""

    def count(engine: NativeEngine) -> list[bytes]:
        seen: list[bytes] = []
        encode = engine.runner.encode_image

        def watched(image):  # type: ignore[no-untyped-def]
            seen.append(image.key)
            return encode(image)

        monkeypatch.setattr(engine.runner, "encode_image", watched)
        return seen

    return count


def test_a_follow_up_about_the_same_picture_costs_only_its_own_tokens(
    count_encodings: Callable[[NativeEngine], list[bytes]],
) -> None:
    """mini, greedy: the same words with the cache as without it, and the picture encoded once."""
    shared, uncached = engine("mini"), engine("mini", prefix_cache=False)
    encoded = count_encodings(shared)
    photo = ImagePart(picture(320, 256, seed=3))
    questions = ("What is this?", "What colour is it?", "How many things are there?")
    cached = []
    for question in questions:
        words, tokens = answer(shared, single_turn(question, photo))
        assert (words, 0) == answer(uncached, single_turn(question, photo))
        cached.append(tokens)
    assert len(encoded) == 1
    image_tokens = shared.prompts.build(single_turn("", photo)).image_tokens
    assert cached[0] == 0
    assert min(cached[1:]) >= image_tokens


def test_a_conversation_goes_on_from_its_own_answers(tiny: Callable[[str], Path]) -> None:
    shared, uncached = engine(tiny("tied")), engine(tiny("tied"), prefix_cache=False)
    conversation = single_turn("the quick brown fox", ImagePart(picture(90, 70, seed=1)))
    for _ in range(4):
        words, cached = answer(shared, conversation)
        assert words == answer(uncached, conversation)[0]
        conversation = (
            *conversation,
            Message("assistant", (TextPart(words),)),
            Message("user", (TextPart("go on"), ImagePart(picture(64, 64, seed=2)))),
        )
    assert cached > 100


@pytest.mark.parametrize("name", ["tied", "wide_heads_one_level", "vision_head_72", "fp8"])
def test_pictures_of_one_size_and_other_content_are_not_taken_for_each_other(
    tiny: Callable[[str], Path], name: str
) -> None:
    shared, uncached = engine(tiny(name)), engine(tiny(name), prefix_cache=False)
    answers = set()
    for seed in (1, 2):
        conversation = single_turn("the quick brown fox", ImagePart(picture(256, 256, seed=seed)))
        words, cached = answer(shared, conversation)
        assert words == answer(uncached, conversation)[0]
        assert cached == 0  # the template's few tokens before the picture fill no block
        answers.add(words)
    assert len(answers) == 2  # so that a mix-up would be seen


def test_of_two_pictures_only_the_new_one_is_encoded(
    tiny: Callable[[str], Path], count_encodings: Callable[[NativeEngine], list[bytes]]
) -> None:
    shared, uncached = engine(tiny("tied")), engine(tiny("tied"), prefix_cache=False)
    one, two, other = (ImagePart(picture(200, 150, seed=seed)) for seed in (1, 2, 3))
    answer(shared, single_turn("the fox", one, two))
    encoded = count_encodings(shared)
    words, cached = answer(shared, single_turn("the fox", one, other))
    assert words == answer(uncached, single_turn("the fox", one, other))[0]
    first, second = shared.prompts.build(single_turn("the fox", one, other)).images
    assert cached >= first.tokens
    assert encoded == [second.key]


def test_a_picture_seen_at_another_size_is_another(tiny: Callable[[str], Path]) -> None:
    shared = engine(tiny("tied"))
    conversation = single_turn("the quick brown fox", ImagePart(picture(512, 512, seed=1)))
    sizes = [shared.prompts.build(conversation, max_image_tokens=cap) for cap in (None, 200, 64)]
    assert len({prompt.images[0].grid for prompt in sizes}) == 3
    for prompt in sizes:
        fresh = engine(tiny("tied"), prefix_cache=False)
        assert answer_prompt(shared, prompt) == answer_prompt(fresh, prompt)


def test_a_clip_is_shared_and_another_is_not(
    tiny: Callable[[str], Path], count_encodings: Callable[[NativeEngine], list[bytes]]
) -> None:
    shared, uncached = engine(tiny("tied")), engine(tiny("tied"), prefix_cache=False)

    def clip(last: int) -> VideoPart:
        return VideoPart(tuple(picture(160, 128, seed=seed) for seed in (1, 2, 3, last)))

    encoded = count_encodings(shared)
    for last, question in ((4, "the fox"), (4, "over the dog"), (5, "the fox")):
        words, _ = answer(shared, single_turn(question, clip(last)))
        assert words == answer(uncached, single_turn(question, clip(last)))[0]
    assert len(encoded) == 2 * 2  # two clips, each of two pairs of frames, which are encoded one by one


def test_many_at_once_in_a_small_pool_answer_as_each_alone(tiny: Callable[[str], Path]) -> None:
    """Blocks are shared, kept, displaced and shared again, while some requests are cancelled."""
    chance = random.Random(7)
    photos = [ImagePart(picture(120 + 40 * seed, 100, seed=seed)) for seed in range(3)]
    text = "the quick brown fox jumps over the lazy dog and then it does so again"
    conversations = [
        single_turn(text[: chance.randint(1, 70)], *photos[: chance.randint(0, 3)]) for _ in range(40)
    ]
    uncached = engine(tiny("tied"), prefix_cache=False)
    alone = [answer(uncached, conversation)[0] for conversation in conversations]
    shared = engine(tiny("tied"), max_model_len=256, kv_tokens=512, max_num_seqs=4, max_num_batched_tokens=48)
    received: list[list[Chunk | Exception]] = [[] for _ in conversations]
    sequences = [
        shared.make_sequence(
            shared.prepare_prompt(shared.prompts.build(conversation)), SAMPLING, events.append
        )
        for conversation, events in zip(conversations, received, strict=True)
    ]
    for number, one in enumerate(sequences):
        shared.submit(one)
        for _ in range(chance.randint(0, 6)):
            shared.step()
        if number % 5 == 4:
            sequences[chance.randint(0, number)].cancelled = True
    while shared.busy:
        shared.step()
    finished = 0
    for expected, events in zip(alone, received, strict=True):
        chunks = [chunk for chunk in events if isinstance(chunk, Chunk)]
        text = "".join(chunk.text for chunk in chunks)
        if chunks[-1].finish_reason == "length":
            finished += 1
            assert text == expected
        else:
            assert expected.startswith(text)
    assert finished > 20
    assert shared.counters.cached_prompt_tokens > 500
    assert shared.block_manager.num_free == shared.block_manager.num_blocks


def test_blocks_of_a_failed_request_are_not_shared(tiny: Callable[[str], Path]) -> None:
    built = engine(tiny("tied"))
    conversation = single_turn("the quick brown fox jumps over the lazy dog and then it does so again")
    run = built.runner.run

    def overflowing(batch: list[ScheduledChunk]) -> StepOutput:
        return select_tokens(torch.full_like(run(batch).logits, torch.nan))

    built.runner.run = overflowing  # type: ignore[method-assign]
    received: list[Chunk | Exception] = []
    built.submit(
        built.make_sequence(
            built.prepare_prompt(built.prompts.build(conversation)), SAMPLING, received.append
        )
    )
    while built.busy:
        built.step()
    assert isinstance(received[-1], ModelFailed)
    built.runner.run = run  # type: ignore[method-assign]
    assert answer(built, conversation)[1] == 0
    assert answer(built, conversation)[1] > 0


def test_it_can_be_switched_off(tiny: Callable[[str], Path]) -> None:
    off = engine(tiny("tied"), prefix_cache=False)
    conversation = single_turn("the quick brown fox jumps over the lazy dog and then it does so again")
    assert answer(off, conversation) == answer(off, conversation)
    assert off.account().pool.cached == 0
    on = engine(tiny("tied"))
    answer(on, conversation)
    known = on.account().pool.cached
    assert known > 0
    assert answer(on, conversation)[1] == on.counters.cached_prompt_tokens > 0
