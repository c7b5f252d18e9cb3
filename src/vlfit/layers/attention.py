"""Attention of a mixed batch over the paged KV cache: decoding sequences together, prefill chunks one by one.

Grouped-query attention throughout: ``heads / kv_heads`` queries share each key and value head. A GPU reads
the cache where it lies (``kernels/attention/paged.py``); here is what a CPU does, in plain PyTorch, on
copies of the keys and values that are looked at unless they lie together.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vlfit.kernels.attention.paged import BlockPlan, attend
from vlfit.kernels.rows.row_ops import Fresh
from vlfit.layers.kv_cache import KVCache
from vlfit.layers.norm import rms_norm
from vlfit.layers.rope import rotate


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Rows ``start`` to ``start + length`` of the batch: the newest tokens of one sequence.

    ``slots`` [past + length] are the sequence's slots up to and including these tokens; ``first`` is the
    first of them if they follow each other. ``mask`` [length, past + length] is true where a token may look;
    None when there is no past (plain causal).
    """

    start: int
    length: int
    slots: Tensor
    mask: Tensor | None
    first: int | None = None


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows 0 to n of the batch: one new token of each of n sequences.

    ``slots`` [n, longest] are padded with a slot of the same sequence; ``mask`` [n, longest] is true where
    there is a token, or None when all are equally long. ``first``: of a single sequence, the first of its
    slots if they follow each other.
    """

    slots: Tensor
    mask: Tensor | None
    first: int | None = None


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Who attends to what in one forward pass. ``write_slots`` [rows]: where each row's key and value go."""

    write_slots: Tensor
    decode: DecodeGroup | None
    chunks: tuple[PrefillChunk, ...]


AttentionPlan = SlotPlan | BlockPlan


def paged_attention(fresh: Fresh, layer: int, cache: KVCache, plan: AttentionPlan) -> Tensor:
    """What the queries of ``fresh`` find in the cache, to which its keys and values are added.

    Gives [rows, heads * head_dim].
    """
    if isinstance(plan, BlockPlan):
        return attend(fresh, cache.keys[layer], cache.values[layer], plan, cache.scales(layer))
    query = rotate_and_store(fresh, plan.write_slots, layer, cache)
    return slot_attention(query, layer, cache, plan)


def rotate_and_store(fresh: Fresh, slots: Tensor, layer: int, cache: KVCache) -> Tensor:
    """Queries [rows, heads, head_dim] of ``fresh``; its keys and values go to ``slots`` of ``cache``."""
    key_heads = cache.keys.shape[2]
    both = fresh.joined[:, :-key_heads]
    if fresh.norm_weight is not None:
        both = rms_norm(both, fresh.norm_weight, fresh.eps)
    turned = rotate(both, fresh.cosines, fresh.sines)
    query, key = turned[:, :-key_heads], turned[:, -key_heads:]
    cache.write(layer, slots, key, fresh.joined[:, -key_heads:])
    return query


def slot_attention(query: Tensor, layer: int, cache: KVCache, plan: SlotPlan) -> Tensor:
    """``query`` [rows, heads, head_dim] over the cache, which already holds the rows' own keys and values."""
    outputs = []
    if plan.decode is not None:
        outputs.append(_decode(query[: len(plan.decode.slots)], layer, cache, plan.decode))
    for chunk in plan.chunks:
        outputs.append(_prefill(query[chunk.start : chunk.start + chunk.length], layer, cache, chunk))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.flatten(1)


def _decode(query: Tensor, layer: int, cache: KVCache, group: DecodeGroup) -> Tensor:
    """One query for each sequence: the queries that share a key head become the rows of one product."""
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


def _prefill(query: Tensor, layer: int, cache: KVCache, chunk: PrefillChunk) -> Tensor:
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
