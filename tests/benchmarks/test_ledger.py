"""The ledger benchmark but for the GPU: checkpoints that are holes, processes in turn, verdicts, workers."""

import io
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import ledger, ledger_workers
from benchmarks.checkpoints import write_sparse_checkpoint
from benchmarks.ledger_workers import NATIVE, TRANSFORMERS, HeldMemory, LedgerJob
from vlfit.checkpoint import catalog
from vlfit.checkpoint.source import read_checkpoint
from vlfit.machine.cards import machine_with_card
from vlfit.machine.model import Machine
from vlfit.plan import calibration
from vlfit.plan.model_lookup import model_of_entry
from vlfit.plan.shapes import model_of
from vlfit.units import GIB, MIB


@pytest.mark.parametrize("weights", catalog.FORMATS)
@pytest.mark.parametrize("size", ["2B", "4B", "8B"])
def test_a_sparse_checkpoint_is_planned_like_a_real_one_and_takes_no_room(
    tmp_path: Path, size: str, weights: str
) -> None:
    folder = write_sparse_checkpoint(tmp_path / "sparse", size, weights)
    checkpoint = read_checkpoint("sparse", folder)
    entry = next(entry for entry in catalog.family_entries(size) if entry.weights == weights)
    sparse, real = model_of("sparse", checkpoint.config, checkpoint.tensors, ""), model_of_entry(entry)
    sizes = ("text_bytes", "vision_bytes", "embedding_bytes", "rounding", "pool", "separate_pool")
    for field in ("weights", "text", "vision", *sizes):
        assert getattr(sparse, field) == getattr(real, field)
    assert sparse.layer == real.layer
    assert sum(file.stat().st_blocks * 512 for file in folder.iterdir()) < 4 * MIB
    assert sum(file.stat().st_size for file in folder.iterdir()) > GIB


def test_there_are_enough_configurations_of_every_kind() -> None:
    jobs = ledger.all_jobs(read_files=False)
    native = [job for job in jobs if job.backend == NATIVE]
    assert len(native) >= 12
    assert {(job.size, job.weights) for job in native} == {
        (size, weights) for size in ("2B", "4B", "8B") for weights in catalog.FORMATS
    }
    assert [job.size for job in jobs if job.backend == TRANSFORMERS] == ["2B", "4B", "8B"]
    assert len({job.name for job in jobs}) == len(jobs)
    assert len({job.image_tokens for job in native}) >= 4
    with_states = ledger.jobs_with_states(read_files=False)
    assert {job.weights for job in with_states} == set(catalog.FORMATS)
    assert len({job.name for job in with_states}) == len(with_states) == 8


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = replace(machine_with_card("H200").gpus[0], index=0)
    machine = Machine((h200,), machine_with_card("H200").host, ())
    monkeypatch.setattr(ledger, "WORKER", "tests.benchmarks.ledger_stand_in")
    monkeypatch.setattr(ledger, "survey", lambda: machine)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["ledger", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        ledger.main()
    return int(ended.value.code or 0)


@pytest.mark.usefixtures("stand_in")
def test_predictions_are_compared_and_what_is_below_is_said_loudly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "ledger.json"
    assert run(monkeypatch, "--only", "i1024", "--json", file) == 1
    out = capsys.readouterr().out
    results = {result["name"]: result for result in json.loads(file.read_text())["results"]}
    assert results["2B-fp8-c4096-i1024-s2-p512"]["verdict"] == "ok"
    below = results["8B-bf16-c4096-i1024-s2-p512"]
    assert below["verdict"] == "BELOW"
    assert below["ratio"] < 1
    [warning] = [line for line in out.splitlines() if "BELOW" in line and not line.startswith("|")]
    assert below["name"] in warning
    failed = results["4B-fp8-c4096-i1024-s2-p256"]
    assert failed["verdict"] == "failed"
    assert failed["why"]
    # What was measured before is compared with what is predicted now, without a GPU.
    monkeypatch.setattr(ledger, "survey", None)
    monkeypatch.setattr(ledger, "measure", None)
    again = tmp_path / "again.json"
    assert run(monkeypatch, "--against", file, "--json", again) == 1
    assert json.loads(again.read_text())["results"] == json.loads(file.read_text())["results"]
    assert run(monkeypatch, "--against", file, "--only", "2B-fp8/no-such-words") == 0
    assert run(monkeypatch, "--against", file, again, "--only", "2B", "fp8") == 0
    assert "BELOW" not in capsys.readouterr().out.splitlines()[-1]


def test_reserve_and_desktop_are_not_compared(tmp_path: Path) -> None:
    job = ledger.with_checkpoint(LedgerJob("", "2B", "fp8", 4096, 1024, 2, 512), tmp_path)
    gpu = machine_with_card("RTX 5060", desktop=951 * MIB).gpus[0]
    lines = {line.line: line.bytes for line in ledger.planned_lines(job, gpu)}
    held = HeldMemory(1, None, 900, 600, 800, 500, 90, 32, {"weights.text": 7, "kv_cache": 8})
    result = ledger.compare(job, replace(held, process=2000), gpu)
    assert "desktop" not in lines
    assert result["predicted"] == sum(lines.values()) - calibration.RESERVE.bytes
    measured = {name: sizes["measured"] for name, sizes in result["lines"].items()}
    assert measured == {
        "context": 2000 - 900,
        "weights.text": 7,
        "kv_cache": 8,
        "workspaces": 900 - 7 - 8,
    }
    workspaces = result["lines"]["workspaces"]["predicted"]
    assert workspaces == lines["vision_workspace"] + lines["text_workspace"] > 0


def test_a_word_that_no_name_has_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["ledger", "--only", "70B"])
    with pytest.raises(SystemExit) as ended:
        ledger.main()
    assert "70B" in str(ended.value.code)


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "survey", lambda: Machine((), machine_with_card("H200").host, ("no driver",)))
    monkeypatch.setattr("sys.argv", ["ledger"])
    with pytest.raises(SystemExit, match="no driver"):
        ledger.main()


def test_a_process_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "TIMEOUT", 0.2)
    program = "import sys, time; sys.stdin.readline(); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert isinstance(ledger.outcome(process), str)
    assert process.returncode is not None


@pytest.mark.parametrize("backend", [NATIVE, TRANSFORMERS])
def test_a_worker_runs_its_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny: Any, backend: str
) -> None:
    """On a CPU; only the answers of CUDA and NVML are made up."""
    import torch

    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 10 * MIB)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    used = iter([100 * MIB, 150 * MIB, 400 * MIB])
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=next(used)),
        nvmlDeviceGetComputeRunningProcesses=lambda _: [],
        NVMLError=ValueError,
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    job = LedgerJob(str(tiny("tied")), "2B", "bf16", 512, 48, 2, 64, backend, device="cpu")
    monkeypatch.setattr("sys.argv", ["worker", json.dumps(asdict(job))])
    monkeypatch.setattr("sys.stdin", io.StringIO("go\n"))
    ledger_workers.main()
    ready, *_, printed = capsys.readouterr().out.splitlines()
    held = HeldMemory(**json.loads(printed))
    assert ready == "ready"
    assert held.process == 300 * MIB
    assert held.bare_context == 40 * MIB
    assert held.own is None
    assert held.lines["weights.text"] > 0
    assert held.lines["weights.vision"] > held.lines["weights.embedding"] > 0
    assert 510 <= held.reached["max_length"] <= 512


def test_a_worker_without_a_line_to_start_leaves_the_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(SystemExit):
        ledger_workers.wait_for_start()
