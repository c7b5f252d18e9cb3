"""Constants of memory and speed, each with its source: built in, or measured by ``vlfit plan --calibrate``.

What was measured on this machine, kept in a JSON file for each GPU, driver and torch, replaces the built-in
numbers. A constant marked ``modelled`` was not measured on the kind of card that it is used for; its source
says so. Nothing built in was measured on an 8 GB card yet. What follows from shapes is not here but in the
backends' ``cost.py``.
"""

import json
import math
import os
import re
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vlfit.atomic_write import write_whole
from vlfit.errors import CannotWrite, UsageError
from vlfit.machine.model import Gpu
from vlfit.units import GIB, KIB, MIB

# --- files of numbers measured on this machine -------------------------------------------------------------


def cache_path(kind: str, *parts: str) -> Path:
    """The path ``$XDG_CACHE_HOME/vlfit/KIND/PART-PART.json``; creates nothing.

    ``~/.cache`` without that variable; raises ``UsageError`` if there is no home folder either. Characters
    other than letters, digits, ``.`` and ``+`` become hyphens.
    """
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The standard ignores a relative path there.
    try:
        base = Path(cache) if cache and Path(cache).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        raise UsageError(
            "there is no folder for what vlfit measures: this user has no home folder",
            hint="Set HOME to a folder that this user may write in.",
        ) from None
    return base / "vlfit" / kind / f"{file_name_of(*parts)}.json"


def file_name_of(*parts: str) -> str:
    """``parts`` joined by hyphens, which characters other than letters, digits, ``.`` and ``+`` become."""
    return "-".join(re.sub(r"[^A-Za-z0-9.+]+", "-", part).strip("-.") or "none" for part in parts)


def write_atomically(path: Path, words: str, what: str, variable: str = "XDG_CACHE_HOME") -> None:
    """Write the text ``words`` to ``path``, whole or not at all; create missing folders.

    Raises ``UsageError`` if that fails. ``what``: a noun for the content; ``variable``: of the environment,
    that moves the folder; both used in the error message.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, words.encode())
    except (OSError, CannotWrite) as error:
        reason = error.strerror if isinstance(error, OSError) else error.message
        raise UsageError(
            f"cannot keep the {what} in {path}: {reason}", f"Set {variable} to a folder that can be written."
        ) from None


VERSION = 1
_MOST = 2**20  # bytes of a file; real ones have some hundred
# Plausible bounds; a file with other numbers was not written by vlfit.
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
_OPTIONAL = {"link_bandwidth"}  # missing in older files
_AGAIN = "Measure again: vlfit plan --calibrate."


@dataclass(frozen=True, slots=True)
class Calibration:
    """Constants measured on one machine, for one ``gpu`` (name), ``driver`` and ``torch`` (versions).

    - ``context``: bytes that CUDA and its libraries hold beside torch's pool.
    - ``workspace``: bytes in that pool for matrix products.
    - ``vision_slack``, ``text_slack``: factors by which torch's pool grows more than the peak of live
      tensors, in the vision tower and the text model.
    - ``copy_bandwidth``: bytes per second of a copy on the card, read and written together.
    - ``launch``: seconds to launch one text layer.
    - ``multiplications``: floating-point operations per second of a large bf16 matrix product.
    - ``link_bandwidth``: bytes per second of a copy from pinned RAM to the card; None in older files.
    - ``date``: when it was measured, in ISO 8601.
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


