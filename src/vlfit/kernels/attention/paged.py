"""Attention over the paged KV cache in place: nothing is gathered, no scores are stored.

Chooses tile sizes and splits, allocates outputs and launches the decode and prefill kernels.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vlfit.kernels.gemm.quantized import has_inline_ptx, has_native_fp8
from vlfit.kernels.launch import next_power_of_2, pdl_options, tile_counters
from vlfit.kernels.rows.row_ops import PackedQKV, rope_store_kv
from vlfit.kernels.target import TargetCard, card_of, launches_on
from vlfit.layers.gated_delta import StateSpans
from vlfit.plan.native.cost import MOST_IN_SMALL_TILES, num_decode_splits
from vlfit.plan.native.tiles import shared_memory

ROW, TOKENS, PAST = 0, 1, 2  # columns of ``BlockAttentionMetadata.query_spans``
_WIDE_HEAD = 128  # head_dim above which tiles are smaller
_SHARED_BESIDE = 1024 + 128  # bytes of shared memory of each program: the driver's, and of its warps


@dataclass(frozen=True, slots=True)
class BlockAttentionMetadata:
    """Attention metadata of one forward pass on a GPU: rows and KV cache blocks of each sequence.

    ``slot_mapping`` [rows]: cache slot of each row's key and value, negative to store nothing.
    ``block_tables`` [sequences, blocks] int32, padded with zeros; ``block_size``: tokens per block.
    ``query_spans`` [sequences, 3] int32: first row, number of new tokens, number of past tokens. The first
    ``num_decodes`` sequences have one new token each, the others are prefill chunks; ``max_query_len``:
    length in tokens of the longest chunk, 0 if there is none.

    ``no_store_slots`` [rows], all negative: for verifying draft tokens, where each row is its own decode
    sequence but some are consecutive tokens of the same one. Keys and values are then stored before any row
    attends, and the past in ``query_spans`` includes the row's own token. None otherwise.

    ``states``: None if no layer keeps a state.
    """

    slot_mapping: Tensor
    block_tables: Tensor
    query_spans: Tensor
    block_size: int
    num_decodes: int
    max_query_len: int
    no_store_slots: Tensor | None = None
    states: StateSpans | None = None


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Tile of one program: ``rows`` of queries, which attend to cached ``tokens`` per step.

    ``rows`` is for prefill only: the decode kernel takes the query heads of one KV head. ``warps`` and
    pipeline ``stages`` of the program. ``most_resident``: programs of decoding whose registers a
    multiprocessor holds; for prefill it means nothing.
    """

    rows: int
    tokens: int
    warps: int
    stages: int
    most_resident: int = 4


def decode_tiles(
    dtype: torch.dtype, head_dim: int, sequences: int, *, fp8_kv: bool, few: bool = False
) -> AttentionTiles:
    """The decode kernel's default tile for queries of ``dtype``; ``fp8_kv``: the cache has FP8 codes.

    Wide heads take half the tokens, unless they are codes: a program's keys and values fit 99 KiB of shared
    memory. Programs of one sequence are few and have more warps; those of several ``sequences`` would then
    not all run at once. On ``few`` multiprocessors three to eight sequences have half a tile and one warp
    (wide heads two), so that less waits for each other.
    """
    several = few and 2 < sequences <= MOST_IN_SMALL_TILES
    if dtype == torch.float32:
        return AttentionTiles(16, 16 if head_dim > _WIDE_HEAD else 32, 4, 2, most_resident=2)
    if head_dim > _WIDE_HEAD:
        if fp8_kv:
            return AttentionTiles(16, 64, 8, 2, most_resident=1)
        return AttentionTiles(16, 16, 2, 2) if several else AttentionTiles(16, 32, 4, 2, most_resident=2)
    if several:
        return AttentionTiles(16, 32, 1, 3, most_resident=8)
    return AttentionTiles(16, 64, 4, 2, most_resident=3) if sequences == 1 else AttentionTiles(16, 64, 2, 2)


def resident_programs(
    card: TargetCard, tiles: AttentionTiles, head_dim: int, *, fp8_kv: bool, item_size: int = 2
) -> int:
    """Programs of the decode kernel that ``card`` runs at once.

    By registers and shared memory of its multiprocessors: each program has a tile of keys and one of values,
    with ``fp8_kv`` also as codes. ``item_size``: bytes of an element of the queries.
    """
    width = max(next_power_of_2(head_dim), 16)
    shared = 2 * tiles.tokens * width * (item_size + fp8_kv) + (0 if fp8_kv else tiles.tokens * 32)
    held = shared_memory(card.capability) // (shared + _SHARED_BESIDE)
    return card.multiprocessors * max(min(tiles.most_resident, held), 1)


