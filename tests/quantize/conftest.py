"""A source checkpoint and a target folder."""

from collections.abc import Callable
from pathlib import Path

import pytest

from vlfit.checkpoint.source import Checkpoint, open_checkpoint


@pytest.fixture
def plain(tiny: Callable[[str], Path]) -> Checkpoint:
    return open_checkpoint(tiny("tied"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"
