"""Sliding-window attention over the paged cache on a CPU, against masked attention."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.engine.shapes import TEXT
from tests.layers.test_attention import mixed_batch
from vlfit.layers.attention import DecodeGroup, SlotAttentionMetadata, slot_attention
from vlfit.layers.kv_cache import KVCache, slots_of_blocks

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM = TEXT.num_attention_heads, TEXT.num_key_value_heads, TEXT.head_dim


def windowed(query: Tensor, keys: Tensor, values: Tensor, window: int) -> Tensor:
    """The newest ``len(query)`` tokens of a sequence, each over the last ``window`` up to itself."""
    repeats = HEADS // KV_HEADS
    keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    total = len(keys)
    row = torch.arange(total - len(query), total)[:, None]
    column = torch.arange(total)
    mask = (column <= row) & (column > row - window)
    mixed = F.scaled_dot_product_attention(
        query.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), attn_mask=mask
    )
    return mixed.transpose(0, 1).flatten(1)


@pytest.mark.parametrize("window", [1, 3, 4, 8, 11, 50])
def test_a_mixed_batch_on_a_cpu(window: int) -> None:
    torch.manual_seed(0)
    spec = replace(TEXT, sliding_windows=(None, window, None)).cache_spec
    cache = KVCache(spec, blocks=12, block_size=4, dtype=torch.float32, device=CPU)
    queries, keys, values, plan = mixed_batch(cache)
    mixed = slot_attention(torch.cat(list(queries.values())), 1, cache, plan)
    expected = torch.cat([windowed(queries[name], keys[name], values[name], window) for name in queries])
    torch.testing.assert_close(mixed, expected)


@pytest.mark.parametrize("first", [None, 16])
def test_a_single_sequence_reads_only_its_window(first: int | None) -> None:
    torch.manual_seed(0)
    spec = replace(TEXT, sliding_windows=(None, 4, None)).cache_spec
    cache = KVCache(spec, blocks=8, block_size=4, dtype=torch.float32, device=CPU)
    cache.keys.fill_(torch.nan)  # tokens outside the window are never written
    cache.values.fill_(torch.nan)
    slots = slots_of_blocks([4, 5, 6], 4)[:10]
    keys, values = (torch.randn(10, KV_HEADS, HEAD_DIM) for _ in range(2))
    cache.write(1, slots[6:], keys[6:], values[6:])
    query = torch.randn(1, HEADS, HEAD_DIM)
    plan = SlotAttentionMetadata(slots[9:], DecodeGroup(slots[None], None, first), ())
    expected = windowed(query, keys, values, 4)
    torch.testing.assert_close(slot_attention(query, 1, cache, plan), expected)


def test_a_window_longer_than_the_context_is_dropped() -> None:
    spec = replace(TEXT, max_position_embeddings=64, sliding_windows=(None, 64, 63)).cache_spec
    assert [layer.window for layer in spec] == [None, None, 63]  # type: ignore[union-attr]
