"""Requests that begin alike share what was computed, and say what they would say without."""

import random
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.test_scheduler import finish_batch
from tests.pictures import picture
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.answer import Chunk, ImageSeen
from vlfit.engine.conversation import Conversation, ImagePart, Message, TextPart, VideoPart, ask
from vlfit.engine.engine import Engine
from vlfit.engine.images import PreparedImage
from vlfit.engine.kv_cache import BlockPool
from vlfit.engine.options import EngineOptions
from vlfit.engine.prefix_cache import PrefixCache, prompt_keys
from vlfit.engine.prompt import Prompt
from vlfit.engine.sampling import SamplingParams
from vlfit.engine.scheduler import Scheduler, Work
from vlfit.engine.scores import Scores, scores_of
from vlfit.engine.sequence import PricedPrompt, Sequence
from vlfit.errors import ModelFailed

BLOCK = 8
BLANK = PreparedImage(
    np.zeros((1, 32, 32, 3), np.uint8), (1, 12, 12), 36, b"", ImageSeen(192, 192, 192, 192, 36)
)
SAMPLING = SamplingParams(max_tokens=16, ignore_eos=True)


def sequence(token_ids: list[int], max_tokens: int = 8) -> Sequence:
    ids = np.array(token_ids)
    keys = prompt_keys(ids, ids[:0], (), BLOCK)
    prompt = PricedPrompt(ids, ids[:0], np.stack([np.arange(len(ids))] * 3), len(ids), (), keys)
    return Sequence(prompt, SamplingParams(), max_tokens, completion=None, listener=print, asked=0.0)  # type: ignore[arg-type]


def house(blocks: int, chunk: int = 64) -> Scheduler:
    return Scheduler(BlockPool(blocks * BLOCK, BLOCK), 4, chunk, PrefixCache())


def run_alone(scheduler: Scheduler, one: Sequence) -> int:
    """How many tokens were there when it began."""
    scheduler.add(one)
    assert scheduler.admit() == [one]
    shared = one.cached
    while len(one.generated) < one.max_tokens:
        finish_batch(scheduler)
        assert scheduler.admit() == []
    scheduler.remove(one)
    return shared


def test_a_prompt_that_begins_as_an_earlier_one_starts_behind_what_they_share() -> None:
    scheduler = house(16)
    first, second = sequence([*range(20)]), sequence([*range(17), 99, 99])
    run_alone(scheduler, first)
    assert scheduler.pool.free == 16
    scheduler.add(second)
    scheduler.admit()
    assert second.cached == 16  # two full blocks of eight; the third differs
    assert [length for _, length in finish_batch(scheduler)] == [3]


def test_a_prompt_seen_before_still_computes_its_last_token() -> None:
    """Also where it fills its blocks to the brim."""
    scheduler = house(16)
    assert [run_alone(scheduler, sequence([*range(16)])) for _ in range(2)] == [0, 8]


def test_the_answer_is_shared_with_the_next_turn() -> None:
    scheduler = house(16)
    first = sequence([*range(10)], max_tokens=15)
    run_alone(scheduler, first)
    # 24 tokens are in the cache: the last one was never fed back. They are three blocks.
    follow_up = sequence([*range(10), *first.generated, 5, 6, 7])
    scheduler.add(follow_up)
    scheduler.admit()
    assert follow_up.cached == 24


def test_one_that_runs_shares_with_one_that_comes() -> None:
    scheduler = house(7)
    first, second = sequence([*range(20)], 9), sequence([*range(20)], 9)  # four blocks each
    scheduler.add(first)
    scheduler.admit()
    finish_batch(scheduler)
    scheduler.add(second)
    assert scheduler.admit() == [second]  # two blocks of its own are enough, and three are left
    assert second.blocks[:2] == first.blocks[:2]
    assert not set(second.blocks[2:]) & set(first.blocks)
    assert scheduler.pool.free == 1
    scheduler.remove(first)
    assert scheduler.pool.free == 3
    scheduler.remove(second)
    assert scheduler.pool.free == 7


def test_kept_blocks_yield_the_ends_of_old_prompts_first() -> None:
    scheduler = house(8)
    old, new = [*range(33)], [*range(100, 125)]
    run_alone(scheduler, sequence(old, 1))  # five blocks, four of them full
    run_alone(scheduler, sequence(new, 1))  # four, three of them full
    # 4 + 3 are kept and one is blank; three more are wanted: the blank one and the last two of the oldest.
    run_alone(scheduler, sequence([*range(200, 217)], 1))
    assert scheduler.pool.free == 8
    for tokens, shared in ((new, 24), (old, 16)):
        one = sequence(tokens, 1)
        scheduler.add(one)
        scheduler.admit()
        assert one.cached == shared
        scheduler.remove(one)


