"""The table of sizes: a row for each number of requests at once; a checkpoint that fails costs no other."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sizes


def samples(*values: float) -> dict[str, Any]:
    return {"median": values[0], "deviation": 0.0, "all": list(values)}


FACTS = {
    "request": {"prompt_tokens": 787},
    "roof": {"bytes_per_second": 4e12},
    "first_token": {"decode": samples(0.004), "vision": samples(0.01)},
    "start": {"program": 0.5, "loading weights": 1.0},
    "memory": {"gpu_process": 5 * 2**30},
    "decoding": [
        {
            "at_once": count,
            "tokens_per_second": samples(500.0 * count),
            "step": samples(0.002),
            "first_token": samples(0.03),
            "read_bytes_per_second": 2e12,
            "share_of_roof": 0.5,
        }
        for count in (1, 8)
    ],
}


def test_rows_of_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    commands: list[list[str]] = []

    def bench(command: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        commands.append(command)
        if "2B-fp8" in command[4]:
            return subprocess.CompletedProcess(command, 3, "", "error: does not fit")
        return subprocess.CompletedProcess(command, 0, json.dumps(FACTS), "")

    monkeypatch.setattr(subprocess, "run", bench)
    monkeypatch.setattr(sizes, "checkpoint_of", lambda name, folder, **_: folder / name)
    monkeypatch.setattr(sizes, "commit", lambda: "c0ffee")
    file = tmp_path / "sizes.json"
    names = ["2B-bf16", "2B-fp8", "8B-int4"]
    monkeypatch.setattr(sys, "argv", ["sizes", *names, "--device", "cpu", "--json", str(file)])
    with pytest.raises(SystemExit) as ended:
        sizes.main()
    out, err = capsys.readouterr()
    assert ended.value.code == 1
    assert "does not fit" in err
    assert [Path(command[4]).name for command in commands] == names
    assert "1,8" in commands[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if "787" in line]
    assert [row[0] for row in rows] == ["2B-bf16 (787 tokens)"] * 2 + ["8B-int4 (787 tokens)"] * 2
    assert rows[1][1:] == [
        *("8", "4000 ± 0", "2.000 ± 0.000", "2,000", "4,000", "50.0 %", "30.0 ± 0.0", "4.0 / 10.0"),
        *("1.5", "5,120"),
    ]
    assert [run["checkpoint"] for run in json.loads(file.read_text())["runs"]] == ["2B-bf16", "8B-int4"]
