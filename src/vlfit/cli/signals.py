"""Signals that end a command."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130  # exit code after Ctrl-C, by convention


@contextmanager
def terminated_as_interrupted() -> Iterator[threading.Event]:
    """Make SIGTERM raise ``KeyboardInterrupt`` in the block, so that one cleanup serves both.

    Yields an event that is set on SIGTERM. No effect outside the main thread.
    """
    received = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        received.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def cleaned_up_when_terminated() -> Iterator[None]:
    """Make SIGTERM in the block clean up as Ctrl-C does, and then kill the process as by default.

    Its parent (systemd, the supervisor) sees a process killed by SIGTERM, as without this block.
    """
    received = threading.Event()
    try:
        with terminated_as_interrupted() as received:
            yield
    finally:
        if received.is_set():
            os.kill(os.getpid(), signal.SIGTERM)


def is_interrupt(abort: BaseException) -> bool:
    """Whether it was Ctrl-C that aborted a question; typer raises ``Abort`` for the end of the input, too."""
    return isinstance(abort.__context__, KeyboardInterrupt)


def end_at_once(code: int) -> NoReturn:
    """Exit now with the status ``code``, on the second signal, with the terminal's cursor shown.

    Python's own exit waits for threads, and aborts if one of them is inside torch.
    """
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), b"\x1b[?25h\r\n")
    os._exit(code)
