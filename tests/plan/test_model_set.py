"""Plans of several models for one card: what fits together, and what waits in RAM."""

from vlfit.machine.cards import machine_with_card
from vlfit.machine.model import Machine
from vlfit.plan.actual import Expectation
from vlfit.plan.model_lookup import find_models
from vlfit.plan.native.model_set import SHARED_LINES, SetPlan, merge_expectations, own_bytes, plan_set
from vlfit.plan.wishes import Wishes
from vlfit.units import MIB

SMALL, LARGE = ("RTX 5060", 951 * MIB), ("RTX 3090", 951 * MIB)


def made(card: tuple[str, int], *names: str, wishes: Wishes | None = None) -> SetPlan:
    name, desktop = card
    return plan_set([find_models(each) for each in names], machine(name, desktop), wishes or Wishes())


def machine(card: str, desktop: int) -> Machine:
    return machine_with_card(card, desktop, wsl2=True)


def test_on_a_small_card_one_at_a_time() -> None:
    plan = made(SMALL, "4B-FP8", "2B-FP8")
    assert plan.fits
    assert len(plan.together) == 1
    assert plan.missing > 0
    # The smaller one is in memory: the larger one's weights wait.
    assert plan.ram == max(each.model.weight_bytes for each in plan.plans)
    contexts = {(each.settings.context, each.settings.sequences) for each in plan.plans}
    assert len(contexts) == 1, "one server has one --context and one --sequences"


def test_on_a_large_card_together() -> None:
    plan = made(LARGE, "4B-FP8", "2B-FP8")
    assert (plan.together, plan.missing, plan.ram) == (
        tuple(each.model.name for each in plan.plans),
        0,
        0,
    )
    gpu = plan.plans[0].gpu
    shared = max(sum(line.bytes for line in each.ledger if line.line in SHARED_LINES) for each in plan.plans)
    assert shared + sum(own_bytes(each.ledger) for each in plan.plans) <= gpu.total


def test_what_is_missing_is_what_all_at_once_need() -> None:
    plan = made(SMALL, "4B-FP8", "2B-FP8", wishes=Wishes(4096, 1024, 2))
    merged = merge_expectations([Expectation(each.ledger) for each in plan.plans])
    assert sum(line.bytes for line in merged.lines) == plan.plans[0].gpu.total + plan.missing


def test_a_model_that_fits_never_is_told() -> None:
    plan = made(SMALL, "4B-FP8", "8B-FP8")
    assert [each.fits for each in plan.plans] == [True, False]
    assert not plan.fits
    assert plan.together == (plan.plans[0].model.name,)


def test_shared_lines_count_once() -> None:
    first, second = (Expectation(each.ledger) for each in made(LARGE, "4B-FP8", "2B-FP8").plans)
    merged = {line.line: line.bytes for line in merge_expectations([first, second]).lines}
    sizes = [{line.line: line.bytes for line in each.lines} for each in (first, second)]
    assert merged["weights.text"] == sizes[0]["weights.text"] + sizes[1]["weights.text"]
    assert merged["context"] == max(each["context"] for each in sizes)
    assert merge_expectations([Expectation(no_lines_reason="unknown"), first]).no_lines_reason == "unknown"
