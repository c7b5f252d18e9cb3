"""The ledger benchmark but for the GPU: checkpoints that are holes, processes in turn, verdicts, workers."""

import importlib
import io
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import ledger, ledger_job
from benchmarks.hollow import write_hollow
from benchmarks.ledger_job import NATIVE, TRANSFORMERS, Held, LedgerJob
from vlfit.checkpoint import catalog
from vlfit.checkpoint.source import read_checkpoint
from vlfit.machine.cards import card
from vlfit.machine.model import Machine
from vlfit.plan import calibration
from vlfit.plan.shapes import model_of
from vlfit.plan.subjects import of_entry
from vlfit.units import GIB, MIB


@pytest.mark.parametrize("weights", catalog.FORMATS)
@pytest.mark.parametrize("size", ["2B", "4B", "8B"])
def test_a_hollow_checkpoint_is_planned_like_a_real_one_and_takes_no_room(
    tmp_path: Path, size: str, weights: str
) -> None:
    folder = write_hollow(tmp_path / "hollow", size, weights)
    checkpoint = read_checkpoint("hollow", folder)
    entry = next(entry for entry in catalog.family(size) if entry.weights == weights)
    hollow, real = model_of("hollow", checkpoint.config, checkpoint.tensors, ""), of_entry(entry)
    sizes = ("text_bytes", "vision_bytes", "embedding_bytes", "rounding", "pool", "pool_apart")
    for field in ("weights", "text", "vision", *sizes):
        assert getattr(hollow, field) == getattr(real, field)
    assert hollow.layer == real.layer
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


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = replace(card("H200").gpus[0], index=0)
    machine = Machine((h200,), card("H200").host, ())
    monkeypatch.setattr(ledger, "WORKERS", dict.fromkeys(ledger.WORKERS, "tests.benchmarks.ledger_stand_in"))
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
    out, err = capsys.readouterr()
    results = {result["name"]: result for result in json.loads(file.read_text())["results"]}
    assert results["2B-fp8-c4096-i1024-s2-p512"]["verdict"] == "ok"
    below = results["8B-bf16-c4096-i1024-s2-p512"]
    assert below["verdict"] == "BELOW"
    assert below["ratio"] < 1
    assert "BELOW THE TRUTH" in out
    assert "8B-bf16-c4096-i1024-s2-p512" in out.rpartition("BELOW THE TRUTH")[2]
    failed = results["4B-fp8-c4096-i1024-s2-p256"]
    assert failed["verdict"] == "failed"
    assert "for this" in failed["why"]
    assert "failed with exit code" in err
    # What was measured before is compared with what is predicted now, without a GPU.
    monkeypatch.setattr(ledger, "survey", None)
    monkeypatch.setattr(ledger, "measured", None)
    again = tmp_path / "again.json"
    assert run(monkeypatch, "--against", file, "--json", again) == 1
    assert json.loads(again.read_text())["results"] == json.loads(file.read_text())["results"]
    assert run(monkeypatch, "--against", file, "--only", "2B-fp8/no-such-words") == 0
    assert run(monkeypatch, "--against", file, again, "--only", "2B", "fp8") == 0
    assert "BELOW" not in capsys.readouterr().out.splitlines()[-1]


def test_the_air_and_the_desktop_are_no_part_of_the_comparison(tmp_path: Path) -> None:
    job = ledger.place(LedgerJob("", "2B", "fp8", 4096, 1024, 2, 512), tmp_path)
    gpu = card("RTX 5060", desktop=951 * MIB).gpus[0]
    lines = {line.line: line.bytes for line in ledger.predicted_lines(job, gpu)}
    held = Held(1, None, 900, 600, 800, 500, 90, 32, {"weights.text": 7, "kv_cache": 8})
    result = ledger.compared(job, replace(held, process=2000), gpu)
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
    with pytest.raises(SystemExit, match="no configuration has"):
        ledger.main()


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "survey", lambda: Machine((), card("H200").host, ("no driver",)))
    monkeypatch.setattr("sys.argv", ["ledger"])
    with pytest.raises(SystemExit, match="no driver"):
        ledger.main()


def test_a_process_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "PATIENCE", 0.2)
    program = "import sys, time; sys.stdin.readline(); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert ledger.outcome(process) == "did not end in 0.2 s"
    assert process.returncode is not None


@pytest.mark.parametrize("module", ["benchmarks.ledger_native", "benchmarks.ledger_transformers"])
def test_a_worker_runs_its_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny: Any, module: str
) -> None:
    """All of it on a CPU; only what CUDA and NVML tell is made up."""
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
    job = LedgerJob(str(tiny("tied")), "2B", "bf16", 512, 48, 2, 64, device="cpu")
    monkeypatch.setattr("sys.argv", ["worker", json.dumps(asdict(job))])
    monkeypatch.setattr("sys.stdin", io.StringIO("go\n"))
    importlib.import_module(module).main()
    ready, *_, printed = capsys.readouterr().out.splitlines()
    held = Held(**json.loads(printed))
    assert ready == "ready"
    assert held.process == 300 * MIB
    assert held.bare_context == 40 * MIB
    assert held.own is None
    assert held.lines["weights.text"] > 0
    assert held.lines["weights.vision"] > held.lines["weights.embedding"] > 0
    assert 510 <= held.reached["max_length"] <= 512


def test_a_worker_that_is_not_told_to_go_leaves_the_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    job = LedgerJob("", "2B", "bf16", 512, 48, 2, 64)
    monkeypatch.setattr("sys.argv", ["worker", json.dumps(asdict(job))])
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(SystemExit, match="nobody said go"):
        ledger_job.begin()
