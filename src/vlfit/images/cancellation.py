"""Cooperative cancellation of work in a thread.

The caller sets a condition with ``cancel_when``; long work calls ``check_cancelled`` between its steps.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_thread = threading.local()


class Cancelled(Exception):
    """Ends work whose result is no longer needed. Never reported to a client."""


@contextmanager
def cancel_when(is_cancelled: Callable[[], bool]) -> Iterator[None]:
    """Within the block, make ``check_cancelled`` in this thread raise as soon as ``is_cancelled()`` is true.

    Blocks cannot be nested.
    """
    _thread.is_cancelled = is_cancelled
    try:
        yield
    finally:
        del _thread.is_cancelled


def check_cancelled() -> None:
    """Raise ``Cancelled`` if the ``cancel_when`` block of this thread is cancelled; no effect outside one."""
    is_cancelled: Callable[[], bool] | None = getattr(_thread, "is_cancelled", None)
    if is_cancelled is not None and is_cancelled():
        raise Cancelled
