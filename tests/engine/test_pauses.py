"""A pool too small for all: the youngest is paused, and goes on with the same words."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.test_scheduler import finish_batch, sequence
from tests.pictures import picture
from vlfit.api.conversation import Conversation, ImagePart, VideoPart, ask
from vlfit.api.engine_options import EngineOptions
from vlfit.api.outputs import Chunk, TokenLogprob
from vlfit.api.sampling_params import SamplingParams
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import Engine
from vlfit.engine.scheduling.block_manager import BlockPool
from vlfit.engine.scheduling.scheduler import Scheduler

BLOCK = 8


def test_an_answer_that_may_be_long_keeps_nobody_out_before_it_is() -> None:
    house = Scheduler(BlockPool(40 * BLOCK, BLOCK), 4, 64)
    both = [sequence(20, max_tokens=300) for _ in range(2)]
    for one in both:
        house.add(one)
    assert house.admit() == both
    assert house.pool.free == 40 - 2 * house.pool.blocks_for(20 + BLOCK)


def test_who_has_a_table_of_blocks_keeps_it_as_it_was() -> None:
    """The layout compares tables to know whether the one on the device is still true."""
    house = Scheduler(BlockPool(40 * BLOCK, BLOCK), 4, 64)
    one = sequence(BLOCK, max_tokens=200)
    house.add(one)
    house.admit()
    tables = [one.blocks]
    copies = [[*one.blocks]]
    while len(one.generated) < 100:
        finish_batch(house)
        house.admit()
        if one.blocks is not tables[-1]:
            tables.append(one.blocks)
            copies.append([*one.blocks])
    assert len(tables) > 5
    assert tables == copies


def test_the_youngest_is_paused_and_comes_before_all_who_wait() -> None:
    house = Scheduler(BlockPool(30 * BLOCK, BLOCK), 2, 64)
    old, young, later = sequence(16, 200), sequence(16, 200), sequence(8, 4)
    for one in (old, young, later):
        house.add(one)
    house.admit()
    while young in house.running:
        finish_batch(house)
        house.admit()
    # 30 blocks are 240 tokens: 120 each.
    assert house.pauses == 1
    assert len(young.generated) > 90
    assert list(house.waiting) == [young, later]
    assert (young.cached, young.blocks) == (0, [])
    said = len(young.generated)
    while old.max_tokens > len(old.generated):
        finish_batch(house)
        house.admit()
        assert young in house.waiting  # nor does who waits behind it get its blocks
    house.remove(old)
    assert house.admit() == [young, later]
    assert len(young.generated) == said
    # All that was said is computed again, in whole chunks, and then it goes on word by word.
    lengths = []
    while not young.decoding:
        lengths += [length for one, length in finish_batch(house) if one is young]
    assert sum(lengths) == 16 + said
    assert len(young.generated) == said + 1


def test_the_oldest_is_never_paused_and_all_come_to_their_end() -> None:
    house = Scheduler(BlockPool(32 * BLOCK, BLOCK), 4, 32)
    requests = [sequence(10 + 7 * number % 60, max_tokens=60 + 37 * number % 130) for number in range(12)]
    for one in requests:
        house.add(one)
    ended: list[int] = []
    for _ in range(5000):
        house.admit()
        if not house.busy:
            break
        oldest = house.running[0]
        finish_batch(house)
        house.admit()
        assert house.running[0] is oldest
        order = [requests.index(one) for one in (*house.running, *house.waiting)]
        assert order == sorted(order)
        held = sum(len(one.blocks) for one in house.running)
        assert house.pool.free == 32 - held
        for one in list(house.running):
            if len(one.generated) == one.max_tokens:
                house.remove(one)
                ended.append(requests.index(one))
    assert sorted(ended) == list(range(12))
    assert house.pauses > 3
    assert house.pool.free == 32


# With a model

GREEDY = SamplingParams(max_tokens=150, ignore_eos=True, top_logprobs=2)
SAMPLED = SamplingParams(
    max_tokens=150,
    ignore_eos=True,
    temperature=1.2,
    top_p=0.95,
    seed=11,
    repetition_penalty=1.1,
    frequency_penalty=0.3,
    top_logprobs=0,
)


def conversations() -> list[Conversation]:
    photos = [ImagePart(picture(160 + 32 * seed, 128, seed=seed)) for seed in range(3)]
    clip = VideoPart(tuple(picture(96, 64, seed=seed) for seed in range(4)))
    return [
        ask("the quick brown fox", photos[0]),
        ask("jumps over"),
        ask("the lazy dog", photos[1], photos[2]),
        ask("and so on", clip),
        ask("the quick brown fox", photos[0], photos[2]),
    ]


def run(engine: Engine, sampling: SamplingParams) -> list[tuple[str, tuple[TokenLogprob, ...]]]:
    heard: list[list[Chunk | Exception]] = []
    for conversation in conversations():
        heard.append([])
        prompt = engine.price(engine.prompts.build(conversation))
        engine.add(engine.sequence(prompt, sampling, heard[-1].append))
    while engine.busy:
        engine.step()
    assert engine.pool.free == engine.pool.blocks
    said = []
    for arrivals in heard:
        chunks = [chunk for chunk in arrivals if isinstance(chunk, Chunk)]
        assert len(chunks) == len(arrivals) == 150
        assert chunks[-1].finish_reason == "length"
        logprobs = tuple(logprob for chunk in chunks for logprob in chunk.logprobs)
        said.append(("".join(chunk.text for chunk in chunks), logprobs))
    return said


@pytest.fixture(autouse=True)
def little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are handed out one by one, for many pauses."""
    monkeypatch.setattr("vlfit.engine.scheduling.scheduler.MARGIN", BLOCK)


