"""How long a benchmark takes on a CPU: the sum by hand, and what is left out where it takes too long."""

from dataclasses import replace
from typing import Any

import pytest

from vlfit.bench.duration import MOST_SECONDS, expected_seconds, shorten
from vlfit.bench.workload import BenchOptions
from vlfit.checkpoint.source import Checkpoint, open_checkpoint
from vlfit.machine.model import Processor
from vlfit.plan.model_lookup import find_exact_models
from vlfit.plan.shapes import Model

FAST = Processor("A CPU", "x86_64", ("avx2", "fma", "f16c"), 32, True, 4 * 10**11, 10**13)
SLOW = replace(FAST, bandwidth=10**9, multiplications=10**9)
USUAL = BenchOptions()


@pytest.fixture(scope="module")
def mini() -> Checkpoint:
    return open_checkpoint("mini")


@pytest.fixture(scope="module")
def model() -> Model:
    """A model of 2B; the requests are counted with mini's tokens."""
    return find_exact_models("2B-INT4")[0]


def test_a_fast_processor_measures_all(mini: Checkpoint, model: Model) -> None:
    assert expected_seconds(mini, USUAL, model, FAST) < MOST_SECONDS
    assert shorten(mini, USUAL, (), model, FAST) == USUAL


def test_a_slow_one_measures_the_least(mini: Checkpoint, model: Model) -> None:
    least = shorten(mini, USUAL, (), model, SLOW)
    assert (least.size, least.batches, least.repeat) == ((512, 512), (1,), 1)
    assert expected_seconds(mini, USUAL, model, SLOW) > 10 * expected_seconds(mini, least, model, SLOW)


def test_what_was_asked_for_stays(mini: Checkpoint, model: Model) -> None:
    for name in ("size", "batches", "repeat"):
        found = shorten(mini, USUAL, (name,), model, SLOW)
        assert getattr(found, name) == getattr(USUAL, name)
        assert found != USUAL
    assert shorten(mini, USUAL, ("size", "batches", "repeat"), model, SLOW) == USUAL


def test_no_more_is_left_out_than_need_be(mini: Checkpoint, model: Model) -> None:
    whole = expected_seconds(mini, USUAL, model, SLOW)
    alone = expected_seconds(mini, replace(USUAL, size=(512, 512), batches=(1,)), model, SLOW)
    share = MOST_SECONDS / alone  # a fifth faster than would do, for what no speed shortens
    just = replace(SLOW, bandwidth=round(10**9 / share * 1.2), multiplications=round(10**9 / share * 1.2))
    found = shorten(mini, USUAL, (), model, just)
    assert whole > alone
    assert (found.batches, found.repeat) == ((1,), 5)


def test_seconds_grow_with_what_is_measured(mini: Checkpoint, model: Model) -> None:
    one = expected_seconds(mini, replace(USUAL, batches=(1,), repeat=1), model, SLOW)
    longer: tuple[dict[str, Any], ...] = (
        {"tokens": 256},
        {"repeat": 2},
        {"batches": (1, 2)},
        {"context": 1000},
    )
    for more in longer:
        wanted = replace(USUAL, **{"batches": (1,), "repeat": 1, **more})
        assert expected_seconds(mini, wanted, model, SLOW) > one
