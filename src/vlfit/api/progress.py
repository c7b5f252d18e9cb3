"""Callbacks that report progress."""

from collections.abc import Callable

LoadProgress = Callable[[str, float], None]  # what is being done, share done (0 to 1)
ByteProgress = Callable[[int, int], None]  # bytes done, bytes in all
StatusCallback = Callable[[str], None]  # one line about what happens now
