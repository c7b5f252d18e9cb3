"""Prefix cache without a model: which blocks are shared, kept, evicted and freed."""

from dataclasses import replace

import numpy as np

from tests.engine.test_scheduler import finish_batch
from vlfit.api.outputs import ImageSeen
from vlfit.api.sampling_params import SamplingParams
from vlfit.engine.scheduling.block_manager import BlockManager
from vlfit.engine.scheduling.prefix_cache import PrefixCache, prompt_keys
from vlfit.engine.scheduling.scheduler import Scheduler
from vlfit.engine.scheduling.sequence import PreparedPrompt, PromptKeys, Sequence
from vlfit.models.interface import PreparedImage

BLOCK = 8
BLANK = PreparedImage(
    np.zeros((1, 32, 32, 3), np.uint8), (1, 12, 12), 36, b"", ImageSeen(192, 192, 192, 192, 36)
)


def sequence(token_ids: list[int], max_tokens: int = 8) -> Sequence:
    ids = np.array(token_ids)
    keys = prompt_keys(ids, ids[:0], (), BLOCK)
    prompt = PreparedPrompt(ids, ids[:0], np.stack([np.arange(len(ids))] * 3), len(ids), (), keys)
    return Sequence(prompt, SamplingParams(), max_tokens, completion=None, listener=print, submitted_at=0.0)  # type: ignore[arg-type]


def make_scheduler(blocks: int, chunk: int = 64) -> Scheduler:
    return Scheduler(BlockManager(blocks * BLOCK, BLOCK), 4, chunk, PrefixCache())


def run_alone(scheduler: Scheduler, one: Sequence) -> int:
    """How many tokens were there when it began."""
    scheduler.add(one)
    assert scheduler.admit() == [one]
    shared = one.num_cached_tokens
    while len(one.generated) < one.max_tokens:
        finish_batch(scheduler)
        assert scheduler.admit() == []
    scheduler.remove(one)
    return shared


def test_a_prompt_that_begins_as_an_earlier_one_starts_behind_what_they_share() -> None:
    scheduler = make_scheduler(16)
    first, second = sequence([*range(20)]), sequence([*range(17), 99, 99])
    run_alone(scheduler, first)
    assert scheduler.block_manager.num_free == 16
    scheduler.add(second)
    scheduler.admit()
    assert second.num_cached_tokens == 16  # two full blocks of eight; the third differs
    assert [length for _, length in finish_batch(scheduler)] == [3]


def test_a_prompt_seen_before_still_computes_its_last_token() -> None:
    """Also where it fills its blocks to the brim."""
    scheduler = make_scheduler(16)
    assert [run_alone(scheduler, sequence([*range(16)])) for _ in range(2)] == [0, 8]


def test_the_answer_is_shared_with_the_next_turn() -> None:
    scheduler = make_scheduler(16)
    first = sequence([*range(10)], max_tokens=15)
    run_alone(scheduler, first)
    # 24 tokens are in the cache: the last one was never fed back. They are three blocks.
    follow_up = sequence([*range(10), *first.generated, 5, 6, 7])
    scheduler.add(follow_up)
    scheduler.admit()
    assert follow_up.num_cached_tokens == 24


def test_one_that_runs_shares_with_one_that_comes() -> None:
    scheduler = make_scheduler(7)
    first, second = sequence([*range(20)], 9), sequence([*range(20)], 9)  # four blocks each
    scheduler.add(first)
    scheduler.admit()
    finish_batch(scheduler)
    scheduler.add(second)
    assert scheduler.admit() == [second]  # two blocks of its own are enough, and three are left
    assert second.block_table[:2] == first.block_table[:2]
    assert not set(second.block_table[2:]) & set(first.block_table)
    assert scheduler.block_manager.num_free == 1
    scheduler.remove(first)
    assert scheduler.block_manager.num_free == 3
    scheduler.remove(second)
    assert scheduler.block_manager.num_free == 7


def test_kept_blocks_yield_the_ends_of_old_prompts_first() -> None:
    scheduler = make_scheduler(8)
    old, new = [*range(33)], [*range(100, 125)]
    run_alone(scheduler, sequence(old, 1))  # five blocks, four of them full
    run_alone(scheduler, sequence(new, 1))  # four, three of them full
    # 4 + 3 are kept and one is blank; three more are wanted: the blank one and the last two of the oldest.
    run_alone(scheduler, sequence([*range(200, 217)], 1))
    assert scheduler.block_manager.num_free == 8
    for tokens, shared in ((new, 24), (old, 16)):
        one = sequence(tokens, 1)
        scheduler.add(one)
        scheduler.admit()
        assert one.num_cached_tokens == shared
        scheduler.remove(one)


def test_a_request_as_large_as_the_pool_is_admitted_whatever_is_kept() -> None:
    scheduler = make_scheduler(8)
    run_alone(scheduler, sequence([*range(60)], 1))
    large = sequence([*range(60, 120)], 5)
    scheduler.add(large)
    assert scheduler.admit() == [large]
    assert scheduler.block_manager.num_free == 0
    assert len(scheduler.prefix_cache or ()) == 0
    scheduler.remove(large)
    # Nothing of it was computed, so nothing of it may be shared, nor of what it displaced.
    for tokens in ([*range(60)], [*range(60, 120)]):
        one = sequence(tokens, 1)
        scheduler.add(one)
        scheduler.admit()
        assert one.num_cached_tokens == 0
        scheduler.remove(one)


