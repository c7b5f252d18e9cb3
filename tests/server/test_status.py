"""Status and ledger: plan and actual memory, counters, and no cost to the engine."""

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.machine.nvml import WSL2, FakeCard, Process, install
from tests.server.harness import Running, running, wait_for
from tests.server.scripted import ScriptedBackend
from vlfit.api.engine_options import EngineOptions
from vlfit.api.stats import Counters, EngineAccount, EngineSettings, KVPool, MemoryUsage
from vlfit.backends.base import Capabilities
from vlfit.backends.held_memory import expected_memory
from vlfit.backends.native import NativeBackend
from vlfit.checkpoint.source import Checkpoint, mini_folder, read_checkpoint
from vlfit.machine.gpu import read_gpus
from vlfit.server.server_settings import ServerSettings
from vlfit.units import MIB

STATUS, LEDGER = "/v1/vlfit/status", "/v1/vlfit/ledger"


@pytest.fixture(scope="module")
def backend(tiny: Callable[[str], Path]) -> Iterator[NativeBackend]:
    options = EngineOptions(device="cpu", max_model_len=512, max_num_seqs=2)
    with NativeBackend.load(tiny("tied"), options) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def server(backend: NativeBackend) -> Iterator[Running]:
    settings = ServerSettings(expectation=expected_memory(backend, ()))
    with running(backend, settings) as running_server:
        yield running_server


def get(server: Running, path: str = STATUS) -> dict[str, Any]:
    answer = httpx.get(server.url + path)
    assert answer.status_code == 200
    facts: dict[str, Any] = answer.json()
    return facts


def test_a_server_on_a_cpu(server: Running, backend: NativeBackend) -> None:
    facts = get(server)
    assert (facts["version"], facts["state"], facts["device"]) == (1, "ready", "cpu")
    assert (facts["model"], facts["backend"]) == (backend.model, "native")
    assert facts["settings"]["kv_tokens"] == 16 * facts["kv_blocks"]["total"]
    assert facts["memory"]["gpu"] is facts["memory"]["pool"] is None
    assert facts["memory"]["held"] == facts["memory"]["ram"]["resident"] == facts["total"]["actual"]
    assert facts["decode_step"] == {"expected": None, "slowest": None}
    assert facts["spills"] is False
    rows = {row["line"]: row for row in facts["ledger"]}
    assert list(rows)[1:5] == ["weights.text", "weights.vision", "weights.embedding", "kv_cache"]
    for line in ("weights.vision", "weights.embedding", "kv_cache"):
        assert rows[line]["planned"] == rows[line]["actual"] > 0
    assert rows["context"]["planned"] is None  # nobody plans Python


def test_counters_move_with_requests(server: Running) -> None:
    def settled() -> dict[str, Any]:
        """Answers are shared for a moment: wait until they tell of now."""
        seen: list[dict[str, Any]] = []

        def fresh() -> bool:
            seen.append(get(server))
            return bool(seen[-1]["uptime_s"] > seen[0]["uptime_s"])

        wait_for(fresh)
        return seen[-1]

    before = settled()
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "ignore_eos": True}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 200
    after = settled()
    assert after["tokens"]["generated"] - before["tokens"]["generated"] == 5
    assert after["steps"]["decode_count"] - before["steps"]["decode_count"] == 4
    assert after["requests"]["finished"] - before["requests"]["finished"] == 1
    assert after["run"] == before["run"]
    assert after["engine_s"] > before["engine_s"]


def test_the_ledger_is_part_of_the_status(server: Running) -> None:
    ledger, status = get(server, LEDGER), get(server)
    assert set(ledger) == {
        *("version", "model", "backend", "device", "settings", "ledger", "total", "over_plan"),
    }
    for same in ("ledger", "settings", "over_plan"):
        assert ledger[same] == status[same]


