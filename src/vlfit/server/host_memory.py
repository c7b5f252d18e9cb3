"""Large buffers in RAM go back to the system when they are freed, in a process that runs for weeks.

A decoded picture is tens of megabytes for a tenth of a second. glibc gives the first of them back at once,
and then learns to keep such sizes in its heaps, of which each thread has one: with eight threads that prepare
pictures the process grows by hundreds of megabytes that nobody uses. A fixed limit, above which memory is
mapped and unmapped for each buffer, keeps it where it is. Does not know pictures. Without glibc nothing is
done.
"""

import ctypes

from vlfit.units import MIB

MAPPED_FROM = 4 * MIB  # bytes of a buffer; smaller ones are had again fast
_M_MMAP_THRESHOLD = -3  # glibc's malloc.h


def give_large_buffers_back() -> bool:
    """For the rest of this process; whether its C library knows how."""
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # no such library, or none that can be named so (Windows)
        return False
    return bool(set_option(_M_MMAP_THRESHOLD, MAPPED_FROM))
