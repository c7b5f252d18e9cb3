"""Memory of large buffers goes back to the system: measured in a process of its own, as it is for good."""

import ctypes
import platform
import subprocess
import sys

import pytest

from vlfit.server import host_memory
from vlfit.units import MIB

PROGRAM = """
import ctypes, os, sys
from pathlib import Path
from vlfit.server import host_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def buffer(size):
    place = libc.malloc(size)
    ctypes.memset(place, 1, size)
    return place

if "give back" in sys.argv:
    assert host_memory.give_large_buffers_back()
libc.free(buffer(24 << 20))  # glibc learns from this that such sizes come and go
before = resident()
large = [buffer(20 << 20) for _ in range(4)]
above = libc.malloc(100_000)  # what lies above them in a heap keeps it from shrinking
for place in large:
    libc.free(place)
print(resident() - before)
"""


def left_behind(*arguments: str) -> int:
    """Bytes that a process still has of 80 MiB that it freed."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps them")
def test_what_is_freed_goes_back() -> None:
    assert left_behind("give back") < 2 * MIB


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert host_memory.give_large_buffers_back() is False