def test_a_request_as_large_as_the_pool_is_admitted_whatever_is_kept() -> None:
    scheduler = house(8)
    run_alone(scheduler, sequence([*range(60)], 1))
    large = sequence([*range(60, 120)], 5)
    scheduler.add(large)
    assert scheduler.admit() == [large]
    assert scheduler.pool.free == 0
    assert len(scheduler.prefixes or ()) == 0
    scheduler.remove(large)
    # Nothing of it was computed, so nothing of it may be shared, nor of what it displaced.
    for tokens in ([*range(60)], [*range(60, 120)]):
        one = sequence(tokens, 1)
        scheduler.add(one)
        scheduler.admit()
        assert one.cached == 0
        scheduler.remove(one)


def test_what_was_cut_off_shares_its_full_blocks_and_what_failed_none() -> None:
    for failed, shared in ((False, 24), (True, 0)):
        scheduler = house(16, chunk=28)
        first = sequence([*range(40)])
        scheduler.add(first)
        scheduler.admit()
        finish_batch(scheduler)  # 28 tokens of 40: three full blocks and a half
        scheduler.remove(first, failed=failed)
        again = sequence([*range(40)])
        scheduler.add(again)
        scheduler.admit()
        assert again.cached == shared


def test_blocks_that_are_shared_are_not_counted_as_free_besides() -> None:
    scheduler = house(4)
    run_alone(scheduler, sequence([*range(17)], 1))  # two of three blocks are kept
    other = sequence([*range(50, 60)], 2)
    scheduler.add(other)
    scheduler.admit()
    assert scheduler.pool.free == 2
    again = sequence([*range(17)], 1)  # the two that are free, and one more
    scheduler.add(again)
    assert scheduler.admit() == []
    scheduler.remove(other)
    assert scheduler.admit() == [again]
    assert again.cached == 16


def about_a_picture(question: int = 7) -> Sequence:
    """60 tokens; the picture's are those from 2 to 37, so that it ends within the fifth block."""
    ids = np.array([7] * 38 + [question] * 22)
    places = np.arange(2, 38)
    one = sequence([*ids])
    keys = prompt_keys(ids, places, (BLANK,), BLOCK)
    one.prompt = replace(one.prompt, placeholders=places, images=(BLANK,), keys=keys)
    return one


def test_what_was_copied_is_not_copied_again_after_a_pause() -> None:
    """Its block holds what came after it by then, and is shared as it is."""
    scheduler = house(32)
    run_alone(scheduler, about_a_picture())
    other = about_a_picture(question=8)
    scheduler.add(other)
    scheduler.admit()
    assert (other.cached, other.copy is None) == (38, False)
    finish_batch(scheduler)
    scheduler._pause(other)
    assert scheduler.admit() == [other]
    assert (other.cached, other.copy) == (56, None)


def test_a_picture_counts_as_known_when_it_is_computed_to_its_end_and_not_before() -> None:
    for chunk, shared in ((37, 32), (38, 38), (39, 38), (40, 40), (50, 48)):
        scheduler = house(32, chunk)
        scheduler.add(about_a_picture())
        scheduler.admit()
        finish_batch(scheduler)
        again = about_a_picture()
        scheduler.add(again)
        scheduler.admit()
        assert again.cached == shared
        assert (again.copy is not None) == (shared == 38)


def test_a_block_that_two_computed_is_known_once_and_freed_twice() -> None:
    scheduler = house(16)
    twins = [sequence([*range(20)]) for _ in range(2)]
    for one in twins:
        scheduler.add(one)
    scheduler.admit()
    finish_batch(scheduler)
    assert len(scheduler.prefixes or ()) == 2
    for one in twins:
        scheduler.remove(one)
    assert scheduler.pool.free == 16
    taken = scheduler.pool.take(16)
    assert sorted(taken) == list(range(16))


# With a model


def engine(folder: Path | str, **options: object) -> Engine:
    settings: dict[str, object] = {"device": "cpu", "context": 512, "image_cache_bytes": 0, **options}
    return Engine(open_checkpoint(folder), EngineOptions(**settings))  # type: ignore[arg-type]