@lru_cache(maxsize=1)
def torch_version() -> str:
    """The version of the installed torch, "" if there is none. Does not import it."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def calibration_path(gpu: str, driver: str, torch: str) -> Path:
    """The path of the calibration file for a GPU (name), driver and torch (versions); it may not exist."""
    return cache_path("calibration", gpu, driver, torch)


def save(measured: Calibration) -> Path:
    """Write ``measured`` to its file and return the path. Raises ``UsageError`` if it cannot be written."""
    path = calibration_path(measured.gpu, measured.driver, measured.torch)
    words = json.dumps({"version": VERSION, **asdict(measured)}, indent=2) + "\n"
    write_atomically(path, words, "calibration")
    return path


def read_json_record(path: Path, most: int) -> Any:
    """The JSON value in the file ``path``; None if it holds more than ``most`` bytes, or no JSON.

    Raises ``OSError`` if the file cannot be read.
    """
    # Without O_NONBLOCK, opening a FIFO waits for a writer.
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        data = file.read(most + 1)
    try:
        return json.loads(data) if len(data) <= most else None
    except (ValueError, RecursionError):
        return None


def load(gpu: str, driver: str, torch: str) -> Calibration | None:
    """Read the calibration file for a GPU (name), driver and torch (versions); None if there is no file.

    Raises ``UsageError`` for a file that cannot be read or whose contents vlfit cannot have written.
    """
    path = calibration_path(gpu, driver, torch)
    try:
        facts = read_json_record(path, _MOST)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"cannot read the calibration {path}: {error.strerror}", _AGAIN) from None
    problem = _problem(facts, gpu, driver, torch)
    if problem:
        raise UsageError(f"the calibration {path} is broken: {problem}", _AGAIN)
    return Calibration(
        **{field.name: facts[field.name] for field in fields(Calibration) if field.name in facts}
    )


def _problem(facts: Any, gpu: str, driver: str, torch: str) -> str:
    """What is wrong with the contents of a file, "" if nothing is."""
    if not isinstance(facts, dict):
        return "it is not a JSON object"
    if facts.get("version") != VERSION:
        return f"version is {facts.get('version')!r}, this vlfit reads {VERSION}"
    for name, wanted in (("gpu", gpu), ("driver", driver), ("torch", torch)):
        if facts.get(name) != wanted:
            return f"{name} is {facts.get(name)!r}, not {wanted!r}"
    if not isinstance(facts.get("date"), str):
        return "it has no date"
    for name, (least, most) in _BOUNDS.items():
        value = facts.get(name)
        if value is None and name in _OPTIONAL:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return f"{name} is {value!r}, no number"
        if not least <= value <= most:
            return f"{name} is {value!r}, which no GPU comes near"
    return ""


# --- built-in constants ------------------------------------------------------------------------------------


EXACT, MEASURED, MODELLED = "exact", "measured", "modelled"  # how a number is known


@dataclass(frozen=True, slots=True)
class Constant:
    """A ``value`` (bytes, seconds, a rate or a factor, as its definition says) and its ``source`` in words.

    ``how`` the value is known: exact, measured or modelled.
    """

    value: float
    how: str
    source: str

    @property
    def bytes(self) -> int:
        """``value`` rounded to an integer, for constants in bytes."""
        return round(self.value)


H200 = "one H200, driver 580.159.04, torch 2.11.0+cu130, 2026-11-21"

# What the process holds on the device beside torch's own pool: CUDA context, stacks, cuBLAS, loaded kernels.
# It was 491 to 501 MiB; a driver takes 2 MiB and more at a time for a kernel.
_CONTEXT_MEASURED = {
    (9, 0): Constant(
        504 * MIB,
        MEASURED,
        "process less torch's pool, 501 MiB at most in 15 processes of 2B, 4B and 8B on an H100, 2026-11-28",
    ),
}
CONTEXT_ELSEWHERE = Constant(
    614 * MIB,
    MODELLED,
    "upper end of the 0.4-0.6 GiB that vLLM users see on small cards, whose stacks are four times as large "
    "as the engine leaves them; an H200 (132 multiprocessors, with which a context grows) measured 492 MiB",
)
STATE_KERNELS = Constant(
    62 * MIB,
    MEASURED,
    "with kernels of linear attention, 565 MiB with Qwen3.5 9B in FP8 on an H100, 2026-11-28",
)
# torch's workspace after the first matrix product, in its pool.
CUBLAS_WORKSPACE = Constant(
    8.125 * MIB,
    EXACT,
    "2 x 4 MiB and 8 x 16 KiB: torch's own choice (aten/src/ATen/cuda/CublasHandlePool.cpp)",
)
_OF_SERVERS = Constant(32 * MIB, MEASURED, f"torch's own choice for compute capability 9 and 10; {H200}")
_WORKSPACES = {9: _OF_SERVERS, 10: _OF_SERVERS}
# Of 17 processes that ``benchmarks/ledger.py`` ran 1.29 is the least that keeps the plan at or above each.
ALLOCATOR_SLACK = Constant(
    1.29, MEASURED, f"torch's pool grows by more than what lives in it, 2B, 4B and 8B with pictures; {H200}"
)
# Held / planned peak, beside what stays: 126/94, 133/95 and 156/128 MiB in 4B FP8, 4B int4 and 8B int4 under
# the whole load of ``benchmarks/memory.py``, in each of which passes of text took more than the tower.
TEXT_SLACK = Constant(
    1.5, MEASURED, f"torch's pool over the peak of passes, 1.41 at most in three models, and air; {H200}"
)
RESERVE = Constant(
    128 * MIB, MODELLED, "a choice, not a measurement: air for the desktop, whose share moves by the minute"
)

# Share of the card's peak bandwidth that a decode step reaches.
EFFICIENCY_LOW = Constant(0.42, MEASURED, "gpt-fast's README, Llama-2-7B int4 on an A100: 863 of 2039 GB/s")
EFFICIENCY = Constant(
    0.65,
    MEASURED,
    "llama.cpp, 8B in 4 bits: 62-66 % on an RTX 5090, RTX PRO 6000 and RTX 5060 (public threads)",
)
EFFICIENCY_HIGH = Constant(
    0.82, MEASURED, "llama.cpp, Llama-7B in 16 bits on an RTX 4090 (pull request 4766)"
)
# Seconds that the CPU takes to launch one layer's kernels without CUDA graphs.
LAUNCH_LOW = Constant(11.5e-3 / 28, MEASURED, f"vLLM 0.22 eager, Qwen3-VL 2B: 11.5 ms for 28 layers; {H200}")
LAUNCH = Constant(
    20.6e-3 / 36,
    MEASURED,
    f"transformers eager, Qwen3-VL 4B: 20.6 ms for 36 layers (2B: 15.5 for 28); {H200}",
)
# Seconds for each layer of a decode step of the native engine, whose kernels lie in a CUDA graph, where
# reading weights takes less: kernels wait for one another. At best, what vLLM's take beside matrix products.
STEP_OF_GRAPH = Constant(
    2.19e-3 / 36, MEASURED, f"4B in FP8, 787 tokens and up to 64 more: 2.19 ms for 36 layers; {H200}"
)
STEP_OF_GRAPH_LOW = Constant(
    (2.17e-3 - 1.295e-3) / 28, MEASURED, f"vLLM 0.22, 2B in bf16: 2.17 ms less 1.295 ms of products; {H200}"
)
# Share of a PCIe link's nominal bandwidth that copies from pinned RAM to the card reach.
_LINKS = "github.com/ZaidQureshi/bam/issues/54"
LINK_LOW = Constant(12 / 15.75, MEASURED, f"V100, generation 3 with 16 lanes: 12 of 15.75 GB/s ({_LINKS})")
LINK = Constant(25 / 31.5, MEASURED, f"A100, generation 4 with 16 lanes: 25 of 31.5 GB/s ({_LINKS})")
LINK_HIGH = Constant(
    55.63 / 63.0, MEASURED, "NVIDIA's example of nvbandwidth, generation 5 with 16 lanes: 55.63 of 63 GB/s"
)
# Multiplications per byte of bandwidth: how much arithmetic a card can do while it reads. The H200 measured
# 750 TFLOP/s at 4.27 TB/s. No small card was measured: halving it is a guess, and so is the range around it.
FLOPS_PER_BYTE_HIGH = Constant(750e12 / 4.27e12, MEASURED, f"bf16 8192^3 matrix product against copy; {H200}")
FLOPS_PER_BYTE = Constant(85.0, MODELLED, "half of the H200's: a guess for consumer cards, not measured")
FLOPS_PER_BYTE_LOW = Constant(30.0, MODELLED, "a guess: older cards, and products that reach a third")

# What WSL2 keeps from a Linux process of the card's memory, beside what Windows' own programs hold.
WSL2_HIDES = Constant(
    512 * MIB,
    MEASURED,
    "lower end of the 0.5-0.8 GiB that free memory inside WSL2 is below the card's"
    " (github.com/Alex8791-cyber/cognithor/pull/318: 30.12 of 31.84 GiB)",
)


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants of one GPU, from its calibration or built in.

    - ``context``, ``workspace``, ``vision_slack``, ``text_slack``: as in ``Calibration``.
    - ``efficiency...``: shares of the peak memory bandwidth that decoding reaches, at worst, expected, at
      best.
    - ``launch_low``, ``launch``: seconds to launch one text layer, at best and expected.
    - ``flops_per_byte...``: floating-point operations in the time in which the card reads a byte.
    - ``link...``: shares of the PCIe link's nominal bandwidth.
    - ``copy_bandwidth``, ``link_bandwidth``, ``multiplications``: as in ``Calibration``; None: not measured
      on this machine.
    - ``broken``: why the calibration file is not used; "" if it is, or there is none.
    """

    context: Constant
    workspace: Constant
    vision_slack: Constant
    text_slack: Constant
    efficiency_low: Constant
    efficiency: Constant
    efficiency_high: Constant
    launch_low: Constant
    launch: Constant
    flops_per_byte_low: Constant
    flops_per_byte: Constant
    flops_per_byte_high: Constant
    link_low: Constant = LINK_LOW
    link: Constant = LINK
    link_high: Constant = LINK_HIGH
    copy_bandwidth: Constant | None = None
    link_bandwidth: Constant | None = None
    multiplications: Constant | None = None
    broken: str = ""


