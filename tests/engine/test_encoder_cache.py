"""The encoder cache stays within its bytes and evicts the least recently used."""

import pytest
import torch

from vlfit.engine.execution.encoder_cache import EncoderCache
from vlfit.models.interface import VisionFeatures

CPU = torch.device("cpu")


def features(rows: int) -> VisionFeatures:
    """``rows`` rows of 8 float32: 64 bytes a row with one deepstack level."""
    return VisionFeatures(torch.zeros(rows, 8), (torch.zeros(rows, 8),))


def test_the_least_recently_used_goes_first() -> None:
    cache = EncoderCache(limit_bytes=3 * 64)
    for key in (b"a", b"b", b"c"):
        cache.put(key, features(1))
    assert cache.get(b"a", CPU) is not None
    cache.put(b"d", features(1))
    assert cache.get(b"b", CPU) is None
    assert all(cache.get(key, CPU) is not None for key in (b"a", b"c", b"d"))
    assert cache.used_bytes == 3 * 64


def test_what_is_larger_than_the_cache_is_not_kept_and_evicts_nothing() -> None:
    cache = EncoderCache(limit_bytes=3 * 64)
    cache.put(b"small", features(1))
    cache.put(b"large", features(4))
    assert cache.get(b"large", CPU) is None
    assert cache.get(b"small", CPU) is not None


@pytest.mark.gpu
def test_what_a_gpu_computed_waits_in_ram_and_comes_back_as_it_was() -> None:
    device = torch.device("cuda")
    cache = EncoderCache(limit_bytes=2**24)
    rows, level = torch.randn(2, 1000, 64, device=device)
    expected = rows.clone(), level.clone()
    cache.put(b"a", VisionFeatures(rows, (level,)))
    rows.zero_()  # what comes later does not reach it
    level.zero_()
    found = cache.get(b"a", device)
    assert found is not None
    assert torch.equal(found.rows, expected[0])
    assert torch.equal(found.deepstack[0], expected[1])
    assert all(entry.rows.device.type == "cpu" for entry in cache._entries.values())
