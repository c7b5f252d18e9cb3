"""Changes that make a plan fit: what each frees, and which suffice alone."""

from dataclasses import replace

import pytest

from tests.plan.example import EXAMPLE, planned, with_free
from vlfit.machine.cards import machine_with_card
from vlfit.machine.model import GpuProcess
from vlfit.plan import calibration
from vlfit.plan.backends import cost_model
from vlfit.plan.changes import enough_together
from vlfit.plan.model_lookup import find_exact_models, find_models
from vlfit.plan.planner import what_if_machines
from vlfit.units import MIB


def test_changes_free_the_stated_bytes() -> None:
    made = planned("Qwen3-VL-4B-Instruct-FP8", context=16384, image_tokens=256)
    assert not made.fits
    assert 1 <= len(made.changes) <= 3
    shorter = next(change for change in made.changes if change.what.startswith("context 16384 -> "))
    context = int(shorter.what.rpartition(" ")[2])
    again = cost_model(made.backend).lines(made.model, made.gpu, replace(made.settings, context=context))
    assert made.total - sum(line.bytes for line in again) == shorter.frees
    assert shorter.frees >= -made.headroom


def test_sufficient_changes_come_first() -> None:
    made = planned("Qwen3-VL-4B-Instruct")
    deficit = -made.headroom
    enough = [change.frees >= deficit for change in made.changes]
    assert enough == sorted(enough, reverse=True)
    assert enough == [change.enough for change in made.changes]
    assert "Qwen/Qwen3-VL-4B-Instruct-FP8" in made.changes[0].what


@pytest.mark.parametrize(
    ("name", "setting", "asked", "advised"),
    [("4B", "context", 32768, 16384), ("2B", "sequences", 64, 16)],
)
def test_largest_step_that_fits_is_proposed(name: str, setting: str, asked: int, advised: int) -> None:
    made = planned(name, EXAMPLE, **{setting: asked})
    steps = [change for change in made.changes if change.what.startswith(f"{setting} {asked} -> ")]
    assert [change.what for change in steps] == [f"{setting} {asked} -> {advised}"]
    assert steps[0].enough
    assert planned(name, EXAMPLE, **{setting: advised}).fits
    assert not planned(name, EXAMPLE, **{setting: 2 * advised}).fits


def test_only_memory_that_can_be_freed_is_proposed() -> None:
    """Under WSL2 logging out frees nothing, and neither does what WSL2 hides."""
    under_wsl2 = planned("Qwen3-VL-8B-Instruct-FP8").changes
    (windows,) = [change for change in under_wsl2 if change.other_programs]
    assert "Windows" in windows.what
    assert windows.frees == 951 * MIB - calibration.WSL2_HIDES.bytes
    assert not windows.enough
    hidden = planned("Qwen3-VL-8B-Instruct-FP8", machine_with_card("RTX 5060", 500 * MIB, wsl2=True)).changes
    assert not [change for change in hidden if change.other_programs]
    linux = machine_with_card("RTX 5060", 951 * MIB)
    linux = replace(linux, host=replace(linux.host, container=False))
    assert [
        change.frees for change in planned("Qwen3-VL-8B-Instruct-FP8", linux).changes if change.other_programs
    ] == [951 * MIB]


def test_browser_memory_reported_by_the_driver_is_proposed() -> None:
    gpu = replace(EXAMPLE.gpus[0], processes=(GpuProcess(7, "firefox", 420 * MIB),))
    host = replace(EXAMPLE.host, wsl2=False, display="wayland")
    machine = replace(EXAMPLE, gpus=(gpu,), host=host)
    made = planned("Qwen/Qwen3-VL-2B-Instruct", machine, context=20480, image_tokens=2560)
    assert -made.headroom < 420 * MIB
    assert "browser" in made.changes[0].what
    assert made.changes[0].frees == 420 * MIB
    rows = dict(what_if_machines(machine))
    closed = next(other for what, other in rows.items() if what.startswith("browser closed"))
    assert closed.gpus[0].free == gpu.free + 420 * MIB


