"""Whether this computer can build the kernels: Triton, a C compiler and Python's headers.

Triton compiles kernels itself, but the few lines of C that launch them need what Python's own extensions
need. It looks for that at the first launch, in somebody's request; this asks before anything loads.
"""

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

from vlfit.errors import DeviceError


def check_toolchain() -> None:
    """Raises ``DeviceError`` with what is missing and how to get it."""
    if importlib.util.find_spec("triton") is None:
        raise DeviceError(
            "Triton is not installed, and vlfit computes with it on a GPU",
            "`pip install triton`; a CUDA build of torch for Linux brings it along. Or use --device cpu",
        )
    # What Triton takes (triton/runtime/build.py): CC, else gcc, else clang.
    named = os.environ.get("CC")
    if not any(shutil.which(name) for name in (("gcc", "clang") if named is None else (named,))):
        said = "" if named is None else f" (the environment's CC is {named!r})"
        raise DeviceError(
            f"there is no C compiler{said}, and Triton needs one to launch kernels on a GPU",
            "`sudo apt install gcc` (or your system's like), or set CC to a compiler. Or use --device cpu",
        )
    scheme = sysconfig.get_default_scheme()
    paths = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)
    headers = Path(paths["include"])
    if not (headers / "Python.h").exists():
        raise DeviceError(
            f"Python's headers are missing ({headers}/Python.h), and Triton needs them on a GPU",
            "`sudo apt install python3-dev` (for this very version of Python). Or use --device cpu",
        )
