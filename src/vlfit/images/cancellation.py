"""Cooperative cancellation of work in a thread.

The caller sets a condition with ``cancel_when``; long work calls ``check_cancelled`` between its steps.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_thread = threading.local()


class Cancelled(Exception):
    """Raised in a thread whose result is no longer needed; no one sees it."""


@contextmanager
def cancel_when(is_cancelled: Callable[[], bool]) -> Iterator[None]:
    """Within the block, ``check_cancelled`` in this thread raises once ``is_cancelled()`` is true."""
    _thread.is_cancelled = is_cancelled
    try:
        yield
    finally:
        del _thread.is_cancelled


def check_cancelled() -> None:
    """Raise ``Cancelled`` if this thread's work has been cancelled."""
    is_cancelled: Callable[[], bool] | None = getattr(_thread, "is_cancelled", None)
    if is_cancelled is not None and is_cancelled():
        raise Cancelled
