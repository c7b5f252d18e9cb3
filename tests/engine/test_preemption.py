"""A KV cache too small for all: the youngest sequence is preempted and resumes with the same tokens."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.test_scheduler import finish_batch, sequence
from tests.pictures import picture
from vlfit.api.conversation import Conversation, ImagePart, VideoPart, single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.outputs import Chunk, TokenLogprob
from vlfit.api.sampling_params import SamplingParams
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.engine.scheduling.block_manager import BlockManager
from vlfit.engine.scheduling.scheduler import Scheduler

BLOCK = 8


def test_an_answer_that_may_be_long_keeps_nobody_out_before_it_is() -> None:
    scheduler = Scheduler(BlockManager(40 * BLOCK, BLOCK), 4, 64)
    both = [sequence(20, max_tokens=300) for _ in range(2)]
    for one in both:
        scheduler.add(one)
    assert scheduler.admit() == both
    assert scheduler.block_manager.num_free == 40 - 2 * scheduler.block_manager.blocks_for(20 + BLOCK)


def test_a_table_grows_in_place_and_before_it_is_full() -> None:
    """A step in flight belongs to its table, and the step after the next one is launched ahead if it fits."""
    scheduler = Scheduler(BlockManager(40 * BLOCK, BLOCK), 4, 64)
    one = sequence(BLOCK, max_tokens=200)
    scheduler.add(one)
    scheduler.admit()
    table = one.block_table
    lengths = {len(table)}
    while len(one.generated) < 100:
        before = [*table]
        finish_batch(scheduler)
        scheduler.admit()
        assert one.block_table is table
        assert table[: len(before)] == before
        assert not one.is_decoding or one.num_tokens + 1 < len(table) * BLOCK
        lengths.add(len(table))
    assert len(lengths) > 1
    assert one.slot_mapping is None


def test_the_last_blocks_are_for_who_needs_them() -> None:
    """With as few free blocks as requests, a table is extended when it is full, and not before."""
    scheduler = Scheduler(BlockManager(14 * BLOCK, BLOCK), 4, 64)
    one = sequence(BLOCK, max_tokens=13 * BLOCK)
    scheduler.add(one)
    scheduler.admit()
    scheduler.block_manager.allocate(scheduler.block_manager.num_free - 1)
    held = len(one.block_table)
    while one.num_tokens < held * BLOCK:
        finish_batch(scheduler)
        scheduler.admit()
    assert len(one.block_table) == held
    finish_batch(scheduler)
    scheduler.admit()
    assert len(one.block_table) == held + 1


def test_the_youngest_is_paused_and_comes_before_all_who_wait() -> None:
    scheduler = Scheduler(BlockManager(30 * BLOCK, BLOCK), 2, 64)
    old, young, later = sequence(16, 200), sequence(16, 200), sequence(8, 4)
    for one in (old, young, later):
        scheduler.add(one)
    scheduler.admit()
    while young in scheduler.running:
        finish_batch(scheduler)
        scheduler.admit()
    # 30 blocks are 240 tokens: 120 each.
    assert scheduler.num_preemptions == 1
    assert len(young.generated) > 90
    assert list(scheduler.waiting) == [young, later]
    assert (young.num_cached_tokens, young.block_table) == (0, [])
    before = len(young.generated)
    while old.max_tokens > len(old.generated):
        finish_batch(scheduler)
        scheduler.admit()
        assert young in scheduler.waiting  # and those queued after it do not get its blocks
    scheduler.remove(old)
    assert scheduler.admit() == [young, later]
    assert len(young.generated) == before
    # Prompt and answer are computed again in whole chunks; then decoding goes on.
    lengths = []
    while not young.is_decoding:
        lengths += [length for one, length in finish_batch(scheduler) if one is young]
    assert sum(lengths) == 16 + before
    assert len(young.generated) == before + 1


def test_the_oldest_is_never_paused_and_all_come_to_their_end() -> None:
    scheduler = Scheduler(BlockManager(32 * BLOCK, BLOCK), 4, 32)
    requests = [sequence(10 + 7 * number % 60, max_tokens=60 + 37 * number % 130) for number in range(12)]
    for one in requests:
        scheduler.add(one)
    ended: list[int] = []
    for _ in range(5000):
        scheduler.admit()
        if not scheduler.busy:
            break
        oldest = scheduler.running[0]
        finish_batch(scheduler)
        scheduler.admit()
        assert scheduler.running[0] is oldest
        order = [requests.index(one) for one in (*scheduler.running, *scheduler.waiting)]
        assert order == sorted(order)
        held = sum(len(one.block_table) for one in scheduler.running)
        assert scheduler.block_manager.num_free == 32 - held
        for one in list(scheduler.running):
            if len(one.generated) == one.max_tokens:
                scheduler.remove(one)
                ended.append(requests.index(one))
    assert sorted(ended) == list(range(12))
    assert scheduler.num_preemptions > 3
    assert scheduler.block_manager.num_free == 32


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
        single_turn("the quick brown fox", photos[0]),
        single_turn("jumps over"),
        single_turn("the lazy dog", photos[1], photos[2]),
        single_turn("and so on", clip),
        single_turn("the quick brown fox", photos[0], photos[2]),
    ]


def run(engine: NativeEngine, sampling: SamplingParams) -> list[tuple[str, tuple[TokenLogprob, ...]]]:
    received: list[list[Chunk | Exception]] = []
    for conversation in conversations():
        received.append([])
        prompt = engine.prepare_prompt(engine.prompts.build(conversation))
        engine.submit(engine.make_sequence(prompt, sampling, received[-1].append))
    while engine.busy:
        engine.step()
    assert engine.block_manager.num_free == engine.block_manager.num_blocks
    answers = []
    for events in received:
        chunks = [chunk for chunk in events if isinstance(chunk, Chunk)]
        assert len(chunks) == len(events) == 150
        assert chunks[-1].finish_reason == "length"
        logprobs = tuple(logprob for chunk in chunks for logprob in chunk.logprobs)
        answers.append(("".join(chunk.text for chunk in chunks), logprobs))
    return answers


@pytest.fixture(autouse=True)
def little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocate blocks one by one, for many preemptions."""
    monkeypatch.setattr("vlfit.engine.scheduling.scheduler.LOOKAHEAD_TOKENS", BLOCK)


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

    def build(kv_tokens: int) -> NativeEngine:
        options = EngineOptions(
            device="cpu",
            max_model_len=320,
            kv_tokens=kv_tokens,
            max_num_seqs=4,
            max_num_batched_tokens=48,
            prefix_cache=prefix_cache,
        )
        return NativeEngine(checkpoint, options)

    large, small = build(320 * 5), build(320)
    expected, found = run(large, sampling), run(small, sampling)
    assert large.account().num_preemptions == 0
    assert small.account().num_preemptions > 5
    for (text, logprobs), (other, others) in zip(expected, found, strict=True):
        assert other == text
        assert [each.token_id for each in others] == [each.token_id for each in logprobs]
        assert [each.logprob for each in others] == pytest.approx(
            [each.logprob for each in logprobs], abs=1e-3
        )


