"""The checks of a computer, each from given inputs, so that no result depends on this one."""

import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.doctor.helpers import WORKED_EXAMPLE
from vlfit.doctor import checks
from vlfit.doctor.checks import (
    TORCH_WHEELS,
    Check,
    best_wheel_name,
    card_problem,
    check_cache,
    check_disk,
    check_driver,
    check_gpu_memory,
    check_memory_limit,
    check_port,
    check_python,
    check_ram,
    check_torch,
    check_wsl,
    hub_cache_folder,
    worst_level,
)
from vlfit.machine.problems import Problem
from vlfit.machine.torch_build import TorchBuild, driver_is_too_old, installed_torch, parse_torch_version
from vlfit.units import GIB

RTX_5060 = replace(WORKED_EXAMPLE.gpus[0], driver="581.15", cuda="13.0")
HOST = WORKED_EXAMPLE.host


def test_python() -> None:
    assert check_python((3, 10)).level == "red"
    assert check_python((3, 11)).level == "green"
    assert check_python((3, 14)).level == "green"


@pytest.mark.parametrize(
    ("problem", "level"),
    [
        (Problem("gpu.none", "the NVIDIA driver finds no GPU"), "yellow"),
        (Problem("gpu.other", "there is no NVIDIA GPU, only graphics from AMD"), "yellow"),
        (
            Problem("container.no_gpu", "no NVIDIA driver is visible in this container", "--gpus all"),
            "yellow",
        ),
        (Problem("driver.missing", "no NVIDIA driver is installed"), "yellow"),
        (
            Problem("driver.missing", "no NVIDIA driver is installed", "install", gpu_present=True),
            "red",
        ),
        (Problem("driver.mismatch", "of different versions", "Restart the computer."), "red"),
        (Problem("wsl.no_driver", "no NVIDIA driver is installed in Windows", "Install it."), "red"),
    ],
)
def test_a_driver_problem_is_red_only_with_a_gpu(problem: Problem, level: str) -> None:
    check = check_driver((), (problem,))
    assert (check.level, check.says, check.fix) == (level, problem.message, problem.fix)


def test_a_driver_that_works() -> None:
    check = check_driver((RTX_5060,), ())
    assert check.level == "green"
    assert "581.15" in check.says
    assert "RTX 5060" in check.says
    # One of two GPUs has failed.
    assert check_driver((RTX_5060,), (Problem("gpu.lost", "GPU 1 fails", "Restart."),)).level == "red"


@pytest.fixture
def wsl(tmp_path: Path) -> Path:
    folder = tmp_path / "usr/lib/wsl/lib"
    folder.mkdir(parents=True)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (folder / name).touch()
    return tmp_path


def test_wsl_libraries(wsl: Path) -> None:
    assert check_wsl(wsl, lambda name: name == "libcuda.so.1").level == "green"
    unfound = check_wsl(wsl, lambda _: False)
    assert unfound.level == "red"
    assert "ld.so.conf.d" in unfound.fix
    (wsl / "usr/lib/wsl/lib/libcuda.so.1").unlink()
    missing = check_wsl(wsl, lambda _: True)
    assert missing.level == "red"
    assert "libcuda.so.1" in missing.says
    assert "libnvidia-ml" not in missing.says


def test_a_linux_driver_inside_wsl(wsl: Path) -> None:
    linux = wsl / "usr/lib/x86_64-linux-gnu"
    linux.mkdir(parents=True)
    (linux / "libnvidia-ml.so.550.90.07").touch()
    check = check_wsl(wsl, lambda _: True)
    assert check.level == "red"
    assert "apt purge" in check.fix


VERSION_FILE = """from typing import Optional
__version__ = '2.11.0'
cuda: Optional[str] = {cuda}
git_version = 'abc'
hip: Optional[str] = {hip}
"""


@pytest.mark.parametrize(
    ("cuda", "hip", "build"),
    [
        ("'12.8'", "None", TorchBuild("2.11.0", (12, 8))),
        ("None", "None", TorchBuild("2.11.0", None)),
        ("None", "'6.3'", TorchBuild("2.11.0", None, "hip")),
    ],
)
def test_the_build_of_torch_is_parsed(cuda: str, hip: str, build: TorchBuild) -> None:
    assert parse_torch_version("2.11.0", VERSION_FILE.format(cuda=cuda, hip=hip)) == build


def test_the_installed_build_is_what_torch_reports() -> None:
    import torch

    found = installed_torch()
    assert found is not None
    named = torch.version.cuda
    assert found.cuda == (None if named is None else tuple(map(int, named.split(".")[:2])))
    assert found.version.split("+")[0] == torch.__version__.split("+")[0]


