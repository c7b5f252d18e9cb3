"""The cache of encoded pictures stays under its bytes and forgets the least recently used."""

import torch

from vlfit.engine.image_cache import ImageCache
from vlfit.engine.qwen3_vl.vision import VisionFeatures


def features(rows: int) -> VisionFeatures:
    """``rows`` rows of 8 float32: 64 bytes a row with one deepstack level."""
    return VisionFeatures(torch.zeros(rows, 8), (torch.zeros(rows, 8),))


def test_the_least_recently_used_goes_first() -> None:
    cache = ImageCache(limit_bytes=3 * 64)
    for key in (b"a", b"b", b"c"):
        cache.put(key, features(1))
    assert cache.get(b"a") is not None
    cache.put(b"d", features(1))
    assert cache.get(b"b") is None
    assert all(cache.get(key) is not None for key in (b"a", b"c", b"d"))
    assert cache.used_bytes == 3 * 64


def test_what_is_larger_than_the_cache_is_not_kept_and_evicts_nothing() -> None:
    cache = ImageCache(limit_bytes=3 * 64)
    cache.put(b"small", features(1))
    cache.put(b"large", features(4))
    assert cache.get(b"large") is None
    assert cache.get(b"small") is not None
