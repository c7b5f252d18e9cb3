"""Offloaded layers: which, the bytes that leave the card, and the speed; only if wished."""

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.wording import codes_of, figures_in
from vlfit.errors import DoesNotFit, UsageError
from vlfit.machine.cards import machine_with_card
from vlfit.machine.model import Machine
from vlfit.plan import calibration
from vlfit.plan.allocator import arena_allocation_sizes, reserved_bytes
from vlfit.plan.backends import NATIVE, check_wishes
from vlfit.plan.ledger import PlanSettings
from vlfit.plan.model_lookup import find_exact_models
from vlfit.plan.native import ram as offload
from vlfit.plan.native.ram import (
    check_ram,
    copy_seconds,
    num_layers_to_free,
    offload_counts,
    offload_of,
    spread_layers,
)
from vlfit.plan.planner import find_plan
from vlfit.plan.plans import Plan
from vlfit.plan.preference import AMPLE_CONTEXT, AMPLE_IMAGE_TOKENS, safety_margin
from vlfit.plan.report import plan_to_json
from vlfit.plan.shapes import Model
from vlfit.plan.speed import FITTED_FACTOR
from vlfit.plan.wishes import Wishes, parse_offload
from vlfit.units import GIB, MIB

EXAMPLE = machine_with_card("RTX 5060", desktop=951 * MIB)
GPU = EXAMPLE.gpus[0]
ROOMY = replace(EXAMPLE, host=replace(EXAMPLE.host, ram_total=64 * GIB, ram_available=48 * GIB))


def model(name: str, weights: str | None = None) -> Model:
    return find_exact_models(name, weights)[0]


def planned(name: str, machine: Machine = ROOMY, **wishes: int | str | None) -> Plan:
    asked = Wishes(**wishes)  # type: ignore[arg-type]
    return find_plan(find_exact_models(name, asked.weights), machine, asked)


@pytest.mark.parametrize("layers", [1, 3, 28, 36])
def test_layers_are_spread_evenly(layers: int) -> None:
    for count in range(1, layers + 1):
        chosen = spread_layers(layers, count)
        gaps = [after - before for before, after in pairwise(chosen)]
        gaps.append(chosen[0] + layers - chosen[-1])  # to the first of the next pass
        assert len(set(chosen)) == count
        assert chosen[0] >= 0
        assert chosen[-1] < layers
        assert max(gaps) - min(gaps) <= 1


def test_fewest_layers_that_free_the_wanted_bytes() -> None:
    """Two slots stay on the card for all of them."""
    four = model("4B", "fp8")
    layer = four.text_bytes / 36
    for wanted in (1, 100 * MIB, GIB, 3 * GIB):
        count = num_layers_to_free(four, wanted)
        apart = offload_of(four, count)
        assert apart.freed_bytes >= wanted
        assert count == offload_counts(four)[0] or offload_of(four, count - 1).freed_bytes < wanted
        assert apart.freed_bytes == pytest.approx((count - 2) * layer, rel=0.01)
        assert apart.weight_bytes <= apart.ram_bytes < apart.weight_bytes + count * 20 * offload.ALIGNMENT
    with pytest.raises(UsageError, match=r"3\.\d\d GiB") as caught:
        num_layers_to_free(four, 4 * GIB)
    assert caught.value.param == "offload"


