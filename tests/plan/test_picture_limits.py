"""Planned pictures are no larger than the checkpoint's own limit."""

from pathlib import Path

import pytest

from tests.checkpoint.edit import change_json, copy_of
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.source import mini_folder, open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.machine.cards import machine_with_card
from vlfit.models.qwen3_vl.config import read_image_processor_config
from vlfit.plan.model_lookup import find_exact_models, find_models
from vlfit.plan.planner import find_plan
from vlfit.plan.preference import is_ample
from vlfit.plan.wishes import Wishes

MINIS_OWN = 144  # 384 x 384 pixels


def test_image_tokens_are_limited_by_the_checkpoint() -> None:
    made = find_plan(find_exact_models("mini"), machine_with_card("RTX 5060"), Wishes())
    assert made.settings.image_tokens == MINIS_OWN
    assert is_ample(made.settings, made.model)
    engine = NativeEngine(open_checkpoint("mini"), EngineOptions(device="cpu", max_model_len=512))
    assert engine.image_tokens == MINIS_OWN


def test_wished_image_tokens_are_kept() -> None:
    made = find_plan(find_exact_models("mini"), machine_with_card("RTX 5060"), Wishes(image_tokens=64))
    assert made.settings.image_tokens == 64


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_conversions_have_the_limit_of_their_original(weights: str) -> None:
    found = find_models("mini", weights)
    assert {model.max_image_tokens for model in (*found.exact, *found.make_smaller_variants())} == {MINIS_OWN}


def test_official_checkpoints_do_not_limit_the_plan() -> None:
    assert find_exact_models("4B")[0].max_image_tokens is None
    assert (
        find_plan(find_exact_models("2B"), machine_with_card("RTX 4090"), Wishes()).settings.image_tokens
        == 2560
    )


def test_checkpoints_without_the_file_have_no_limit(tmp_path: Path) -> None:
    folder = copy_of(mini_folder(), tmp_path / "bare")
    size = {"shortest_edge": 1024, "longest_edge": 600 * 1024}
    change_json(folder / "preprocessor_config.json", lambda settings: settings.update(size=size))
    assert read_image_processor_config(folder).max_tokens == 600
    assert [model.max_image_tokens for model in find_exact_models(str(folder))] == [600]
    assert (
        find_plan(
            find_exact_models(str(folder)), machine_with_card("RTX 5060"), Wishes()
        ).settings.image_tokens
        == 600
    )
    (folder / "preprocessor_config.json").unlink()
    assert [model.max_image_tokens for model in find_exact_models(str(folder))] == [None]
