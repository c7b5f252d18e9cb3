"""malloc settings, heap trimming and gc.freeze, each in a process of its own."""

import asyncio
import ctypes
import platform
import subprocess
import sys

import pytest

from vlfit.server.http import malloc
from vlfit.units import MIB

PROGRAM = """
import ctypes, os, sys
from pathlib import Path
from vlfit.server.http import malloc

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def buffer(size):
    place = libc.malloc(size)
    ctypes.memset(place, 1, size)
    return place

if "give back" in sys.argv or "compute" in sys.argv:
    assert malloc.configure_malloc()
if "compute" in sys.argv:
    assert malloc.keep_buffers("cpu")
libc.free(buffer(24 << 20))  # glibc learns from this that such sizes come and go
before = resident()
large = [buffer(20 << 20) for _ in range(4)]
above = libc.malloc(100_000)  # what lies above them in a heap keeps it from shrinking
for place in large:
    libc.free(place)
kept = resident() - before
if "compute" in sys.argv:
    malloc.trim_heaps()
    assert kept > 40 << 20, kept
print(resident() - before)
"""

THREADS = """
import ctypes, threading
from vlfit.server.http import malloc

assert malloc.configure_malloc()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
together = threading.Barrier(24)

def work():
    together.wait()
    libc.malloc(1000)
    together.wait()

threads = [threading.Thread(target=work) for _ in range(24)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""


BETWEEN = """
import ctypes, os
from pathlib import Path
from vlfit.server.http import malloc

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
pieces = [libc.malloc(100_000) for _ in range(400)]
for place in pieces:
    ctypes.memset(place, 1, 100_000)
for number, place in enumerate(pieces):
    if number % 20:  # what stays keeps the heap from shrinking
        libc.free(place)
before = resident()
malloc.trim_heaps()
print(before - resident())
"""


def left_behind(*arguments: str) -> int:
    """Bytes that a process still has of 80 MiB that it freed."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps them")
def test_freed_buffers_return_to_the_system() -> None:
    assert left_behind("give back") < 2 * MIB


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps them")
def test_a_process_that_computes_keeps_buffers_until_it_is_idle() -> None:
    assert left_behind("compute") < 2 * MIB
    assert malloc.keep_buffers("cuda:0") is False


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="others have other heaps")
def test_arenas_are_limited() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=True)
    assert 1 < done.stdout.count("<heap nr=") <= malloc.MAX_ARENAS


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps it")
def test_trimming_returns_free_pages() -> None:
    done = subprocess.run([sys.executable, "-c", BETWEEN], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 30 * MIB  # of 36


def test_heaps_are_trimmed_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for requests that end one after the other, and not while there is another."""
    trimmed: list[float] = []
    monkeypatch.setattr(malloc, "QUIET_SECONDS", 0.05)
    monkeypatch.setattr(malloc, "trim_heaps", lambda: trimmed.append(1.0))
    running = 0

    async def requests() -> None:
        nonlocal running
        trimming = malloc.HeapTrimmer(lambda: running > 0)
        running = 1
        trimming.request_ended()
        await asyncio.sleep(0.1)
        assert trimmed == []
        running = 0
        trimming.request_ended()
        trimming.request_ended()
        running = 1  # another comes in time
        await asyncio.sleep(0.1)
        assert trimmed == []
        running = 0
        trimming.request_ended()
        trimming.request_ended()
        while not trimmed:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(requests(), 20))
    assert trimmed == [1.0]


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert malloc.configure_malloc() is False
    malloc.trim_heaps()


def test_gc_ignores_frozen_objects() -> None:
    program = """
import gc
from vlfit.server.http import malloc

class Held: pass

before = Held()
before.itself = before
malloc.freeze_gc()
after = Held()
after.itself = after
del before, after
print(gc.collect() > 0, sum(type(each) is Held for each in gc.get_objects()))
gc.unfreeze()
print(sum(type(each) is Held for each in gc.get_objects()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "0", "1"]
