"""Paged attention against plain attention over each sequence's own tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.engine.shapes import TEXT
from vlfit import kernels
from vlfit.api.sampling_params import SamplingParams
from vlfit.engine.execution.model_runner import AttentionMetadataBuilder
from vlfit.engine.sampling.output_processor import Completion
from vlfit.engine.scheduling.sequence import PreparedPrompt, ScheduledChunk, Sequence
from vlfit.kernels.attention.paged import BlockAttentionMetadata
from vlfit.layers.attention import DecodeGroup, PrefillChunk, SlotAttentionMetadata, slot_attention
from vlfit.layers.kv_cache import KVCache, slots_of_blocks
from vlfit.models.cache_spec import Paged

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM = TEXT.num_attention_heads, TEXT.num_key_value_heads, TEXT.head_dim


def dense(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The newest ``len(query)`` tokens over all tokens of one sequence, causal: [new, heads * head_dim]."""
    repeats = HEADS // KV_HEADS
    keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    mask = torch.ones(len(query), len(keys), dtype=torch.bool).tril(len(keys) - len(query))
    mixed = F.scaled_dot_product_attention(
        query.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), attn_mask=mask
    )
    return mixed.transpose(0, 1).flatten(1)


def mixed_batch(
    cache: KVCache,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], SlotAttentionMetadata]:
    """Queries, keys and values of four sequences, two of which decode, written to layer 1 of ``cache``."""
    cache.keys.fill_(torch.nan)  # whatever is read without having been written shows
    cache.values.fill_(torch.nan)
    tables = {"short": [7], "long": [3, 9, 1], "fresh": [0, 5], "later": [8, 2, 10]}
    lengths = {"short": 3, "long": 11, "fresh": 6, "later": 9}
    new = {"short": 1, "long": 1, "fresh": 6, "later": 4}
    slots = {name: slots_of_blocks(table, 4)[: lengths[name]] for name, table in tables.items()}
    keys = {name: torch.randn(lengths[name], KV_HEADS, HEAD_DIM) for name in tables}
    values = {name: torch.randn(lengths[name], KV_HEADS, HEAD_DIM) for name in tables}
    queries = {name: torch.randn(new[name], HEADS, HEAD_DIM) for name in tables}
    for name in tables:
        cache.write(1, slots[name], keys[name], values[name])
    short_padded = torch.cat([slots["short"], slots["short"][-1:].expand(8)])
    decode_mask = torch.arange(11) < torch.tensor([[3], [11]])
    later_mask = torch.arange(9) <= torch.arange(5, 9)[:, None]
    plan = SlotAttentionMetadata(
        torch.empty(0, dtype=torch.long),
        DecodeGroup(torch.stack([short_padded, slots["long"]]), decode_mask),
        (PrefillChunk(2, 6, slots["fresh"], None), PrefillChunk(8, 4, slots["later"], later_mask)),
    )
    return queries, keys, values, plan


def test_a_mixed_batch_equals_each_sequence_alone() -> None:
    torch.manual_seed(0)
    cache = KVCache(TEXT.cache_spec, blocks=12, block_size=4, dtype=torch.float32, device=CPU)
    queries, keys, values, plan = mixed_batch(cache)
    mixed = slot_attention(torch.cat(list(queries.values())), 1, cache, plan)
    expected = torch.cat([dense(queries[name], keys[name], values[name]) for name in queries])
    torch.testing.assert_close(mixed, expected)


@pytest.mark.parametrize("past", [0, 12, 20, 40])
def test_rounding_keeps_a_window(past: int) -> None:
    """A window that no slot is left out for, too: each row still attends to its own part."""
    torch.manual_seed(past)
    window, new = 16, 24
    spec = tuple(replace(layer, window=window) for layer in TEXT.cache_spec if isinstance(layer, Paged))
    cache = KVCache(spec, blocks=20, block_size=4, dtype=torch.float32, device=CPU)
    total = past + new
    slots = slots_of_blocks(list(range(20)), 4)[:total]
    keys, values = (torch.randn(total, KV_HEADS, HEAD_DIM) for _ in range(2))
    cache.write(1, slots, keys, values)
    query = torch.randn(new, HEADS, HEAD_DIM)
    causal = None if past == 0 else torch.arange(total) <= torch.arange(past, total)[:, None]
    plan = SlotAttentionMetadata(
        torch.empty(0, dtype=torch.long), None, (PrefillChunk(0, new, slots, causal),)
    )
    exact, rounded = (slot_attention(query, 1, cache, plan, rounds=rounds) for rounds in (False, True))
    torch.testing.assert_close(rounded, exact, atol=0.03, rtol=0)


@pytest.mark.parametrize("table", [[4, 5, 6], [4, 6, 5]], ids=["one run", "scattered"])
def test_consecutive_blocks_of_one_sequence_are_read_as_a_view(table: list[int]) -> None:
    torch.manual_seed(0)
    cache = KVCache(TEXT.cache_spec, blocks=8, block_size=4, dtype=torch.float32, device=CPU)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    slots = slots_of_blocks(table, 4)[:10]
    keys, values = (torch.randn(10, KV_HEADS, HEAD_DIM) for _ in range(2))
    cache.write(1, slots, keys, values)
    prompt = PreparedPrompt(np.zeros(9, np.int64), np.zeros(0, np.int64), np.zeros((3, 9), np.int64), 9, ())
    completion = Completion(None, SamplingParams(), frozenset(), 8)  # type: ignore[arg-type]
    sequence = Sequence(prompt, SamplingParams(), 8, completion, lambda _: None, 0.0)
    sequence.block_table, sequence.slot_mapping = table, slots_of_blocks(table, 4)
    for cached, new in ((9, 1), (5, 4), (0, 9)):
        sequence.num_cached_tokens, sequence.generated = cached, [0] if cached == 9 else []
        plan = AttentionMetadataBuilder(4, CPU).build([ScheduledChunk(sequence, new)])
        assert isinstance(plan, SlotAttentionMetadata)
        parts = [plan.decode] if plan.decode else list(plan.chunks)
        assert [part.first_slot for part in parts] == [16 if table == [4, 5, 6] else None]
        query = torch.randn(new, HEADS, HEAD_DIM)
        seen = cached + new
        expected = dense(query, keys[:seen], values[:seen])
        torch.testing.assert_close(slot_attention(query, 1, cache, plan), expected)


def test_metadata_follow_a_table_that_grows_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table on the device is reused while it is the same, and no longer."""
    monkeypatch.setattr(kernels, "enabled_on", lambda device: True)
    prompt = PreparedPrompt(np.zeros(4, np.int64), np.zeros(0, np.int64), np.zeros((3, 4), np.int64), 4, ())
    completion = Completion(None, SamplingParams(), frozenset(), 8)  # type: ignore[arg-type]
    sequence = Sequence(prompt, SamplingParams(), 8, completion, lambda _: None, 0.0)
    sequence.block_table, sequence.generated = [3, 1], [0]
    builder = AttentionMetadataBuilder(4, CPU)
    before = None
    for cached, table in ((6, [3, 1]), (7, [3, 1]), (8, [3, 1, 5])):
        sequence.block_table += table[len(sequence.block_table) :]
        sequence.num_cached_tokens = cached
        sequence.slot_mapping = slots_of_blocks(table, 4)
        plan = builder.build([ScheduledChunk(sequence, 1)])
        assert isinstance(plan, BlockAttentionMetadata)
        assert plan.block_tables.tolist() == [table]
        assert (plan.block_tables is before) is (cached == 7)
        before = plan.block_tables
