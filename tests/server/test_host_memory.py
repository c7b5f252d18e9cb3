"""Memory goes back to the system, and heaps are few: seen in processes of their own, as it is for good."""

import asyncio
import ctypes
import platform
import subprocess
import sys

import pytest

from vlfit.server.http import malloc as host_memory
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
    assert host_memory.give_memory_back()
libc.free(buffer(24 << 20))  # glibc learns from this that such sizes come and go
before = resident()
large = [buffer(20 << 20) for _ in range(4)]
above = libc.malloc(100_000)  # what lies above them in a heap keeps it from shrinking
for place in large:
    libc.free(place)
print(resident() - before)
"""

THREADS = """
import ctypes, threading
from vlfit.server import host_memory

assert host_memory.give_memory_back()
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
from vlfit.server import host_memory

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
host_memory.trim_heaps()
print(before - resident())
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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="others have other heaps")
def test_many_threads_share_few_heaps() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=True)
    assert 1 < done.stdout.count("<heap nr=") <= host_memory.MOST_HEAPS


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps it")
def test_what_is_free_between_what_is_not_goes_back() -> None:
    done = subprocess.run([sys.executable, "-c", BETWEEN], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 30 * MIB  # of 36


def test_heaps_are_trimmed_when_nobody_has_asked_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for requests that end one after the other, and not while there is another."""
    trimmed: list[float] = []
    monkeypatch.setattr(host_memory, "QUIET", 0.05)
    monkeypatch.setattr(host_memory, "trim_heaps", lambda: trimmed.append(1.0))
    running = 0

    async def requests() -> None:
        nonlocal running
        trimming = host_memory.Trimming(lambda: running > 0)
        running = 1
        trimming.ended()
        await asyncio.sleep(0.1)
        assert trimmed == []
        running = 0
        trimming.ended()
        trimming.ended()
        running = 1  # another comes in time
        await asyncio.sleep(0.1)
        assert trimmed == []
        running = 0
        trimming.ended()
        trimming.ended()
        while not trimmed:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(requests(), 20))
    assert trimmed == [1.0]


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert host_memory.give_memory_back() is False
    host_memory.trim_heaps()


def test_the_collector_looks_at_what_came_later_alone() -> None:
    program = """
import gc
from vlfit.server import host_memory

class Held: pass

before = Held()
before.itself = before
host_memory.keep_what_is_loaded()
after = Held()
after.itself = after
del before, after
print(gc.collect() > 0, sum(type(each) is Held for each in gc.get_objects()))
gc.unfreeze()
print(sum(type(each) is Held for each in gc.get_objects()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "0", "1"]
