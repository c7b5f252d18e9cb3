"""malloc and garbage collector settings for a process that runs for weeks, so that freed RAM is returned.

glibc raises its mmap threshold when large buffers (decoded pictures) are freed, and then keeps them in its
arenas: the threshold is fixed here. Arenas (by default eight per core) shrink only from their end and keep
their peak: their number is limited here (``MAX_ARENAS``), and they are trimmed when no request has come for
a while (113 MiB returned after 233 requests with pictures). A process whose model is computed on the CPU
keeps larger buffers until then: a picture of 512x512 takes 4 GB of them, one after the other, and mapping and
zeroing these anew took a fifth of its time. What is free at the end of a heap is kept up to a limit; what is
free below a live block stays until heaps are trimmed, which a batch never does. With another C library none
of this is done.
"""

import asyncio
import ctypes
import gc
import threading
from collections.abc import Callable

from vlfit.units import MIB

MMAP_THRESHOLD = 4 * MIB
# While a model is computed: the largest buffer that comes from a heap, and what a heap keeps at its end.
COMPUTING_THRESHOLD, COMPUTING_KEEPS = 32 * MIB, 128 * MIB
# Threads that prepare pictures mostly compute: with 2, 4 and up to 16 arenas (2 cores) throughput was the
# same; anonymous RAM came to 349, 362 and 375 MiB.
MAX_ARENAS = 4
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h
QUIET_SECONDS = 1.0  # without a request, before heaps are trimmed; trimming takes tens of ms


def configure_malloc() -> bool:
    """Fix the mmap threshold and the number of arenas; call before threads start.

    Returns whether the C library supports it.
    """
    return _set_options((_M_MMAP_THRESHOLD, MMAP_THRESHOLD), (_M_ARENA_MAX, MAX_ARENAS))


def keep_buffers(device: str) -> bool:
    """Keep larger freed buffers until ``trim_heaps``, if the process's model is on the CPU.

    ``device``: that of its backend. Returns whether it is done.
    """
    if device != "cpu":
        return False
    return _set_options((_M_MMAP_THRESHOLD, COMPUTING_THRESHOLD), (_M_TRIM_THRESHOLD, COMPUTING_KEEPS))


def _set_options(*options: tuple[int, int]) -> bool:
    """Set ``options`` of glibc's malloc; whether the C library has them."""
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # not glibc; on Windows None names no library
        return False
    return all(set_option(option, value) == 1 for option, value in options)


def freeze_gc() -> None:
    """Exclude all current objects from garbage collection.

    They are 200,000, mostly torch's, and never freed; a full collection over them takes 0.2 s and more.
    """
    gc.freeze()


def trim_heaps() -> None:
    """Return free pages anywhere in malloc's heaps to the system; no effect with a libc other than glibc."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):  # as above
        return


class HeapTrimmer:
    """Trims heaps when no request has run for ``QUIET_SECONDS``. Belongs to one event loop.

    ``busy``: returns whether a request runs.
    """

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._planned: asyncio.TimerHandle | None = None

    def request_ended(self) -> None:
        """Schedule a trim in ``QUIET_SECONDS``, unless one is scheduled or another request runs.

        The trim is skipped if a request runs by then.
        """
        if self._planned is None and not self._busy():
            self._planned = asyncio.get_running_loop().call_later(QUIET_SECONDS, self._trim)

    def _trim(self) -> None:
        self._planned = None
        if not self._busy():  # otherwise the end of that request plans the next trim
            threading.Thread(target=trim_heaps, name="vlfit-trim", daemon=True).start()
