"""Grouped-query attention of a mixed batch over the paged KV cache.

On a GPU by kernels that read the cache in place (``kernels/attention/paged.py``). On a CPU in plain PyTorch:
decoding sequences in one batch, prefill chunks one by one, on gathered keys and values.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vlfit.kernels.attention.paged import BlockAttentionMetadata, block_attention
from vlfit.kernels.rows.row_ops import PackedQKV
from vlfit.layers.kv_cache import KVCache
from vlfit.layers.norm import rms_norm
from vlfit.layers.rope import apply_rope


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Rows ``start`` to ``start + length`` of the batch: the newest tokens of one sequence.

    ``slots`` [past + length]: of the sequence up to and including these tokens; ``first``: the first of them
    if they are consecutive. ``mask`` [length, past + length]: true where a row attends; None without a past
    (plain causal).
    """

    start: int
    length: int
    slots: Tensor
    mask: Tensor | None
    first: int | None = None


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows 0 to n of the batch: one new token of each of n sequences.

    ``slots`` [n, longest], padded with a slot of the same sequence; ``mask`` [n, longest]: true where there
    is a token, None if all are equally long. ``first``: of a single sequence with consecutive slots, the
    first of them.
    """

    slots: Tensor
    mask: Tensor | None
    first: int | None = None


@dataclass(frozen=True, slots=True)
class SlotAttentionMetadata:
    """Attention metadata of one forward pass, by slots. ``slot_mapping`` [rows]: where keys and values go."""

    slot_mapping: Tensor
    decode: DecodeGroup | None
    chunks: tuple[PrefillChunk, ...]


AttentionMetadata = SlotAttentionMetadata | BlockAttentionMetadata


def paged_attention(packed: PackedQKV, layer: int, cache: KVCache, plan: AttentionMetadata) -> Tensor:
    """Attention output [rows, heads * head_dim]. Stores the keys and values of ``packed`` in ``cache``."""
    if isinstance(plan, BlockAttentionMetadata):
        return block_attention(
            packed, *cache.layer(layer), plan, cache.scales(layer), window=cache.window(layer)
        )
    query = rotate_and_store(packed, plan.slot_mapping, layer, cache)
    return slot_attention(query, layer, cache, plan)


def rotate_and_store(packed: PackedQKV, slots: Tensor, layer: int, cache: KVCache) -> Tensor:
    """Normalized, rotated queries [rows, heads, head_dim]; stores keys and values in ``slots``."""
    key_heads = cache.layer(layer)[0].shape[1]
    both = packed.qkv[:, :-key_heads]
    if packed.norm_weight is not None:
        both = rms_norm(both, packed.norm_weight, packed.eps)
    rotated = apply_rope(both, packed.cos, packed.sin)
    query, key = rotated[:, :-key_heads], rotated[:, -key_heads:]
    cache.write(layer, slots, key, packed.qkv[:, -key_heads:])
    return query


def slot_attention(query: Tensor, layer: int, cache: KVCache, plan: SlotAttentionMetadata) -> Tensor:
    """Attention of ``query`` [rows, heads, head_dim] to the cache, which already holds the rows' own keys."""
    outputs = []
    if plan.decode is not None:
        outputs.append(_decode(query[: len(plan.decode.slots)], layer, cache, plan.decode))
    for chunk in plan.chunks:
        outputs.append(_prefill(query[chunk.start : chunk.start + chunk.length], layer, cache, chunk))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.flatten(1)


def _decode(query: Tensor, layer: int, cache: KVCache, group: DecodeGroup) -> Tensor:
    """One query per sequence: the queries that share a key head become the rows of one product."""
    group = _windowed_group(group, cache.window(layer))
    keys, values = cache.read(layer, group.slots, group.first)  # [n, longest, kv_heads, head_dim]
    sequences, heads, head_dim = query.shape
    kv_heads = keys.shape[2]
    mixed = F.scaled_dot_product_attention(
        query.view(sequences, kv_heads, heads // kv_heads, head_dim),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=None if group.mask is None else group.mask[:, None, None],
    )
    return mixed.reshape(sequences, heads, head_dim)


def _windowed_group(group: DecodeGroup, window: int | None) -> DecodeGroup:
    """Only the last ``window`` tokens of each sequence."""
    longest = group.slots.shape[1]
    if window is None or window >= longest:
        return group
    if group.mask is None:
        first = None if group.first is None else group.first + longest - window
        return DecodeGroup(group.slots[:, longest - window :], None, first)
    lengths = group.mask.sum(1, keepdim=True)
    inside = torch.arange(longest, device=lengths.device) >= lengths - window
    return DecodeGroup(group.slots, group.mask & inside, group.first)


def _prefill(query: Tensor, layer: int, cache: KVCache, chunk: PrefillChunk) -> Tensor:
    chunk = _windowed_chunk(chunk, cache.window(layer))
    keys, values = cache.read(layer, chunk.slots, chunk.first)  # [context, kv_heads, head_dim]
    mixed = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        enable_gqa=True,
    )
    return mixed[0].transpose(0, 1)


def _windowed_chunk(chunk: PrefillChunk, window: int | None) -> PrefillChunk:
    """``chunk`` without the slots that none of its tokens attends to, each token limited to ``window``."""
    total = len(chunk.slots)
    if window is None or window >= total:
        return chunk
    past = total - chunk.length
    begin = max(past + 1 - window, 0)
    columns = torch.arange(begin, total, device=chunk.slots.device)
    rows = torch.arange(past, total, device=chunk.slots.device)[:, None]
    mask = (columns <= rows) & (columns > rows - window)
    first = None if chunk.first is None else chunk.first + begin
    return PrefillChunk(chunk.start, chunk.length, chunk.slots[begin:], mask, first)
