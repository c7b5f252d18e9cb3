"""Signals that end a command: one way for all of them. Knows nothing of what is ended."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


@contextmanager
def terminated_as_interrupted() -> Iterator[threading.Event]:
    """Within the block SIGTERM is what Ctrl-C is, as in ``vlfit serve``: whoever cleans up after the one does
    so after the other. Gives what is set once SIGTERM came.
    """
    came = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        came.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def cleaned_up_when_terminated() -> Iterator[None]:
    """Within the block SIGTERM lets whoever is in it clean up as after Ctrl-C, and then ends the process as
    it does without: what started it (systemd, a keeper) sees no difference.
    """
    came = threading.Event()
    try:
        with terminated_as_interrupted() as came:
            yield
    finally:
        if came.is_set():
            os.kill(os.getpid(), signal.SIGTERM)


def end_at_once(code: int) -> NoReturn:
    """End the process now, for whoever has been asked a second time, with the terminal's cursor to be seen.

    Python's own end would wait for threads, and abort where one of them is inside of torch.
    """
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), b"\x1b[?25h\r\n")
    os._exit(code)
