"""What the card of trained weights tells, and what it does not claim to know. Its words: ``tests/golden``."""

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

MINIS_LIMITS = "src/vlfit/mini/README.md"


def materials(folder: Path) -> Path:
    """A record of sources as `prepare` keeps it."""
    fonts = [("npm:one", "1.0", "OFL-1.1", "a font", ""), ("npm:other", "2.0", "OFL-1.1", "a font", "")]
    drawings = ("npm:@iconify-json/emojione", "1.2.3", "CC-BY-4.0", "emoji drawings", "Emoji One")
    scored = ("npm:@iconify-json/twemoji", "1.2.5", "CC-BY-4.0", "emoji drawings", "Twitter")
    keys = ("package", "version", "licence", "holds", "attribution")
    rows = [dict(zip(keys, source, strict=True)) for source in (*fonts, drawings, scored)]
    (folder / "sources.json").write_text(json.dumps(rows))
    return folder


def table(page: str) -> dict[str, list[str]]:
    """The rows of all tables of ``page`` but for their heads, by their first cell."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line[:1] == "|"]
    return {first: rest for first, *rest in rows if first not in ("---", "materials", "topic")}


def test_the_card_names_the_run_the_sources_and_the_scores(tmp_path: Path) -> None:
    making = TrainingRecord("HOW", materials(tmp_path), {"name": 0.975, "count": 1.0}, 48)
    said = card(making, Shape(), 12_345_678, Path("build/mine"))
    assert {"12.3", "HOW", "48"} <= set(said.split())
    assert table(said) == {
        "npm:one 1.0, npm:other 2.0": ["a font", "OFL-1.1", ""],
        "npm:@iconify-json/emojione 1.2.3": ["emoji drawings", "CC-BY-4.0", "Emoji One"],
        "name": ["98 %"],
        "count": ["100 %"],
    }  # and no twemoji: nothing was learnt from it
    assert "--model build/mine`" in said
    assert MINIS_LIMITS in said


def test_what_nobody_recorded_is_not_told(tmp_path: Path) -> None:
    said = card(None, Shape(), 1, tmp_path)
    assert table(said) == {}
    assert MINIS_LIMITS not in said
    unknown = sources(tmp_path / "sources.json")
    assert unknown
    for broken in ('[{"package": "npm:one"}]', "{", "5"):
        (tmp_path / "sources.json").write_text(broken)
        assert sources(tmp_path / "sources.json") == unknown
    assert str(tmp_path) in previous_record(tmp_path)
    assert ">" not in previous_record(tmp_path), "there is nothing to quote"


def test_a_small_model_of_built_in_drawings_claims_none_of_minis_limits(tmp_path: Path) -> None:
    for making, shape in (
        (TrainingRecord("One step."), TINY),
        (TrainingRecord("One step."), Shape()),
        (TrainingRecord("One step.", materials(tmp_path)), TINY),
    ):
        said = card(making, shape, 1, tmp_path)
        assert MINIS_LIMITS not in said
        assert len(table(said)) == (2 if making.materials else 0)


def test_the_card_of_a_refined_model_keeps_what_it_began_with(tmp_path: Path) -> None:
    first = card(TrainingRecord("LESSON 1", materials(tmp_path)), Shape(), 1, tmp_path)
    (tmp_path / "README.md").write_text(first)
    making = TrainingRecord("LESSON 2", before=previous_record(tmp_path))
    (tmp_path / "README.md").write_text(card(making, Shape(), 1, tmp_path))
    third = card(TrainingRecord("LESSON 3", before=previous_record(tmp_path)), Shape(), 1, tmp_path)
    assert third.count(MADE) == 1
    lessons = [line.partition("LESSON") for line in third.splitlines() if "LESSON" in line]
    assert [(quoted.count(">"), int(number)) for quoted, _, number in lessons] == [(0, 3), (1, 2), (2, 1)]
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
