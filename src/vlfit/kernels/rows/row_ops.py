"""What is done to rows between products, one kernel for what PyTorch does in three to eight.

Knows: what each step allocates, and how many programs it gets. The references are in
``layers/fused.py``, which also decides where these run.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vlfit.kernels.launch import overlapping, power_of_two

_TILE = 1024  # elements that one program multiplies
_HEADS = 8  # that one program turns


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Adds ``delta`` to ``hidden`` [rows, width] in place; gives the norm of the sum, times ``weight``."""
    output = torch.empty_like(hidden)
    rows, width = hidden.shape
    if hidden.device.type != "meta" and rows:
        from vlfit.kernels.rows.row_kernels import add_norm as kernel

        tile = power_of_two(width)
        kernel[(rows,)](
            hidden,
            hidden if delta is None else delta,
            weight,
            output,
            eps,
            width=width,
            has_delta=delta is not None,
            tile=tile,
            num_warps=8 if tile >= 2048 else 4,
            **overlapping(hidden.device),
        )
    return output


@dataclass(frozen=True, slots=True)
class Fresh:
    """Queries, keys and values as a product leaves them, and what they are turned by.

    ``joined`` [rows, heads + 2 * key_heads, head_dim]. Queries and keys are normalized head by head if there
    is a ``norm_weight`` [heads + key_heads, head_dim], and turned by ``cosines`` and ``sines`` [rows, 1,
    rotated] (``rope.rotate``).
    """

    joined: Tensor
    norm_weight: Tensor | None
    cosines: Tensor
    sines: Tensor
    eps: float


def rotate_and_store(
    fresh: Fresh,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Queries [rows, heads, head_dim] of ``fresh``, normalized and rotated; keys and values to the cache.

    ``slots`` [rows], negative for a row that leaves nothing, ``keys`` and ``values`` [slots, key_heads,
    head_dim] of one layer; with ``scales`` [slots, key_heads] of either they are codes of FP8, uint8.
    """
    joined, norm_weight = fresh.joined, fresh.norm_weight
    rows, heads, head_dim = joined.shape
    key_heads = keys.shape[1]
    query = torch.empty((rows, heads - 2 * key_heads, head_dim), dtype=joined.dtype, device=joined.device)
    if joined.device.type != "meta" and rows:
        from vlfit.kernels.rows.row_kernels import rotate_and_store as kernel

        kernel[(rows, -(-heads // _HEADS))](
            joined,
            joined if norm_weight is None else norm_weight,
            fresh.cosines,
            fresh.sines,
            slots,
            keys,
            values,
            *(scales or (keys, values)),
            query,
            fresh.eps,
            query_heads=heads - 2 * key_heads,
            key_heads=key_heads,
            head_dim=head_dim,
            rotated=fresh.cosines.shape[-1],
            has_norm=norm_weight is not None,
            tile_heads=_HEADS,
            tile=power_of_two(head_dim),
            narrow=scales is not None,
            num_warps=4,
            **overlapping(joined.device),
        )
    return query


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` [rows, inner] of ``gate_up`` [rows, 2 * inner], where gate was: rows lie apart."""
    rows, both = gate_up.shape
    output = gate_up[:, : both // 2]
    if gate_up.device.type != "meta" and rows:
        from vlfit.kernels.rows.row_kernels import silu_and_multiply as kernel

        cells = output.numel()
        kernel[(-(-cells // _TILE),)](
            gate_up, cells, width=both // 2, tile=_TILE, num_warps=4, **overlapping(gate_up.device)
        )
    return output


# How a pass begins and ends on a GPU: rows of a table in 8 bits, what positions turn by, and what the step
# after it reads.
#
# Knows: what each allocates, and how many programs it gets. References: ``layers/embedding.py`` and
# ``layers/rope.py``, which also decide where these run; of ``next_inputs`` ``graphs.StepInputs.fill``.


def look_up(token_ids: Tensor, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [n, width] of ``codes`` [tokens, width] int8 times ``scale`` [tokens, groups]."""
    rows, width = len(token_ids), codes.shape[1]
    output = torch.empty((rows, width), dtype=dtype, device=codes.device)
    if codes.device.type != "meta" and rows:
        from vlfit.kernels.rows.row_kernels import look_up as kernel

        kernel[(rows,)](
            token_ids,
            codes,
            scale,
            output,
            width=width,
            groups=scale.shape[1],
            tile=power_of_two(width),
            num_warps=4,
            **overlapping(codes.device),
        )
    return output


def rotation_tables(
    positions: Tensor, frequencies: Tensor, axis: Tensor | None, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines [rows, 1, 2 * pairs], times ``factor``, for ``positions`` [3, rows].

    ``frequencies`` [pairs] float32; ``axis`` [pairs] int64: which of the three each pair stands on; None: the
    first.
    """
    rows, pairs = positions.shape[1], len(frequencies)
    cosines, sines = torch.empty((2, rows, 1, 2 * pairs), dtype=dtype, device=positions.device)
    if positions.device.type != "meta" and rows:
        from vlfit.kernels.rows.row_kernels import rotation_tables as kernel

        kernel[(rows,)](
            positions,
            frequencies,
            frequencies if axis is None else axis,
            cosines,
            sines,
            factor,
            positions.stride(0),
            positions.stride(1),
            has_axis=axis is not None,
            pairs=pairs,
            tile=power_of_two(pairs),
            num_warps=1,
            **overlapping(positions.device),
        )
    return cosines, sines


def next_inputs(
    chosen: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    spans: Tensor,
    table: Tensor,
    block_size: int,
) -> None:
    """What a decode step reads, as the next one is to read it, in place.

    ``chosen`` [rows] int64 become ``token_ids`` [rows]; ``positions`` [rows], the past in ``spans`` [rows, 3]
    and ``slots`` [rows] move on by a token, all int32. ``table`` [rows, blocks] says where the next slot is;
    past its end it is -1. A row whose past is negative stays as it is.
    """
    if chosen.device.type != "meta":
        from vlfit.kernels.rows.row_kernels import next_inputs as kernel

        kernel[(1,)](
            chosen,
            token_ids,
            positions,
            slots,
            spans,
            table,
            len(token_ids),
            blocks=table.shape[1],
            block_size=block_size,
            tile=power_of_two(len(token_ids)),
            num_warps=1,
            **overlapping(chosen.device),
        )
