"""What the card of trained weights tells, and what it does not claim to know."""

import json
import os
from pathlib import Path

import pytest
import torch

from training.mini.card import MADE, TrainingRecord, card, previous_record, sources
from training.mini.export import export
from training.mini.model import Model
from training.mini.shape import Shape
from training.mini.train import TINY


def materials(folder: Path) -> Path:
    """A record of sources as `prepare` keeps it."""
    fonts = [("npm:one", "1.0", "OFL-1.1", "a font", ""), ("npm:other", "2.0", "OFL-1.1", "a font", "")]
    drawings = ("npm:@iconify-json/emojione", "1.2.3", "CC-BY-4.0", "emoji drawings", "Emoji One")
    scored = ("npm:@iconify-json/twemoji", "1.2.5", "CC-BY-4.0", "emoji drawings", "Twitter")
    keys = ("package", "version", "licence", "holds", "attribution")
    rows = [dict(zip(keys, source, strict=True)) for source in (*fonts, drawings, scored)]
    (folder / "sources.json").write_text(json.dumps(rows))
    return folder


def test_the_card_names_the_run_the_sources_and_the_scores(tmp_path: Path) -> None:
    making = TrainingRecord("Seven steps.", materials(tmp_path), {"name": 0.975, "count": 1.0}, 48)
    said = card(making, Shape(), 12_345_678, Path("build/mine"))
    assert "12.3 million parameters" in said
    assert "Seven steps." in said
    assert "| npm:one 1.0, npm:other 2.0 | a font | OFL-1.1 |  |" in said
    assert "| npm:@iconify-json/emojione 1.2.3 | emoji drawings | CC-BY-4.0 | Emoji One |" in said
    assert "twemoji" not in said, "nothing was learnt from it"
    assert "Training's own measure" in said
    assert "up to 48 questions" in said
    assert "| name | 98 % |" in said
    assert "--model build/mine`" in said
    assert 'see "What it cannot do" in `src/vlfit/mini/README.md`' in said


def test_what_nobody_recorded_is_not_told(tmp_path: Path) -> None:
    said = card(None, Shape(), 1, tmp_path)
    assert "Nothing is recorded of it." in said
    assert "It was not measured" in said
    assert "src/vlfit/mini/README.md" not in said
    assert "what they were made from is not recorded" in sources(tmp_path / "sources.json")
    (tmp_path / "sources.json").write_text('[{"package": "npm:one"}]')
    assert "what they were made from is not recorded" in sources(tmp_path / "sources.json")
    assert "is not recorded" in previous_record(tmp_path)


def test_a_small_model_of_built_in_drawings_claims_none_of_minis_limits(tmp_path: Path) -> None:
    built_in = card(TrainingRecord("One step."), TINY, 1, tmp_path)
    assert "No materials were fetched" in built_in
    assert "another shape than mini's" in built_in
    for making, shape in (
        (TrainingRecord("One step."), Shape()),
        (TrainingRecord("One step.", materials(tmp_path)), TINY),
    ):
        assert "src/vlfit/mini/README.md" not in card(making, shape, 1, tmp_path)


def test_the_card_of_a_refined_model_keeps_what_it_began_with(tmp_path: Path) -> None:
    first = card(TrainingRecord("The first lesson.", materials(tmp_path)), Shape(), 1, tmp_path)
    (tmp_path / "README.md").write_text(first)
    making = TrainingRecord("The second lesson.", before=previous_record(tmp_path))
    (tmp_path / "README.md").write_text(card(making, Shape(), 1, tmp_path))
    third = card(TrainingRecord("The third lesson.", before=previous_record(tmp_path)), Shape(), 1, tmp_path)
    assert third.count(MADE) == 1
    assert [line for line in third.splitlines() if line.endswith("lesson.")] == [
        "The third lesson.",
        "> The second lesson.",
        "> > The first lesson.",
    ]
    assert "Emoji One" in third, "who made what it first learnt from is credited still"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_checkpoint_has_a_card_and_files_as_open_as_the_user_wants(
    umask: int, mode: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Model(TINY)
    before = os.umask(umask)
    try:
        export(model.state_dict(), TINY, tmp_path, making=TrainingRecord("One step."))
    finally:
        os.umask(before)
    assert "One step." in (tmp_path / "README.md").read_text()
    weights = list(tmp_path.glob("*.safetensors"))
    assert weights
    assert {path.stat().st_mode & 0o777 for path in weights} == {mode}
