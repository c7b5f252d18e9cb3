"""Memory in RAM goes back to the system when it is freed, in a process that runs for weeks.

A decoded picture is tens of megabytes for a tenth of a second. glibc gives the first of them back at once,
and then learns to keep such sizes in its heaps. A fixed limit, above which memory is mapped and unmapped for
each buffer, keeps it where it is. Smaller buffers come from heaps, which shrink only from their end. glibc
has up to eight of them for each core, one for each thread that runs at the same time, and every one keeps the
most that a thread ever had there: so there are few. And when nobody has asked for a while, glibc is told to
give back what is free between what is not (113 MiB after 233 requests with pictures). Without glibc nothing
of this is done.

Python's garbage collector has to find what refers to itself in a circle. It looks at old objects the less
often, the more of them there are, and then at all of them, while everybody waits. So what is there when a
server is ready is none of its business. Does not know pictures.
"""

import asyncio
import ctypes
import gc
import threading
from collections.abc import Callable

from vlfit.units import MIB

MAPPED_FROM = 4 * MIB  # bytes of a buffer; smaller ones are had again fast
# A choice. Threads that prepare pictures mostly compute: with 2, 4 and up to 16 heaps (2 cores) as many
# requests were served; anonymous RAM came to 349, 362 and 375 MiB.
MOST_HEAPS = 4
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # glibc's malloc.h
QUIET = 1.0  # seconds without a request, after which heaps are gone through: that takes some tens of ms


def give_memory_back() -> bool:
    """For the rest of this process, before it has threads; whether its C library knows how."""
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # no such library, or none that can be named so (Windows)
        return False
    options = ((_M_MMAP_THRESHOLD, MAPPED_FROM), (_M_ARENA_MAX, MOST_HEAPS))
    return all(set_option(option, value) == 1 for option, value in options)


def keep_what_is_loaded() -> None:
    """The garbage collector no longer looks at what is there now.

    That is 200,000 objects, most of them torch's, of which none is ever to go: a look at all of them takes a
    fifth of a second and more.
    """
    gc.freeze()


def trim_heaps() -> None:
    """Whole pages that are free anywhere in a heap go back to the system."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):  # as above
        return


class Trimming:
    """Trims heaps when requests have ended and no other has come. Belongs to one event loop.

    ``busy`` says whether there is a request.
    """

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._planned: asyncio.TimerHandle | None = None

    def ended(self) -> None:
        """A request is over."""
        if self._planned is None and not self._busy():
            self._planned = asyncio.get_running_loop().call_later(QUIET, self._trim)

    def _trim(self) -> None:
        self._planned = None
        if not self._busy():  # else the end of that one is waited for
            threading.Thread(target=trim_heaps, name="vlfit-trim", daemon=True).start()
