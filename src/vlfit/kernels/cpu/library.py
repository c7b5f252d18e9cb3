"""The compiled products of ``products.c`` and its parts: built at the first use, kept in a cache, loaded.

Nothing is compiled before a checkpoint with large matrices is opened on a CPU; then it takes some seconds.
The library lies in ``XDG_CACHE_HOME/vlfit/kernels`` (``~/.cache``), under a name that holds a hash of the
source, the compiler and the vector unit, with its own hash behind it: loading half a library ends the
process. Without a compiler, or with ``VLFIT_CPU_KERNELS=0``, weights are widened when they are loaded.
"""

import ctypes
import hashlib
import logging
import os
import signal
import stat
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from importlib import resources
from pathlib import Path

import torch

from vlfit.machine import processor

logger = logging.getLogger(__name__)

_COMPILE_SECONDS = 120.0
# The first includes the others.
_SOURCES = (
    "products.c",
    "threads.c",
    "rows.c",
    "attention.c",
    "blocks.c",
    "planes.c",
    "tiles.c",
    "gemm.c",
    "floats.c",
    "pair_attention.c",
    "decode_layers.c",
)
_FLAGS = (
    *("-O2", "-std=gnu11", "-fPIC", "-shared", "-pthread"),
    *("-fvisibility=hidden", "-ffp-contract=fast", "-w"),
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_VNNI = (*_AVX512, "-mavx512vnni")
# What the library says of itself, and flags of gcc and clang. The first that the CPU has is used.
LEVELS = {
    "amx": (519, (*_VNNI, "-mavx512bf16", "-mamx-tile", "-mamx-bf16")),
    "avx512_bf16": (517, (*_VNNI, "-mavx512bf16")),
    "avx512_vnni": (513, _VNNI),
    "avx512": (512, _AVX512),
    "avx2_vnni": (257, (*_AVX2, "-mavxvnni")),
    "avx2": (256, _AVX2),
    "portable": (0, ()),
}
KNOWN_TO_ALL = ("avx512", "avx2", "portable")  # every compiler knows these flags


class Unavailable(Exception):
    """Why there is no library; the message is for a log."""


class CompilerFailed(Unavailable):
    """The compiler returned an error: a flag that it does not know, perhaps."""


def vector_levels() -> tuple[str, ...]:
    """The keys of ``LEVELS`` that this CPU has, best first.

    None is above what torch uses (``ATEN_CPU_CAPABILITY``), or above that of ``VLFIT_CPU_KERNELS``.
    """
    capability = torch.backends.cpu.get_cpu_capability().upper()
    wanted = os.environ.get(processor.KERNELS_SWITCH, "").strip().lower()
    if wanted and wanted not in LEVELS and not processor.products_are_off():
        _warn_of_unknown_level(wanted)
    return _levels_below(capability, wanted)


@cache
def _warn_of_unknown_level(wanted: str) -> None:
    logger.warning(
        "%s=%s is ignored: it can be 0, or one of %s", processor.KERNELS_SWITCH, wanted, ", ".join(LEVELS)
    )


@cache
def _levels_below(capability: str, wanted: str) -> tuple[str, ...]:
    order = list(LEVELS)
    first = {"AVX512": "amx", "AVX2": "avx2_vnni"}.get(capability, "portable")
    begin = max(order.index(first), order.index(wanted) if wanted in LEVELS else 0)
    return tuple(level for level in order[begin:] if set(processor.LEVELS[level]) <= _units())


def vector_level() -> str:
    """The first of ``vector_levels``, for which the library is compiled if the compiler knows it."""
    return vector_levels()[0]


@cache
def _units() -> frozenset[str]:
    return frozenset(processor.read_processor().units)


def load_library() -> ctypes.CDLL | None:
    """The library for this CPU, compiled if need be; None if it is switched off or cannot be had.

    A line in the log says why there is none. The same object at every call, per vector unit.
    """
    if processor.products_are_off():
        return None
    return _load(vector_levels())


@cache
def _load(levels: tuple[str, ...]) -> ctypes.CDLL | None:
    try:
        library, level = _open(levels)
    except (Unavailable, OSError, AttributeError) as error:
        logger.warning("weights are widened at load, as there are no compiled products: %s", error)
        return None
    logger.info("products for stored weights: %s", level)
    return library


def _open(levels: tuple[str, ...]) -> tuple[ctypes.CDLL, str]:
    """The library for the first of ``levels`` that the compiler knows, and that level.

    Raises ``Unavailable``, ``OSError``, ``AttributeError``.
    """
    for level in levels:
        try:
            path = _build(level)
        except CompilerFailed as error:
            if level in KNOWN_TO_ALL:
                raise
            logger.info("no products for %s: %s", level, error)
            continue
        library = ctypes.CDLL(str(path))
        if library.vlfit_level() != LEVELS[level][0]:
            raise Unavailable(f"the compiled products are not for {level}")
        return library, level
    raise Unavailable("no vector unit")  # not reached: the last one is in every CPU


def _build(level: str) -> Path:
    """The library for ``level``, compiled unless it is in the cache. Raises ``Unavailable``, ``OSError``."""
    folder_of_sources = resources.files("vlfit.kernels.cpu")
    sources = {name: folder_of_sources.joinpath(name).read_bytes() for name in _SOURCES}
    compiler = processor.find_c_compiler()
    if compiler is None:
        named = os.environ.get("CC")
        raise Unavailable(
            "no C compiler (gcc or clang)"
            if named is None
            else f"no C compiler: CC is {named!r}, which is not a program"
        )
    flags = (*_FLAGS, *LEVELS[level][1])
    # A compiler is known by its file: asking for its version takes longer than all the rest of a start.
    facts = os.stat(compiler)
    key = repr((compiler, facts.st_size, facts.st_mtime_ns, flags)).encode() + b"".join(sources.values())
    folder = library_folder()
    path = folder / f"products-{level}-{hashlib.sha256(key).hexdigest()[:24]}.so"
    if _is_ours(path) and _is_whole(path):
        return path
    logger.info("compiling products for stored weights (%s), once", level)
    with tempfile.TemporaryDirectory(dir=folder, prefix="building-") as place:
        for name, source in sources.items():
            (Path(place) / name).write_bytes(source)
        built = Path(place) / path.name
        _compile([compiler, *flags, "-o", str(built), str(Path(place) / _SOURCES[0]), "-lm"])
        _append_hash(built)
        built.chmod(0o700)
        built.replace(path)
    return path


def _compile(command: list[str]) -> None:
    """Run the compiler ``command``. Raises ``Unavailable`` if it fails or takes too long."""
    # In this process group, so that Ctrl-C in a terminal reaches it.
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        try:
            _, complaint = process.communicate(timeout=_COMPILE_SECONDS)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{command[0]} took more than {_COMPILE_SECONDS:.0f} s") from None
        finally:
            if process.returncode is None:
                _kill_with_children(process)
    if process.returncode:
        raise CompilerFailed(f"{command[0]} failed: {complaint.strip()[:400]}")


def _kill_with_children(process: subprocess.Popen[str]) -> None:
    """Kill a compiler's driver and what it started: killed alone, it leaves that running."""
    children = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = file.read_text("utf-8", errors="replace").rpartition(")")[2].split()[1]
            if int(parent) == process.pid:
                children.append(int(file.parent.name))
    process.kill()
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def _append_hash(built: Path) -> None:
    with built.open("r+b") as file:
        file.write(hashlib.sha256(file.read()).digest())
        file.flush()
        os.fsync(file.fileno())


def _is_whole(path: Path) -> bool:
    """Whether ``path`` ends with the hash of what is before it: of a file cut short it does not."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    size = hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


def library_folder() -> Path:
    """The folder of compiled libraries, created if need be; only its owner may write in it.

    Raises ``Unavailable`` if it belongs to another user or others may write in it: they could have this
    process load code of theirs; or if there is no home folder.
    """
    cache_home = os.environ.get("XDG_CACHE_HOME", "")
    # The standard ignores a relative path there.
    try:
        base = Path(cache_home) if cache_home and Path(cache_home).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        raise Unavailable("no home folder to keep them in: HOME and XDG_CACHE_HOME are not set") from None
    folder = base / "vlfit" / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = folder.resolve()
    for place in (folder, folder.parent):
        facts = place.stat()
        if facts.st_uid != os.getuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise Unavailable(f"{place} belongs to another user, or others may write in it")
    return folder


def _is_ours(path: Path) -> bool:
    """Whether ``path`` is a file of this user's that nobody else may change."""
    try:
        facts = path.lstat()
    except OSError:
        return False
    is_safe = stat.S_ISREG(facts.st_mode) and facts.st_uid == os.getuid()
    return is_safe and not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
