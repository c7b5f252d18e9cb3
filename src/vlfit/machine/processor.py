"""The processor that models without a GPU are computed on: its units, and how fast it and its memory are.

``measure`` takes about a second, needs neither torch nor a compiler, and imports numpy in a process of its
own alone. Which code runs is decided here for engine and plan: ``vector_level``, ``find_c_compiler``.
"""

import ctypes
import mmap
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from vlfit.machine.host import physical_cores, read_host, usable_cores
from vlfit.machine.model import Processor
from vlfit.units import MIB

KERNELS_SWITCH = "VLFIT_CPU_KERNELS"  # 0: no compiled products; avx2, portable: at most that vector unit
OFF = ("0", "false", "no", "off")
# The flags of Linux that count, in the order in which they are shown: which products are written for, and
# which torch has products for.
UNITS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx_vnni", "avx512_vnni"),
    *("avx512_bf16", "amx_tile", "amx_bf16", "amx_int8", "asimd", "sve", "bf16", "i8mm"),
)
PORTABLE = "portable"
_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
# Vector units that products are compiled for, best first, and what each needs.
LEVELS = {
    "amx": (*_AVX512, "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"),
    "avx512_bf16": (*_AVX512, "avx512_vnni", "avx512_bf16"),
    "avx512_vnni": (*_AVX512, "avx512_vnni"),
    "avx512": _AVX512,
    "avx2_vnni": (*_AVX2, "avx_vnni"),
    "avx2": _AVX2,
    PORTABLE: (),
}
_CPUINFO = 2**14  # characters that are read of /proc/cpuinfo: the kernel writes it core by core

# Of the buffer that is read: larger than most caches, and written once, as untouched pages are all the same.
_BUFFER, _LEAST_BUFFER = 512 * MIB, 64 * MIB
_READ_SECONDS = 0.35
_BUSY_SECONDS = 1.5  # while other programs run: a round without them may come
_LEAST_ROUNDS = 4
# Less processor time than this share of the best round's: other programs ran on these cores.
_QUIET_SHARE = 0.9
_SIDE = 1024  # of the matrices whose product is timed
_PRODUCT_SECONDS, _PRODUCT_TIMEOUT = 0.35, 20.0
_PRODUCTS = """
import sys, time
import numpy
side, seconds = int(sys.argv[1]), float(sys.argv[2])
one, other = (numpy.full((side, side), value, numpy.float32) for value in (1, 2))
out, times = numpy.empty_like(one), []
while len(times) < 4 or sum(times) < seconds:
    began = time.perf_counter()
    numpy.matmul(one, other, out=out)
    times.append(time.perf_counter() - began)
print(2 * side**3 / min(times))
"""


def read_processor(proc: Path = Path("/proc"), machine: str = "") -> Processor:
    """Read name, units and threads of this computer's processor; speeds are None. Never raises.

    ``proc``, ``machine`` (the architecture): replaced in tests.
    """
    machine = machine or platform.machine()
    facts = _first_core(proc / "cpuinfo")
    flags = facts.get("flags", facts.get("Features", "")).split()
    return Processor(
        name=facts.get("model name") or platform.processor() or machine or "CPU",
        architecture=machine,
        units=tuple(unit for unit in UNITS if unit in flags),
        threads=num_threads(),
        compiles=compiles_products(),
    )


def num_threads() -> int:
    """Threads of a model on a CPU: one for each physical core that this process may use."""
    return max(min(usable_cores(), physical_cores()), 1)


def _first_core(cpuinfo: Path) -> dict[str, str]:
    """The lines of ``/proc/cpuinfo`` up to the second core, by name; empty where there is none (macOS)."""
    facts: dict[str, str] = {}
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as file:
            text = file.read(_CPUINFO)
    except OSError:
        return facts
    for line in text.splitlines():
        name, _, text = line.partition(":")
        if name.strip() in facts:
            break
        if name.strip():
            facts[name.strip()] = text.strip()
    return facts


# --- which code runs ---------------------------------------------------------------------------------------


