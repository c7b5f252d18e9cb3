"""Sets of keys that stay small: eight bytes a key, whatever its length.

Knows hashes and nothing of what keys mean. Two keys have the same hash, and the second is taken to be there,
with a chance of n^2 / 2^65 for n keys: 3 in a million for ten million, 3 in ten thousand for a hundred
million.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_BYTES = 8
_LEAST_MERGED = 65_536  # a set of as many ints takes some 5 MiB


def hash_of(key: str) -> int:
    """A number of 64 bits that stands for ``key``. Names of files may hold bytes that are no UTF-8."""
    return int.from_bytes(blake2b(key.encode("utf-8", "surrogatepass"), digest_size=_BYTES).digest(), "big")


class KeySet:
    """Keys in a sorted array; those that came last wait in an ordinary set until they are worth a merge.

    One thread may ``add`` while others look.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._sorted = array("Q")
        self._fresh: set[int] = set()
        for key in keys:
            self.add(key)

    def add(self, key: str) -> None:
        number = hash_of(key)
        if not self._has(number):
            self._fresh.add(number)
            # Merging costs as much as the whole is long, so it waits until there is an eighth more.
            if len(self._fresh) >= max(_LEAST_MERGED, len(self._sorted) // 8):
                self._merge()

    def __contains__(self, key: str) -> bool:
        return self._has(hash_of(key))

    def __len__(self) -> int:
        return len(self._sorted) + len(self._fresh)

    def _has(self, number: int) -> bool:
        if number in self._fresh:
            return True
        place = bisect_left(self._sorted, number)
        return place < len(self._sorted) and self._sorted[place] == number

    def hashes(self) -> NDArray[np.uint64]:
        """All of them, sorted, as a copy."""
        self._merge()
        return np.frombuffer(self._sorted, np.uint64).copy()

    def _merge(self) -> None:
        merged = self._sorted[:]
        merged.extend(self._fresh)
        np.frombuffer(merged, np.uint64).sort()  # in place, without a Python int for each
        # In this order another thread that looks finds every key in one of the two.
        self._sorted = merged
        self._fresh = set()
