"""Two other tools beside the plan: reading what they print, and the page."""

import json
from pathlib import Path

import pytest

from benchmarks import side_by_side
from benchmarks.ledger import all_jobs
from benchmarks.ledger_workers import LedgerJob
from benchmarks.side_by_side import Row, accelerate_sizes, cached, cell, measured_bytes, page
from vlfit.machine.cards import machine_with_card
from vlfit.units import GIB, MIB

# As accelerate 1.15.0 printed it.
TABLE = """Loading pretrained config for `Qwen/Qwen3-VL-4B` from `transformers`...
┌────────────────────────────────────────────────────┐
│    Memory Usage for loading `Qwen/Qwen3-VL-4B`     │
├───────┬─────────────┬──────────┬───────────────────┤
│ dtype │Largest Layer│Total Size│Training using Adam│
├───────┼─────────────┼──────────┼───────────────────┤
│float16│  741.88 MB  │ 8.27 GB  │      33.06 GB     │
│  int8 │  370.94 MB  │ 4.13 GB  │        N/A        │
└───────┴─────────────┴──────────┴───────────────────┘
"""
GPU = machine_with_card("RTX 5060").gpus[0]


def test_accelerates_table_is_read() -> None:
    assert accelerate_sizes(TABLE) == {"float16": round(8.27 * GIB), "int8": round(4.13 * GIB)}
    assert accelerate_sizes("no such model") == {}


def test_the_page_says_what_was_not_measured_and_what_failed() -> None:
    rows = [
        Row("a", 100 * MIB, None, None, 50 * MIB, None),
        Row("b", 99 * MIB, 50 * MIB, 80 * MIB, 1, 100 * MIB),
    ]
    text = page(rows, GPU, {"card": "a card", "torch": "2.13.0", "transformers": "5.17.0"})
    lines = [
        [part.strip() for part in line.split("|")[1:-1]]
        for line in text.splitlines()
        if line[:3] in ("| a", "| b")
    ]
    assert lines[0] == ["a", "100", "failed", "failed", "50", "60", "not measured"]
    assert lines[1][:4] == ["b", "99 (99%)", "50 (50%)", "80 (80%)"]
    assert lines[1][-1] == "100"
    assert "a card, torch 2.13.0, transformers" in text
    assert cell(None, None) == "failed"


def test_measurements_are_the_ledger_benchmarks() -> None:
    results = [{"name": "a", "measured": 5}, {"name": "b", "verdict": "failed"}]
    assert measured_bytes({"results": results}) == {"a": 5}
    assert measured_bytes({}) == {}


def test_a_tool_is_asked_once_unless_it_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(side_by_side, "ANSWERS", tmp_path / "answers.json")
    answers = iter([{}, {"total": 1}, {"total": 2}])
    results = [cached("tool job", lambda: next(answers)) for _ in range(3)]
    assert results == [{}, {"total": 1}, {"total": 1}]
    monkeypatch.setattr(side_by_side, "TOOLS", {"tool": "2.0"})
    assert cached("tool job", lambda: next(answers)) == {"total": 2}


def test_a_tool_that_fails_has_no_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin").mkdir()
    for name, program in (("hf-vram-calc", "echo wrong >&2; exit 3"), ("accelerate", "exit 0")):
        tool = tmp_path / "bin" / name
        tool.write_text(f"#!/bin/sh\n{program}\n")
        tool.chmod(0o755)
    monkeypatch.setattr(side_by_side, "TOOLS_FOLDER", tmp_path)
    job = LedgerJob(str(tmp_path), "2B", "bf16", 512, 48, 2, 64)
    assert side_by_side.hf_vram_calc(job) == {}
    printed = capsys.readouterr().err
    assert "hf-vram-calc" in printed
    assert "3: wrong" in printed
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    assert side_by_side.accelerate("2B", tmp_path / "config.json") == {}


def test_the_document_has_every_configuration() -> None:
    document = side_by_side.PAGE.read_text("utf-8")
    for job in all_jobs(read_files=False):
        assert f"| {job.name} " in document