def with_bandwidth(gpu: Gpu) -> Gpu:
    """``gpu`` with its calibration's copy bandwidth as ``bandwidth``, if the driver reports none.

    ``gpu`` itself if it has a bandwidth or none was measured.
    """
    copied = constants_for(gpu).copy_bandwidth
    if gpu.bandwidth is not None or copied is None:
        return gpu
    return replace(gpu, bandwidth=copied.bytes, bandwidth_how=MEASURED)


def context_with_states(context: Constant) -> Constant:
    """Memory of CUDA itself for a model with linear attention, from ``Constants.context``.

    Where that is an upper end that was not measured, it is enough.
    """
    if context is CONTEXT_ELSEWHERE:
        return context
    value = context.value + STATE_KERNELS.value
    return Constant(value, context.how, f"{context.source}; {STATE_KERNELS.source}")


def with_default_launches(constants: Constants) -> Constants:
    """``constants`` with the built-in launch times, for backends other than the native engine.

    ``vlfit plan --calibrate`` measures launch times of the native engine alone.
    """
    return replace(constants, launch_low=LAUNCH_LOW, launch=LAUNCH)


def constants_for(gpu: Gpu) -> Constants:
    """Constants of ``gpu``, measured with its driver and the installed torch; built-in ones if not measured.

    Built-in ones also for a card named on the command line (``gpu.driver`` is "") and, without an error, if
    the calibration file is broken: ``Constants.broken`` says why then.
    """
    if not gpu.driver:
        return _from_table(gpu)
    path = calibration_path(gpu.name, gpu.driver, torch_version())
    try:
        changed = path.stat().st_mtime_ns
    except OSError:
        return _from_table(gpu)
    return _from_file(gpu.name, gpu.driver, torch_version(), str(path), changed, gpu)


