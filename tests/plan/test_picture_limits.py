"""Pictures that a checkpoint scales down by its own settings are not planned any larger."""

from pathlib import Path

import pytest

from tests.checkpoint.edit import change_json, copy_of
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.processor_files import ImageProcessing
from vlfit.checkpoint.source import mini_folder, open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.machine.cards import card
from vlfit.plan.preference import is_ample
from vlfit.plan.search import plan
from vlfit.plan.subjects import named, subjects
from vlfit.plan.wishes import Wishes

MINIS_OWN = 144  # 384 x 384 pixels


def test_a_plan_has_room_for_no_larger_pictures_than_the_checkpoint_takes() -> None:
    made = plan(subjects("mini"), card("RTX 5060"), Wishes())
    assert made.settings.image_tokens == MINIS_OWN
    assert is_ample(made.settings, made.model)
    engine = NativeEngine(open_checkpoint("mini"), EngineOptions(device="cpu", max_model_len=512))
    assert engine.image_tokens == MINIS_OWN


def test_what_was_wished_for_stays() -> None:
    made = plan(subjects("mini"), card("RTX 5060"), Wishes(image_tokens=64))
    assert made.settings.image_tokens == 64


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_a_conversion_takes_what_its_original_takes(weights: str) -> None:
    found = named("mini", weights)
    assert {model.most_image_tokens for model in (*found.exact, *found.coarser())} == {MINIS_OWN}


def test_official_checkpoints_allow_more_than_is_tried_and_nobody_asks_them() -> None:
    assert subjects("4B")[0].most_image_tokens is None
    assert plan(subjects("2B"), card("RTX 4090"), Wishes()).settings.image_tokens == 2560


def test_a_folder_without_the_file_is_planned_as_if_all_were_allowed(tmp_path: Path) -> None:
    folder = copy_of(mini_folder(), tmp_path / "bare")
    size = {"shortest_edge": 1024, "longest_edge": 600 * 1024}
    change_json(folder / "preprocessor_config.json", lambda settings: settings.update(size=size))
    assert ImageProcessing.read(folder).most_tokens == 600
    assert [model.most_image_tokens for model in subjects(str(folder))] == [600]
    assert plan(subjects(str(folder)), card("RTX 5060"), Wishes()).settings.image_tokens == 600
    (folder / "preprocessor_config.json").unlink()
    assert [model.most_image_tokens for model in subjects(str(folder))] == [None]
