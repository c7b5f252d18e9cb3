"""Encoder cache: vision features of recent images by content, in RAM, bounded by bytes.

It is in RAM because every byte of a GPU is planned, and not pinned because torch rounds pinned memory up to
powers of two: a server grew by half a gigabyte (docs/log.md).
"""

from collections import OrderedDict

import torch

from vlfit.models.interface import VisionFeatures


class EncoderCache:
    """LRU cache in RAM of vision features by content key, at most ``limit_bytes`` in all.

    ``limit_bytes`` 0: caches nothing. ``used_bytes``: bytes of all entries.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._entries: OrderedDict[bytes, VisionFeatures] = OrderedDict()

    def get(self, key: bytes, device: torch.device) -> VisionFeatures | None:
        """A copy on ``device`` of the features of the image with content ``key``; None if not cached."""
        features = self._entries.get(key)
        if features is None:
            return None
        self._entries.move_to_end(key)
        deepstack = tuple(level.to(device) for level in features.deepstack)
        return VisionFeatures(features.rows.to(device), deepstack)

    def put(self, key: bytes, features: VisionFeatures) -> None:
        """Cache a copy of ``features`` of the image with content ``key``; waits for the device.

        Evicts the least recently used entries beyond ``limit_bytes``. Does nothing if ``key`` is cached, or
        if ``features`` are larger than ``limit_bytes``.
        """
        if key in self._entries or features.nbytes > self.limit_bytes:
            return
        deepstack = tuple(level.cpu() for level in features.deepstack)
        self._entries[key] = VisionFeatures(features.rows.cpu(), deepstack)
        self.used_bytes += features.nbytes
        while self.used_bytes > self.limit_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.used_bytes -= oldest.nbytes

    def clear(self) -> None:
        """Drop all entries."""
        self._entries.clear()
        self.used_bytes = 0