# A search calls this thousands of times; ``changed`` is part of the key, so a changed file is read again.
@lru_cache(maxsize=8)
def _from_file(name: str, driver: str, torch: str, path: str, changed: int, gpu: Gpu) -> Constants:
    try:
        measured = load(name, driver, torch)
    except UsageError as error:
        return replace(_from_table(gpu), broken=error.message)
    return _from_table(gpu) if measured is None else _from_measured(measured, gpu)


def _from_table(gpu: Gpu) -> Constants:
    return Constants(
        context=_CONTEXT_MEASURED.get(gpu.compute_capability, CONTEXT_ELSEWHERE),
        workspace=_WORKSPACES.get(gpu.compute_capability[0], CUBLAS_WORKSPACE),
        vision_slack=ALLOCATOR_SLACK,
        text_slack=TEXT_SLACK,
        efficiency_low=EFFICIENCY_LOW,
        efficiency=EFFICIENCY,
        efficiency_high=EFFICIENCY_HIGH,
        launch_low=LAUNCH_LOW,
        launch=LAUNCH,
        flops_per_byte_low=FLOPS_PER_BYTE_LOW,
        flops_per_byte=FLOPS_PER_BYTE,
        flops_per_byte_high=FLOPS_PER_BYTE_HIGH,
    )


def _from_measured(measured: Calibration, gpu: Gpu) -> Constants:
    """The efficiency is at most a copy's; arithmetic ranges from a third of the measured to all of it."""
    source = f"measured on this machine, {measured.date}"
    bandwidth = gpu.bandwidth or measured.copy_bandwidth
    per_byte = measured.multiplications / bandwidth
    copy = Constant(min(measured.copy_bandwidth / bandwidth, 1.0), MEASURED, f"a copy, {source}")
    launch = Constant(measured.launch, MEASURED, f"one layer of mini in the native engine, {source}")
    return Constants(
        context=Constant(measured.context, MEASURED, source),
        workspace=Constant(measured.workspace, MEASURED, source),
        # Slack depends on shapes more than on the machine, and a few layers may show too little of it.
        vision_slack=max(ALLOCATOR_SLACK, Constant(measured.vision_slack, MEASURED, source), key=_value),
        text_slack=max(TEXT_SLACK, Constant(measured.text_slack, MEASURED, source), key=_value),
        efficiency_low=min(EFFICIENCY_LOW, copy, key=_value),
        efficiency=min(EFFICIENCY, copy, key=_value),
        efficiency_high=copy,
        launch_low=launch,
        launch=launch,
        flops_per_byte_low=Constant(per_byte / 3, MODELLED, f"a third of the rate {source}"),
        flops_per_byte=Constant(per_byte / 2, MODELLED, f"half of the rate {source}"),
        flops_per_byte_high=Constant(per_byte, MEASURED, source),
        copy_bandwidth=Constant(measured.copy_bandwidth, MEASURED, source),
        multiplications=Constant(measured.multiplications, MEASURED, source),
        link_bandwidth=(
            None
            if measured.link_bandwidth is None
            else Constant(measured.link_bandwidth, MEASURED, f"a copy from locked RAM, {source}")
        ),
    )


def _value(constant: Constant) -> float:
    return constant.value
