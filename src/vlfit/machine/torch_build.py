"""The installed build of PyTorch, by its files without importing it, and the drivers that it runs with."""

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """A build of PyTorch.

    ``cuda``: the CUDA version that it is built for; None: it is not for CUDA. ``other_platform``: ``hip``
    (AMD) or ``xpu`` (Intel); "" for CUDA and for the CPU alone.
    """

    version: str
    cuda: tuple[int, int] | None
    other_platform: str = ""


def installed_torch() -> TorchBuild | None:
    """The installed build of PyTorch, read from its files without importing it; None: not installed."""
    try:
        installed = distribution("torch")
    except PackageNotFoundError:
        return None
    try:
        text = Path(str(installed.locate_file("torch/version.py"))).read_text("utf-8")
    except OSError:
        text = ""
    return parse_torch_version(installed.version, text)


def parse_torch_version(version: str, text: str) -> TorchBuild:
    """The build that ``text``, the contents of ``torch/version.py``, describes.

    ``version``: of the installed package; only copied into the result.
    """
    values = dict(re.findall(r"^(cuda|hip|xpu)\b[^=\n]*= *'([^'\n]+)'", text, re.MULTILINE))
    if cuda := parse_cuda_version(values.get("cuda", "")):
        return TorchBuild(version, cuda)
    return TorchBuild(version, None, next((name for name in ("hip", "xpu") if name in values), ""))


def parse_cuda_version(text: str) -> tuple[int, int] | None:
    """``(12, 9)`` from ``"12.9"`` or ``"12.9.1"``; None if ``text`` does not start with a version."""
    version = re.match(r"(\d+)\.(\d+)", text)
    return (int(version.group(1)), int(version.group(2))) if version else None


def driver_is_too_old(build_cuda: tuple[int, int], driver_cuda: tuple[int, int]) -> bool:
    """Whether a driver that supports CUDA ``driver_cuda`` is too old for a program built for ``build_cuda``.

    Any driver of the same major version is new enough (NVIDIA's minor version compatibility).
    """
    return driver_cuda[0] < build_cuda[0]
