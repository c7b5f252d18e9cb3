"""GPUs read through a fake NVML."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pynvml  # type: ignore[import-untyped]
import pytest

from tests.machine.nvml import (
    DESKTOP,
    LAPTOP,
    LARGE,
    LIBRARY_NOT_FOUND,
    WSL2,
    FakeCard,
    FakeNvml,
    Process,
    install,
)
from vlfit.machine.gpu import read_gpus
from vlfit.machine.model import Gpu, GpuProcess
from vlfit.machine.problems import SystemKind
from vlfit.units import MIB


def read_one() -> Gpu:
    (gpu,), problems = read_gpus({})
    assert problems == ()
    return gpu


def test_a_desktop(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, DESKTOP)
    assert read_one() == Gpu(
        index=0,
        name="NVIDIA GeForce RTX 5060",
        total=8151 * MIB,
        free=7200 * MIB,
        desktop=951 * MIB,
        processes=(
            GpuProcess(1200, "Xorg", 310 * MIB),
            GpuProcess(2600, "firefox", 298 * MIB),
            GpuProcess(1400, "gnome-shell", 122 * MIB),
            GpuProcess(3100, "Discord", 96 * MIB),
        ),
        driver="596.49",
        cuda="13.2",
        compute_capability=(12, 0),
        bandwidth=448_032_000_000,
        bandwidth_how="clocks",
        pcie_bandwidth=31_507_692_308,
        pcie_generation=5,
        pcie_lanes=8,
        reserved=207 * MIB,
        uuid="GPU-aaaa",
        multiprocessors=30,
        clock_mhz=2497,  # of the table; drivers name what the card never runs at
    )
    assert nvml.open == 0


def test_the_fake_has_only_functions_of_nvml() -> None:
    names = [name for name in dir(FakeNvml) if name.startswith(("nvml", "NVML"))]
    assert len(names) > 15
    assert [name for name in names if not hasattr(pynvml, name)] == []


def test_wsl2_without_process_sizes_clocks_and_link(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, WSL2)
    gpu = read_one()
    assert gpu.processes == (GpuProcess(400, "Xwayland", None),)
    assert gpu.desktop == 951 * MIB
    assert (gpu.bandwidth, gpu.bandwidth_how) == (448_000_000_000, "table")
    assert (gpu.pcie_bandwidth, gpu.pcie_generation, gpu.pcie_lanes) == (None, None, None)


def test_a_laptop_by_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The laptop card has 256 GB/s, the desktop card of the same number 272."""
    install(monkeypatch, LAPTOP)
    gpu = read_one()
    assert (gpu.bandwidth, gpu.bandwidth_how) == (256_000_000_000, "table")


def test_an_unknown_card(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, replace(LAPTOP, name="NVIDIA Quantum 1"))
    gpu = read_one()
    assert (gpu.bandwidth, gpu.bandwidth_how) == (None, "unknown")
    assert (gpu.multiprocessors, gpu.clock_mhz) == (30, 3090)


def test_multiprocessors_that_the_driver_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, replace(DESKTOP, cores=None, highest_clock=None))
    assert (read_one().multiprocessors, read_one().clock_mhz) == (30, 2497)
    install(monkeypatch, replace(DESKTOP, name="NVIDIA Quantum 1", cores=None, highest_clock=None))
    assert (read_one().multiprocessors, read_one().clock_mhz) == (None, None)
    install(
        monkeypatch, replace(LARGE, name="NVIDIA A100-SXM4-40GB", total=40960, capability=(8, 0), cores=6912)
    )
    assert read_one().multiprocessors == 108


def test_implausible_clocks_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, replace(DESKTOP, memory_clock=1))
    assert read_one().bandwidth_how == "table"


def test_an_old_driver_without_reserved_bytes_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, replace(DESKTOP, reserved=None, name=b"Old name"))
    nvml.driver, nvml.cuda, nvml.old = b"470.1", None, True
    gpu = read_one()
    assert len(gpu.processes) == 4
    assert (gpu.reserved, gpu.name, gpu.driver, gpu.cuda) == (0, "Old name", "470.1", "")


