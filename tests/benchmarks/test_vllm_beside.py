"""The comparison with vLLM without either server: requests, results and the report."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import pytest

from benchmarks import vllm_beside
from benchmarks.serving import DidNotStart, MemoryCurve, Reply
from vlfit.units import MIB

LOG = """(EngineCore) INFO 11-22 08:00:01 [cuda.py:3] Using FLASH_ATTN attention backend out of ['FLASH_ATTN']
(EngineCore) INFO 11-22 08:00:02 [runner.py:4] Model loading took 2.57 GiB memory and 1.2 seconds
(EngineCore) INFO 11-22 08:00:03 [core.py:5] nothing of note
(EngineCore) INFO 11-22 08:00:04 [utils.py:6] GPU KV cache size: 16,512 tokens
"""
LEDGER = [
    {"line": "weights", "planned": 2000 * MIB, "actual": 2010 * MIB},
    {"line": "kv_cache", "planned": 1000 * MIB, "actual": 1000 * MIB},
    {"line": "desktop", "planned": 900 * MIB, "actual": None},
    {"line": "reserve", "planned": 128 * MIB, "actual": None},
]


class FakeServer:
    """A server with a fixed speed: the native engine is twice as fast as vLLM."""

    vllm_log = Path()

    def __init__(self, arguments: list[str], meter: object) -> None:
        slow = 2.0 if "vllm" in arguments else 1.0
        if arguments[-1] == "8" and slow == 2.0:
            raise DidNotStart("exit code 3\nerror: not even tried")
        self.ready_s, self.memory = 30.0 * slow, MemoryCurve(peak=round(3000 * slow) * MIB)
        self.pid = os.getpid()
        self.url = f"http://{slow}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def gpu_bytes(self) -> int:
        return self.memory.peak - MIB

    def get(self, path: str) -> dict[str, Any]:
        return {"ledger": LEDGER}

    def log_tail(self, count: int) -> str:
        return f"its log: {self.vllm_log}"

    def log_without_requests(self) -> list[str]:
        return self.log_tail(1).splitlines()


def run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ended: str, *options: str
) -> tuple[int, dict[str, Any]]:
    """Exit code and what was kept. Plans have room for four requests of vLLM's, and eight of ours."""

    def time_at_once(url: str, seed: int, count: int, tokens: int) -> tuple[float, list[Reply]]:
        slow = float(url.removeprefix("http://"))
        images = ({"tokens": 768},)
        return slow * (0.05 + 0.01 * (tokens - 1)) * (1 if count == 1 else 2), [
            Reply(200, ended, 800, tokens, images=images) for _ in range(count)
        ]

    def planned(command: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        fits = "vllm" not in command or command[command.index("--sequences") + 1] in ("4", "2", "1")
        return subprocess.CompletedProcess(command, 0 if fits else 3, "", "")

    FakeServer.vllm_log = tmp_path / "vllm.log"
    FakeServer.vllm_log.write_text(LOG, "utf-8")
    monkeypatch.setattr(vllm_beside, "ServerProcess", FakeServer)
    monkeypatch.setattr(vllm_beside, "time_at_once", time_at_once)
    monkeypatch.setattr(vllm_beside, "commit", lambda: "c0ffee")
    monkeypatch.setattr(vllm_beside, "process_tree", lambda pid: [] if ended == "length" else [pid])
    monkeypatch.setattr(subprocess, "run", planned)
    file = tmp_path / "beside.json"
    monkeypatch.setattr(sys, "argv", ["beside", "mini", "--device", "cpu", "--json", str(file), *options])
    with pytest.raises(SystemExit) as end:
        vllm_beside.main()
    return int(end.value.code or 0), json.loads(file.read_text())


def test_two_servers_are_told_side_by_side(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, kept = run(monkeypatch, tmp_path, "length", "--starts", "2")
    out = capsys.readouterr().out
    table = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if "|" in line
    ]
    cells = {row[0]: row[1:] for row in table}
    assert code == 0
    assert cells["mini"] == ["native", "vllm", "vllm / native"]
    assert cells["ready, s"] == ["30.0", "60.0", "2.00"]
    assert cells["first token, ms"] == ["50.0", "100.0", "2.00"]
    assert cells["alone, tokens/s"] == ["100.0", "50.0", "0.50"]
    # Eight times 512 tokens in 2 x (0.05 + 5.11) s.
    assert cells["all at once, tokens/s"] == ["397", "198", "0.50"]
    assert cells["run at once"] == ["8", "4", "0.50"]
    assert cells["planned, MiB"] == ["3,000", "3,000", "1.00"]
    assert cells["held at most, MiB"] == ["3,000", "6,000", "2.00"]
    assert cells["weights"] == ["2,000.0", "2,010.0"]
    native, vllm = kept["results"]
    assert [len(result["starts"]) for result in (native, vllm)] == [2, 2]
    assert native["image_tokens"] == 768
    assert len(vllm["vllm_log"]) == 3


def test_what_did_not_start_or_ended_early_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(vllm_beside, "fits", lambda words, backend, device: True)
    code, kept = run(monkeypatch, tmp_path, "stop")
    out = capsys.readouterr().out
    native, vllm = kept["results"]
    assert code == 1
    assert native["wrong"] == ["answers ended early", f"left behind: [{os.getpid()}], 0 MiB"]
    assert vllm["wrong"] == ["it did not start"]
    assert native["wrong"][0] in out
