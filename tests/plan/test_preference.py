"""The order of preference: floors, margin, and further rounding only if nothing else fits."""

import pytest

from tests.plan.example import EXAMPLE, planned, with_free
from tests.wording import codes_of
from vlfit.errors import UsageError
from vlfit.machine.cards import machine_with_card
from vlfit.plan.backends import NATIVE, cost_model
from vlfit.plan.calibration import MEASURED, MODELLED
from vlfit.plan.candidates import candidates
from vlfit.plan.ledger import Line
from vlfit.plan.model_lookup import find_exact_models
from vlfit.plan.plans import Plan
from vlfit.plan.preference import preferred_weights, safety_margin
from vlfit.plan.wishes import Wishes
from vlfit.units import MIB

# --- floors and air ----------------------------------------------------------------------------------------


def test_floors_come_before_a_longer_context() -> None:
    """4B in FP8 on the example: 8192 would fit with 256 image tokens and next to nothing left."""
    made = planned("Qwen3-VL-4B-Instruct-FP8")
    assert made.settings.context >= 4096
    assert made.settings.image_tokens >= 1024
    assert made.headroom >= safety_margin(made.ledger) > 0
    assert made.remarks == ()
    tight = planned("Qwen3-VL-4B-Instruct-FP8", context=8192, image_tokens=256)
    assert tight.fits  # who asks for it gets it


def test_little_headroom_is_maximal_and_remarked() -> None:
    name = "Qwen3-VL-4B-Instruct-FP8"
    one = planned(name, context=4096, image_tokens=1024, sequences=1)
    least = min(totals_above_the_floors(one))
    made = planned(name, with_free(7200 * MIB - one.headroom - (one.total - least)))
    assert made.fits
    assert made.headroom < safety_margin(made.ledger)
    assert codes_of(made.remarks) == ["little_is_left"]
    assert (made.settings.context, made.settings.image_tokens) == (4096, 1024)  # above both floors
    assert made.total == min(totals_above_the_floors(made))


def totals_above_the_floors(made: Plan) -> list[int]:
    return [
        sum(line.bytes for line in NATIVE.lines(made.model, made.gpu, settings))
        for settings, _ in candidates([made.model], Wishes(), NATIVE)
        if settings.context >= 4096 and settings.image_tokens >= 1024
    ]


def test_measured_lines_need_no_margin() -> None:
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
def test_last_candidate_takes_the_least_memory(name: str, backend: str) -> None:
    """The search relies on this: if the last candidate does not fit, none does."""
    model, gpu = find_exact_models(name)[0], EXAMPLE.gpus[0]
    every = candidates([model], Wishes(), cost_model(backend))
    totals = [
        sum(line.bytes for line in cost_model(backend).lines(model, gpu, settings)) for settings, _ in every
    ]
    assert totals[-1] == min(totals)


# --- rounded further ---------------------------------------------------------------------------------------


def test_8b_is_rounded_as_little_as_needed() -> None:
    """Nothing more exact fits, and a remark says so."""
    (roomier, little), (tighter, more) = (
        (machine, planned("8B", machine).model.convert_options)
        for machine in (EXAMPLE, with_free(6600 * MIB))
    )
    assert "--embedding int8 --head int8" in little
    assert "--group-size" not in little
    assert little in more
    for machine in (roomier, tighter):
        made = planned("8B", machine)
        assert made.headroom >= safety_margin(made.ledger)
        assert made.settings.context >= 4096
        assert made.settings.image_tokens >= 1024
        assert "weights_rounded" in codes_of(made.remarks)
    name = "Qwen3-VL-8B-Instruct-INT4-E8-V8-G128"
    least = planned(name, EXAMPLE, context=2048, image_tokens=256, sequences=1)
    tightest = planned("8B", with_free(7200 * MIB - least.headroom - MIB))
    assert tightest.model.head.form == "int4"
    assert "weights_rounded" in codes_of(tightest.remarks)
    exact = planned("8B", machine_with_card("RTX 3060 12GB"))
    assert not exact.model.convert_options
    assert exact.remarks == ()


def test_a_sliding_window_does_not_limit_the_context() -> None:
    assert planned("Phi-3-mini", context=4096).settings.context == 4096
    with pytest.raises(UsageError, match=r"Phi-3-mini-4k-instruct.* 4096"):
        planned("Phi-3-mini", context=4097)
    with pytest.raises(UsageError, match="4096"):
        planned("Llama-2-7B", context=4097)


def test_formats_on_a_processor_by_speed_and_what_is_less_exact_last() -> None:
    wanted = [
        ("Q4_K_M", "Q4_K_M", 25),
        ("IQ4_NL", "IQ4_NL", 26),
        ("Q4_K_S", "Q4_K_S", 24),  # of two types of 4 bits the larger
        ("Q5_K_M", "Q5_K_M", 29),
        ("Q6_K", "Q6_K", 33),
        ("Q8_0", "Q8_0", 43),
        ("fp8", "", 48),
        ("BF16", "BF16", 80),
        ("bf16", "", 80),
        ("F32", "F32", 160),
        ("int4", "", 31),
        ("Q3_K_M", "Q3_K_M", 21),
        ("Q2_K", "Q2_K", 17),
    ]
    by_name = sorted(wanted)
    ranked = sorted(by_name, key=lambda each: preferred_weights(each[0], each[2], gguf_type=each[1]))
    assert ranked == wanted