def prefill_tiles(dtype: torch.dtype, head_dim: int, *, fp8_kv: bool) -> AttentionTiles:
    """The prefill kernel's default tile for queries of ``dtype``; ``fp8_kv``: the cache has FP8 codes.

    For wide heads it is chosen by registers, too: two stages of codes do not fit them.
    """
    if head_dim > _WIDE_HEAD:
        if dtype == torch.float32:
            return AttentionTiles(16, 16, 4, 1)
        return AttentionTiles(64, 64, 8, 1) if fp8_kv else AttentionTiles(64, 32, 8, 2)
    return AttentionTiles(32, 32, 4, 2) if dtype == torch.float32 else AttentionTiles(64, 64, 4, 2)


def block_attention(
    qkv: PackedQKV,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: BlockAttentionMetadata,
    kv_scales: tuple[Tensor, Tensor] | None = None,
    *,
    window: int | None = None,
    splits: int | None = None,
    tiles: AttentionTiles | None = None,
) -> Tensor:
    """Store the keys and values of ``qkv`` in the cache; return attention's output [rows, heads * head_dim].

    Applies QK norm and RoPE first. ``k_cache`` and ``v_cache`` [slots, kv_heads, head_dim] belong to one
    layer; with ``kv_scales`` (of keys and of values, [slots, kv_heads] each, bits of bfloat16) they hold FP8
    codes as uint8. ``window``: sliding window in tokens; None: full attention. ``splits``:
    programs that share a decoding sequence's context (split-KV); None: chosen by sequences and card.
    ``tiles``: for decoding and prefill; None for the default of each. Rows of no sequence are not written.

    Allocates the output; for prefill chunks the queries; for decoding sequences ``splits`` * (head_dim + 2)
    float32 per head.
    """
    packed = qkv.qkv
    rows, heads, head_dim = packed.shape
    heads -= 2 * k_cache.shape[1]
    out = torch.empty((rows, heads * head_dim), dtype=packed.dtype, device=packed.device)
    if metadata.max_query_len:
        # Decoding rows go through this too, and again in the decode kernel: they are few.
        query = rope_store_kv(qkv, metadata.slot_mapping, k_cache, v_cache, kv_scales)
        if launches_on(packed.device):
            _launch_prefill(
                query,
                k_cache,
                v_cache,
                kv_scales,
                metadata,
                out,
                window,
                tiles or prefill_tiles(packed.dtype, head_dim, fp8_kv=kv_scales is not None),
            )
        del query
    if metadata.no_store_slots is not None:
        rope_store_kv(qkv, metadata.slot_mapping, k_cache, v_cache, kv_scales)
    if metadata.num_decodes:
        sequences, card, fp8_kv = metadata.num_decodes, card_of(packed.device), kv_scales is not None
        few = card is not None and card.has_few_multiprocessors
        tiles = tiles or decode_tiles(packed.dtype, head_dim, sequences, fp8_kv=fp8_kv, few=few)
        resident = None
        if card is not None and few:
            size = packed.element_size()
            resident = resident_programs(card, tiles, head_dim, fp8_kv=fp8_kv, item_size=size)
        splits = splits or num_decode_splits(sequences, k_cache.shape[1], resident)
        split_shape = (sequences, heads, splits)
        partial_out = torch.empty((*split_shape, head_dim), dtype=torch.float32, device=packed.device)
        partial_stats = torch.empty((*split_shape, 2), dtype=torch.float32, device=packed.device)
        if launches_on(packed.device):
            _launch_decode(
                qkv, k_cache, v_cache, kv_scales, metadata, partial_out, partial_stats, out, window, tiles
            )
    return out


