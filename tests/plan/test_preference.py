"""The order of preference: floors, air, and what is rounded further only where nothing else fits."""

from dataclasses import replace

import pytest

from vlfit.errors import UsageError
from vlfit.machine.cards import card
from vlfit.machine.model import Machine
from vlfit.plan.backends import NATIVE, cost_model
from vlfit.plan.calibration import MEASURED, MODELLED
from vlfit.plan.candidates import candidates
from vlfit.plan.ledger import Line
from vlfit.plan.plans import Plan
from vlfit.plan.preference import safety_margin
from vlfit.plan.search import plan
from vlfit.plan.subjects import instead_of, named, subjects
from vlfit.plan.wishes import Wishes
from vlfit.units import MIB

# The card of the documents: 8151 MiB, of which a desktop under Windows holds 951.
EXAMPLE = card("RTX 5060", desktop=951 * MIB, wsl2=True)


def planned(name: str, machine: Machine = EXAMPLE, **wishes: int | str | None) -> Plan:
    asked = Wishes(**wishes)  # type: ignore[arg-type]
    found = named(name, asked.weights)
    return plan(found.exact, machine, asked, lambda: instead_of(found.exact, name), found.makers)


def with_free(free: int) -> Machine:
    gpu = EXAMPLE.gpus[0]
    return replace(EXAMPLE, gpus=(replace(gpu, free=free, desktop=gpu.total - free),))


# --- floors and air ----------------------------------------------------------------------------------------


def test_a_long_context_is_not_bought_with_small_pictures() -> None:
    """4B in FP8 on the example: 8192 would fit with 256 image tokens and next to nothing left."""
    made = planned("Qwen3-VL-4B-Instruct-FP8")
    assert made.settings.context >= 4096
    assert made.settings.image_tokens >= 1024
    assert made.headroom >= safety_margin(made.ledger) > 0
    assert made.remarks == ()
    tight = planned("Qwen3-VL-4B-Instruct-FP8", context=8192, image_tokens=256)
    assert tight.fits  # who asks for it gets it


def test_a_plan_that_leaves_next_to_nothing_says_so_and_leaves_what_it_can() -> None:
    name = "Qwen3-VL-4B-Instruct-FP8"
    one = planned(name, context=4096, image_tokens=1024, sequences=1)
    least = min(totals_above_the_floors(one))
    made = planned(name, with_free(7200 * MIB - one.headroom - (one.total - least)))
    assert made.fits
    assert made.headroom < safety_margin(made.ledger)
    assert "Little is left" in made.remarks[0]
    assert (made.settings.context, made.settings.image_tokens) == (4096, 1024)  # above both floors
    assert made.total == min(totals_above_the_floors(made))


def totals_above_the_floors(made: Plan) -> list[int]:
    return [
        sum(line.bytes for line in NATIVE.lines(made.model, made.gpu, settings))
        for settings, _ in candidates([made.model], Wishes(), NATIVE)
        if settings.context >= 4096 and settings.image_tokens >= 1024
    ]


def test_what_is_measured_needs_no_air() -> None:
    assert (
        safety_margin([Line("context", 700 * MIB, MEASURED, ""), Line("reserve", 128 * MIB, MODELLED, "")])
        == 0
    )
    assert (
        safety_margin([Line("context", 614 * MIB, MODELLED, "")]) >= (704 - 614) * MIB
    )  # the one that was measured


@pytest.mark.parametrize("backend", ["native", "vllm"])
@pytest.mark.parametrize(
    "name", ["2B", "Qwen3-VL-4B-Instruct-FP8", "Qwen3-VL-8B-Instruct-INT4-E8-V8-G128-H4"]
)
def test_the_last_settings_take_the_least(name: str, backend: str) -> None:
    """On which the search relies: where they do not fit, it looks no further."""
    model, gpu = subjects(name)[0], EXAMPLE.gpus[0]
    every = candidates([model], Wishes(), cost_model(backend))
    totals = [
        sum(line.bytes for line in cost_model(backend).lines(model, gpu, settings)) for settings, _ in every
    ]
    assert totals[-1] == min(totals)


# --- rounded further ---------------------------------------------------------------------------------------


def test_8b_on_a_small_card_is_rounded_as_little_as_it_takes() -> None:
    """Nothing more exact fits at all, and that is said."""
    (roomier, little), (tighter, more) = (
        (machine, planned("8B", machine).model.convert_options) for machine in (card("RTX 4060"), EXAMPLE)
    )
    assert "--embedding int8 --head int8" in little
    assert "--group-size" not in little
    assert little.partition(" --out")[0] in more
    for machine in (roomier, tighter):
        made = planned("8B", machine)
        assert made.headroom >= safety_margin(made.ledger)
        assert made.settings.context >= 4096
        assert made.settings.image_tokens >= 1024
        assert any(remark.startswith("Nothing more exact fits: ") for remark in made.remarks)
    name = "Qwen3-VL-8B-Instruct-INT4-E8-V8-G128"
    least = planned(name, EXAMPLE, context=2048, image_tokens=256, sequences=1)
    tightest = planned("8B", with_free(7200 * MIB - least.headroom - MIB))
    assert tightest.model.head.form == "int4"
    assert any("was not measured" in remark for remark in tightest.remarks)
    exact = planned("8B", card("RTX 3060 12GB"))
    assert not exact.model.convert_options
    assert exact.remarks == ()


def test_a_window_is_named_where_it_is_what_limits_the_context() -> None:
    with pytest.raises(UsageError) as caught:
        planned("Phi-3-mini", context=4096)
    assert caught.value.message.count("2047") == 2  # the limit, and the window that sets it
    with pytest.raises(UsageError, match=r"Llama-2-7b-hf .* 4096"):
        planned("Llama-2-7B", context=4097)
