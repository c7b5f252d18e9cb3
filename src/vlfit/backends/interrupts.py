"""Holds Ctrl-C back while something runs that does not survive being interrupted. Knows nothing else."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Within the block SIGINT is only noted; after it, it does what it would have done.

    Importing torch runs C++ start-up code that aborts the process (SIGABRT) when a KeyboardInterrupt comes
    out of it half-way. Only the main thread gets signals, so elsewhere nothing needs to be done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
    if noted:
        signal.raise_signal(signal.SIGINT)
