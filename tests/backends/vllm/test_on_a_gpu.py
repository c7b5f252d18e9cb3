"""Starts of a fake vLLM on described GPUs: failures, retries, records."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.backends.vllm.conftest import Stage
from tests.backends.vllm.fake_vllm import environment
from tests.backends.vllm.test_backend import flag
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.vllm import starting
from vlfit.backends.vllm.installed import find_vllm
from vlfit.backends.vllm.planning import native_alternative, plan_start, restrict_gpus
from vlfit.backends.vllm.serve_command import VllmOptions, build_command, loopback_address
from vlfit.errors import DeviceError, VllmFailed
from vlfit.machine.cards import machine_with_card
from vlfit.machine.model import Machine
from vlfit.plan.vllm import starts
from vlfit.units import GIB, MIB

TAKEN = (
    "ValueError: Free memory on device cuda:0 ({free}/7.96 GiB) on startup is less than desired GPU memory "
    "utilization ({share}, {wanted} GiB). Decrease GPU memory utilization or reduce GPU memory used by other "
    "processes."
)
Seen = Callable[[Machine], None]


@pytest.fixture
def sees(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The machine that a survey finds; vLLM is a build for GPUs."""
    stage.python = str(environment(stage.folder / "gpu", "0.28.0", cpu=False))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def sees(machine: Machine) -> None:
        for module in ("backend", "planning"):
            monkeypatch.setattr(f"vlfit.backends.vllm.{module}.survey", lambda: machine)

    sees(machine_with_card("RTX 5060", desktop=951 * MIB))
    return sees


def test_command_and_record_on_a_gpu(stage: Stage, sees: Seen) -> None:
    stage.configure(log=str(stage.folder / "log"))
    free = machine_with_card("RTX 5060", desktop=951 * MIB).gpus[0].free
    lines = (
        "INFO 11-22 10:00:27 [x.py:1] Model loading took 0.02 GiB memory and 4.1 seconds\n"
        f"INFO 11-22 10:00:43 [x.py:1] Initial free memory {free / GIB - 0.5:.2f} GiB, reserved 0.05 GiB "
        "memory for KV Cache as specified by kv_cache_memory_bytes config\n"
        "INFO 11-22 10:00:44 [x.py:1] Graph capturing finished in 2 secs, took 0.05 GiB\n"
    )
    (stage.folder / "log").write_text(lines)
    with stage.load() as backend:
        assert backend.device == "cuda:0"
        words = stage.starts[0]["words"]
        assert 0 < float(flag(words, "--gpu-memory-utilization")) < 1
        held = {row.line: row.actual for row in backend.ledger_rows()}
        assert held["weights"] == round(0.02 * GIB)
        assert abs((held["context"] or 0) - 0.5 * GIB) < 0.01 * GIB
        place = starts.model_key(backend.plan.model, backend.plan.settings)
        began = starts.find_start("NVIDIA GeForce RTX 5060", "0.28.0", place, backend.plan.settings)
    assert began is not None
    assert began.graph_pool == round(0.05 * GIB)


def test_card_taken_meanwhile_is_replanned(stage: Stage, sees: Seen) -> None:
    said = TAKEN.format(free="6.0", share="0.85", wanted="6.77")
    stage.configure(fails=said, fails_once=str(stage.folder / "failed"))
    with stage.load():
        first, second = (start["words"] for start in stage.starts)
    assert first != second
    assert "[vllm.free_lt_util]" in stage.status_lines[0]
    assert len(stage.status_lines) >= 2  # the cause, then what was changed


def test_last_failure_offers_the_native_engine(stage: Stage, sees: Seen) -> None:
    stage.configure(
        fails="ImportError: libcuda.so.1: cannot open shared object file: No such file or directory"
    )
    with pytest.raises(VllmFailed, match=r"wsl\.lib_missing") as raised:
        stage.load()
    assert "vlfit serve mini --context" in raised.value.hint
    assert len(stage.starts) == 1


def test_offered_native_plan_fits(stage: Stage, sees: Seen) -> None:
    machine = machine_with_card("RTX 5060", desktop=951 * MIB)
    options = EngineOptions(max_model_len=2048)
    planned = plan_start("mini", options, VllmOptions(), find_vllm(stage.python), machine)
    offer = native_alternative(planned)
    assert offer is not None
    assert offer.fits
    assert (offer.backend, offer.settings.context) == ("native", 2048)


def four() -> Machine:
    (gpu,) = machine_with_card("RTX 4090").gpus
    gpus = tuple(replace(gpu, index=index, uuid=f"GPU-{index}a") for index in range(4))
    return Machine(gpus, machine_with_card("RTX 4090").host, ())


def test_hanging_cards_are_restarted_without_peer_access(
    stage: Stage, sees: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "HANG_SECONDS", 0.5)
    sees(four())
    stage.configure(stops_after="Starting to load model", goes_on_with="--disable-custom-all-reduce")
    with stage.load(None, "--tensor-parallel", "2") as backend:
        assert backend.plan.environment["NCCL_P2P_DISABLE"] == "1"
    assert len(stage.starts) == 2
    assert any("[vllm.waits_for_peers]" in words for words in stage.status_lines)


@pytest.mark.parametrize(
    ("device", "told", "expected"),
    [
        ("auto", None, [0, 1, 2, 3]),
        ("auto", "2,0", [2, 0]),
        ("auto", "GPU-3a", [3]),
        ("cuda:1", None, [1]),
        ("cuda:1", "3,2", [2]),
        ("cuda", "1", [1]),
        ("cpu", None, []),
        ("auto", "-1", []),
    ],
)
def test_visible_gpus(device: str, told: str | None, expected: list[int]) -> None:
    """By number or UUID, as Ray or a person sets it; a device counts among those."""
    told_so = {} if told is None else {"CUDA_VISIBLE_DEVICES": told}
    assert [gpu.index for gpu in restrict_gpus(four(), device, told_so).gpus] == expected


@pytest.mark.parametrize(("device", "told"), [("cuda:4", None), ("cuda:1", "2"), ("cuda", "")])
def test_missing_device(device: str, told: str | None) -> None:
    with pytest.raises(DeviceError, match=device):
        restrict_gpus(four(), device, {} if told is None else {"CUDA_VISIBLE_DEVICES": told})


@pytest.mark.parametrize(("device", "expected"), [("cuda:0", "0"), ("cuda:2", "2"), ("auto", None)])
def test_vllm_sees_only_the_named_card(stage: Stage, sees: Seen, device: str, expected: str | None) -> None:
    options = EngineOptions(device=device, max_model_len=2048)
    planned = plan_start("mini", options, VllmOptions(), find_vllm(stage.python), four())
    command = build_command(planned.plan, ("vllm",), loopback_address("mini", 1), pinned=planned.pinned)
    if expected is not None:
        assert command.variables["CUDA_VISIBLE_DEVICES"] == expected
        assert command.variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    else:
        assert planned.pinned == {}
