"""RAM, cores, display, WSL2 and containers, from ``/proc`` and cgroup trees of several computers."""

import os
from pathlib import Path

import pytest

from vlfit.machine.host import physical_cores
from vlfit.machine.host import read_host as read
from vlfit.machine.model import Host
from vlfit.units import GIB, KIB, MIB

MEMINFO = (
    "MemTotal:       16384000 kB\nMemFree:          500000 kB\nMemAvailable:    8192000 kB\nHugePages: 0\n"
    "SwapTotal:       4194304 kB\n"
)
LINUX = "6.8.0-49-generic\n"
WSL2 = "5.15.167.4-microsoft-standard-WSL2\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    write(folder / "meminfo", MEMINFO)
    write(folder / "sys" / "kernel" / "osrelease", LINUX)
    write(folder / "self" / "cgroup", "0::/user.slice/shell\n")
    return folder


def read_host(proc: Path, control_groups: Path, **environment: str) -> Host:
    """Read with an otherwise empty file system."""
    return read(proc, control_groups, proc.parent / "root", environment)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_ram(proc: Path, tmp_path: Path) -> None:
    host = read_host(proc, tmp_path / "none")
    assert (host.ram_total, host.ram_available, host.wsl2) == (16384000 * KIB, 8192000 * KIB, False)


@pytest.mark.parametrize(
    ("release", "wsl2"),
    [(WSL2, True), (LINUX, False), ("4.4.0-19041-Microsoft\n", False), ("", False)],
)
def test_wsl2(proc: Path, tmp_path: Path, release: str, wsl2: bool) -> None:
    write(proc / "sys" / "kernel" / "osrelease", release)
    assert read_host(proc, tmp_path / "none").wsl2 is wsl2


def test_limit_of_a_container(proc: Path, tmp_path: Path) -> None:
    """The limit is that of an outer cgroup; reclaimable file pages do not count as used."""
    groups = tmp_path / "cgroup"
    write(groups / "user.slice" / "shell" / "memory.max", "max\n")
    write(groups / "user.slice" / "shell" / "memory.current", "1\n")
    write(groups / "user.slice" / "memory.max", f"{4 * GIB}\n")
    write(groups / "user.slice" / "memory.current", f"{3 * GIB}\n")
    write(groups / "user.slice" / "memory.stat", f"anon 5\ninactive_file {2 * GIB}\n")
    host = read_host(proc, groups)
    assert (host.ram_total, host.ram_available, host.memory_limit) == (4 * GIB, 3 * GIB, 4 * GIB)


def test_limit_of_an_older_container(proc: Path, tmp_path: Path) -> None:
    """In a cgroup of version 1 the process sees the root, not its own path."""
    write(proc / "self" / "cgroup", "12:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n")
    groups = tmp_path / "cgroup"
    write(groups / "memory" / "memory.limit_in_bytes", f"{2 * GIB}\n")
    write(groups / "memory" / "memory.usage_in_bytes", f"{512 * MIB}\n")
    host = read_host(proc, groups)
    assert (host.ram_total, host.ram_available) == (2 * GIB, 2 * GIB - 512 * MIB)