@pytest.mark.parametrize(("name", "weights"), [("2B", "bf16"), ("4B", "fp8"), ("8B", "int4")])
def test_ledger_of_layers_on_the_card_and_two_slots(name: str, weights: str) -> None:
    each = model(name, weights)
    settings = PlanSettings(weights, 4096, 1024, 2, 1024)
    before = {line.line: line for line in NATIVE.lines(each, GPU, settings)}
    assert "weights.offload" not in before
    count = num_layers_to_free(each, GIB // 2)
    apart = offload_of(each, count)
    after = {line.line: line for line in NATIVE.lines(each, GPU, replace(settings, offloaded_layers=count))}
    assert after["weights.text"].bytes == before["weights.text"].bytes - apart.weight_bytes
    assert after["weights.offload"].bytes == apart.slots_bytes == 2 * apart.slot_bytes
    assert count in figures_in(after["weights.offload"].note)
    same = ("desktop", "context", "weights.vision", "weights.embedding", "kv_cache", "reserve")
    assert after["graphs"].bytes == 0  # layers that come and go have no addresses to record
    assert all(after[line].bytes == before[line].bytes for line in same)
    # What torch rounds up is counted anew, tensor by tensor.
    layers = {tensor: size for tensor, size in each.sizes.items() if layer_of(tensor) >= 0}
    rest = {tensor: size for tensor, size in each.sizes.items() if tensor not in layers}
    kept = [size for tensor, size in layers.items() if layer_of(tensor) not in apart.layers]
    taken = reserved_bytes([*kept, *arena_allocation_sizes(rest), apart.slot_bytes, apart.slot_bytes])
    rounding = offload.torch_reserved_bytes(each, apart) - (each.weight_bytes - apart.freed_bytes)
    assert rounding >= 0
    assert abs(offload.torch_reserved_bytes(each, apart) - taken) <= 4 * MIB  # slots come behind the layers
    text = after["text_workspace"].bytes - before["text_workspace"].bytes
    assert text == rounding - each.pool


def weights(made: Plan) -> int:
    return sum(line.bytes for line in made.ledger if line.line.startswith("weights."))


def layer_of(tensor: str) -> int:
    _, found, rest = tensor.partition("layers.")
    return int(rest.split(".")[0]) if found else -1


def test_step_time_is_the_longer_of_copying_and_computing() -> None:
    four = model("4B", "fp8")
    settings = PlanSettings("fp8", 4096, 1024, 1, 1024)
    constants = calibration.constants_for(GPU)
    alone = NATIVE.speed(four, GPU, settings)
    assert alone is not None
    launch = 36 * constants.launch.value  # without CUDA graphs
    assert GPU.pcie_bandwidth is not None
    seen = []
    for count in (3, 12, 36):
        apart = offload_of(four, count)
        copies = copy_seconds(apart, GPU, constants)
        speed = NATIVE.speed(four, GPU, replace(settings, offloaded_layers=count))
        assert speed is not None
        assert copies is not None
        assert copies[1] == apart.ram_bytes / (GPU.pcie_bandwidth * 25 / 31.5)
        step = max(1 / alone.decode.expected, launch)
        assert 1 / speed.decode.expected == pytest.approx(max(step, copies[1]))
        assert 1 / speed.decode.high == pytest.approx(max(step / FITTED_FACTOR, copies[0]))
        assert 1 / speed.decode.low == pytest.approx(step * FITTED_FACTOR + copies[2])
        # A prompt of 1064 tokens in two passes, each of which needs all layers.
        assert alone.first_token.expected <= speed.first_token.expected
        assert speed.first_token.expected >= 2 * copies[1]
        seen.append(speed.decode.expected)
    assert seen[0] == pytest.approx(1 / launch)  # copies of few layers hide behind the others
    assert seen[1] > 2 * seen[2]


def test_link_bandwidth_measured_nominal_or_unknown() -> None:
    four = model("4B", "fp8")
    apart = offload_of(four, 10)
    constants = calibration.constants_for(GPU)
    measured = replace(constants, link_bandwidth=calibration.Constant(2e9, "measured", "here"))
    assert copy_seconds(apart, GPU, measured) == (apart.ram_bytes / 2e9,) * 3
    untold = replace(GPU, pcie_bandwidth=None)
    assert copy_seconds(apart, untold, constants) is None
    settings = PlanSettings("fp8", 4096, 1024, 1, 1024)
    assert NATIVE.speed(four, untold, settings) is not None
    assert NATIVE.speed(four, untold, replace(settings, offloaded_layers=10)) is None


def test_offload_only_if_wished() -> None:
    refused = planned("8B", weights="fp8")
    assert not refused.fits
    assert refused.settings.offloaded_layers == 0
    made = planned("8B", weights="fp8", offload="auto")
    assert made.fits
    settings = made.settings
    assert (settings.context, settings.image_tokens) == (AMPLE_CONTEXT, AMPLE_IMAGE_TOKENS)
    assert settings.chunk == 1024  # each pass copies all layers that wait
    assert made.headroom >= safety_margin(made.ledger)
    fewer = replace(settings, offloaded_layers=settings.offloaded_layers - 1)
    lines = NATIVE.lines(made.model, GPU, fewer)
    assert GPU.total - sum(line.bytes for line in lines) < safety_margin(lines)  # as few as fit
    assert "layers_in_ram" in codes_of(made.remarks)


def test_offload_auto_offloads_nothing_if_it_fits() -> None:
    assert planned("4B", weights="fp8", offload="auto") == planned("4B", weights="fp8")


def test_command_has_the_planned_offload() -> None:
    made = planned("8B", weights="fp8", offload="auto")
    assert made.command is not None
    asked = parse_offload(made.command[made.command.index("--offload") + 1])
    assert asked != "auto"
    assert num_layers_to_free(made.model, asked) == made.settings.offloaded_layers


def test_offload_by_size_leaves_the_card() -> None:
    made = planned("4B", weights="fp8", offload=2 * GIB, context=4096, image_tokens=1024, sequences=1)
    plain = planned("4B", weights="fp8", context=4096, image_tokens=1024, sequences=1)
    saved = weights(plain) - weights(made)
    assert 2 * GIB <= saved < 2 * GIB + made.model.text_bytes / 36  # whole layers
    told = plan_to_json(made)["offload"]
    assert told["frees"] == saved
    assert len(told["layers"]) == made.settings.offloaded_layers
    assert "offload" not in plan_to_json(plain)


def test_offload_needs_free_ram() -> None:
    """Locked memory cannot be swapped, so taking the last of it is refused, with numbers."""
    small = replace(ROOMY, host=replace(ROOMY.host, ram_available=4 * GIB))
    with pytest.raises(DoesNotFit, match=r"4\.00 GiB"):
        planned("8B", small, weights="fp8", offload="auto")
    apart = offload_of(model("4B", "fp8"), 10)
    enough = replace(ROOMY.host, ram_available=apart.ram_bytes + offload.RAM_LEFT)
    check_ram(apart, enough)
    with pytest.raises(DoesNotFit):
        check_ram(apart, replace(enough, ram_available=enough.ram_available - 1))


@pytest.mark.parametrize(
    ("typed", "wish"),
    [("auto", "auto"), ("AUTO", "auto"), ("2", 2 * GIB), ("1.5", 3 * GIB // 2), ("800MiB", 800 * MIB)],
)
def test_parse_offload_accepts(typed: str, wish: int | str) -> None:
    assert parse_offload(typed) == wish


@pytest.mark.parametrize("typed", ["", "0", "-1", "x", "2 things", "1e99"])
def test_parse_offload_refuses(typed: str) -> None:
    with pytest.raises(UsageError):
        parse_offload(typed)


@pytest.mark.parametrize("backend", ["vllm", "transformers"])
def test_offload_is_refused_by_other_backends(backend: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_wishes(Wishes(backend=backend, offload=GIB))
    assert caught.value.param == "offload"
