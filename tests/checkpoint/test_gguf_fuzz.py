"""Damaged GGUF files end in errors of ours, in bounded time and memory, in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gguf_files import as_gguf
from tests.loading.test_ollama_layout import as_ollama

ROOT = Path(__file__).parents[2]
SLOWEST = 30.0  # seconds for a file, on a computer that does other things too; alone 0.1


def fuzz(model: Path, mmproj: Path | None, tmp_path: Path, *more: str, count: int, seed: int) -> Any:
    assert mmproj is not None
    program = [sys.executable, "-m", "tests.gguf_mutations", str(model), str(mmproj), str(count), str(seed)]
    done = subprocess.run(
        [*program, *more],
        cwd=ROOT,
        env=person(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]  # a crash: the last number names the file
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert found["opened"] + found["refused"] == count
    assert found["slowest"] < SLOWEST
    return found


def person(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}


def test_some_damaged_files(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    found = fuzz(*as_gguf(tiny("tied"), tmp_path / "gguf", "q8_0"), tmp_path, count=60, seed=0)
    assert min(found["opened"], found["refused"]) > 10


@pytest.mark.slow
def test_many_damaged_files(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    files = as_gguf(tiny("tied"), tmp_path / "gguf", "q8_0")
    fuzz(*files, tmp_path, count=500, seed=1000)
    fuzz(*files, tmp_path, "--run", count=500, seed=5000)
    inside = as_ollama(tiny("tied"), tmp_path / "inside")
    fuzz(inside, files[1], tmp_path, count=500, seed=9000)