def test_limit_above_the_ram_is_no_limit(proc: Path, tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    write(groups / "memory.max", f"{2**63 - 4096}\n")
    write(groups / "memory.current", "0\n")
    host = read_host(proc, groups)
    assert (host.ram_available, host.memory_limit) == (8192000 * KIB, None)


def test_a_cgroup_over_its_limit_has_nothing_available(proc: Path, tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    write(groups / "memory.max", f"{GIB}\n")
    write(groups / "memory.current", f"{2 * GIB}\n")
    assert read_host(proc, groups).ram_available == 0


def test_computer_without_proc(tmp_path: Path) -> None:
    host = read_host(tmp_path / "none", tmp_path / "none")
    assert host.ram_total == host.ram_available == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        ("0::/box/shell\n", {"box/cpu.max": "150000 100000\n", "box/shell/cpu.max": "max 100000\n"}, 2),
        ("0::/box\n", {"box/cpu.max": "50000 100000\n"}, 1),
        ("0::/box\n", {"box/cpu.max": "max 100000\n"}, 8),
        ("0::/box\n", {"box/cpu.max": "9900000 100000\n"}, 8),
        ("0::/box\n", {"box/cpu.max": "gibberish\n"}, 8),
        (
            "2:cpu,cpuacct:/box\n",
            {"cpu/box/cpu.cfs_quota_us": "300000\n", "cpu/box/cpu.cfs_period_us": "100000\n"},
            3,
        ),
        (
            "2:cpu,cpuacct:/box\n",
            {"cpu/box/cpu.cfs_quota_us": "-1\n", "cpu/box/cpu.cfs_period_us": "100000\n"},
            8,
        ),
        ("0::/box\n", {}, 8),
    ],
)
def test_a_cpu_quota_limits_the_cores(
    proc: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cgroup: str,
    files: dict[str, str],
    cores: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    write(proc / "self" / "cgroup", cgroup)
    for name, text in files.items():
        write(tmp_path / "groups" / name, text)
    assert read_host(proc, tmp_path / "groups").cores == cores


@pytest.mark.parametrize(
    ("ours", "siblings", "cores"),
    [
        ({0, 1, 2, 3}, {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, 2),
        ({0, 1}, {0: "0,2", 1: "1,3"}, 2),  # one thread of each of two cores
        ({0, 2}, {0: "0,2", 2: "0,2"}, 1),  # both threads of one
        ({0, 1, 2}, {0: "0", 1: "1", 2: "2"}, 3),
        ({0, 1, 2}, {}, 3),  # no topology
    ],
)
def test_two_threads_of_a_core_are_one_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: set[int], siblings: dict[int, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: ours)
    for number, text in siblings.items():
        write(tmp_path / f"cpu{number}" / "topology" / "thread_siblings_list", f"{text}\n")
    assert physical_cores(tmp_path) == cores


def test_swap_cores_and_system(proc: Path, tmp_path: Path) -> None:
    host = read_host(proc, tmp_path / "none")
    assert host.swap_total == 4 * GIB
    assert host.memory_limit is None
    assert 1 <= host.cores <= (os.cpu_count() or 1)
    assert host.platform.split()[0] in ("Linux", "Darwin")


@pytest.mark.parametrize(
    ("file", "text", "environment"),
    [
        ("root/.dockerenv", "", {}),
        ("root/run/.containerenv", "", {}),
        ("proc/1/cgroup", "9:memory:/docker/0a1b\n", {}),
        ("proc/1/cgroup", "9:memory:/kubepods.slice/pod1\n", {}),
        ("unrelated", "", {"container": "podman"}),
        ("unrelated", "", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}),
    ],
)
def test_container(proc: Path, tmp_path: Path, file: str, text: str, environment: dict[str, str]) -> None:
    write(proc / "1" / "cgroup", "0::/init.scope\n")
    assert read_host(proc, tmp_path / "none").container is False
    write(tmp_path / file, text)
    assert read_host(proc, tmp_path / "none", **environment).container is True


@pytest.mark.parametrize(
    ("programs", "environment", "display"),
    [
        ([], {}, "none"),
        (["bash", "sshd"], {}, "none"),
        (["Xorg", "gnome-shell"], {}, "x11"),
        (["gnome-shell"], {}, "wayland"),
        (["gnome-shell", "Xwayland"], {}, "wayland"),
        (["kwin_wayland"], {"DISPLAY": ":0"}, "wayland"),
        ([], {"WAYLAND_DISPLAY": "wayland-0", "DISPLAY": ":0"}, "wayland"),
        ([], {"DISPLAY": ":1"}, "x11"),
        (["sshd"], {"DISPLAY": "localhost:10.0"}, "none"),  # ssh -X: the screen is elsewhere
        (["Xvfb"], {}, "none"),  # draws into RAM
    ],
)
def test_display(
    proc: Path, tmp_path: Path, programs: list[str], environment: dict[str, str], display: str
) -> None:
    for pid, program in enumerate(programs, 100):
        write(proc / str(pid) / "comm", f"{program}\n")
    (proc / "999").mkdir()  # has ended meanwhile
    assert read_host(proc, tmp_path / "none", **environment).display == display


def test_display_under_wsl2(proc: Path, tmp_path: Path) -> None:
    write(proc / "sys" / "kernel" / "osrelease", WSL2)
    write(proc / "400" / "comm", "Xwayland\n")
    assert read_host(proc, tmp_path / "none", WAYLAND_DISPLAY="wayland-0").display == "windows"
