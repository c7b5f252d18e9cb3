"""``benchmarks.prefix`` with a tiny model that keeps states."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import prefix


def test_all_cases_reuse_what_is_equal(
    tiny_qwen3_5: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "measured.json"
    arguments = [str(tiny_qwen3_5("small")), "--pictures", "2", "--tokens", "4", "--size", "640x480"]
    assert prefix.main([*arguments, "--context", "1024", "--json", str(file)]) == 0
    cases = json.loads(file.read_text("utf-8"))["cases"]
    assert tuple(cases) == prefix.CASES
    assert cases["first"]["reused"] == [0, 0]
    picture = cases["second question"]["reused"][0]
    assert picture > 60
    for name in prefix.CASES[1:]:
        assert min(cases[name]["reused"]) >= picture, name
        assert cases[name]["different"] == 0
    assert "snapshots" in capsys.readouterr().out
    assert prefix.main([*arguments, "--context", "1024", "--limit", "0.0001"]) == 1
