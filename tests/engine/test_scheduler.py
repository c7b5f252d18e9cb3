"""Admission and batching: who runs, in what order, and whose blocks are free again."""

import numpy as np

from vlfit.api.sampling_params import SamplingParams
from vlfit.engine.scheduling.block_manager import BlockPool
from vlfit.engine.scheduling.scheduler import Scheduler
from vlfit.engine.scheduling.sequence import PricedPrompt, Sequence


def sequence(prompt_tokens: int, max_tokens: int = 8) -> Sequence:
    counter = np.arange(prompt_tokens)
    prompt = PricedPrompt(counter, counter[:0], np.stack([counter] * 3), prompt_tokens, ())
    return Sequence(prompt, SamplingParams(), max_tokens, completion=None, listener=print, asked=0.0)  # type: ignore[arg-type]


def scheduler(blocks: int = 16, sequences: int = 4, chunk: int = 32) -> Scheduler:
    return Scheduler(BlockPool(blocks * 8, block_size=8), sequences, chunk)


def finish_batch(house: Scheduler) -> list[tuple[Sequence, int]]:
    """Run what is next, as the engine would: account for it, and let every finished prompt speak."""
    batch = house.next_batch()
    speaking = [work.sequence for work in batch if work.finishes_prompt]
    for work in batch:
        house.advance(work)
    for one in speaking:
        one.generated.append(0)
    return [(work.sequence, work.length) for work in batch]


def test_a_long_prompt_is_prefilled_in_chunks() -> None:
    house = scheduler(chunk=32)
    long = sequence(70)
    house.add(long)
    house.admit()
    assert [finish_batch(house) for _ in range(4)] == [
        [(long, 32)],
        [(long, 32)],
        [(long, 6)],
        [(long, 1)],
    ]


def test_decoding_goes_on_while_a_prompt_is_prefilled() -> None:
    house = scheduler(chunk=8)
    first, second = sequence(4), sequence(20)
    house.add(first)
    house.admit()
    finish_batch(house)
    house.add(second)
    house.admit()
    assert finish_batch(house) == [(first, 1), (second, 7)]
    assert finish_batch(house) == [(first, 1), (second, 7)]
    assert finish_batch(house) == [(first, 1), (second, 6)]
    assert finish_batch(house) == [(first, 1), (second, 1)]


def test_beside_whoever_decodes_a_prompt_may_have_less_room() -> None:
    house = scheduler(chunk=16)
    first, second = sequence(20), sequence(30)
    house.add(first)
    house.admit()
    assert [work.length for work in house.next_batch(room=3)] == [16]  # nobody decodes
    finish_batch(house)
    finish_batch(house)
    house.add(second)
    house.admit()
    assert [work.length for work in house.next_batch(room=3)] == [1, 3]
    assert [work.length for work in house.next_batch(room=99)] == [1, 15]


def test_a_request_waits_until_its_whole_length_is_free_and_is_not_overtaken() -> None:
    house = scheduler(blocks=4)
    running, large, small = sequence(17, 8), sequence(20, 8), sequence(1, 1)
    for one in (running, large, small):
        house.add(one)
    assert house.admit() == [running]  # 24 slots of 32
    assert house.pool.free == 1
    assert house.admit() == []
    house.remove(running)
    assert house.admit() == [large]
    assert house.admit() == []
    house.remove(large)
    assert house.admit() == [small]
    house.remove(small)
    assert house.pool.free == 4


def test_no_more_run_at_once_than_was_planned() -> None:
    house = scheduler(sequences=2)
    for _ in range(3):
        house.add(sequence(2, 2))
    assert len(house.admit()) == 2
    assert len(house.waiting) == 1


def test_removing_twice_or_while_waiting_frees_nothing_twice() -> None:
    house = scheduler(blocks=2)
    running, waiting = sequence(8, 8), sequence(8, 8)
    house.add(running)
    house.add(waiting)
    house.admit()
    for one in (waiting, running, running, waiting):
        house.remove(one)
    assert house.pool.free == 2
    assert not house.busy