def test_a_key_is_asked_for_and_no_line_is_logged(
    backend: NativeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    key = {"Authorization": "Bearer sesame"}
    with (
        running(backend, ServerSettings(api_keys=("sesame",))) as server,
        caplog.at_level(logging.INFO, "vlfit.server"),
    ):
        for path in (STATUS, LEDGER):
            assert httpx.get(server.url + path).status_code == 401
            assert httpx.get(server.url + path, headers=key).status_code == 200
            assert httpx.post(server.url + path, headers=key).status_code == 405
        wait_for(lambda: len(caplog.records) >= 4)
    statuses = [record.getMessage().split()[3] for record in caplog.records]
    assert statuses == ["401", "405"] * 2  # not a look


def test_a_backend_without_statistics() -> None:
    with running(ScriptedBackend()) as server:
        facts = get(server)
        always = {"version", "vlfit", "model", "state", "pid", "run", "uptime_s", "places"}
        assert set(facts) == always | {"backend", "device", "note"}
        assert set(get(server, LEDGER)) == {"version", "model", "backend", "device", "note"}


# --- on a GPU, with the driver and the engine made up ------------------------------------------------------


@dataclass
class OnGpu(ScriptedBackend):
    """mini, as if it were on a GPU."""

    capabilities = Capabilities(account=True)
    kind: str = "native"
    reserved: int = 200 * MIB
    looks: int = 0
    checkpoint: Checkpoint = field(default_factory=lambda: read_checkpoint("mini", mini_folder()))

    def account(self) -> EngineAccount:
        self.looks += 1
        settings = EngineSettings("cuda:0", "GPU-aaaa", "bfloat16", 2, 1024, 144, 2, 512, 2048)
        weights = {"weights.text": 40 * MIB, "weights.vision": 20 * MIB, "weights.embedding": 10 * MIB}
        held = MemoryUsage(
            weights, 30 * MIB, 5 * MIB, 64 * MIB, 150 * MIB, self.reserved, 180 * MIB, 200 * MIB, 900 * MIB
        )
        return EngineAccount(12.5, settings, 1, 0, KVPool(128, 16, 16), held, Counters(tokens=7))


CARD = FakeCard(free=7200)


def on_gpu(monkeypatch: pytest.MonkeyPatch, after: FakeCard) -> dict[str, Any]:
    """The status of a server that was started on ``CARD`` and is now on ``after``."""
    backend = OnGpu()
    install(monkeypatch, CARD)
    settings = ServerSettings(expectation=expected_memory(backend, read_gpus({})[0]))
    nvml = install(monkeypatch, after)
    with running(backend, settings) as server:
        facts = get(server)
    assert nvml.open == 1  # held for the next look
    return facts


def test_a_server_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:

    ours = Process(os.getpid(), "python", 700)
    facts = on_gpu(monkeypatch, replace(CARD, free=6500, compute=(ours, Process(9, "firefox", 300))))
    assert facts["memory"]["gpu"] == {
        "name": "NVIDIA GeForce RTX 5060",
        "total": 8151 * MIB,
        "free": 6500 * MIB,
        "desktop": 951 * MIB,
    }
    assert facts["memory"]["held"] == 700 * MIB
    assert facts["memory"]["pool"]["peak_allocated"] == 180 * MIB
    rows = {row["line"]: row for row in facts["ledger"]}
    assert rows["desktop"]["planned"] == rows["desktop"]["actual"] == 951 * MIB
    assert rows["context"]["actual"] == 500 * MIB
    assert rows["text_workspace"]["actual"] == 100 * MIB
    assert rows["vision_workspace"]["actual"] is None
    assert "text_workspace" in rows["vision_workspace"]["remark"]  # where it is counted
    assert rows["reserve"]["planned"] >= 128 * MIB
    assert facts["decode_step"]["slowest"]["base_s"] > facts["decode_step"]["expected"]["base_s"] > 0
    assert {"line": "weights.text", "bytes": 40 * MIB - rows["weights.text"]["planned"]} in facts["over_plan"]


def test_wsl2_without_process_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = on_gpu(monkeypatch, replace(WSL2, free=6300))
    rows = {row["line"]: row for row in facts["ledger"]}
    assert rows["context"]["actual"] is None
    assert rows["desktop"]["actual"] == (8151 - 6300 - 200) * MIB - rows["context"]["planned"]
    assert facts["memory"]["held"] == 200 * MIB + rows["context"]["planned"]


def test_a_missing_driver_leaves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = OnGpu()
    install(monkeypatch, failure=15)
    with running(backend, ServerSettings(expectation=expected_memory(backend, ()))) as server:
        facts = get(server)
    assert facts["memory"]["gpu"] is None
    assert facts["memory"]["held"] == 200 * MIB
    assert facts["note"]
    assert {row["line"] for row in facts["ledger"]} >= {"weights.text", "kv_cache"}


def test_status_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = OnGpu()
    install(monkeypatch, CARD)
    monkeypatch.setattr("vlfit.server.admin.status.CACHE_SECONDS", 60.0)
    with running(backend) as server, ThreadPoolExecutor(8) as many:
        answers = list(many.map(lambda _: get(server), range(40)))
    assert backend.looks == 1
    assert all(answer == answers[0] for answer in answers)