def answer(
    engine: Engine, conversation: Conversation, sampling: SamplingParams = SAMPLING
) -> tuple[str, int]:
    """What is said, and how many tokens of the prompt were not computed for it."""
    return answer_prompt(engine, engine.prompts.build(conversation), sampling)


def answer_prompt(engine: Engine, prompt: Prompt, sampling: SamplingParams = SAMPLING) -> tuple[str, int]:
    heard: list[Chunk | Exception] = []
    engine.add(engine.sequence(engine.price(prompt), sampling, heard.append))
    while engine.busy:
        engine.step()
    chunks = [chunk for chunk in heard if isinstance(chunk, Chunk)]
    assert len(chunks) == len(heard), heard[-1]
    usage = chunks[-1].usage
    assert usage is not None
    assert engine.pool.free == engine.pool.blocks
    return "".join(chunk.text for chunk in chunks), usage.cached_tokens


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine], list[bytes]]:
    """The keys of the pictures that an engine encodes from now on."""

    def count(engine: Engine) -> list[bytes]:
        seen: list[bytes] = []
        encode = engine.runner.encode

        def watched(image):  # type: ignore[no-untyped-def]
            seen.append(image.key)
            return encode(image)

        monkeypatch.setattr(engine.runner, "encode", watched)
        return seen

    return count


def test_a_follow_up_about_the_same_picture_costs_only_its_own_tokens(
    counted: Callable[[Engine], list[bytes]],
) -> None:
    """mini, greedy: the same words with the cache as without it, and the picture encoded once."""
    shared, apart = engine("mini"), engine("mini", prefix_cache=False)
    encoded = counted(shared)
    photo = ImagePart(picture(320, 256, seed=3))
    questions = ("What is this?", "What colour is it?", "How many things are there?")
    cached = []
    for question in questions:
        words, tokens = answer(shared, ask(question, photo))
        assert (words, 0) == answer(apart, ask(question, photo))
        cached.append(tokens)
    assert len(encoded) == 1
    image_tokens = shared.prompts.build(ask("", photo)).image_tokens
    assert cached[0] == 0
    assert min(cached[1:]) >= image_tokens


def test_a_conversation_goes_on_from_its_own_answers(tiny: Callable[[str], Path]) -> None:
    shared, apart = engine(tiny("tied")), engine(tiny("tied"), prefix_cache=False)
    conversation = ask("the quick brown fox", ImagePart(picture(90, 70, seed=1)))
    for _ in range(4):
        words, cached = answer(shared, conversation)
        assert words == answer(apart, conversation)[0]
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
    shared, apart = engine(tiny(name)), engine(tiny(name), prefix_cache=False)
    said = set()
    for seed in (1, 2):
        conversation = ask("the quick brown fox", ImagePart(picture(256, 256, seed=seed)))
        words, cached = answer(shared, conversation)
        assert words == answer(apart, conversation)[0]
        assert cached == 0  # the template's few tokens before the picture fill no block
        said.add(words)
    assert len(said) == 2  # the test would see a mistake


def test_the_second_of_two_pictures_is_looked_at_anew_and_the_first_is_not(
    tiny: Callable[[str], Path], counted: Callable[[Engine], list[bytes]]
) -> None:
    shared, apart = engine(tiny("tied")), engine(tiny("tied"), prefix_cache=False)
    one, two, other = (ImagePart(picture(200, 150, seed=seed)) for seed in (1, 2, 3))
    answer(shared, ask("the fox", one, two))
    encoded = counted(shared)
    words, cached = answer(shared, ask("the fox", one, other))
    assert words == answer(apart, ask("the fox", one, other))[0]
    first, second = shared.prompts.build(ask("the fox", one, other)).images
    assert cached >= first.tokens
    assert encoded == [second.key]


def test_a_picture_seen_at_another_size_is_another(tiny: Callable[[str], Path]) -> None:
    shared = engine(tiny("tied"))
    conversation = ask("the quick brown fox", ImagePart(picture(512, 512, seed=1)))
    sizes = [shared.prompts.build(conversation, max_image_tokens=cap) for cap in (None, 200, 64)]
    assert len({prompt.images[0].grid for prompt in sizes}) == 3
    for prompt in sizes:
        fresh = engine(tiny("tied"), prefix_cache=False)
        assert answer_prompt(shared, prompt) == answer_prompt(fresh, prompt)


