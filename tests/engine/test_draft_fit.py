"""Layers that draft tokens are loaded where they take nothing from the rest, in plan and engine."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_memory_fit import CARD, WANTED, on_card
from tests.engine.test_speculative import build
from tests.machine.nvml import FakeCard, install
from tests.plan.example import EXAMPLE, planned, with_free
from tests.wording import codes_of, figures_in
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.catalog import CatalogEntry, entries
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.source import Checkpoint, open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.engine.memory import fit as memory_fit
from vlfit.engine.memory.fit import MemoryFit, check_fit
from vlfit.errors import DoesNotFit, UsageError
from vlfit.machine.gpu import read_gpus
from vlfit.machine.model import Machine
from vlfit.plan.backends import check_wishes
from vlfit.plan.native import model_set
from vlfit.plan.planner import find_plan
from vlfit.plan.plans import Plan
from vlfit.plan.preference import safety_margin
from vlfit.plan.wishes import Wishes
from vlfit.units import MIB

LONG: dict[str, Any] = {"context": 65536, "kv_dtype": "fp8"}
FREE = 7200 * MIB


def line_of(plan: Plan, name: str) -> int:
    return sum(line.bytes for line in plan.ledger if line.line == name)


# --- the plan ----------------------------------------------------------------------------------------------


def test_drafts_are_left_out_before_anything_is_narrowed() -> None:
    auto, without, forced = (
        planned("9B", with_free(FREE), **LONG, speculate=wish) for wish in (None, False, True)
    )
    assert auto.fits
    assert not auto.settings.uses_draft_model
    assert auto.settings.speculate, "prompt lookup takes next to nothing"
    assert line_of(auto, "weights.draft") == 0
    assert "--head int4" not in auto.model.convert_options
    assert auto.model.convert_options == without.model.convert_options
    assert auto.settings.image_tokens == without.settings.image_tokens
    assert forced.settings.uses_draft_model
    assert line_of(forced, "weights.draft") == forced.model.draft_bytes > 0
    assert forced.model.weight_bytes < auto.model.weight_bytes, "that is what they are paid with"


def test_one_remark_says_what_they_would_need() -> None:
    auto = planned("9B", with_free(FREE), **LONG)
    [remark] = [each for each in auto.remarks if each.code == "drafts_left_out"]
    takes, lacks = figures_in(remark)
    assert auto.model.draft_bytes / MIB < takes
    same = {"image_tokens": auto.settings.image_tokens, "sequences": auto.settings.sequences}
    for missing, drafted in ((lacks - 3, False), (lacks + 3, True)):
        made = _of_one(auto, with_free(FREE + round(missing * MIB)), **LONG, **same)
        assert (made.settings.chunk < auto.settings.chunk) == drafted, "prefill chunks give way"
        assert made.settings.uses_draft_model == drafted
        assert ("drafts_left_out" in codes_of(made.remarks)) != drafted
    for wish in (True, False):
        asked = planned("9B", with_free(FREE), **LONG, speculate=wish)
        assert "drafts_left_out" not in codes_of(asked.remarks)


def _of_one(plan: Plan, machine: Machine, **wishes: Any) -> Plan:
    return find_plan([plan.model], machine, Wishes(**wishes))


def test_where_there_is_room_nothing_changes() -> None:
    plan = planned("Qwen3.5-2B", weights="bf16")
    assert plan.settings.uses_draft_model
    assert plan.headroom >= safety_margin(plan.ledger)
    assert plan.command is not None
    assert not {"--speculate", "--no-speculate"} & set(plan.command)
    assert plan.settings == planned("Qwen3.5-2B", weights="bf16", speculate=True).settings
    assert not planned("2B", weights="fp8").settings.uses_draft_model, "Qwen3-VL has no such layers"


def test_commands_say_what_the_engine_would_not_do_by_itself() -> None:
    off = planned("Qwen3.5-2B", weights="bf16", speculate=False)
    assert off.command is not None
    assert off.command[-1] == "--no-speculate"
    roomy = planned("Qwen3.5-2B", weights="bf16", speculate=True)
    asked: dict[str, Any] = {"context": roomy.settings.context, "image_tokens": 2560, "sequences": 8}
    least = _of_one(roomy, with_free(4000 * MIB), **asked, speculate=True)
    assert not least.fits
    for spare in (10, 400):
        made = _of_one(roomy, with_free(4000 * MIB - least.headroom + spare * MIB), **asked, speculate=True)
        assert made.command is not None
        assert ("--speculate" in made.command) == (made.headroom < safety_margin(made.ledger))
        assert made.settings.uses_draft_model


def test_forced_drafts_are_refused_where_nothing_can_make_room() -> None:
    wish: dict[str, Any] = {"context": 65536, "image_tokens": 2560, "sequences": 1, "kv_dtype": "fp8"}
    model = planned("9B", with_free(FREE), **wish)
    free = FREE - model.headroom + 20 * MIB
    assert _of_one(model, with_free(free), **wish).fits
    refused = _of_one(model, with_free(free), **wish, speculate=True)
    assert not refused.fits
    assert any("--speculate" in change.what and change.enough for change in refused.changes)


def test_drafts_go_before_layers_leave_the_card() -> None:
    wish: dict[str, Any] = {"context": 32768, "weights": "int4", "offload": "auto", "kv_dtype": "fp8"}
    made = planned("9B", with_free(5000 * MIB), **wish)
    assert made.fits
    assert made.settings.offloaded_layers
    assert not made.settings.uses_draft_model
    drafted = planned("9B", with_free(5000 * MIB), **wish, speculate=True)
    assert drafted.settings.uses_draft_model
    assert drafted.settings.offloaded_layers > made.settings.offloaded_layers


@pytest.mark.parametrize("backend", ["vllm", "transformers"])
def test_other_backends_have_none_to_promise(backend: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_wishes(Wishes(backend=backend, speculate=True))
    assert caught.value.param == "speculate"
    check_wishes(Wishes(backend=backend, speculate=False))


# --- the engine --------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint() -> Checkpoint:
    entry: CatalogEntry = next(each for each in entries() if each.name == "Qwen/Qwen3.5-4B")
    assert isinstance(entry.config, ModelConfig)
    return Checkpoint(entry.name, Path("nowhere"), entry.config, entry.tensors)


def card_of(free: int) -> FakeCard:
    return replace(CARD, free=free, total=max(CARD.total, free + 500))


@pytest.mark.parametrize("short", [-40, 40, 200, 600])
def test_engine_and_plan_agree(monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint, short: int) -> None:
    """MiB around the border at which the plan takes drafts, at the settings of the plan's own command."""
    card = card_of(13000)
    install(monkeypatch, card)
    machine = replace(EXAMPLE, gpus=tuple(read_gpus({})[0]))
    asked: dict[str, Any] = {"context": 16384, "image_tokens": 1024, "sequences": 2}
    roomy = planned("Qwen3.5-4B", machine, **asked, weights="bf16")
    assert roomy.settings.uses_draft_model
    border = (roomy.headroom - safety_margin(roomy.ledger)) // MIB
    card = card_of(13000 - border + short)
    install(monkeypatch, card)
    plan = planned("Qwen3.5-4B", replace(machine, gpus=tuple(read_gpus({})[0])), **asked, weights="bf16")
    settings = plan.settings
    wanted = replace(
        WANTED,
        max_model_len=settings.context,
        max_num_seqs=settings.sequences,
        max_num_batched_tokens=settings.chunk,
        kv_tokens=16384,
        image_tokens=settings.image_tokens,
    )
    found = on_card(monkeypatch, card, checkpoint, wanted)
    assert found.draft_model == settings.uses_draft_model
    assert found.headroom == plan.headroom
    assert (found.draft_model_lacks > 0) == (not found.draft_model)