def test_variants_of_the_machine() -> None:
    rows = list(what_if_machines(EXAMPLE))
    words = ["native Linux", "headless", "12 GB card", "16 GB card", "24 GB card"]
    assert [word for what, _ in rows for word in words if what.startswith(word)] == words
    machines = dict(rows)
    headless = next(other for what, other in machines.items() if what.startswith("headless"))
    assert headless.gpus[0].free == headless.gpus[0].total - calibration.WSL2_HIDES.bytes
    rows_of_linux = dict(what_if_machines(machine_with_card("RTX 5060", desktop=951 * MIB)))
    free = [other.gpus[0].free for what, other in rows_of_linux.items() if what.startswith("headless: no")]
    assert free == [8151 * MIB]
    hidden = machine_with_card("RTX 5060", desktop=400 * MIB, wsl2=True)  # less than WSL2 alone keeps
    assert not [what for what, _ in what_if_machines(hidden) if what.startswith("headless")]
    assert not rows[0][1].host.wsl2
    assert rows[-1][1].gpus[0].desktop == 951 * MIB


def test_refused_exact_model_proposes_further_rounding() -> None:
    made = planned("Qwen3-VL-8B-Instruct-INT4", with_free(4800 * MIB))
    assert made.model.name == "Qwen3-VL-8B-Instruct-INT4"
    (rounded,) = [change for change in made.changes if "vlfit convert" in change.what]
    assert "--head int4 --vision int8 --group-size 128)" in rounded.what
    assert not rounded.enough
    (model,) = find_exact_models("Qwen3-VL-8B-Instruct-INT4-E8-V8-G128-H4")
    again = cost_model(made.backend).lines(model, made.gpu, made.settings)
    assert made.total - sum(line.bytes for line in again) == rounded.frees


def test_mildest_sufficient_rounding_is_proposed() -> None:
    """For a model named in FP8, which has no rounding in 8 bits of its own."""
    made = planned("Qwen3-VL-8B-Instruct-FP8", with_free(6300 * MIB))
    (offered,) = [change for change in made.changes if "fp8 -> int4" in change.what]
    assert offered.enough
    settings = replace(made.settings, weights="int4")
    offers = find_models("Qwen3-VL-8B-Instruct", "int4")
    enough = {
        model.convert_command: sum(
            line.bytes for line in cost_model(made.backend).lines(model, made.gpu, settings)
        )
        <= made.gpu.total
        for model in (*offers.exact, *offers.make_smaller_variants())  # the mildest first
    }
    assert offered.what.endswith(f"({next(command for command in enough if enough[command])})")
    assert not all(enough.values())


def test_two_changes_sufficient_together() -> None:
    """8B on a smaller card: the coarsest rounding, and closing Windows programs."""
    least = planned("Qwen3-VL-8B-Instruct-INT4-E8-V8-G128-H4", context=2048, image_tokens=256, sequences=1)
    free = 7200 * MIB - least.headroom - 250 * MIB
    [card] = machine_with_card("RTX 3050 6GB").gpus
    machine = machine_with_card("RTX 3050 6GB", desktop=card.total - free, wsl2=True)
    made = planned("8B", machine)
    both = enough_together(made.changes, -made.headroom)
    assert both is not None
    assert [change.other_programs for change in both] == [False, True]
    held = machine.gpus[0].desktop - both[1].frees
    freed = machine_with_card("RTX 3050 6GB", desktop=held, wsl2=True)
    assert planned("Qwen3-VL-8B-Instruct-INT4-E8-V8-G128-H4", freed).fits
    assert enough_together(made.changes, -made.headroom + MIB * 2048) is None
    fits_alone = [replace(change, enough=True) for change in both]
    assert enough_together(fits_alone, 0) is None


def test_variants_are_of_the_card_that_is_planned_for() -> None:
    small, old = EXAMPLE.gpus[0], machine_with_card("RTX 2080 Ti", 951 * MIB).gpus[0]
    both = replace(EXAMPLE, gpus=(replace(old, index=1), small))
    for gpu, given in ((small, None), (old, both.gpus[0])):  # the native engine's; another backend's
        machines = dict(what_if_machines(both, given))
        headless = next(other for what, other in machines.items() if what.startswith("headless"))
        assert headless.gpus[0].name == gpu.name
