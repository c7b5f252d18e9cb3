"""What kernels are launched with besides their sizes: whether they overlap, and what they count in."""

import importlib.util
import logging
import os
import shutil
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlfit.errors import DeviceError
from vlfit.units import format_seconds

MOST_TILES = 16384  # of a product that is shared out: those are cut into less than ``BUSY`` tiles


def power_of_two(size: int) -> int:
    """The smallest that is not below ``size``."""
    return 1 << (size - 1).bit_length()


@cache
def overlapping(device: torch.device) -> dict[str, Any]:
    """Arguments of every kernel of a decode step: whether it is made ready while the one before it runs.

    Programmatic dependent launch, which cards have from compute capability 9.0 on.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"overlap": True, "launch_pdl": True}
    return {"overlap": False}


@cache
def arrivals(device: torch.device) -> Tensor:
    """How many programs of each tile have finished, of a product that several share.

    [MOST_TILES] int32: zeros between any two kernels of a device's stream.
    """
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


# Says when kernels are compiled, which takes a first start on a card half a minute, and counts them.
#
# Triton compiles a kernel for each kind of launch and keeps it in its cache; later starts find it there.
# Knows Triton's listener. Does not know the kernels.


logger = logging.getLogger(__name__)


@dataclass
class Compiled:
    """``kernels`` that were in no cache, and the ``seconds`` that the compiler took."""

    kernels: int = 0
    seconds: float = 0.0

    def note(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        """What Triton tells of each kernel that it was asked for the first time."""
        if cache_hit:
            return
        if not self.kernels:
            logger.info("compiling kernels for this card, once; they are kept in Triton's cache")
        self.kernels += 1
        self.seconds += times.total / 1e6  # microseconds

    def tell(self) -> None:
        """Say in the log what there was to compile, if anything."""
        if self.kernels:
            logger.info("%d kernels compiled in %s", self.kernels, format_seconds(self.seconds))


def listen(device: str) -> Compiled:
    """Count what this process compiles from now on; nothing where ``device`` (as in ``EngineOptions``) turns
    out to be a CPU, for which Triton is not imported.
    """
    compiled = Compiled()
    if device == "cpu" or not torch.cuda.is_available():
        return compiled
    with suppress(ImportError, AttributeError):  # a Triton without a listener, or none
        from triton import knobs

        knobs.compilation.listener = compiled.note
    return compiled


# Whether this computer can build the kernels: Triton, a C compiler and Python's headers.
#
# Triton compiles kernels itself, but the few lines of C that launch them need what Python's own extensions
# need. It looks for that at the first launch, in somebody's request; this asks before anything loads.


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
