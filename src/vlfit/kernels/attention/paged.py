"""Attention over the paged KV cache where it lies: nothing is copied out of it, no scores are kept.

Knows: how a batch is laid out for the kernels, which tile sizes it gets, and what that allocates. Does not
know who runs (``runner.py`` lays the batch out).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vlfit.kernels.gemm.quantized import by_hand, converts_float8
from vlfit.kernels.launch import arrivals, overlapping, power_of_two
from vlfit.kernels.rows.row_ops import Fresh, rotate_and_store

ROW, TOKENS, PAST = 0, 1, 2  # columns of ``BlockPlan.spans``


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Who attends to what in one forward pass, by blocks.

    ``write_slots`` [rows]: where each row's key and value go. ``table`` [sequences, blocks] int32: the block
    tables, filled up with zeros. ``spans`` [sequences, 3] int32: first row, new tokens and past of each. The
    first ``decoding`` sequences have one new token each; ``longest`` is the most that one of the rest has.
    ``stored_before`` [rows], all negative: all decode, and some of them are the same sequence at tokens that
    follow each other, so that keys and values are stored before any row looks, and the past has its own.
    """

    write_slots: Tensor
    table: Tensor
    spans: Tensor
    block_size: int
    decoding: int
    longest: int
    stored_before: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows (or, decoding, shares of a context) x tokens of one program, by so many warps and load stages."""

    rows: int
    tokens: int
    warps: int
    stages: int


def decode_splits(sequences: int) -> int:
    """Among how many programs a sequence's context is shared out.

    Of an odd number the last has the newest token alone, which takes as long as a tile of the past: for so
    few sequences that all are at work at once. Where very many run they keep a card busy by themselves, and
    would be too many to count (``launch.MOST_TILES``).
    """
    if sequences <= 2:
        return 17
    return 16 if sequences <= 4 else 8 if sequences <= 16 else 4 if sequences <= 256 else 1


def decode_tiles(dtype: torch.dtype) -> Tiles:
    return Tiles(16, 32, 4, 2) if dtype == torch.float32 else Tiles(16, 64, 2, 2)


def prefill_tiles(dtype: torch.dtype) -> Tiles:
    return Tiles(32, 32, 4, 2) if dtype == torch.float32 else Tiles(64, 64, 4, 2)


def attend(
    fresh: Fresh,
    keys: Tensor,
    values: Tensor,
    plan: BlockPlan,
    scales: tuple[Tensor, Tensor] | None = None,
    *,
    splits: int | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """What the queries of ``fresh`` find, [rows, heads * head_dim]; its own keys and values go to ``keys``
    and ``values`` [slots, key_heads, head_dim] of a layer: numbers, or with ``scales`` [slots, key_heads] of
    either codes of FP8, uint8.

    Allocates the answer; where there are chunks of prompts the queries; for sequences that decode ``splits``
    times (head_dim + 2) float32 for each head. ``splits`` and ``tiles`` are
    chosen if not given.
    """
    joined = fresh.joined
    rows, heads, head_dim = joined.shape
    heads -= 2 * keys.shape[1]
    output = torch.empty((rows, heads * head_dim), dtype=joined.dtype, device=joined.device)
    if plan.longest:
        # Rows that decode are turned with the others, and once more below: they are few.
        query = rotate_and_store(fresh, plan.write_slots, keys, values, scales)
        if joined.device.type != "meta":
            _launch_prefill(query, keys, values, scales, plan, output, tiles or prefill_tiles(joined.dtype))
        del query
    if plan.stored_before is not None:
        rotate_and_store(fresh, plan.write_slots, keys, values, scales)
    if plan.decoding:
        from_splits = (plan.decoding, heads, splits or decode_splits(plan.decoding))
        partial = torch.empty((*from_splits, head_dim), dtype=torch.float32, device=joined.device)
        extremes = torch.empty((*from_splits, 2), dtype=torch.float32, device=joined.device)
        if joined.device.type != "meta":
            tiles = tiles or decode_tiles(joined.dtype)
            _launch_decode(fresh, keys, values, scales, plan, partial, extremes, output, tiles)
    return output


def _launch_decode(
    fresh: Fresh,
    keys: Tensor,
    values: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    plan: BlockPlan,
    partial: Tensor,
    extremes: Tensor,
    output: Tensor,
    tiles: Tiles,
) -> None:
    from vlfit.kernels.attention.decode_kernel import decode

    joined = fresh.joined
    sequences, heads, splits, _ = partial.shape
    key_heads = keys.shape[1]
    decode[(sequences, key_heads, splits)](
        joined,
        joined if fresh.norm_weight is None else fresh.norm_weight,
        fresh.cosines,
        fresh.sines,
        plan.write_slots if plan.stored_before is None else plan.stored_before,
        keys,
        values,
        *(scales or (keys, values)),
        plan.table,
        plan.spans,
        partial,
        extremes,
        arrivals(joined.device),
        output,
        fresh.eps,
        plan.table.stride(0),
        **_sizes(heads, keys, plan),
        rotated=fresh.cosines.shape[-1],
        has_norm=fresh.norm_weight is not None,
        splits=splits,
        sharing=splits - 1 if splits % 2 and splits > 1 else splits,
        tile_heads=max(power_of_two(heads // key_heads), 16),
        tile_shared=power_of_two(heads // key_heads),
        tile_tokens=tiles.tokens,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        # It reads what the kernel before stores before it waits for that.
        **(overlapping(joined.device) if plan.stored_before is None else {"overlap": False}),
    )


def _launch_prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    plan: BlockPlan,
    output: Tensor,
    tiles: Tiles,
) -> None:
    from vlfit.kernels.attention.prefill_kernel import prefill

    chunks = len(plan.table) - plan.decoding
    prefill[(-(-plan.longest // tiles.rows), query.shape[1], chunks)](
        query,
        keys,
        values,
        *(scales or (keys, values)),
        plan.table[plan.decoding :],
        plan.spans[plan.decoding :],
        output,
        query.stride(0),
        plan.table.stride(0),
        **_sizes(query.shape[1], keys, plan),
        tile_rows=tiles.rows,
        tile_tokens=tiles.tokens,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def _sizes(heads: int, keys: Tensor, plan: BlockPlan) -> dict[str, int | float]:
    _, key_heads, head_dim = keys.shape
    return {
        "key_heads": key_heads,
        "shared": heads // key_heads,
        "head_dim": head_dim,
        "block_size": plan.block_size,
        "tile_dim": max(power_of_two(head_dim), 16),
        "factor": head_dim**-0.5 * math.log2(math.e),
        "narrow": keys.dtype == torch.uint8,
        "hardware": keys.dtype == torch.uint8 and converts_float8(keys.device),
        "by_hand": keys.dtype == torch.uint8 and by_hand(keys.device),
    }


def plain_attention(query: Tensor, keys: Tensor, values: Tensor, plan: BlockPlan) -> Tensor:
    """What ``attend`` finds, in plain PyTorch and any dtype: what it is tested against.

    ``query`` [rows, heads, head_dim] is turned, and the keys and values of its rows are stored.
    """
    outputs = torch.zeros_like(query)
    shared = query.shape[1] // keys.shape[1]
    for blocks, (row, tokens, past) in zip(plan.table, plan.spans.tolist(), strict=True):
        index = torch.arange(past + tokens, device=query.device)
        slots = blocks.long()[index // plan.block_size] * plan.block_size + index % plan.block_size
        seen = index <= index[past:, None]  # [tokens, past + tokens]
        key, value = (part[slots].repeat_interleave(shared, 1).transpose(0, 1) for part in (keys, values))
        asked = query[row : row + tokens].transpose(0, 1)
        scores = (asked @ key.transpose(1, 2) * query.shape[2] ** -0.5).masked_fill(~seen, float("-inf"))
        outputs[row : row + tokens] = (scores.softmax(-1) @ value).transpose(0, 1)
    return outputs.flatten(1)