def test_cancelling_a_preempted_request_ends_it(tiny: Callable[[str], Path]) -> None:
    engine = NativeEngine(
        open_checkpoint(tiny("tied")),
        EngineOptions(device="cpu", max_model_len=320, kv_tokens=320, max_num_seqs=2),
    )
    received: list[Chunk | Exception] = []
    others: list[Chunk | Exception] = []
    prompt = engine.prepare_prompt(engine.prompts.build(single_turn("jumps over")))
    sampling = replace(GREEDY, max_tokens=200)
    sequences = [
        engine.make_sequence(prompt, sampling, listener) for listener in (others.append, received.append)
    ]
    for one in sequences:
        engine.submit(one)
    while not engine.account().num_preemptions:
        engine.step()
    before = len(received)
    sequences[1].cancelled = True
    while engine.busy:
        engine.step()
    last = received[-1]
    assert isinstance(last, Chunk)
    assert last.finish_reason == "cancelled"
    assert last.usage is not None
    assert last.usage.completion_tokens == before == len(received) - 1
    assert engine.block_manager.num_free == engine.block_manager.num_blocks


def test_usage_and_times_are_those_of_one_request(tiny: Callable[[str], Path]) -> None:
    """A preempted request is queued and matched in the prefix cache only once, at its first admission."""
    engine = NativeEngine(
        open_checkpoint(tiny("tied")),
        EngineOptions(device="cpu", max_model_len=320, kv_tokens=320, max_num_seqs=3),
    )
    run(engine, GREEDY)
    assert engine.account().num_preemptions > 0
    counters = engine.counters
    assert (counters.finished, counters.failed) == (5, 0)
    prompts = [engine.prompts.build(conversation) for conversation in conversations()]
    assert counters.cached_prompt_tokens < sum(len(prompt.token_ids) for prompt in prompts)
    assert counters.tokens == 5 * 150