def vector_level(processor: Processor, environment: Mapping[str, str] = os.environ) -> str:
    """A key of ``LEVELS``: what products of stored weights are compiled for (``kernels/cpu/library.py``).

    The best that ``processor`` has, at most what ``VLFIT_CPU_KERNELS`` and ``ATEN_CPU_CAPABILITY`` say.
    """
    order = list(LEVELS)
    level = next(each for each, units in LEVELS.items() if set(units) <= set(processor.units))
    torchs = {"avx512": "amx", "avx2": "avx2_vnni", "default": PORTABLE}
    wanted = environment.get(KERNELS_SWITCH, "").strip().lower()
    limits = (wanted, torchs.get(environment.get("ATEN_CPU_CAPABILITY", "").strip().lower(), ""))
    begin = max((order.index(limit) for limit in limits if limit in LEVELS), default=0)
    return next(
        each for each in order[max(begin, order.index(level)) :] if set(LEVELS[each]) <= set(processor.units)
    )


def find_c_compiler() -> str | None:
    """The C compiler, looked for as Triton does: ``CC``, else gcc, else clang; None if there is none."""
    named = os.environ.get("CC")
    names = ("gcc", "clang") if named is None else (named,)
    return next((found for name in names if (found := shutil.which(name))), None)


def products_are_off(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ``VLFIT_CPU_KERNELS`` switches the compiled products off."""
    return environment.get(KERNELS_SWITCH, "").strip().lower() in OFF


def compiles_products() -> bool:
    """Whether products of stored weights can be compiled here: they are not off, with a C compiler."""
    return not products_are_off() and find_c_compiler() is not None


# --- how fast ----------------------------------------------------------------------------------------------


def measure(processor: Processor) -> Processor:
    """``processor``, which must be this computer's, with its speeds measured, in about a second.

    What cannot be measured (no memory to read, no numpy) stays None.
    """
    bandwidth, quiet = _measure_bandwidth(processor.threads)
    return replace(
        processor,
        bandwidth=bandwidth,
        multiplications=_measure_products(processor.threads),
        measured=datetime.now(UTC).date().isoformat(),
        quiet=quiet,
    )


def _measure_bandwidth(threads: int) -> tuple[int | None, bool]:
    """Bytes per second that ``threads`` read from RAM, the best of some rounds; and whether they were alone.

    C's ``memcmp`` reads two equal halves, which Python calls without its lock: two streams are what a core
    reads fastest (on a Xeon as fast as ``kernels/cpu``'s products; ``memchr`` 30 % slower).
    """
    size = min(_BUFFER, read_host().ram_available // 8) // (2 * threads * MIB) * 2 * threads * MIB
    if size < _LEAST_BUFFER:
        return None, False
    try:
        library = ctypes.CDLL(None)
        compare, fill = library.memcmp, library.memset
    except (OSError, TypeError, AttributeError):  # no C library by that name
        return None, False
    fill.argtypes, fill.restype = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], ctypes.c_void_p
    compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    with mmap.mmap(-1, size) as memory:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        view = ctypes.c_char.from_buffer(memory)
        address, part = ctypes.addressof(view), size // threads

        def on_all(work: Callable[[int], object]) -> tuple[float, float]:
            """Seconds by the clock, and the least share of them that a thread had a core."""
            shares: list[float] = []

            def run(start: int) -> None:
                began, used = time.perf_counter(), time.thread_time()
                work(start)
                shares.append((time.thread_time() - used) / max(time.perf_counter() - began, 1e-9))

            runners = [threading.Thread(target=run, args=(address + each * part,)) for each in range(threads)]
            began = time.perf_counter()
            for runner in runners:
                runner.start()
            for runner in runners:
                runner.join()
            return time.perf_counter() - began, min(shares)

        try:
            on_all(lambda start: fill(start, 1, part))
            rounds: list[tuple[float, float]] = []
            while len(rounds) < _LEAST_ROUNDS or sum(seconds for seconds, _ in rounds) < (
                _READ_SECONDS if min(rounds)[1] >= _QUIET_SHARE else _BUSY_SECONDS
            ):
                rounds.append(on_all(lambda start: compare(start, start + part // 2, part // 2)))
        finally:
            del view  # the map cannot be closed before
    seconds, share = min(rounds)
    return round(size / seconds), share >= _QUIET_SHARE


def _measure_products(threads: int) -> int | None:
    """Float32 operations per second of numpy's matrix products on ``threads``; None without numpy.

    In a process of its own: the library's threads would stay, and their number is set when it is loaded.
    """
    variables = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PRODUCTS, str(_SIDE), str(_PRODUCT_SECONDS)],
            env={**os.environ, **dict.fromkeys(variables, str(threads))},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PRODUCT_TIMEOUT,
            check=False,
        )
        return round(float(done.stdout)) if done.returncode == 0 else None
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
