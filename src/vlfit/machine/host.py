"""The computer around the GPU: RAM, cores, display, WSL2 or container. Read from ``/proc`` and cgroups."""

import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from vlfit.machine.model import Host
from vlfit.units import KIB

# Names as in /proc/PID/comm: 15 letters at most.
_WAYLAND = frozenset(
    (
        *("Xwayland", "kwin_wayland", "sway", "weston", "Hyprland"),
        *("labwc", "wayfire", "river", "niri", "cosmic-comp"),
    )
)
_COMPOSITORS = frozenset(("gnome-shell", "mutter", "cinnamon"))
_X11 = frozenset(("Xorg", "X", "Xorg.bin"))
# Files of a cgroup: limit, usage, and the entry of memory.stat with reclaimable pages.
_CGROUP_V2_FILES = ("memory.max", "memory.current", "inactive_file")
_CGROUP_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
# A container runtime shows in the cgroup of the first process (version 1), or by one of these files.
_CONTAINER_CGROUPS = re.compile(r"docker|kubepods|containerd|libpod|/lxc/")
_CONTAINER_FILES = (".dockerenv", "run/.containerenv")


def read_host(
    proc: Path = Path("/proc"),
    cgroups: Path = Path("/sys/fs/cgroup"),
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
) -> Host:
    """Read RAM, cores, display and kind (WSL2, container) of this computer. Never raises.

    The parameters are for tests: they replace this computer's files and environment variables.
    """
    meminfo = _meminfo(proc)
    ram = meminfo.get("MemTotal") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = meminfo.get("MemAvailable", ram)
    tightest = ram
    for limit, used in _memory_limits(proc, cgroups):
        tightest = min(tightest, limit)
        available = min(available, max(limit - used, 0))
    wsl2 = is_wsl2(proc)
    return Host(
        ram_total=tightest,
        ram_available=min(available, tightest),
        swap_total=meminfo.get("SwapTotal", 0),
        memory_limit=tightest if tightest < ram else None,
        wsl2=wsl2,
        container=_is_container(proc, root, environment),
        display="windows" if wsl2 else read_display(proc, environment),
        cores=usable_cores(proc, cgroups),
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
    )


def read_or_empty(path: Path) -> str:
    """The text of a small file; "" if it is missing or cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _meminfo(proc: Path) -> dict[str, int]:
    """``/proc/meminfo`` in bytes; empty where there is none (macOS)."""
    values: dict[str, int] = {}
    for line in read_or_empty(proc / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            values[name] = int(words[0]) * KIB
    return values


def is_wsl2(proc: Path = Path("/proc")) -> bool:
    """WSL2's kernel release ends in ``-microsoft-standard-WSL2``; WSL1 has no GPU and does not count."""
    release = read_or_empty(proc / "sys" / "kernel" / "osrelease").lower()
    return "microsoft" in release and "wsl2" in release


def _is_container(proc: Path, root: Path, environment: Mapping[str, str]) -> bool:
    if any((root / name).exists() for name in _CONTAINER_FILES):
        return True
    # podman, LXC and systemd-nspawn set the first, Kubernetes the second.
    if environment.get("container") or environment.get("KUBERNETES_SERVICE_HOST"):
        return True
    return _CONTAINER_CGROUPS.search(read_or_empty(proc / "1" / "cgroup")) is not None


def read_display(proc: Path, environment: Mapping[str, str]) -> str:
    """Detect this computer's display server: "wayland", "x11" or "none".

    Looks for running compositors and X servers, as a shell over ssh lacks the desktop's variables, and then
    at ``WAYLAND_DISPLAY`` and ``DISPLAY``. ``proc``: the folder ``/proc``.
    """
    programs = _running_programs(proc)
    if programs & _COMPOSITORS and not programs & _X11:
        return "wayland"  # on X11 the same programs run beside an X server
    if programs & _WAYLAND or environment.get("WAYLAND_DISPLAY"):
        return "wayland"
    if programs & _X11:
        return "x11"
    # ":0" is a display of this computer; "localhost:10.0" is the client's screen under ssh -X.
    return "x11" if environment.get("DISPLAY", "").startswith(":") else "none"


def _running_programs(proc: Path) -> set[str]:
    return {read_or_empty(folder / "comm").strip() for folder in proc.glob("[0-9]*")}


def usable_cores(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Number of logical cores that this process may use, by its affinity (``taskset``) and CPU quotas.

    Quotas of its cgroups, rounded up to whole cores. The parameters are replaced in tests.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group, is_version_2 in _control_groups(proc, cgroups, "cpu"):
        cores = min(cores, _cpu_quota(group, is_version_2) or cores)
    return cores


def physical_cores(processors: Path = Path("/sys/devices/system/cpu")) -> int:
    """Number of physical cores in this process's affinity; hyper-threads of one core count once.

    Ignores cgroup quotas, unlike ``usable_cores``. ``processors``: replaced in tests.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    siblings = (
        read_or_empty(processors / f"cpu{number}" / "topology" / "thread_siblings_list") for number in allowed
    )
    return len({threads.strip() or number for threads, number in zip(siblings, allowed, strict=True)})


def _cpu_quota(group: Path, is_version_2: bool) -> int | None:
    """CPU quota of a cgroup in cores, rounded up; None if it has none or is not visible."""
    if is_version_2:
        numbers = read_or_empty(group / "cpu.max").split()  # "200000 100000", or "max 100000"
    else:  # without a limit the quota is -1
        numbers = [read_or_empty(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(numbers) != 2 or not all(number.isdigit() and int(number) for number in numbers):
        return None
    quota, period = map(int, numbers)
    return -(-quota // period)


def _memory_limits(proc: Path, cgroups: Path) -> list[tuple[int, int]]:
    """Limit and usage in bytes of every cgroup of this process, from inner to outermost."""
    limits: list[tuple[int, int]] = []
    for group, is_version_2 in _control_groups(proc, cgroups, "memory"):
        limits += _memory_limit(group, _CGROUP_V2_FILES if is_version_2 else _CGROUP_V1_FILES)
    return limits


def _memory_limit(group: Path, files: tuple[str, str, str]) -> list[tuple[int, int]]:
    """Limit and usage of one cgroup; empty if it has no limit (``max``) or is not visible."""
    limit, used = read_or_empty(group / files[0]).strip(), read_or_empty(group / files[1]).strip()
    if not limit.isdigit() or not used.isdigit():
        return []
    # The usage includes cached file pages, which the kernel reclaims.
    return [(int(limit), max(int(used) - _stat_value(group / "memory.stat", files[2]), 0))]


def _stat_value(path: Path, name: str) -> int:
    for line in read_or_empty(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return 0


def _control_groups(proc: Path, cgroups: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Folders of this process's cgroups, from inner to outermost, and whether they are of version 2."""
    for line in read_or_empty(proc / "self" / "cgroup").splitlines():
        # "0::/path" is version 2; "4:memory:/path" is the memory controller of version 1.
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        base = cgroups / controller if controllers else cgroups
        innermost = base / path.strip("/")
        for group in (innermost, *innermost.parents):
            yield group, not controllers
            if group == base:
                break