def test_what_was_cut_off_shares_its_full_blocks_and_what_failed_none() -> None:
    for failed, shared in ((False, 24), (True, 0)):
        scheduler = make_scheduler(16, chunk=28)
        first = sequence([*range(40)])
        scheduler.add(first)
        scheduler.admit()
        finish_batch(scheduler)  # 28 tokens of 40: three full blocks and a half
        scheduler.remove(first, failed=failed)
        again = sequence([*range(40)])
        scheduler.add(again)
        scheduler.admit()
        assert again.num_cached_tokens == shared


def test_blocks_that_are_shared_are_not_counted_as_free_besides() -> None:
    scheduler = make_scheduler(4)
    run_alone(scheduler, sequence([*range(17)], 1))  # two of three blocks are kept
    other = sequence([*range(50, 60)], 2)
    scheduler.add(other)
    scheduler.admit()
    assert scheduler.block_manager.num_free == 2
    again = sequence([*range(17)], 1)  # the two that are free, and one more
    scheduler.add(again)
    assert scheduler.admit() == []
    scheduler.remove(other)
    assert scheduler.admit() == [again]
    assert again.num_cached_tokens == 16


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
    scheduler = make_scheduler(32)
    run_alone(scheduler, about_a_picture())
    other = about_a_picture(question=8)
    scheduler.add(other)
    scheduler.admit()
    assert (other.num_cached_tokens, other.block_copy is None) == (38, False)
    finish_batch(scheduler)
    scheduler._preempt(other)
    assert scheduler.admit() == [other]
    assert (other.num_cached_tokens, other.block_copy) == (56, None)


def test_a_picture_counts_as_known_when_it_is_computed_to_its_end_and_not_before() -> None:
    for chunk, shared in ((37, 32), (38, 38), (39, 38), (40, 40), (50, 48)):
        scheduler = make_scheduler(32, chunk)
        scheduler.add(about_a_picture())
        scheduler.admit()
        finish_batch(scheduler)
        again = about_a_picture()
        scheduler.add(again)
        scheduler.admit()
        assert again.num_cached_tokens == shared
        assert (again.block_copy is not None) == (shared == 38)


def test_a_block_that_two_computed_is_known_once_and_freed_twice() -> None:
    scheduler = make_scheduler(16)
    twins = [sequence([*range(20)]) for _ in range(2)]
    for one in twins:
        scheduler.add(one)
    scheduler.admit()
    finish_batch(scheduler)
    assert len(scheduler.prefix_cache or ()) == 2
    for one in twins:
        scheduler.remove(one)
    assert scheduler.block_manager.num_free == 16
    taken = scheduler.block_manager.allocate(16)
    assert sorted(taken) == list(range(16))


def test_where_snapshots_of_states_are_wanted() -> None:
    """Pictures always; turns and the end if they are far enough from the last one, old turns further."""
    ids, places = np.arange(900), np.arange(264, 300)
    turns = [100, 150, 400, 700, 760, 800, 830]
    keys = prompt_keys(ids, places, (BLANK,), BLOCK, turns)
    assert keys.snapshot_ends == (300, 700, 800, 899)
    assert prompt_keys(ids, places, (BLANK,), BLOCK) == PromptKeys(keys.block_keys, keys.image_ends)
    # Also where a prompt of an earlier turn may have ended, or its answer: up to eight tokens before.
    inside = {end for turn in turns for end in (turn, *range(turn - 9, turn))} | {300, 899}
    assert [end for end, _ in keys.part_ends] == sorted(end for end in inside if end % BLOCK)
    assert dict(keys.image_ends).items() <= dict(keys.part_ends).items()
    short = prompt_keys(ids[:60], places[:0], (), BLOCK, [20, 54])
    assert short.snapshot_ends == ()


def test_no_turn_ends_outside_of_the_prompt() -> None:
    keys = prompt_keys(np.arange(100), np.arange(0), (), BLOCK, [1, 3, 100])
    assert keys.snapshot_ends == (99,)
    assert [end for end, _ in keys.part_ends] == [1, 2, 3, 91, 92, 93, 94, 95, 97, 98, 99]


def test_a_grid_counts_even_where_the_pixels_would_not_tell() -> None:
    """Keys of pictures hold their shape already; the block's key does not lean on that."""
    ids = np.full(40, 7)
    places = np.arange(2, 38)

    def keys(grid: tuple[int, int, int], key: bytes) -> tuple[bytes, ...]:
        image = replace(BLANK, grid=grid, key=key)
        found = prompt_keys(ids, places, (image,), BLOCK)
        assert [end for end, _ in found.image_ends] == [38]
        return (*found.block_keys, found.image_ends[0][1])

    assert keys((1, 12, 12), b"a") == keys((1, 12, 12), b"a")
    assert not set(keys((1, 12, 12), b"a")) & set(keys((1, 6, 24), b"a"))
    assert not set(keys((1, 12, 12), b"a")) & set(keys((1, 12, 12), b"b"))
