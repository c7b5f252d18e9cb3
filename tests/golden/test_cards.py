"""Cards of weights that ``training/mini`` makes, word by word."""

from pathlib import Path

import pytest

from tests.golden.kept import check
from tests.training.test_card import materials
from training.mini.card import TrainingRecord, card, previous_record
from training.mini.shape import Shape
from training.mini.train import TINY


@pytest.mark.parametrize("name", ["learnt", "refined", "built-in", "small", "unknown"])
def test_card(name: str, tmp_path: Path) -> None:
    folder = Path("build/mine")
    learnt = TrainingRecord("Seven steps.", materials(tmp_path), {"name": 0.975, "count": 1.0}, 48)
    (tmp_path / "README.md").write_text(card(learnt, Shape(), 12_345_678, folder))
    making, shape = {
        "learnt": (learnt, Shape()),
        "refined": (TrainingRecord("Two more.", before=previous_record(tmp_path)), Shape()),
        "built-in": (TrainingRecord("One step."), Shape()),
        "small": (TrainingRecord("One step.", tmp_path / "nowhere"), TINY),
        "unknown": (None, Shape()),
    }[name]
    page = card(making, shape, 12_345_678, folder).replace(str(tmp_path), "START")
    check(f"cards/{name}.md", page)