def test_a_grid_counts_even_where_the_pixels_would_not_tell() -> None:
    """Keys of pictures hold their shape already; the block's key does not lean on that."""
    ids = np.full(40, 7)
    places = np.arange(2, 38)

    def keys(grid: tuple[int, int, int], key: bytes) -> tuple[bytes, ...]:
        image = replace(BLANK, grid=grid, key=key)
        found = prompt_keys(ids, places, (image,), BLOCK)
        assert [end for end, _ in found.ends] == [38]
        return (*found.blocks, found.ends[0][1])

    assert keys((1, 12, 12), b"a") == keys((1, 12, 12), b"a")
    assert not set(keys((1, 12, 12), b"a")) & set(keys((1, 6, 24), b"a"))
    assert not set(keys((1, 12, 12), b"a")) & set(keys((1, 12, 12), b"b"))


def test_a_clip_is_shared_and_another_is_not(
    tiny: Callable[[str], Path], counted: Callable[[Engine], list[bytes]]
) -> None:
    shared, apart = engine(tiny("tied")), engine(tiny("tied"), prefix_cache=False)

    def clip(last: int) -> VideoPart:
        return VideoPart(tuple(picture(160, 128, seed=seed) for seed in (1, 2, 3, last)))

    encoded = counted(shared)
    for last, question in ((4, "the fox"), (4, "over the dog"), (5, "the fox")):
        words, _ = answer(shared, ask(question, clip(last)))
        assert words == answer(apart, ask(question, clip(last)))[0]
    assert len(encoded) == 2 * 2  # two clips, each of two pairs of frames, which are looked at one by one


def test_many_at_once_in_a_small_pool_say_what_each_says_alone(tiny: Callable[[str], Path]) -> None:
    """Blocks are shared, kept, displaced and shared again, while some requests are cancelled."""
    chance = random.Random(7)
    photos = [ImagePart(picture(120 + 40 * seed, 100, seed=seed)) for seed in range(3)]
    text = "the quick brown fox jumps over the lazy dog and then it does so again"
    conversations = [ask(text[: chance.randint(1, 70)], *photos[: chance.randint(0, 3)]) for _ in range(40)]
    apart = engine(tiny("tied"), prefix_cache=False)
    alone = [answer(apart, conversation)[0] for conversation in conversations]
    shared = engine(tiny("tied"), context=256, kv_tokens=512, sequences=4, chunk=48)
    heard: list[list[Chunk | Exception]] = [[] for _ in conversations]
    sequences = [
        shared.sequence(shared.price(shared.prompts.build(conversation)), SAMPLING, arrivals.append)
        for conversation, arrivals in zip(conversations, heard, strict=True)
    ]
    for number, one in enumerate(sequences):
        shared.add(one)
        for _ in range(chance.randint(0, 6)):
            shared.step()
        if number % 5 == 4:
            sequences[chance.randint(0, number)].cancelled = True
    while shared.busy:
        shared.step()
    finished = 0
    for said, arrivals in zip(alone, heard, strict=True):
        chunks = [chunk for chunk in arrivals if isinstance(chunk, Chunk)]
        text = "".join(chunk.text for chunk in chunks)
        if chunks[-1].finish_reason == "length":
            finished += 1
            assert text == said
        else:
            assert said.startswith(text)
    assert finished > 20
    assert shared.counters.shared_tokens > 500
    assert shared.pool.free == shared.pool.blocks


def test_numbers_that_are_none_are_not_shared(tiny: Callable[[str], Path]) -> None:
    built = engine(tiny("tied"))
    conversation = ask("the quick brown fox jumps over the lazy dog and then it does so again")
    run = built.runner.run

    def overflowing(batch: Many[Work]) -> Scores:
        return scores_of(torch.full_like(run(batch).logits, torch.nan))

    built.runner.run = overflowing  # type: ignore[method-assign]
    heard: list[Chunk | Exception] = []
    built.add(built.sequence(built.price(built.prompts.build(conversation)), SAMPLING, heard.append))
    while built.busy:
        built.step()
    assert isinstance(heard[-1], ModelFailed)
    built.runner.run = run  # type: ignore[method-assign]
    assert answer(built, conversation)[1] == 0
    assert answer(built, conversation)[1] > 0


def test_it_can_be_switched_off(tiny: Callable[[str], Path]) -> None:
    off = engine(tiny("tied"), prefix_cache=False)
    conversation = ask("the quick brown fox jumps over the lazy dog and then it does so again")
    assert answer(off, conversation) == answer(off, conversation)
    assert off.account().pool.known == 0
    on = engine(tiny("tied"))
    answer(on, conversation)
    known = on.account().pool.known
    assert known > 0
    assert answer(on, conversation)[1] == on.counters.shared_tokens > 0
