"""Admission and batching: which sequences run, in which order, and when their blocks are free."""

import numpy as np

from vlfit.api.sampling_params import SamplingParams
from vlfit.engine.scheduling.block_manager import BlockManager
from vlfit.engine.scheduling.scheduler import Scheduler
from vlfit.engine.scheduling.sequence import PreparedPrompt, Sequence


def sequence(prompt_tokens: int, max_tokens: int = 8) -> Sequence:
    counter = np.arange(prompt_tokens)
    prompt = PreparedPrompt(counter, counter[:0], np.stack([counter] * 3), prompt_tokens, ())
    return Sequence(prompt, SamplingParams(), max_tokens, completion=None, listener=print, submitted_at=0.0)  # type: ignore[arg-type]


def make_scheduler(blocks: int = 16, sequences: int = 4, chunk: int = 32) -> Scheduler:
    return Scheduler(BlockManager(blocks * 8, block_size=8), sequences, chunk)


def finish_batch(scheduler: Scheduler) -> list[tuple[Sequence, int]]:
    """Run what is next, as the engine would: account for it, and let every finished prompt speak."""
    batch = scheduler.schedule()
    speaking = [chunk.sequence for chunk in batch if chunk.needs_sampling]
    for chunk in batch:
        scheduler.advance(chunk)
    for one in speaking:
        one.generated.append(0)
    return [(chunk.sequence, chunk.num_tokens) for chunk in batch]


def test_a_long_prompt_is_prefilled_in_chunks() -> None:
    scheduler = make_scheduler(chunk=32)
    long = sequence(70)
    scheduler.add(long)
    scheduler.admit()
    assert [finish_batch(scheduler) for _ in range(4)] == [
        [(long, 32)],
        [(long, 32)],
        [(long, 6)],
        [(long, 1)],
    ]


def test_decoding_goes_on_while_a_prompt_is_prefilled() -> None:
    scheduler = make_scheduler(chunk=8)
    first, second = sequence(4), sequence(20)
    scheduler.add(first)
    scheduler.admit()
    finish_batch(scheduler)
    scheduler.add(second)
    scheduler.admit()
    assert finish_batch(scheduler) == [(first, 1), (second, 7)]
    assert finish_batch(scheduler) == [(first, 1), (second, 7)]
    assert finish_batch(scheduler) == [(first, 1), (second, 6)]
    assert finish_batch(scheduler) == [(first, 1), (second, 1)]


def test_beside_whoever_decodes_a_prompt_may_have_less_room() -> None:
    scheduler = make_scheduler(chunk=16)
    first, second = sequence(20), sequence(30)
    scheduler.add(first)
    scheduler.admit()
    assert [chunk.num_tokens for chunk in scheduler.schedule(max_prompt_tokens=3)] == [16]  # nobody decodes
    finish_batch(scheduler)
    finish_batch(scheduler)
    scheduler.add(second)
    scheduler.admit()
    assert [chunk.num_tokens for chunk in scheduler.schedule(max_prompt_tokens=3)] == [1, 3]
    assert [chunk.num_tokens for chunk in scheduler.schedule(max_prompt_tokens=99)] == [1, 15]


def test_a_request_waits_until_its_whole_length_is_free_and_is_not_overtaken() -> None:
    scheduler = make_scheduler(blocks=4)
    running, large, small = sequence(17, 8), sequence(20, 8), sequence(1, 1)
    for one in (running, large, small):
        scheduler.add(one)
    assert scheduler.admit() == [running]  # 24 slots of 32
    assert scheduler.block_manager.num_free == 1
    assert scheduler.admit() == []
    scheduler.remove(running)
    assert scheduler.admit() == [large]
    assert scheduler.admit() == []
    scheduler.remove(large)
    assert scheduler.admit() == [small]
    scheduler.remove(small)
    assert scheduler.block_manager.num_free == 4


def test_no_more_run_at_once_than_was_planned() -> None:
    scheduler = make_scheduler(sequences=2)
    for _ in range(3):
        scheduler.add(sequence(2, 2))
    assert len(scheduler.admit()) == 2
    assert len(scheduler.waiting) == 1


def test_removing_twice_or_while_waiting_frees_nothing_twice() -> None:
    scheduler = make_scheduler(blocks=2)
    running, waiting = sequence(8, 8), sequence(8, 8)
    scheduler.add(running)
    scheduler.add(waiting)
    scheduler.admit()
    for one in (waiting, running, running, waiting):
        scheduler.remove(one)
    assert scheduler.block_manager.num_free == 2
    assert not scheduler.busy
