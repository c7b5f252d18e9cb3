"""The plan against what processes held on a GPU: never below, and hardly above.

The numbers are those of ``benchmarks/ledger.py`` and of ``benchmarks/memory.py`` (servers under their whole
load) in ``benchmarks/measured/``: nothing is measured here.
"""

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.checkpoints import write_sparse_checkpoint
from benchmarks.harness import MIB, ROOT
from benchmarks.ledger import compare, read_measured, with_checkpoint
from benchmarks.ledger_workers import NATIVE, TRANSFORMERS, HeldMemory, LedgerJob
from vlfit.checkpoint.source import read_checkpoint
from vlfit.plan.ledger import PlanSettings
from vlfit.plan.native.expectation import expect_on_gpu

PAGE = (ROOT / "docs" / "side-by-side.md").read_text("utf-8")
MEASURED = ROOT / "benchmarks" / "measured"
BESIDE, FACTS, GPU = read_measured([MEASURED / "ledger-h100.json"])  # other tools' estimates
WITH_STATES, *_ = read_measured([MEASURED / "ledger-states-h100.json"])
KNOWN = BESIDE | WITH_STATES
MOST = {NATIVE: 1.03, TRANSFORMERS: 1.05}  # times what was measured
SERVED: dict[str, Any] = json.loads((MEASURED / "memory-h200.json").read_text("utf-8"))


@pytest.fixture(autouse=True)
def _no_calibration(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """The table's constants, whatever was measured on this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_there_are_enough_of_them_and_the_machine_is_named() -> None:
    assert len([job for job in KNOWN if job.backend == NATIVE]) >= 20
    assert len([job for job in KNOWN if job.backend == TRANSFORMERS]) == 3
    assert len(WITH_STATES) == 8
    names = ["2B-fp8", "4B-fp8", "4B-int4", "8B-int4", "Qwen3.5-9B-int4"]
    assert [row["name"] for row in SERVED["rows"]] == names
    assert "H100" in FACTS["card"]
    assert "H200" in SERVED["facts"]["card"]
    assert FACTS["torch"]


@pytest.mark.parametrize("job", KNOWN, ids=[job.name for job in KNOWN])
def test_the_total_is_not_below_and_hardly_above(
    tmp_path_factory: pytest.TempPathFactory, job: LedgerJob
) -> None:
    held = KNOWN[job]
    assert isinstance(held, HeldMemory)
    placed = with_checkpoint(job, tmp_path_factory.getbasetemp())
    result = compare(placed, held, GPU)
    assert 1 <= result["ratio"] <= MOST[job.backend]
    if job in BESIDE:
        [row] = [line.split("|") for line in PAGE.splitlines() if line.startswith(f"| {job.name} ")]
        planned = f"{result['predicted'] / MIB:,.0f}"
        assert row[2].split()[0] == planned, "run python -m benchmarks.side_by_side"
        assert row[-2].strip() == f"{held.process / MIB:,.0f}"
    lines = result["lines"]  # the engine repeats the norms of q and k for each head, which is 0.01 % at most
    for name in ("weights.text", "weights.vision", "weights.embedding", "kv_cache"):
        if name in lines:
            assert lines[name]["predicted"] == pytest.approx(lines[name]["measured"], rel=1e-4), name
    # Where the total is not below, no line is either: none lives on what another has too much. What graphs of
    # prompts keep beside their pool was measured among the workspaces, and is planned with the graphs.
    for names in (("context",), ("graphs",), ("workspaces", "graphs")):
        found = [lines[name] for name in names if name in lines]
        assert sum(line["predicted"] for line in found) >= sum(line["measured"] for line in found), names


@pytest.mark.parametrize("row", SERVED["rows"], ids=[row["name"] for row in SERVED["rows"]])
def test_a_server_under_its_whole_load_held_what_is_planned_now(
    tmp_path_factory: pytest.TempPathFactory, row: dict[str, Any]
) -> None:
    made, started = row["row"], row["ledger_at_ready"]["settings"]
    folder = tmp_path_factory.mktemp("sparse") / row["name"]
    write_sparse_checkpoint(folder, made["size"], made["weights"], tuple(made["int8"]), made["group_size"])
    context, image_tokens, sequences, chunk = (
        started[name] for name in ("context", "image_tokens", "sequences", "chunk")
    )
    kv_dtype = "fp8" if started["kv_dtype"] == "fp8" else "bf16"
    settings = PlanSettings(
        made["weights"],
        context,
        image_tokens,
        sequences,
        chunk,
        kv_dtype=kv_dtype,
        draft_model=started["draft_model"],
    )
    checkpoint = read_checkpoint(row["name"], folder)
    gpu = replace(GPU, free=row["free"])
    lines = expect_on_gpu(checkpoint, gpu, settings, 2, started["kv_tokens"]).lines
    planned = sum(line.bytes for line in lines if line.line not in ("desktop", "reserve"))
    assert 1 <= planned / row["peak"] <= 1.03