@pytest.mark.parametrize(
    ("name", "prefix_cache", "sampling"),
    [
        ("tied", True, GREEDY),
        ("tied", False, SAMPLED),
        ("wide_heads_one_level", True, SAMPLED),
        ("vision_head_72", False, GREEDY),
    ],
)
def test_words_and_logprobs_are_those_of_a_pool_large_enough(
    tiny: Callable[[str], Path], name: str, prefix_cache: bool, sampling: SamplingParams
) -> None:
    checkpoint = open_checkpoint(tiny(name))

    def build(kv_tokens: int) -> Engine:
        options = EngineOptions(
            device="cpu",
            context=320,
            kv_tokens=kv_tokens,
            sequences=4,
            chunk=48,
            prefix_cache=prefix_cache,
        )
        return Engine(checkpoint, options)

    large, small = build(320 * 5), build(320)
    expected, found = run(large, sampling), run(small, sampling)
    assert large.account().pauses == 0
    assert small.account().pauses > 5
    for (text, logprobs), (other, others) in zip(expected, found, strict=True):
        assert other == text
        assert [each.token_id for each in others] == [each.token_id for each in logprobs]
        assert [each.logprob for each in others] == pytest.approx(
            [each.logprob for each in logprobs], abs=1e-3
        )


def test_one_that_is_cancelled_while_it_is_paused_ends(tiny: Callable[[str], Path]) -> None:
    engine = Engine(
        open_checkpoint(tiny("tied")),
        EngineOptions(device="cpu", context=320, kv_tokens=320, sequences=2),
    )
    heard: list[Chunk | Exception] = []
    others: list[Chunk | Exception] = []
    prompt = engine.price(engine.prompts.build(ask("jumps over")))
    sampling = replace(GREEDY, max_tokens=200)
    asked = [engine.sequence(prompt, sampling, listener) for listener in (others.append, heard.append)]
    for one in asked:
        engine.add(one)
    while not engine.account().pauses:
        engine.step()
    said = len(heard)
    asked[1].cancelled = True
    while engine.busy:
        engine.step()
    last = heard[-1]
    assert isinstance(last, Chunk)
    assert last.finish_reason == "cancelled"
    assert last.usage is not None
    assert last.usage.completion_tokens == said == len(heard) - 1
    assert engine.pool.free == engine.pool.blocks


def test_usage_and_times_are_those_of_one_request(tiny: Callable[[str], Path]) -> None:
    """A pause makes no second request of it: it was queued once, and found once what was cached."""
    engine = Engine(
        open_checkpoint(tiny("tied")),
        EngineOptions(device="cpu", context=320, kv_tokens=320, sequences=3),
    )
    run(engine, GREEDY)
    assert engine.account().pauses > 0
    counters = engine.counters
    assert (counters.finished, counters.failed) == (5, 0)
    prompts = [engine.prompts.build(conversation) for conversation in conversations()]
    assert counters.shared_tokens < sum(len(prompt.token_ids) for prompt in prompts)
    assert counters.tokens == 5 * 150
