"""Block tables, slots, and what is written is read back from where the table says."""

import pytest
import torch

from tests.engine.shapes import TEXT
from vlfit.engine.scheduling.block_manager import BlockManager
from vlfit.layers.kv_cache import KVCache, dequantize_kv_rows, quantize_kv_rows, slots_of_blocks

CPU = torch.device("cpu")


def test_blocks_are_rounded_up_and_never_handed_out_twice() -> None:
    pool = BlockManager(tokens=81, block_size=16)
    assert [pool.blocks_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
    first, second = pool.allocate(2), pool.allocate(4)
    assert sorted(first + second) == list(range(6))
    assert pool.num_free == 0
    pool.free(first)
    assert sorted(pool.allocate(2)) == sorted(first)


def test_blocks_allocated_together_are_in_order() -> None:
    pool = BlockManager(tokens=16 * 8, block_size=16)
    first, second = pool.allocate(4), pool.allocate(4)
    pool.free(second, cached=second)  # what may be wanted again is handed out as late as can be
    pool.free(first, cached=first)
    assert [pool.allocate(4), pool.allocate(4)] == [second, first] == [[4, 5, 6, 7], [0, 1, 2, 3]]


def test_slots_follow_the_block_table() -> None:
    assert slots_of_blocks([3, 0], 4).tolist() == [12, 13, 14, 15, 0, 1, 2, 3]


def test_read_returns_what_was_written() -> None:
    cache = KVCache(TEXT.cache_spec, blocks=4, block_size=4, dtype=torch.float32, device=torch.device("cpu"))
    slots = slots_of_blocks([2, 1], 4)
    keys = torch.randn(8, TEXT.num_key_value_heads, TEXT.head_dim)
    cache.write(1, slots, keys, -keys)
    read_keys, read_values = cache.read(1, slots.view(2, 4))
    assert torch.equal(read_keys.flatten(0, 1), keys)
    assert torch.equal(read_values.flatten(0, 1), -keys)


def test_bytes_equal_the_formula() -> None:
    cache = KVCache(TEXT.cache_spec, blocks=4, block_size=4, dtype=torch.bfloat16, device=torch.device("cpu"))
    per_token = 2 * TEXT.num_hidden_layers * TEXT.num_key_value_heads * TEXT.head_dim * 2
    assert cache.nbytes == 16 * per_token


def test_bytes_in_fp8() -> None:
    cache = KVCache(TEXT.cache_spec, blocks=4, block_size=4, dtype=torch.bfloat16, device=CPU, fp8=True)
    per_token = 2 * TEXT.num_hidden_layers * TEXT.num_key_value_heads * (TEXT.head_dim + 2)
    assert cache.nbytes == 16 * per_token
    assert cache.block_bytes == 4 * per_token
    assert sum(len(part.untyped_storage()) for part in (cache.keys, cache.values)) == cache.nbytes


@pytest.mark.parametrize("first", [None, 4])
def test_fp8_rows_are_rounded_once(first: int | None) -> None:
    torch.manual_seed(0)
    cache = KVCache(TEXT.cache_spec, blocks=4, block_size=4, dtype=torch.float32, device=CPU, fp8=True)
    slots = slots_of_blocks([1, 2] if first else [2, 1], 4)
    keys = torch.randn(8, TEXT.num_key_value_heads, TEXT.head_dim)
    cache.write(1, slots, keys, 9 * keys)
    found = cache.read(1, slots, first)
    for rows, exact in zip(found, (keys, 9 * keys), strict=True):
        assert torch.equal(rows, dequantize_kv_rows(*quantize_kv_rows(exact), torch.float32))


@pytest.mark.parametrize("narrow", [False, True])
def test_resize_keeps_blocks(narrow: bool) -> None:
    """Keys, values and, in FP8, their scales: what is kept reads as before wherever it lies."""
    torch.manual_seed(0)
    cache = KVCache(TEXT.cache_spec, blocks=5, block_size=4, dtype=torch.float32, device=CPU, fp8=narrow)
    sizes = torch.arange(1.0, 21)[:, None, None]
    for layer in range(TEXT.num_hidden_layers):
        new = torch.randn(20, TEXT.num_key_value_heads, TEXT.head_dim) * sizes * (layer + 1)
        cache.write(layer, torch.arange(20), new, -new)
    before = [cache.read(layer, slots_of_blocks([3, 1], 4)) for layer in range(TEXT.num_hidden_layers)]
    cache.copy_block(3, 4, 4)
    cache.resize(2, {4: 1, 1: 0}, lambda: None)
    assert cache.nbytes == 2 * cache.block_bytes
    for layer, known in enumerate(before):
        for now, then in zip(cache.read(layer, slots_of_blocks([1, 0], 4)), known, strict=True):
            assert torch.equal(now, then)
    cache.resize(0, {}, lambda: None)
    assert cache.nbytes == 0 != cache.block_bytes


def test_copy_block_copies_the_first_tokens_only() -> None:
    cache = KVCache(TEXT.cache_spec, blocks=3, block_size=4, dtype=torch.float32, device=torch.device("cpu"))
    cache.keys.copy_(torch.randn(cache.keys.shape))
    cache.values.copy_(torch.randn(cache.values.shape))
    keys, values = cache.keys.clone(), cache.values.clone()
    cache.copy_block(2, 0, 3)
    cache.copy_block(1, 1, 4)
    for now, before in ((cache.keys, keys), (cache.values, values)):
        assert torch.equal(now[:, :3], before[:, 8:11])
        assert torch.equal(now[:, 3:], before[:, 3:])
