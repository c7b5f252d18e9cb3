"""What ``vlfit plan --calibrate`` measured on this machine: a JSON file for each GPU, driver and torch.

Knows the fields, their plausible bounds and where the files lie. Does not know how anything is measured
(``engine/calibrate.py``) or what the plan makes of it (``calibration.py``). Numbers that come from a broken
file are never used: who asks is told why.
"""

import json
import math
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vlfit.errors import UsageError
from vlfit.plan.kept import kept_file, write_whole
from vlfit.units import GIB, KIB

VERSION = 1
_MOST = 2**20  # bytes of a file; real ones have some hundred
# What no card comes near, below or above: a file with such numbers was not written by vlfit.
_BOUNDS = {
    "context": (16 * KIB**2, 8 * GIB),
    "workspace": (0, GIB),
    "vision_slack": (1.0, 4.0),
    "text_slack": (1.0, 4.0),
    "copy_bandwidth": (1e9, 1e14),
    "link_bandwidth": (1e7, 1e13),
    "launch": (1e-7, 1.0),
    "multiplications": (1e9, 1e17),
}
_MAY_LACK = {"link_bandwidth"}  # files of before it was measured are as good as ever for the rest
_AGAIN = "measure again: vlfit plan --calibrate"


@dataclass(frozen=True, slots=True)
class Measured:
    """One machine's own numbers. ``gpu``, ``driver`` and ``torch`` are what they hold for; ``date`` is ISO.

    ``context``: bytes that CUDA and its libraries hold beside torch's pool. ``workspace``: bytes in that pool
    for matrix products. ``vision_slack`` and ``text_slack``: by how much more than its live tensors the pool
    grew, in the tower and in a pass of the text model. ``copy_bandwidth``: bytes per second, read and
    written together. ``launch``: seconds to launch one text layer. ``multiplications``: floating-point
    operations per second of a large bf16 matrix product. ``link_bandwidth``: bytes per second of a copy from
    locked RAM to the card; None in files of before it was measured.
    """

    gpu: str
    driver: str
    torch: str
    date: str
    context: int
    workspace: int
    vision_slack: float
    text_slack: float
    copy_bandwidth: float
    launch: float
    multiplications: float
    link_bandwidth: float | None = None


def torch_version() -> str:
    """The version of the installed torch, "" if there is none. Does not import it."""
    return _version_of_torch()


@lru_cache(maxsize=1)
def _version_of_torch() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def file_of(gpu: str, driver: str, torch: str) -> Path:
    """Where the numbers for this GPU, driver and torch are kept: ``$XDG_CACHE_HOME/vlfit/calibration``."""
    return kept_file("calibration", gpu, driver, torch)


def save(measured: Measured) -> Path:
    """Keep ``measured``, whole or not at all; the file. Raises ``UsageError`` if it cannot be written."""
    path = file_of(measured.gpu, measured.driver, measured.torch)
    words = json.dumps({"version": VERSION, **asdict(measured)}, indent=2) + "\n"
    write_whole(path, words, "calibration")
    return path


def load(gpu: str, driver: str, torch: str) -> Measured | None:
    """What was kept for this GPU, driver and torch, None if nothing was.

    Raises ``UsageError`` for a file that cannot be read or holds what vlfit does not write.
    """
    path = file_of(gpu, driver, torch)
    try:
        with path.open("rb") as file:
            data = file.read(_MOST + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"cannot read the calibration {path}: {error.strerror}", _AGAIN) from None
    try:
        facts: Any = json.loads(data) if len(data) <= _MOST else None
    except (ValueError, RecursionError):
        facts = None
    problem = _problem(facts, gpu, driver, torch)
    if problem:
        raise UsageError(f"the calibration {path} is broken: {problem}", _AGAIN)
    return Measured(**{field.name: facts[field.name] for field in fields(Measured) if field.name in facts})


def _problem(facts: Any, gpu: str, driver: str, torch: str) -> str:
    """What is wrong with the contents of a file, "" if nothing is."""
    if not isinstance(facts, dict):
        return "it is no JSON object"
    if facts.get("version") != VERSION:
        return f"version is {facts.get('version')!r}, this vlfit reads {VERSION}"
    for name, wanted in (("gpu", gpu), ("driver", driver), ("torch", torch)):
        if facts.get(name) != wanted:
            return f"{name} is {facts.get(name)!r}, not {wanted!r}"
    if not isinstance(facts.get("date"), str):
        return "it has no date"
    for name, (least, most) in _BOUNDS.items():
        value = facts.get(name)
        if value is None and name in _MAY_LACK:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return f"{name} is {value!r}, no number"
        if not least <= value <= most:
            return f"{name} is {value!r}, which no GPU comes near"
    return ""
