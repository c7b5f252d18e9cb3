"""Which plan is recommended, what is typed for it, what it needs, and which longer contexts fit."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from tests.plan.example import EXAMPLE
from vlfit.checkpoint import catalog, store
from vlfit.checkpoint.source import resolve_name
from vlfit.errors import DeviceError
from vlfit.machine.cards import machine_with_card
from vlfit.machine.model import Machine
from vlfit.plan.model_lookup import catalog_models, find_models, smaller_variants_of
from vlfit.plan.needs import SERVER_RAM, needs_of
from vlfit.plan.planner import find_plan
from vlfit.plan.plans import Plan
from vlfit.plan.recommend import (
    advice_for,
    commands_to_type,
    is_ready_made,
    longer_contexts,
    recommended,
    short_name,
)
from vlfit.plan.wishes import Wishes


def plans_for(machine: Machine, wishes: Wishes | None = None) -> list[Plan]:
    found = [
        find_plan([model], machine, wishes or Wishes(), smaller_variants=smaller_variants_of([model]))
        for model in catalog_models()
    ]
    return sorted(found, key=lambda plan: plan.rank)


def plan_of(name: str, machine: Machine = EXAMPLE, wishes: Wishes | None = None) -> Plan:
    subject = find_models(name)
    return find_plan(subject.exact, machine, wishes or Wishes(), smaller_variants=subject.smaller_variants)


@pytest.mark.parametrize(
    ("card", "desktop", "model"),
    [
        ("RTX 5060", None, "Qwen/Qwen3-VL-4B-Instruct-FP8"),
        ("RTX 3050 6GB", None, "Qwen/Qwen3-VL-2B-Instruct-FP8"),
        ("RTX 3090", None, "Qwen/Qwen3-VL-8B-Instruct"),
        ("RTX 3050 6GB", 2560 * 2**20, "Qwen/Qwen3.5-0.8B"),  # nothing ready-made of Qwen3-VL fits
    ],
)
def test_ready_made_checkpoints_come_first(card: str, desktop: int | None, model: str) -> None:
    plans = plans_for(machine_with_card(card, desktop))
    best = recommended(plans)
    assert best is not None
    assert best.fits
    assert best.model.name.startswith(model)
    assert is_ready_made(best) or not any(plan.fits and is_ready_made(plan) for plan in plans)


def test_nothing_is_recommended_where_nothing_fits() -> None:
    assert recommended(plans_for(machine_with_card("RTX 5060", 7800 * 2**20))) is None


def test_a_copy_in_the_store_is_ready_made(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("VLFIT_HOME", str(tmp_path))
    plan = plan_of("Qwen3-VL-4B-Instruct-INT4")
    assert not is_ready_made(plan)
    store.folder_for("Qwen3-VL-4B-Instruct-INT4").mkdir(parents=True)
    assert is_ready_made(plan)


def test_short_names_mean_their_own_checkpoint() -> None:
    assert short_name("Qwen/Qwen3-VL-4B-Instruct-FP8") == "4B-FP8"
    assert short_name("mini") == "mini"
    for entry in (*catalog.entries(), *catalog.variants()):
        (found,) = resolve_name(short_name(entry.name))
        assert found.name == entry.name


def test_what_is_typed_names_the_model_that_is_planned() -> None:
    (serve,) = commands_to_type(plan_of("4B-FP8"), ready=True)
    assert serve[:3] == ["vlfit", "serve", "4B-FP8"]
    plan = plan_of("8B")
    convert, serve = commands_to_type(plan, ready=False)
    assert convert[:3] == ["vlfit", "convert", "8B"]
    assert convert[3:] == shlex.split(plan.model.convert_command)[3:]
    assert serve[:3] == ["vlfit", "serve", plan.model.source]
    assert commands_to_type(plan_of("8B-FP8"), ready=True) == []  # it does not fit


def test_downloads_are_the_bytes_of_the_files() -> None:
    for name in ("4B-FP8", "2B-FP8"):
        plan = plan_of(name)
        entry = catalog.find_entry(plan.model.name)
        assert entry is not None
        assert plan.needs.download == sum(info.bytes for info in entry.tensors.values())
        assert (plan.needs.disk, plan.needs.conversion_s) == (plan.needs.download, None)
        assert plan.needs.ram == SERVER_RAM.bytes
    assert plan_of("mini").needs.download == 0


def test_a_file_here_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its path may look like a name on the hub: ``models/4B.gguf``."""
    model = replace(plan_of("4B-FP8").model, source="models/4B.gguf")
    assert needs_of(model).download > 0
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "4B.gguf").touch()
    assert (needs_of(model).download, needs_of(model).disk) == (0, 0)


def test_a_conversion_needs_its_source_too_and_time() -> None:
    four, eight = plan_of("Qwen3-VL-4B-Instruct-INT4").needs, plan_of("8B").needs
    source = catalog.find_entry("Qwen/Qwen3-VL-4B-Instruct")
    assert source is not None
    assert four.download == sum(info.bytes for info in source.tensors.values()) < four.disk
    assert four.conversion_s is not None
    assert eight.conversion_s is not None
    assert 60 < four.conversion_s < eight.conversion_s < 600


def test_layers_in_ram_need_ram() -> None:
    plan = plan_of("8B-FP8", wishes=Wishes(offload="auto"))
    assert plan.settings.offloaded_layers
    assert plan.needs.ram > SERVER_RAM.bytes + 2**30


def test_longer_contexts_fit_and_have_steps_in_between() -> None:
    machine = machine_with_card("RTX 3060 12GB", None)
    plan = plan_of("4B-FP8", machine)
    longer = longer_contexts(plan, machine, Wishes())
    contexts = [each.settings.context for each in longer]
    assert len(contexts) >= 3
    assert contexts == sorted(contexts)
    assert plan.settings.context < contexts[0] <= 1.25 * plan.settings.context
    for each in longer:
        assert each.fits
        assert each.settings.image_tokens >= 1024
    assert longer_contexts(plan, machine, Wishes(context=4096)) == []


def test_of_a_context_that_does_not_fit_the_longest_that_does_is_known() -> None:
    wishes = Wishes(context=65536)
    refused = plan_of("Qwen3-VL-4B-Instruct-INT4", wishes=wishes)
    assert not refused.fits
    longest = advice_for(refused, EXAMPLE, wishes).shorter[-1]
    assert longest.fits
    assert 8192 < longest.settings.context < 65536


def test_a_card_older_than_the_kernels_is_refused_by_the_native_engine_alone() -> None:
    machine = machine_with_card("GTX 1660", None)
    with pytest.raises(DeviceError, match=r"7\.5.* 8\.0") as caught:
        plans_for(machine)
    assert "--backend transformers" in caught.value.hint
    with pytest.raises(DeviceError):
        plan_of("Qwen/Qwen3-VL-2B-Instruct-FP8", machine)
    assert plan_of("Qwen/Qwen3-VL-2B-Instruct", machine, Wishes(backend="transformers")).ledger


@pytest.mark.parametrize("card", ["RTX 3050 6GB", "RTX 5060", "RTX 3060 12GB", "RTX 4090", "H100 PCIe"])
def test_the_likely_first_token_has_a_range_below_a_factor_of_two(card: str) -> None:
    for plan in plans_for(machine_with_card(card, None)):
        assert plan.speed is not None
        likely, bounds = plan.speed.likely_first_token, plan.speed.first_token
        assert likely is not None
        assert likely.low <= likely.expected <= likely.high < 2 * likely.low
        assert likely.expected == bounds.expected
        assert bounds.low <= likely.low
        assert likely.high <= bounds.high
