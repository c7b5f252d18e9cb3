"""The computer around the GPU: how much RAM there is and may be used, WSL2 or not, container or not.

Read from Linux' ``/proc`` and control groups.
"""

import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from vlfit.machine.model import Host
from vlfit.units import KIB

# Which display server draws the desktop of this computer, if any.
# Under WSL2 Windows draws the desktop, and none of this is asked.


# Programs by the name that the kernel keeps of them (15 letters at most).
_WAYLAND = frozenset(
    (
        "Xwayland",
        "kwin_wayland",
        "sway",
        "weston",
        "Hyprland",
        "labwc",
        "wayfire",
        "river",
        "niri",
        "cosmic-comp",
    )
)
_COMPOSITORS = frozenset(("gnome-shell", "mutter", "cinnamon"))
_X11 = frozenset(("Xorg", "X", "Xorg.bin"))


def read_display(proc: Path, environment: Mapping[str, str]) -> str:
    """ "wayland", "x11" or "none". Running programs tell it also to a shell that came in over the network."""
    names = _running(proc)
    if names & _COMPOSITORS and not names & _X11:
        return "wayland"  # on X11 the same programs run beside an X server
    if names & _WAYLAND or environment.get("WAYLAND_DISPLAY"):
        return "wayland"
    if names & _X11:
        return "x11"
    # ":0" is a display of this computer; "localhost:10.0" is the screen of whoever logged in with ssh -X.
    return "x11" if environment.get("DISPLAY", "").startswith(":") else "none"


def _running(proc: Path) -> set[str]:
    names = set()
    for folder in proc.glob("[0-9]*"):
        try:
            names.add((folder / "comm").read_text(encoding="utf-8", errors="replace").strip())
        except OSError:
            continue  # it ended while we looked
    return names


# Files of a control group: its limit, what it uses, and the line of memory.stat with reclaimable pages.
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


# Container runtimes leave their names in the control group of the first process (version 1), or these files.
_RUNTIMES = re.compile(r"docker|kubepods|containerd|libpod|/lxc/")
_CONTAINER_FILES = (".dockerenv", "run/.containerenv")


def read_host(
    proc: Path = Path("/proc"),
    control_groups: Path = Path("/sys/fs/cgroup"),
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
) -> Host:
    """What this computer has now. Reads small files only; never fails."""
    meminfo = _meminfo(proc)
    ram = meminfo.get("MemTotal") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = meminfo.get("MemAvailable", ram)
    tightest = ram
    for limit, used in _limits(proc, control_groups):
        tightest = min(tightest, limit)
        available = min(available, max(limit - used, 0))
    wsl2 = _is_wsl2(proc)
    return Host(
        ram_total=tightest,
        ram_available=min(available, tightest),
        swap_total=meminfo.get("SwapTotal", 0),
        memory_limit=tightest if tightest < ram else None,
        wsl2=wsl2,
        container=_is_container(proc, root, environment),
        display="windows" if wsl2 else read_display(proc, environment),
        cores=own_cores(proc, control_groups),
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
    )


def own_cores(proc: Path = Path("/proc"), control_groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may keep busy: ``taskset`` can leave it fewer than there are, and a container a
    share of their time, which counts as so many whole ones.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group, is_version_2 in _groups(proc, control_groups, "cpu"):
        cores = min(cores, _share_of_cores(group, is_version_2) or cores)
    return cores


def whole_cores(processors: Path = Path("/sys/devices/system/cpu")) -> int:
    """How many of the processors that this process may run on do not share one core's units with another of
    them: a core that runs two threads at once shows as two processors.
    """
    ours = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    told = (_read(processors / f"cpu{number}" / "topology" / "thread_siblings_list") for number in ours)
    return len({siblings.strip() or number for siblings, number in zip(told, ours, strict=True)})


def _share_of_cores(group: Path, is_version_2: bool) -> int | None:
    """How many cores a group may use, rounded up; None when it has no limit or is not visible."""
    if is_version_2:
        numbers = _read(group / "cpu.max").split()  # "200000 100000", or "max 100000"
    else:
        numbers = [
            _read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
        ]  # quota -1: none
    if len(numbers) != 2 or not all(each.isdigit() and int(each) for each in numbers):
        return None
    quota, period = map(int, numbers)
    return -(-quota // period)


def _is_container(proc: Path, root: Path, environment: Mapping[str, str]) -> bool:
    if any((root / name).exists() for name in _CONTAINER_FILES):
        return True
    # podman, LXC and systemd-nspawn set the first, Kubernetes the second.
    if environment.get("container") or environment.get("KUBERNETES_SERVICE_HOST"):
        return True
    return _RUNTIMES.search(_read(proc / "1" / "cgroup")) is not None


def _meminfo(proc: Path) -> dict[str, int]:
    """``/proc/meminfo`` in bytes; empty where there is none (macOS)."""
    values: dict[str, int] = {}
    for line in _read(proc / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            values[name] = int(words[0]) * KIB
    return values


def _limits(proc: Path, root: Path) -> list[tuple[int, int]]:
    """Limit and use in bytes of each control group that this process is in, from inner to outermost."""
    limits: list[tuple[int, int]] = []
    for group, is_version_2 in _groups(proc, root, "memory"):
        limits += _limit(group, _VERSION_2 if is_version_2 else _VERSION_1)
    return limits


def _groups(proc: Path, root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Folders of the control groups that this process is in, from inner to outermost, and whether they are of
    version 2.
    """
    for line in _read(proc / "self" / "cgroup").splitlines():
        # "0::/path" is version 2; "4:memory:/path" is the memory controller of version 1.
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        innermost = base / path.strip("/")
        for group in (innermost, *innermost.parents):
            yield group, not controllers
            if group == base:
                break


def _limit(group: Path, files: tuple[str, str, str]) -> list[tuple[int, int]]:
    """Limit and use of one group; empty when it has no limit (``max``) or is not visible in a container."""
    limit, used = _read(group / files[0]).strip(), _read(group / files[1]).strip()
    if not limit.isdigit() or not used.isdigit():
        return []
    # Cached file pages count as used, but the kernel gives them back when asked.
    return [(int(limit), max(int(used) - _stat(group / "memory.stat", files[2]), 0))]


def _stat(path: Path, name: str) -> int:
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return 0


def _is_wsl2(proc: Path) -> bool:
    """WSL1 has no kernel of its own and no GPU; WSL2's release ends in ``-microsoft-standard-WSL2``."""
    release = _read(proc / "sys" / "kernel" / "osrelease").lower()
    return "microsoft" in release and "wsl2" in release


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
