"""Problems and fixes where no GPU is found, from file trees of such computers."""

import re
from pathlib import Path

import pynvml  # type: ignore[import-untyped]
import pytest

from vlfit.machine.problems import (
    Problem,
    SystemKind,
    explain_driver_error,
    explain_hidden_gpus,
    explain_missing_library,
    explain_no_gpu,
)

VERSION = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31 09:35:42 UTC 2024\n"
    "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"
)
OPEN_VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def plug_in(root: Path, slot: str, vendor: str, kind: str = "0x030000") -> None:
    device = root / "sys/bus/pci/devices" / slot
    write(device / "vendor", f"{vendor}\n")
    write(device / "class", f"{kind}\n")


def failed(name: str, system: SystemKind) -> Problem:
    """The problem for an error of NVML, by its name in nvml.h."""
    error = pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{name}"))
    return explain_driver_error(error.value, str(error), system)


def test_no_driver(tmp_path: Path) -> None:
    problem = explain_missing_library(SystemKind(root=tmp_path))
    assert (problem.id, problem.gpu_present) == ("driver.missing", False)
    assert "vlfit plan --gpu" in problem.fix


@pytest.mark.parametrize("nouveau", [False, True])
def test_a_card_without_its_driver(tmp_path: Path, nouveau: bool) -> None:
    plug_in(tmp_path, "0000:01:00.0", "0x10de")
    if nouveau:
        (tmp_path / "sys/module/nouveau").mkdir(parents=True)
    problem = explain_missing_library(SystemKind(root=tmp_path))
    assert (problem.id, problem.gpu_present) == ("driver.missing", True)
    assert ("nouveau" in problem.message) is nouveau
    assert "ubuntu-drivers install" in problem.fix


def test_only_other_graphics(tmp_path: Path) -> None:
    plug_in(tmp_path, "0000:00:02.0", "0x8086")
    plug_in(tmp_path, "0000:01:00.0", "0x1002", "0x038000")
    plug_in(tmp_path, "0000:02:00.0", "0x10de", "0x040300")  # a card's sound device
    problem = explain_missing_library(SystemKind(root=tmp_path))
    assert (problem.id, problem.gpu_present) == ("gpu.other", False)
    assert {"AMD", "Intel"} <= set(re.findall(r"\w+", problem.message))


def test_wsl2_without_a_driver_in_windows(tmp_path: Path) -> None:
    problem = explain_missing_library(SystemKind(wsl2=True, root=tmp_path))
    assert problem.id == "wsl.no_driver"
    assert "wsl --update" in problem.fix


def test_wsl2_with_the_library_off_the_path(tmp_path: Path) -> None:
    write(tmp_path / "usr/lib/wsl/lib/libnvidia-ml.so.1")
    problem = explain_missing_library(SystemKind(wsl2=True, root=tmp_path))
    assert problem.id == "wsl.path"
    assert "ldconfig" in problem.fix


def test_container(tmp_path: Path) -> None:
    problem = explain_missing_library(SystemKind(container=True, root=tmp_path))
    assert problem.id == "container.no_gpu"
    assert "--gpus all" in problem.fix


@pytest.mark.parametrize(("text", "module"), [(VERSION, "550.90.07"), (OPEN_VERSION, "580.95.05")])
def test_mismatch_names_both_versions(tmp_path: Path, text: str, module: str) -> None:
    write(tmp_path / "proc/driver/nvidia/version", text)
    write(tmp_path / "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1")
    write(tmp_path / "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.595.71.05")
    problem = failed("LIB_RM_VERSION_MISMATCH", SystemKind(root=tmp_path))
    assert problem.id == "driver.mismatch"
    assert module in problem.message
    assert "595.71.05" in problem.message


def test_mismatch_of_unknown_versions(tmp_path: Path) -> None:
    problem = failed("LIB_RM_VERSION_MISMATCH", SystemKind(root=tmp_path))
    assert problem.id == "driver.mismatch"
    assert "(" not in problem.message


def test_module_not_loaded(tmp_path: Path) -> None:
    plug_in(tmp_path, "0000:01:00.0", "0x10de", "0x030200")
    problem = failed("DRIVER_NOT_LOADED", SystemKind(root=tmp_path))
    assert problem.id == "driver.not_loaded"
    assert "modprobe nvidia" in problem.fix


def test_driver_without_a_card(tmp_path: Path) -> None:
    assert failed("DRIVER_NOT_LOADED", SystemKind(root=tmp_path)).id == "gpu.none"


@pytest.mark.parametrize("name", ["LIB_RM_VERSION_MISMATCH", "DRIVER_NOT_LOADED"])
def test_a_linux_driver_inside_wsl2(tmp_path: Path, name: str) -> None:
    problem = failed(name, SystemKind(wsl2=True, root=tmp_path))
    assert problem.id == "wsl.linux_driver"
    assert "apt purge" in problem.fix


@pytest.mark.parametrize(
    ("name", "system", "problem_id", "in_fix"),
    [
        ("NO_PERMISSION", SystemKind(), "driver.permission", "/dev/nvidia"),
        ("NO_PERMISSION", SystemKind(container=True), "driver.permission", "--gpus all"),
        ("NO_PERMISSION", SystemKind(wsl2=True), "driver.permission", "/dev/nvidia"),
        ("OPERATING_SYSTEM", SystemKind(), "driver.permission", "/dev/nvidia"),
        ("OPERATING_SYSTEM", SystemKind(container=True), "driver.permission", "--gpus all"),
        ("OPERATING_SYSTEM", SystemKind(wsl2=True), "wsl.no_driver", "wsl --update"),
        ("OPERATING_SYSTEM", SystemKind(wsl2=True, container=True), "wsl.no_driver", "wsl --update"),
        ("GPU_IS_LOST", SystemKind(), "gpu.lost", "xid"),
        ("RESET_REQUIRED", SystemKind(), "gpu.lost", "xid"),
        ("INSUFFICIENT_POWER", SystemKind(), "gpu.power", "cables"),
        ("FUNCTION_NOT_FOUND", SystemKind(), "driver.old", "driver"),
        ("FUNCTION_NOT_FOUND", SystemKind(wsl2=True), "driver.old", "wsl --update"),
        ("UNKNOWN", SystemKind(), "driver.broken", "nvidia_uvm"),
        ("UNKNOWN", SystemKind(container=True), "container.lost_gpu", "daemon-reload"),
        ("UNKNOWN", SystemKind(wsl2=True), "wsl.unknown", "wsl --shutdown"),
        ("UNKNOWN", SystemKind(wsl2=True, container=True), "container.lost_gpu", "daemon-reload"),
        ("IRQ_ISSUE", SystemKind(), "driver.broken", "dmesg"),
    ],
)
def test_other_failures(name: str, system: SystemKind, problem_id: str, in_fix: str) -> None:
    problem = failed(name, system)
    assert problem.id == problem_id
    assert in_fix in problem.fix


def test_a_failure_without_a_code_keeps_the_drivers_text() -> None:
    problem = explain_driver_error(None, "the sky is falling", SystemKind())
    assert "the sky is falling" in problem.message


def test_problems_as_sentences(tmp_path: Path) -> None:
    for problem in (
        explain_no_gpu(SystemKind()),
        explain_hidden_gpus("7"),
        explain_hidden_gpus("MIG-1"),
        explain_missing_library(SystemKind(root=tmp_path)),
    ):
        assert problem.text[0].isupper()
        assert problem.text.endswith(".")
        assert ".." not in problem.text
