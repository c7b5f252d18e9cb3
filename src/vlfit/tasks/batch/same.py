"""Pictures of the same bytes are asked about once: who leads, who follows, and what was said of late ones.

Knows digests and answers as bytes. Bounded: of pictures that are over it keeps the answers of the latest, up
to ``MOST_BYTES``; one that comes again later is asked about again. Does not know how that is done.
"""

import pickle
import threading
from collections import OrderedDict
from hashlib import blake2b
from typing import Any

from vlfit.tasks.batch.item import Item, Record
from vlfit.tasks.batch.names import shown_name

MOST_BYTES = 8 * 1024**2  # answers of some 15,000 captions
_ENTRY_BYTES = 200  # of Python, beside the answer itself
_OWN = ("key", "picture", "extra")


def digest_of(data: bytes) -> bytes:
    """16 bytes: nobody will see two pictures share them."""
    return blake2b(data, digest_size=16).digest()


class Same:
    """``Waiting`` is whatever stands for a picture that waits for another's answer. Any thread may call."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, bytes] = OrderedDict()
        self._leading: dict[bytes, list[Any]] = {}
        self._bytes = 0
        self._most = most_bytes

    def lead_or_follow(self, digest: bytes, waiting: Any) -> Record | bool | None:
        """What was said of these bytes; or True: ask yourself, then ``answered`` or ``failed``; or None:
        another asks, and gets ``waiting`` with what comes.
        """
        with self._lock:
            known = self._known.get(digest)
            if known is not None:
                self._known.move_to_end(digest)
                record: Record = pickle.loads(known)
                return record
            followers = self._leading.get(digest)
            if followers is not None:
                followers.append(waiting)
                return None
            self._leading[digest] = []
            return True

    def answered(self, digest: bytes, record: Record) -> list[Any]:
        """Keep ``record`` for those that come later. Gives those that wait for it."""
        shared = {name: value for name, value in record.items() if name not in _OWN}
        data = pickle.dumps({**shared, "same_as": record["key"]}, pickle.HIGHEST_PROTOCOL)
        with self._lock:
            if digest not in self._known:
                self._known[digest] = data
                self._bytes += len(data) + _ENTRY_BYTES
            while self._bytes > self._most:
                self._bytes -= len(self._known.popitem(last=False)[1]) + _ENTRY_BYTES
            return self._leading.pop(digest, [])

    def failed(self, digest: bytes) -> list[Any]:
        """Those that waited for an answer that will not come."""
        with self._lock:
            return self._leading.pop(digest, [])


def taken_over(shared: Record, item: Item) -> Record:
    """The record of ``item``, whose picture has the bytes of the one that ``shared`` tells of."""
    own: Record = {
        "key": item.key,
        "picture": shown_name(item.path) if item.path is not None else item.key,
        "same_as": shared["same_as"],
    }
    record = {**own, **{name: value for name, value in shared.items() if name not in (*own, *_OWN)}}
    return {**record, "extra": dict(item.extra)} if item.extra else record
