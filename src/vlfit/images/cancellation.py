"""Whether anybody still waits for what a thread computes. No torch.

Whoever hands work to a thread says how to find out; work that takes long asks between its steps, and stops
with ``Unwanted``. Knows nothing of clients or requests.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_here = threading.local()


class Unwanted(Exception):
    """Nobody waits for the result any more, so there is nobody to tell this either."""


@contextmanager
def until(gone: Callable[[], bool]) -> Iterator[None]:
    """In this thread, for as long as the block lasts: ``gone`` tells whether nobody waits any more."""
    _here.gone = gone
    try:
        yield
    finally:
        del _here.gone


def check_wanted() -> None:
    """Raises ``Unwanted`` if nobody waits for what this thread does."""
    gone: Callable[[], bool] | None = getattr(_here, "gone", None)
    if gone is not None and gone():
        raise Unwanted
