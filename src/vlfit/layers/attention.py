"""Grouped-query attention of a mixed batch over the paged KV cache.

On a GPU by kernels that read the cache in place (``kernels/attention/paged.py``). On a CPU in plain PyTorch:
decoding sequences in one batch, prefill chunks one by one, on gathered keys and values.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vlfit import kernels
from vlfit.kernels.attention.paged import BlockAttentionMetadata, block_attention
from vlfit.kernels.cpu import row_functions as cpu_rows
from vlfit.kernels.rows.row_ops import PackedQKV, gate_rows
from vlfit.layers.gated_delta import StateSpans
from vlfit.layers.kv_cache import KVCache
from vlfit.layers.norm import rms_norm
from vlfit.layers.rope import apply_rope

FEW_QUERIES = 16  # attention of at most this many, as of drafts, is never rounded, nor are products of them


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A prefill chunk: ``length`` tokens of one sequence, from row ``start`` of the batch on.

    ``slots`` [past + length]: cache slots of the sequence's tokens up to the last of the chunk, where past is
    the number of tokens before it. ``first_slot``: ``slots[0]`` if the slots are consecutive (the cache is
    then read without a copy), else None. ``mask`` [length, past + length]: true where a row attends; None
    without a past (plain causal).
    """

    start: int
    length: int
    slots: Tensor
    mask: Tensor | None
    first_slot: int | None = None


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decoding sequences: one new token each, in the first n rows of the batch.

    ``slots`` [n, longest]: cache slots of each sequence's tokens, the new one included, padded with any slot
    of the same sequence. ``mask`` [n, longest]: false for padding; None if all sequences are equally long.
    ``first_slot``: ``slots[0, 0]`` for a single sequence with consecutive slots (the cache is then read
    without a copy), else None.
    """

    slots: Tensor
    mask: Tensor | None
    first_slot: int | None = None


@dataclass(frozen=True, slots=True)
class SlotAttentionMetadata:
    """Attention metadata of one forward pass on a CPU; ``BlockAttentionMetadata`` is the GPU's.

    ``slot_mapping`` [rows]: the cache slot that each row's key and value are stored in. ``decode``: the first
    rows, None without decoding sequences. ``chunks``: the other rows, in order. ``states``: None if no
    layer keeps a state.
    """

    slot_mapping: Tensor
    decode: DecodeGroup | None
    chunks: tuple[PrefillChunk, ...]
    states: StateSpans | None = None


AttentionMetadata = SlotAttentionMetadata | BlockAttentionMetadata


def paged_attention(packed: PackedQKV, layer: int, cache: KVCache, metadata: AttentionMetadata) -> Tensor:
    """Store keys and values of ``packed`` in ``cache``; return the attention output [rows, heads * head_dim].

    Applies QK norm and RoPE first, and the layer's sliding window. ``layer``: index of the text layer.
    """
    if isinstance(metadata, BlockAttentionMetadata):
        return block_attention(
            packed, *cache.layer(layer), metadata, cache.scales(layer), window=cache.window(layer)
        )
    query = rotate_and_store(packed, metadata.slot_mapping, layer, cache)
    return slot_attention(query, layer, cache, metadata, is_compiled=packed.is_compiled, rounds=packed.rounds)


def gate_output(attended: Tensor, gate: Tensor) -> Tensor:
    """Multiply attention's output ``attended`` [rows, heads * head_dim] by sigmoid(``gate``), in place.

    ``gate`` [rows, heads, head_dim], perhaps strided. Returns ``attended``.
    """
    if kernels.enabled_for("attention", attended.device):
        return gate_rows(attended, gate)
    return attended.mul_(gate.sigmoid().flatten(1))


def rotate_and_store(packed: PackedQKV, slots: Tensor, layer: int, cache: KVCache) -> Tensor:
    """Apply QK norm and RoPE; store keys and values in ``slots`` [rows]; return the queries.

    Queries are [rows, heads, head_dim]. ``layer``: index of the text layer. For CPUs.
    """
    keys, values = cache.layer(layer)
    key_heads = keys.shape[1]
    if packed.is_compiled:
        tables, wide = (packed.cos, packed.sin), keys.dtype == torch.float32
        place = (slots, keys, values) if wide else None
        query, key = cpu_rows.rotate(packed.qkv, packed.norm_weight, tables, packed.eps, key_heads, place)
        if key is not None:
            cache.write(layer, slots, key, packed.qkv[:, -key_heads:])
        return query
    both = packed.qkv[:, :-key_heads]
    if packed.norm_weight is not None:
        both = rms_norm(both, packed.norm_weight, packed.eps)
    rotated = apply_rope(both, packed.cos, packed.sin)
    query, key = rotated[:, :-key_heads], rotated[:, -key_heads:]
    cache.write(layer, slots, key, packed.qkv[:, -key_heads:])
    return query


def slot_attention(
    query: Tensor,
    layer: int,
    cache: KVCache,
    metadata: SlotAttentionMetadata,
    *,
    is_compiled: bool = False,
    rounds: bool = False,
) -> Tensor:
    """Attention output [rows, heads * head_dim] of ``query`` [rows, heads, head_dim] over the cache.

    The rows' own keys and values must be stored already (``rotate_and_store``). ``layer``: index of the text
    layer. For CPUs. ``is_compiled``: decoding sequences by ``kernels/cpu/row_functions.py``, if that takes
    their cache. ``rounds``: prompts in bfloat16, if the processor has units for it.
    """
    outputs = []
    if metadata.decode is not None:
        decode = _decode_compiled if is_compiled else _decode
        outputs.append(decode(query[: len(metadata.decode.slots)], layer, cache, metadata.decode))
    for chunk in metadata.chunks:
        of_chunk = query[chunk.start : chunk.start + chunk.length]
        outputs.append(_prefill(of_chunk, layer, cache, chunk, rounds=rounds))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.flatten(1)


def _decode(query: Tensor, layer: int, cache: KVCache, group: DecodeGroup) -> Tensor:
    """Decode attention: the query heads that share a KV head are the rows of one matrix product."""
    group = _windowed_group(group, cache.window(layer))
    keys, values = cache.read(layer, group.slots, group.first_slot)  # [n, longest, kv_heads, head_dim]
    sequences, heads, head_dim = query.shape
    kv_heads = keys.shape[2]
    mixed = F.scaled_dot_product_attention(
        query.view(sequences, kv_heads, heads // kv_heads, head_dim),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=None if group.mask is None else group.mask[:, None, None],
    )
    return mixed.reshape(sequences, heads, head_dim)


def _decode_compiled(query: Tensor, layer: int, cache: KVCache, group: DecodeGroup) -> Tensor:
    """``_decode`` by ``kernels/cpu/row_functions.py``, if that takes the cache."""
    keys, values = cache.layer(layer)
    if not cpu_rows.takes_attention(query.shape[-1], keys):
        return _decode(query, layer, cache, group)
    slots, lengths = group.slots, token_counts(group)
    window = cache.window(layer)
    if window is not None and window < slots.shape[1]:
        starts = (lengths - window).clamp_min(0)
        columns = (starts[:, None] + torch.arange(window)).clamp_max(slots.shape[1] - 1)
        slots, lengths = slots.gather(1, columns), lengths - starts
    return cpu_rows.decode_attention(query, keys, values, slots, lengths)


def token_counts(group: DecodeGroup) -> Tensor:
    """How many slots of each sequence of ``group`` are no padding: [n] int64."""
    if group.mask is not None:
        return group.mask.sum(1)
    return torch.full((len(group.slots),), group.slots.shape[1])


def _windowed_group(group: DecodeGroup, window: int | None) -> DecodeGroup:
    """``group`` limited to the last ``window`` tokens of each sequence."""
    longest = group.slots.shape[1]
    if window is None or window >= longest:
        return group
    if group.mask is None:
        first = None if group.first_slot is None else group.first_slot + longest - window
        return DecodeGroup(group.slots[:, longest - window :], None, first)
    lengths = group.mask.sum(1, keepdim=True)
    inside = torch.arange(longest, device=lengths.device) >= lengths - window
    return DecodeGroup(group.slots, group.mask & inside, group.first_slot)


def _prefill(query: Tensor, layer: int, cache: KVCache, chunk: PrefillChunk, *, rounds: bool) -> Tensor:
    whole, chunk = chunk, _windowed_chunk(chunk, cache.window(layer))
    keys, values = cache.read(layer, chunk.slots, chunk.first_slot)  # [context, kv_heads, head_dim]
    if (
        chunk is whole
        and rounds
        and len(query) > FEW_QUERIES
        and cpu_rows.takes_many_queries(query.shape[-1])
    ):
        return cpu_rows.attend_in_bf16(query, keys, values, len(chunk.slots) - chunk.length)
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
    """``chunk`` with a sliding-window mask, without the slots that no token of it attends to."""
    total = len(chunk.slots)
    if window is None or window >= total:
        return chunk
    past = total - chunk.length
    begin = max(past + 1 - window, 0)
    columns = torch.arange(begin, total, device=chunk.slots.device)
    rows = torch.arange(past, total, device=chunk.slots.device)[:, None]
    mask = (columns <= rows) & (columns > rows - window)
    first = None if chunk.first_slot is None else chunk.first_slot + begin
    return PrefillChunk(chunk.start, chunk.length, chunk.slots[begin:], mask, first)