def test_a_process_in_both_lists_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Process(7, "/usr/bin/blender", 500)
    install(monkeypatch, replace(DESKTOP, graphics=(both,), compute=(both,)))
    assert read_one().processes == (GpuProcess(7, "blender", 500 * MIB),)


def test_a_size_reported_in_one_list_only(monkeypatch: pytest.MonkeyPatch) -> None:
    known, unknown = Process(7, "a", 500), Process(7, "a", None)
    for lists in ((known, unknown), (unknown, known)):
        install(monkeypatch, replace(DESKTOP, graphics=lists[:1], compute=lists[1:]))
        assert read_one().processes == (GpuProcess(7, "a", 500 * MIB),)


def test_our_own_process_does_not_count_as_desktop(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Process(os.getpid(), "/usr/bin/python3", 900)
    install(monkeypatch, replace(DESKTOP, graphics=(), compute=(ours,)))
    gpu = read_one()
    assert (gpu.processes, gpu.desktop) == ((), 51 * MIB)


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="needs Linux")
def test_a_useless_name_is_replaced_by_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = os.getppid()
    comm = Path(f"/proc/{parent}/comm").read_text().strip()
    for command in ("/proc/self/exe --type=gpu-process", ""):
        install(monkeypatch, replace(DESKTOP, graphics=(Process(parent, command, 5),)))
        assert read_one().processes == (GpuProcess(parent, comm, 5 * MIB),)


def test_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, DESKTOP, LARGE)
    (first, second), problems = read_gpus({})
    assert problems == ()
    assert (first.index, second.index, second.uuid) == (0, 1, "GPU-bbbb")
    assert (second.total, second.bandwidth) == (24576 * MIB, 936_096_000_000)
    assert second.pcie_bandwidth == 31_507_692_308


def test_one_of_two_gpus_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, replace(DESKTOP, broken=15), LARGE)
    gpus, (problem,) = read_gpus({})
    assert [gpu.index for gpu in gpus] == [1]
    assert problem.id == "gpu.lost"
    assert "GPU 0" in problem.message
    assert nvml.open == 0


def test_the_only_gpu_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, replace(DESKTOP, broken=15))
    gpus, (problem,) = read_gpus({})
    assert (gpus, problem.id) == ((), "gpu.lost")


@pytest.mark.parametrize(
    ("cards", "failure", "kind"),
    [
        ((DESKTOP,), LIBRARY_NOT_FOUND, "container.no_gpu"),
        ((DESKTOP,), 18, "driver.mismatch"),
        ((), None, "gpu.none"),
    ],
)
def test_no_gpu_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cards: tuple[FakeCard, ...],
    failure: int | None,
    kind: str,
) -> None:
    nvml = install(monkeypatch, *cards, failure=failure)
    gpus, (problem,) = read_gpus({}, SystemKind(container=True, root=tmp_path))
    assert (gpus, problem.id, nvml.open) == ((), kind, 0)


def test_no_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    gpus, (problem,) = read_gpus({})
    assert (gpus, problem.id) == ((), "python.nvml")
    assert "pip install nvidia-ml-py" in problem.fix


@pytest.mark.parametrize(
    ("setting", "indexes"),
    [
        ("0", [0]),
        ("1,0", [1, 0]),
        ("1", [1]),
        (" 1 ", [1]),
        ("GPU-bb", [1]),
        ("1,7,0", [1]),  # CUDA stops at an unknown name
        ("0,0", [0]),
        ("", []),
        ("-1", []),
        ("MIG-1234", []),
    ],
)
def test_visible_devices(monkeypatch: pytest.MonkeyPatch, setting: str, indexes: list[int]) -> None:
    install(monkeypatch, DESKTOP, LARGE)
    gpus, problems = read_gpus({"CUDA_VISIBLE_DEVICES": setting})
    assert [gpu.index for gpu in gpus] == indexes
    assert ["CUDA_VISIBLE_DEVICES" in problem.message for problem in problems] == ([] if indexes else [True])
