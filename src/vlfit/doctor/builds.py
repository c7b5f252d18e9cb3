"""Builds of PyTorch: which cards each has code for, which driver it needs, how to install it.

Knows: the wheels of PyTorch 2.9 to 2.13. Does not know what is installed (``checks.py``).
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Build:
    """The wheels for one CUDA: the compute capabilities they reach from and to."""

    name: str
    cuda: tuple[int, int]
    oldest: tuple[int, int]
    newest: tuple[int, int]


# TORCH_CUDA_ARCH_LIST of PyTorch 2.9's own wheels: cu126 5.0 to 9.0, cu128 7.0 to 12.0, cu130 7.5 to
# 12.0+PTX.
BUILDS = (
    Build("cu126", (12, 6), (5, 0), (9, 0)),
    Build("cu128", (12, 8), (7, 0), (12, 0)),
    Build("cu130", (13, 0), (7, 5), (12, 1)),
)
_NEWEST_WITH_PTX = (99, 0)  # code in PTX is compiled for newer cards when it is loaded
_OLDEST_CUDA_FOR = {(10, 0): (12, 8), (12, 0): (12, 8), (9, 0): (11, 8), (8, 9): (11, 8)}


def wanted_build(capability: tuple[int, int] | None, driver_cuda: tuple[int, int] | None = None) -> str:
    """The build with code for a card of ``capability`` that a driver for ``driver_cuda`` runs; "" if none is.

    Of several the newest that needs nothing of the driver, then the newest within its major version. For an
    unknown driver the build that most of them run; for an unknown card the one that reaches most of them.
    """
    fitting = [build for build in BUILDS if capability is None or _reaches(build, capability)]
    if driver_cuda is None:
        oldest = min((build.cuda[0] for build in fitting), default=0)
        return next((build.name for build in reversed(fitting) if build.cuda[0] == oldest), "")
    runnable = [build for build in fitting if not driver_is_too_old(build.cuda, driver_cuda)]
    best = max(runnable, key=lambda build: (build.cuda <= driver_cuda, build.cuda), default=None)
    return "" if best is None else best.name


def _reaches(build: Build, capability: tuple[int, int]) -> bool:
    newest = _NEWEST_WITH_PTX if build is BUILDS[-1] else build.newest
    return build.oldest <= capability <= newest


def driver_wanted(capability: tuple[int, int] | None) -> str:
    """The CUDA that a driver has to run before any build has code for this card: ``"12.8"``."""
    fitting = [build.cuda for build in BUILDS if capability is None or _reaches(build, capability)]
    return ".".join(map(str, min(fitting, default=BUILDS[-1].cuda)))


def parse_cuda(text: str) -> tuple[int, int] | None:
    """``"12.9"`` as two numbers; None for a driver that does not tell."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found.group(1)), int(found.group(2))) if found else None


def install_command(build: str) -> str:
    """How to replace the installed PyTorch by ``build``."""
    return f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{build}"


def lacks_code_for(cuda: tuple[int, int], capability: tuple[int, int]) -> str:
    """Why a PyTorch built for ``cuda`` cannot run on a card of ``capability``; "" if it can."""
    card = f"{capability[0]}.{capability[1]}"
    build = max((build for build in BUILDS if build.cuda <= cuda), key=lambda build: build.cuda, default=None)
    if build is not None and capability < build.oldest:
        return (
            f"its wheels have code for cards from {build.oldest[0]}.{build.oldest[1]} on; this one is {card}"
        )
    needed = max((need for since, need in _OLDEST_CUDA_FOR.items() if capability >= since), default=(0, 0))
    if cuda < needed:
        return f"a card of compute capability {card} needs CUDA {needed[0]}.{needed[1]} or newer"
    return ""


def driver_is_too_old(cuda: tuple[int, int], driver_cuda: tuple[int, int]) -> bool:
    """Whether a driver that runs up to ``driver_cuda`` is too old for a program built for ``cuda``.

    Within one major version any driver of that version will do (NVIDIA's minor version compatibility).
    """
    return driver_cuda[0] < cuda[0]
