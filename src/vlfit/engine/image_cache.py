"""Features of pictures seen before, by content: the same picture is encoded once. Bounded by bytes."""

from collections import OrderedDict

from vlfit.engine.qwen3_vl.vision import VisionFeatures


class ImageCache:
    """Least recently used goes first. A picture larger than the whole cache is not kept."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._entries: OrderedDict[bytes, VisionFeatures] = OrderedDict()

    def get(self, key: bytes) -> VisionFeatures | None:
        features = self._entries.get(key)
        if features is not None:
            self._entries.move_to_end(key)
        return features

    def put(self, key: bytes, features: VisionFeatures) -> None:
        if key in self._entries or features.nbytes > self.limit_bytes:
            return
        self._entries[key] = features
        self.used_bytes += features.nbytes
        while self.used_bytes > self.limit_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.used_bytes -= oldest.nbytes

    def clear(self) -> None:
        """Forget all pictures: their memory is free for others."""
        self._entries.clear()
        self.used_bytes = 0
