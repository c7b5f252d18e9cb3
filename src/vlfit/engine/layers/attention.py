"""Attention of a mixed batch over the paged KV cache: decoding sequences together, prefill chunks one by one.

Grouped-query attention throughout: ``heads / kv_heads`` queries share each key and value head. A GPU reads
the cache where it lies (``engine/kernels/attention.py``); here is what a CPU does, in plain PyTorch, on
copies of the keys and values that are looked at.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vlfit.engine.kernels.attention import BlockPlan, block_attention
from vlfit.engine.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Rows ``start`` to ``start + length`` of the batch: the newest tokens of one sequence.

    ``slots`` [past + length] are the sequence's slots up to and including these tokens. ``mask``
    [length, past + length] is true where a token may look; None when there is no past (plain causal).
    """

    start: int
    length: int
    slots: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows 0 to n of the batch: one new token of each of n sequences.

    ``slots`` [n, longest] are padded with a slot of the same sequence; ``mask`` [n, longest] is true where
    there is a token, or None when all are equally long.
    """

    slots: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Who attends to what in one forward pass. ``write_slots`` [rows]: where each row's key and value go."""

    write_slots: Tensor
    decode: DecodeGroup | None
    chunks: tuple[PrefillChunk, ...]


AttentionPlan = SlotPlan | BlockPlan


def paged_attention(query: Tensor, layer: int, cache: KVCache, plan: AttentionPlan) -> Tensor:
    """``query`` [rows, heads, head_dim] over the cache, which already holds the rows' own keys and values.

    Gives [rows, heads * head_dim].
    """
    if isinstance(plan, BlockPlan):
        return block_attention(query, cache.keys[layer], cache.values[layer], plan)
    outputs = []
    if plan.decode is not None:
        outputs.append(_decode(query[: len(plan.decode.slots)], layer, cache, plan.decode))
    for chunk in plan.chunks:
        outputs.append(_prefill(query[chunk.start : chunk.start + chunk.length], layer, cache, chunk))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.flatten(1)


def _decode(query: Tensor, layer: int, cache: KVCache, group: DecodeGroup) -> Tensor:
    """One query for each sequence: the queries that share a key head become the rows of one product."""
    keys, values = cache.read(layer, group.slots)  # [n, longest, kv_heads, head_dim]
    sequences, heads, head_dim = query.shape
    kv_heads = keys.shape[2]
    grouped = query.view(sequences, kv_heads, heads // kv_heads, head_dim) * head_dim**-0.5
    scores = grouped @ keys.permute(0, 2, 3, 1)
    if group.mask is not None:
        scores = scores.masked_fill(~group.mask[:, None, None], float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights @ values.transpose(1, 2)).view(sequences, heads, head_dim)


def _prefill(query: Tensor, layer: int, cache: KVCache, chunk: PrefillChunk) -> Tensor:
    keys, values = cache.read(layer, chunk.slots)  # [context, kv_heads, head_dim]
    mixed = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        enable_gqa=True,
    )
    return mixed[0].transpose(0, 1)