def _launch_decode(
    qkv: PackedQKV,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_scales: tuple[Tensor, Tensor] | None,
    metadata: BlockAttentionMetadata,
    partial_out: Tensor,
    partial_stats: Tensor,
    out: Tensor,
    window: int | None,
    tiles: AttentionTiles,
) -> None:
    from vlfit.kernels.attention.paged_kernels import paged_decode_kernel

    packed = qkv.qkv
    sequences, heads, splits, _ = partial_out.shape
    kv_heads = k_cache.shape[1]
    paged_decode_kernel[(sequences, kv_heads, splits)](
        packed,
        packed if qkv.norm_weight is None else qkv.norm_weight,
        qkv.cos,
        qkv.sin,
        metadata.slot_mapping if metadata.no_store_slots is None else metadata.no_store_slots,
        k_cache,
        v_cache,
        *(kv_scales or (k_cache, v_cache)),
        metadata.block_tables,
        metadata.query_spans,
        partial_out,
        partial_stats,
        tile_counters(packed.device),
        out,
        qkv.eps,
        metadata.block_tables.stride(0),
        metadata.block_tables.shape[1],
        **_kernel_constants(heads, k_cache, metadata, window),
        ROTARY_DIM=qkv.cos.shape[-1],
        HAS_QK_NORM=qkv.norm_weight is not None,
        NUM_SPLITS=splits,
        BLOCK_H=max(next_power_of_2(heads // kv_heads), 16),
        MERGE_BLOCK_H=next_power_of_2(heads // kv_heads),
        BLOCK_T=tiles.tokens,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        # With ``no_store_slots`` the previous kernel writes keys that this one loads before ``pdl_sync``.
        **(pdl_options(packed.device) if metadata.no_store_slots is None else {"USE_PDL": False}),
    )


def _launch_prefill(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_scales: tuple[Tensor, Tensor] | None,
    metadata: BlockAttentionMetadata,
    out: Tensor,
    window: int | None,
    tiles: AttentionTiles,
) -> None:
    from vlfit.kernels.attention.paged_kernels import paged_prefill_kernel

    chunks = len(metadata.block_tables) - metadata.num_decodes
    paged_prefill_kernel[(-(-metadata.max_query_len // tiles.rows), query.shape[1], chunks)](
        query,
        k_cache,
        v_cache,
        *(kv_scales or (k_cache, v_cache)),
        metadata.block_tables[metadata.num_decodes :],
        metadata.query_spans[metadata.num_decodes :],
        out,
        query.stride(0),
        metadata.block_tables.stride(0),
        **_kernel_constants(query.shape[1], k_cache, metadata, window),
        BLOCK_M=tiles.rows,
        BLOCK_T=tiles.tokens,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def _kernel_constants(
    heads: int, k_cache: Tensor, metadata: BlockAttentionMetadata, window: int | None
) -> dict[str, int | float]:
    _, kv_heads, head_dim = k_cache.shape
    return {
        "NUM_KV_HEADS": kv_heads,
        "GROUP_SIZE": heads // kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": metadata.block_size,
        "WINDOW": window or 0,
        "BLOCK_D": max(next_power_of_2(head_dim), 16),
        "SCALE_LOG2": head_dim**-0.5 * math.log2(math.e),
        "FP8_KV": k_cache.dtype == torch.uint8,
        "NATIVE_FP8": k_cache.dtype == torch.uint8 and has_native_fp8(k_cache.device),
        "INLINE_PTX": k_cache.dtype == torch.uint8 and has_inline_ptx(k_cache.device),
    }


def reference_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: BlockAttentionMetadata,
    window: int | None = None,
) -> Tensor:
    """``block_attention`` in plain PyTorch, for caches of any dtype but FP8: the tests' reference.

    ``query`` [rows, heads, head_dim] has RoPE applied, and the keys and values of its rows are in the
    cache. ``window``: sliding window in tokens; None: full attention. Returns [rows, heads * head_dim];
    rows of no sequence stay 0. ``no_store_slots`` is not supported.
    """
    outputs = torch.zeros_like(query)
    group_size = query.shape[1] // k_cache.shape[1]
    for block_table, (first, tokens, past) in zip(
        metadata.block_tables, metadata.query_spans.tolist(), strict=True
    ):
        positions = torch.arange(past + tokens, device=query.device)
        slots = (
            block_table.long()[positions // metadata.block_size] * metadata.block_size
            + positions % metadata.block_size
        )
        visible = positions <= positions[past:, None]  # [tokens, past + tokens]
        if window is not None:
            visible &= positions > positions[past:, None] - window
        k, v = (part[slots].repeat_interleave(group_size, 1).transpose(0, 1) for part in (k_cache, v_cache))
        q = query[first : first + tokens].transpose(0, 1)
        scores = (q @ k.transpose(1, 2) * query.shape[2] ** -0.5).masked_fill(~visible, float("-inf"))
        outputs[first : first + tokens] = (scores.softmax(-1) @ v).transpose(0, 1)
    return outputs.flatten(1)
