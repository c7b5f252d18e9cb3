"""Whether Triton can build what launches its kernels: a C compiler, and Python's own headers.

The native engine computes with Triton on every GPU, as vLLM does, and Triton compiles some lines of C when it
launches its first kernel. A fresh Ubuntu, under WSL2 most of all, has neither. Knows where Triton looks
(triton/runtime/build.py); a test holds it to what the engine asks for before it loads.
"""

import importlib.util
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from vlfit.doctor.check import Check

INSTALL = "sudo apt install build-essential python3-dev"


def check_compiler(environment: Mapping[str, str]) -> Check:
    """Whether Triton, a C compiler and ``Python.h`` are here. To be asked only where there is a GPU."""
    if importlib.util.find_spec("triton") is None:
        says = "Triton is not installed, and the native engine computes with it on a GPU"
        return Check("compiler", "red", says, "A CUDA build of PyTorch for Linux brings it along.")
    asked = environment.get("CC")
    names = ("clang", "gcc") if asked is None else (asked,)
    path = environment.get("PATH")
    found = next((place for name in names if (place := shutil.which(name, path=path))), None)
    headers = python_headers() / "Python.h"
    missing = [] if found else ["C compiler" if asked is None else f"C compiler {asked!r}, which CC names"]
    missing += [] if headers.exists() else [f"{headers}"]
    if missing:
        says = f"there is no {' and no '.join(missing)}: Triton needs both to launch a kernel on the GPU"
        return Check("compiler", "red", says, _fix(asked if found is None else None))
    return Check("compiler", "green", f"{found} and Python's headers are here, for Triton")


def python_headers() -> Path:
    """Where Triton expects ``Python.h``."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])


def _fix(asked: str | None) -> str:
    if asked is not None:
        return "Unset CC, or let it name a compiler."
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return (
        f"Run `{INSTALL}` (not on Debian or Ubuntu: gcc and Python's headers). A Python {version} that is "
        f"not "
        f"the system's own needs python{version}-dev."
    )
