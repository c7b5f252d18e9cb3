"""Prompt chunks are as long as decoding sequences tolerate; times are made up."""

from collections.abc import Callable

import pytest

from vlfit.engine.scheduling.scheduler import INITIAL_CHUNK, MAX_SLOWDOWN, MIN_CHUNK, PrefillPacer

PROMPT = 900  # tokens


def chunks_of(pace: PrefillPacer, seconds: Callable[[int], float], prompts: int) -> list[list[int]]:
    """The chunks in which each of ``prompts`` is read, with steps in between in which all decode."""
    read = []
    for _ in range(prompts):
        for _ in range(30):
            pace.record_step(0, seconds(0))
        left, chunks = PROMPT, []
        while left:
            chunks.append(min(pace.prefill_budget(), left))
            left -= chunks[-1]
            pace.record_step(chunks[-1], seconds(chunks[-1]))
        read.append(chunks)
    return read


def test_nothing_is_known_at_first() -> None:
    assert PrefillPacer(1024).prefill_budget() == INITIAL_CHUNK
    pace = PrefillPacer(512)
    pace.record_step(0, 0.02)
    assert pace.prefill_budget() == INITIAL_CHUNK
    assert PrefillPacer(64).prefill_budget() == 64


def test_at_rest_chunks_are_whole_and_nothing_is_learnt() -> None:
    pace = PrefillPacer(1024)
    with pace.disabled():
        pace.record_step(0, 0.02)
        pace.record_step(1000, 2.0)
        assert pace.prefill_budget() == 1024
    assert pace.prefill_budget() == INITIAL_CHUNK
    assert PrefillPacer(1024, enabled=False).prefill_budget() == 1024


@pytest.mark.parametrize("each", [0.1e-3, 0.25e-3, 1e-3])
def test_a_small_card_reads_in_chunks_that_take_as_long_as_a_step(each: float) -> None:
    """A step reads the weights in 20 ms, which computing is as long as for some of the tokens."""

    def seconds(tokens: int) -> float:
        return max(0.020, 0.004 + each * tokens)

    later = chunks_of(PrefillPacer(1024), seconds, 8)[2:]
    assert max(seconds(max(chunks)) for chunks in later) < 1.1 * MAX_SLOWDOWN * 0.020
    assert min(seconds(chunks[0]) for chunks in later) > 0.7 * MAX_SLOWDOWN * 0.020


def test_where_every_pass_is_too_long_there_are_few() -> None:
    """A step is a graph of 1.5 ms, another pass is launched for 11 ms whatever is in it."""
    read = chunks_of(PrefillPacer(1024), lambda tokens: 0.011 + 17e-6 * tokens if tokens else 0.0015, 40)
    assert sum(map(len, read)) < 1.7 * len(read)


def test_a_chunk_is_never_nothing() -> None:
    assert {
        chunk
        for chunks in chunks_of(PrefillPacer(64), lambda tokens: 0.02 + tokens, 3)[1:]
        for chunk in chunks
    } == {
        MIN_CHUNK,
        PROMPT % MIN_CHUNK,
    }


def test_where_tokens_cost_nothing_chunks_are_whole() -> None:
    pace = PrefillPacer(1024)
    assert chunks_of(pace, lambda _: 0.02, 5)[1:] == [[PROMPT]] * 4