def test_on_a_card_the_engine_leaves_them_out_or_refuses(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint
) -> None:
    roomy = on_card(monkeypatch, card_of(14000), checkpoint, WANTED)
    assert roomy.draft_model
    whole = sum(line.bytes for line in roomy.lines) // MIB
    tight = card_of(whole - 30)
    found = on_card(monkeypatch, tight, checkpoint, WANTED)
    assert not found.draft_model
    assert found.draft_model_lacks >= 30 * MIB
    with pytest.raises(DoesNotFit) as caught:
        on_card(monkeypatch, tight, checkpoint, replace(WANTED, speculate=True))
    assert "--speculate" in caught.value.hint
    assert not on_card(monkeypatch, card_of(14000), checkpoint, replace(WANTED, speculate=False)).draft_model
    # Images that nobody fixed are as large as without drafts; so is a KV cache at its least.
    open_images = replace(WANTED, image_tokens=None, kv_tokens=None)
    drafted = set()
    for free in range(whole - 200, whole + 900, 220):
        found = on_card(monkeypatch, card_of(free), checkpoint, open_images)
        with monkeypatch.context() as patched:
            patched.setattr(memory_fit, "has_draft_model", lambda *_: False)
            without = on_card(patched, card_of(free), checkpoint, open_images)
        assert found.image_tokens == without.image_tokens
        drafted.add(found.draft_model)
    assert drafted == {False, True}


def test_a_model_of_several_is_planned_alike(monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint) -> None:
    options = EngineOptions(max_model_len=4096, max_num_seqs=2, image_tokens=1024)
    monkeypatch.setattr(model_set, "read_image_processor_config", lambda *_: None)
    install(monkeypatch, card_of(14000))
    [gpu] = read_gpus({})[0]
    drafted = model_set.plan_on_gpu(checkpoint, gpu, options)[1]
    assert "weights.draft" in {line.line for line in drafted.lines}
    whole = sum(line.bytes for line in drafted.lines if line.line != "desktop")
    install(monkeypatch, card_of(whole // MIB - 30))
    [gpu] = read_gpus({})[0]
    plain = model_set.plan_on_gpu(checkpoint, gpu, options)[1]
    assert "weights.draft" not in {line.line for line in plain.lines}
    with pytest.raises(DoesNotFit):
        model_set.plan_on_gpu(checkpoint, gpu, replace(options, speculate=True))


def test_without_room_the_engine_looks_up_only(
    tiny_qwen3_5: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In RAM, where the whole engine can be built: no weights, no cache layer, the same answers."""
    found: list[MemoryFit] = []

    def noted(*wishes: Any) -> MemoryFit:
        found.append(check_fit(*wishes))
        return found[-1]

    monkeypatch.setattr("vlfit.engine.engine.check_fit", noted)
    folder = tiny_qwen3_5("large")
    loaded = build(folder, speculate=True)
    needs = sum(line.bytes for line in found[0].lines)
    assert loaded.account().settings.draft_model
    monkeypatch.setattr(memory_fit, "free_bytes", lambda device: needs - 1)
    options = loaded.options
    with pytest.raises(DoesNotFit):
        NativeEngine(open_checkpoint(folder), options)
    caplog.set_level("INFO", "vlfit")
    engine = NativeEngine(open_checkpoint(folder), replace(options, speculate=None))
    settings = engine.account().settings
    assert settings.speculate
    assert not settings.draft_model
    assert engine.runner.drafter is None
    assert "weights.draft" not in engine.weights
    assert len(engine.runner.cache.spec) == len(loaded.runner.cache.spec) - 1
    assert "multi-token prediction" in caplog.text
    engine.sleep("files")
    engine.wake()
    assert engine.runner.drafter is None
