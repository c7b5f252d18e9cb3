"""The computer around the GPU: how much RAM there is and may be used, and whether this is WSL2.

Knows: Linux' ``/proc`` and control groups. Does not know: GPUs (``gpu.py``), or who uses the RAM.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from vlfit.units import KIB

# Files of a control group: its limit, what it uses, and the line of memory.stat with reclaimable pages.
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@dataclass(frozen=True, slots=True)
class Host:
    """``ram_total`` and ``ram_available`` in bytes; both respect the limit of a container."""

    ram_total: int
    ram_available: int
    wsl2: bool


def read_host(proc: Path = Path("/proc"), control_groups: Path = Path("/sys/fs/cgroup")) -> Host:
    """What this computer has now. Reads two or three small files; never fails."""
    meminfo = _meminfo(proc)
    total = meminfo.get("MemTotal") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = meminfo.get("MemAvailable", total)
    for limit, used in _limits(proc, control_groups):
        total = min(total, limit)
        available = min(available, max(limit - used, 0))
    return Host(total, available, _is_wsl2(proc))


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
    for line in _read(proc / "self" / "cgroup").splitlines():
        # "0::/path" is version 2; "4:memory:/path" is the memory controller of version 1.
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base, files = root, _VERSION_2
        elif "memory" in controllers.split(","):
            base, files = root / "memory", _VERSION_1
        else:
            continue
        innermost = base / path.strip("/")
        for group in (innermost, *innermost.parents):
            limits += _limit(group, files)
            if group == base:
                break
    return limits


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
