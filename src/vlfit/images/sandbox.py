"""Limits that a process sets on itself, for the kernel to enforce: a decode worker, one for chat templates.

Linux enforces all of them. macOS does not enforce a limit of memory (``LIMITS_MEMORY`` is false): there only
CPU and wall time end what takes too much.
"""

import ctypes
import os
import resource
import signal
import sys
from contextlib import suppress

from vlfit.units import MIB

LIMITS_MEMORY = sys.platform == "linux"

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_NO_NEW_PRIVS = 1, 15, 38  # linux/prctl.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h
_MAX_FILES = 32
_ENOMEM = 12
_OUT_OF_MEMORY = ("out of memory", "cannot allocate", "insufficient memory")  # in messages of decoders

# malloc keeps up to ``MALLOC_KEEPS_BYTES`` of the last picture for the next one: new pages cost as much as
# decoding into them. Larger blocks are mapped by themselves and returned at once.
MALLOC_KEEPS_BYTES = 16 * MIB
_MMAP_THRESHOLD = 4 * MIB


def ignore_terminal() -> None:
    """Ignore SIGINT (Ctrl-C), SIGTERM and SIGHUP: the parent handles them, and may still need workers."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)


def configure_malloc() -> None:
    """Let glibc's malloc use one arena and keep at most ``MALLOC_KEEPS_BYTES`` of freed memory.

    No effect with another C library.
    """
    with suppress(OSError, AttributeError):  # not glibc
        set_option = ctypes.CDLL(None).mallopt
        set_option(_M_ARENA_MAX, 1)
        set_option(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
        set_option(_M_TRIM_THRESHOLD, MALLOC_KEEPS_BYTES)


def confine(parent: int | None, most_memory: int) -> None:
    """Restrict this process for good to what it needs to compute.

    Everywhere: no data written to files, no core dumps, 32 open files. On Linux also: at most ``most_memory``
    bytes of address space; no new privileges; the first to be killed if the machine runs out of memory;
    killed when the thread of its parent that started it ends. Raises ``OSError`` if the kernel refuses.

    ``parent``: pid of the parent. None: the parent has several threads, and any may have started this
    process, which must see for itself when the parent ends.
    """
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, _MAX_FILES),
    ):
        resource.setrlimit(kind, (most, most))
    if LIMITS_MEMORY:
        _set_soft_limit(resource.RLIMIT_AS, most_memory, hard=most_memory)
    if sys.platform != "linux":
        return
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    options = {_PR_SET_NO_NEW_PRIVS: 1}
    if parent is not None:
        options[_PR_SET_PDEATHSIG] = signal.SIGKILL
    for option, value in options.items():
        if prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3):
            raise OSError(ctypes.get_errno(), "prctl")
    if parent is not None and os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def set_process_name(name: str) -> None:
    """Set the name of this process in ``top`` and ``ps``, cut to 15 characters. No effect but on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()), *[ctypes.c_ulong(0)] * 3)


def address_space_bytes() -> int:
    """Address space that this process has mapped, in bytes; 0 where ``LIMITS_MEMORY`` is false."""
    if not LIMITS_MEMORY:
        return 0
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read(64).split()[0]) * resource.getpagesize()


def limit_memory(most: int) -> None:
    """Limit this process to ``most`` bytes of address space, at most to the ``most_memory`` of ``confine``.

    A later call may raise the limit again. No effect where ``LIMITS_MEMORY`` is false.
    """
    if LIMITS_MEMORY:
        _set_soft_limit(resource.RLIMIT_AS, most)


def limit_cpu(seconds: int) -> None:
    """Let the kernel end this process with SIGXCPU after ``seconds`` to ``seconds + 1`` more of CPU time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _set_soft_limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + seconds + 1)


def _set_soft_limit(kind: int, most: int, hard: int | None = None) -> None:
    before = resource.getrlimit(kind)[1]
    ceiling = before if hard is None or resource.RLIM_INFINITY != before < hard else hard
    if ceiling != resource.RLIM_INFINITY:
        most = min(most, ceiling)
    resource.setrlimit(kind, (most, ceiling))


# Decoders in C report a failed allocation as a damaged file, or as nothing in particular: the C library's
# errno still tells. It is read without giving up the GIL, in a process of one thread.
try:
    _c_library = ctypes.PyDLL(None)
    _errno_location = getattr(_c_library, "__errno_location" if sys.platform == "linux" else "__error")
    _errno_location.restype = ctypes.POINTER(ctypes.c_int)
except (OSError, AttributeError):
    _errno_location = None


def clear_errno() -> None:
    """Set the C library's errno to 0, so that ``ran_out_of_memory`` sees later failures only."""
    if _errno_location is not None:
        _errno_location()[0] = 0


def lacked_memory() -> bool:
    """Whether an allocation has failed since ``clear_errno``, by errno."""
    return _errno_location is not None and bool(_errno_location()[0] == _ENOMEM)


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether ``error``, just caught, comes from a failed allocation: by errno, its type or its message.

    Call ``clear_errno`` before the work that may raise ``error``: errno keeps the last failure.
    """
    if lacked_memory():
        return True
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in _OUT_OF_MEMORY)
