"""What a measurement is made with, beside the GPU: the processor's name, versions of packages."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def processor() -> str:
    """The name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def versions_of(*packages: str) -> dict[str, str]:
    """Versions of Python and of the installed ones among ``packages``."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
