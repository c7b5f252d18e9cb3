"""Attention over the paged KV cache where it lies: nothing is copied out of it, no scores are kept.

Knows: how a batch is laid out for the kernels, which tile sizes it gets, and what that allocates. Does not
know who runs (``runner.py`` lays the batch out).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vlfit.engine.kernels.launch import overlapping

ROW, TOKENS, PAST = 0, 1, 2  # columns of ``BlockPlan.spans``


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Who attends to what in one forward pass, by blocks.

    ``write_slots`` [rows]: where each row's key and value go. ``table`` [sequences, blocks] int32: the block
    tables, filled up with zeros. ``spans`` [sequences, 3] int32: first row, new tokens and past of each. The
    first ``decoding`` sequences have one new token each; ``longest`` is the most that one of the rest has.
    """

    write_slots: Tensor
    table: Tensor
    spans: Tensor
    block_size: int
    decoding: int
    longest: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows (or, decoding, shares of a context) x tokens of one program, by so many warps and load stages."""

    rows: int
    tokens: int
    warps: int
    stages: int


def decode_splits(sequences: int) -> int:
    """Among how many programs a sequence's context is shared out: a power of two."""
    return 16 if sequences <= 4 else 8 if sequences <= 16 else 4


def decode_tiles(dtype: torch.dtype) -> Tiles:
    return Tiles(16, 32, 4, 2) if dtype == torch.float32 else Tiles(16, 64, 4, 2)


def prefill_tiles(dtype: torch.dtype) -> Tiles:
    return Tiles(32, 32, 4, 2) if dtype == torch.float32 else Tiles(64, 64, 4, 2)


def block_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: BlockPlan,
    *,
    splits: int | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """``query`` [rows, heads, head_dim] over ``keys`` and ``values`` [slots, key_heads, head_dim] of a layer.

    Gives [rows, heads * head_dim]. Allocates that and, for sequences that decode, ``splits`` times
    (head_dim + 2) float32 for each head. ``splits`` and ``tiles`` are chosen if not given.
    """
    rows, heads, head_dim = query.shape
    output = torch.empty((rows, heads * head_dim), dtype=query.dtype, device=query.device)
    if plan.decoding:
        _decode(query, keys, values, plan, output, splits or decode_splits(plan.decoding), tiles)
    if plan.longest and query.device.type != "meta":
        _launch_prefill(query, keys, values, plan, output, tiles or prefill_tiles(query.dtype))
    return output


def _decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: BlockPlan,
    output: Tensor,
    splits: int,
    tiles: Tiles | None,
) -> None:
    from_splits = (plan.decoding, query.shape[1], splits)
    partial = torch.empty((*from_splits, query.shape[2]), dtype=torch.float32, device=query.device)
    extremes = torch.empty((*from_splits, 2), dtype=torch.float32, device=query.device)
    if query.device.type != "meta":
        tiles = tiles or decode_tiles(query.dtype)
        _launch_decode(query, keys, values, plan, partial, extremes, output, tiles)


def _launch_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: BlockPlan,
    partial: Tensor,
    extremes: Tensor,
    output: Tensor,
    tiles: Tiles,
) -> None:
    from vlfit.engine.kernels.decode_attention import decode, merge

    sequences, heads, splits, head_dim = partial.shape
    sizes = _sizes(query, keys, plan)
    decode[(sequences, keys.shape[1], splits)](
        query,
        keys,
        values,
        plan.table,
        plan.spans,
        partial,
        extremes,
        query.stride(0),
        plan.table.stride(0),
        **sizes,
        splits=splits,
        tile_heads=max(power_of_two(heads // keys.shape[1]), 16),
        tile_tokens=tiles.tokens,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **overlapping(query.device),
    )
    merge[(sequences, heads)](
        partial,
        extremes,
        plan.spans,
        output,
        heads=heads,
        head_dim=head_dim,
        splits=splits,
        tile_dim=sizes["tile_dim"],
        **overlapping(query.device),
    )


def _launch_prefill(
    query: Tensor, keys: Tensor, values: Tensor, plan: BlockPlan, output: Tensor, tiles: Tiles
) -> None:
    from vlfit.engine.kernels.prefill_attention import prefill

    chunks = len(plan.table) - plan.decoding
    prefill[(-(-plan.longest // tiles.rows), query.shape[1], chunks)](
        query,
        keys,
        values,
        plan.table[plan.decoding :],
        plan.spans[plan.decoding :],
        output,
        query.stride(0),
        plan.table.stride(0),
        **_sizes(query, keys, plan),
        tile_rows=tiles.rows,
        tile_tokens=tiles.tokens,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def _sizes(query: Tensor, keys: Tensor, plan: BlockPlan) -> dict[str, int | float]:
    _, heads, head_dim = query.shape
    key_heads = keys.shape[1]
    return {
        "key_heads": key_heads,
        "shared": heads // key_heads,
        "head_dim": head_dim,
        "block_size": plan.block_size,
        "tile_dim": max(power_of_two(head_dim), 16),
        "factor": head_dim**-0.5 * math.log2(math.e),
    }


def power_of_two(size: int) -> int:
    """The smallest that is not below ``size``."""
    return 1 << (size - 1).bit_length()


def plain_attention(query: Tensor, keys: Tensor, values: Tensor, plan: BlockPlan) -> Tensor:
    """What ``block_attention`` computes, in plain PyTorch and any dtype: what it is tested against."""
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
