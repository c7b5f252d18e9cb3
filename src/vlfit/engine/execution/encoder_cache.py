"""Features of pictures seen before, by content: the same picture is encoded once. Bounded by bytes.

They wait in RAM, also if they were computed on a GPU: there every byte is dear. In RAM that is not pinned:
torch keeps what it pinned, by powers of two, and a server grew by half a gigabyte (docs/log.md).
"""

from collections import OrderedDict

import torch

from vlfit.models.qwen3_vl.vision import VisionFeatures


class ImageCache:
    """Least recently used goes first. A picture larger than the whole cache is not kept."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._entries: OrderedDict[bytes, VisionFeatures] = OrderedDict()

    def get(self, key: bytes, device: torch.device) -> VisionFeatures | None:
        """The features of the picture ``key`` on ``device``."""
        features = self._entries.get(key)
        if features is None:
            return None
        self._entries.move_to_end(key)
        deepstack = tuple(level.to(device) for level in features.deepstack)
        return VisionFeatures(features.rows.to(device), deepstack)

    def put(self, key: bytes, features: VisionFeatures) -> None:
        if key in self._entries or features.nbytes > self.limit_bytes:
            return
        deepstack = tuple(level.cpu() for level in features.deepstack)
        self._entries[key] = VisionFeatures(features.rows.cpu(), deepstack)
        self.used_bytes += features.nbytes
        while self.used_bytes > self.limit_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.used_bytes -= oldest.nbytes

    def clear(self) -> None:
        """Forget all pictures: their memory is free for others."""
        self._entries.clear()
        self.used_bytes = 0