@pytest.mark.parametrize(
    ("build", "level", "word"),
    [
        (None, "red", "PyTorch"),
        (TorchBuild("2.13.0+cpu", None), "red", "2.13.0+cpu"),
        (TorchBuild("2.11.0", None, "hip"), "red", "AMD"),
        (TorchBuild("2.6.0", (12, 4)), "red", "12.8"),
        (TorchBuild("2.9.0", (12, 6)), "red", "12.8"),
        (TorchBuild("2.9.0", (12, 8)), "green", "12.8"),
        (TorchBuild("2.11.0", (13, 0)), "green", "13.0"),
    ],
)
def test_torch_beside_an_rtx_5060(build: TorchBuild | None, level: str, word: str) -> None:
    check = check_torch(build, (RTX_5060,))
    assert check.level == level
    assert word in check.says
    assert (level == "green") == (check.fix == "")
    assert level == "green" or "cu130" in check.fix


def test_a_cpu_build_of_torch_is_right_without_a_gpu() -> None:
    assert check_torch(TorchBuild("2.13.0+cpu", None), ()).level == "green"


def test_an_old_card_and_an_old_driver() -> None:
    gtx_1080 = replace(RTX_5060, name="GTX 1080", compute_capability=(6, 1))
    dropped = check_torch(TorchBuild("2.11.0", (13, 0)), (gtx_1080,))
    assert dropped.level == "red"
    assert "cu126" in dropped.fix
    old_driver = replace(RTX_5060, cuda="12.8")
    check = check_torch(TorchBuild("2.11.0", (13, 0)), (old_driver,))
    assert check.level == "red"
    assert "12.8" in check.says
    # A driver of the same major version is new enough.
    assert check_torch(TorchBuild("2.9.0", (12, 8)), (replace(RTX_5060, cuda="12.2"),)).level == "green"
    assert not driver_is_too_old((12, 8), (12, 2))
    # A driver whose CUDA version is unknown passes.
    assert check_torch(TorchBuild("2.9.0", (12, 8)), (replace(RTX_5060, cuda=""),)).level == "green"


@pytest.mark.parametrize(
    "capability", [(5, 0), (6, 1), (7, 0), (7, 5), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
)
def test_the_best_build_supports_the_card(capability: tuple[int, int]) -> None:
    name = best_wheel_name(capability)
    (build,) = [each for each in TORCH_WHEELS if each.name == name]
    assert card_problem(build.cuda, capability) == ""


def test_gpu_memory() -> None:
    check = check_gpu_memory(RTX_5060)
    assert check.level == "green"
    assert "951 MiB" in check.says
    full = check_gpu_memory(replace(RTX_5060, free=GIB, desktop=RTX_5060.total - GIB))
    assert full.level == "yellow"
    assert "vlfit machine" in full.fix
    small = check_gpu_memory(replace(RTX_5060, total=2 * GIB, free=2 * GIB, desktop=0))
    assert (small.level, small.fix.count("vlfit plan")) == ("yellow", 1)
    assert "2.00 GiB" in small.says


def test_ram() -> None:
    assert check_ram(replace(HOST, ram_available=8 * GIB)).level == "green"
    short = check_ram(replace(HOST, ram_available=GIB, wsl2=True))
    assert short.level == "yellow"
    assert ".wslconfig" in short.fix
    assert ".wslconfig" not in check_ram(replace(HOST, ram_available=GIB, wsl2=False)).fix
    assert check_memory_limit(GIB).level == "yellow"
    assert check_memory_limit(16 * GIB).level == "green"


def test_the_cache_folder_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert hub_cache_folder({}) == Path("/home/me/.cache/huggingface/hub")
    assert hub_cache_folder({"HF_HOME": "/data/hub"}) == Path("/data/hub/hub")
    assert hub_cache_folder({"HF_HOME": "/data/hub", "HF_HUB_CACHE": "/fast"}) == Path("/fast")
    assert hub_cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/huggingface/hub")


def test_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_cache(tmp_path / "not" / "yet" / "there").level == "green"
    file = tmp_path / "file"
    file.touch()
    assert check_cache(file / "hub").level == "red"
    monkeypatch.setattr("os.access", lambda *_: False)
    assert check_cache(tmp_path).level == "red"


@pytest.mark.parametrize(("free", "level"), [(GIB, "yellow"), (6 * GIB, "yellow"), (100 * GIB, "green")])
def test_disk(free: int, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": free})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    assert check_disk(tmp_path / "hub").level == level


def test_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check = check_port(port)
        assert check.level == "yellow"
        assert f"--port {port % 65535 + 1}" in check.fix
    assert check_port(port).level == "green"
    assert check_port(0).level == "green"


def test_worst() -> None:
    green, yellow, red = (Check("x", level, "") for level in ("green", "yellow", "red"))
    assert worst_level([]) == "green"
    assert worst_level([green, yellow]) == "yellow"
    assert worst_level([yellow, red, green]) == "red"


def test_torch_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # an import would raise
    assert {check.id for check in checks.check_all(0)} >= {"python", "driver", "torch", "ram", "disk", "port"}
