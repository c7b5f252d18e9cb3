"""Row operations between GEMMs, each one kernel for what PyTorch does in three to eight.

References are in ``layers/`` (``fused.py``, ``rope.py``), which also decides where these run.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vlfit.kernels.launch import next_power_of_2, pdl_options
from vlfit.kernels.target import launches_on

_BLOCK = 1024  # elements per program of silu_and_mul and gate_rows
_BLOCK_H = 16  # heads per program of rope_store_kv
_WARP = 32  # threads


def add_rms_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add ``delta`` (None: nothing) to ``hidden`` [rows, width] in place; returns the RMSNorm of the sum."""
    out = torch.empty_like(hidden)
    rows, width = hidden.shape
    if launches_on(hidden.device) and rows:
        from vlfit.kernels.rows.row_kernels import add_rms_norm_kernel

        block = next_power_of_2(width)
        add_rms_norm_kernel[(rows,)](
            hidden,
            hidden if delta is None else delta,
            weight,
            out,
            eps,
            WIDTH=width,
            HAS_DELTA=delta is not None,
            BLOCK=block,
            num_warps=8 if block >= 2048 else 4,
            **pdl_options(hidden.device),
        )
    return out


@dataclass(frozen=True, slots=True)
class PackedQKV:
    """Output of the QKV projection, with what QK norm and RoPE need.

    ``qkv`` [rows, heads + 2 * kv_heads, head_dim]: queries, keys, values. ``norm_weight`` [heads + kv_heads,
    head_dim] and ``eps`` are those of the QK norm; None: no norm. ``cos`` and ``sin`` [rows, 1, rotary_dim]
    are RoPE tables (``rope_cos_sin``). On a CPU: ``is_compiled``: by ``kernels/cpu/row_functions.py``;
    ``rounds``: attention of prompts may be computed in bfloat16.
    """

    qkv: Tensor
    norm_weight: Tensor | None
    cos: Tensor
    sin: Tensor
    eps: float
    is_compiled: bool = False
    rounds: bool = False


def rope_store_kv(
    packed: PackedQKV,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Normalize and rotate queries and keys; store keys and values in the KV cache.

    Returns the queries [rows, heads, head_dim]; ``packed`` is not changed. ``slot_mapping`` [rows]: the cache
    slot of each row, negative to store nothing. ``k_cache`` and ``v_cache`` [slots, kv_heads, head_dim]
    belong to one layer; with ``kv_scales`` (of keys and of values, [slots, kv_heads] each, bits of bfloat16)
    they hold FP8 codes as uint8.
    """
    qkv, norm_weight = packed.qkv, packed.norm_weight
    rows, heads, head_dim = qkv.shape
    kv_heads = k_cache.shape[1]
    query = torch.empty((rows, heads - 2 * kv_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if launches_on(qkv.device) and rows:
        from vlfit.kernels.rows.row_kernels import rope_store_kv_kernel

        rope_store_kv_kernel[(rows, -(-heads // _BLOCK_H))](
            qkv,
            qkv if norm_weight is None else norm_weight,
            packed.cos,
            packed.sin,
            slot_mapping,
            k_cache,
            v_cache,
            *(kv_scales or (k_cache, v_cache)),
            query,
            packed.eps,
            NUM_HEADS=heads - 2 * kv_heads,
            NUM_KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            ROTARY_DIM=packed.cos.shape[-1],
            HAS_QK_NORM=norm_weight is not None,
            BLOCK_H=_BLOCK_H,
            BLOCK_D=next_power_of_2(head_dim),
            FP8_KV=kv_scales is not None,
            num_warps=4,
            **pdl_options(qkv.device),
        )
    return query


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of ``gate_up`` [rows, 2 * inner], gates first, computed in place.

    Overwrites the gates and returns them: a strided view [rows, inner].
    """
    rows, double_width = gate_up.shape
    out = gate_up[:, : double_width // 2]
    if launches_on(gate_up.device) and rows:
        from vlfit.kernels.rows.row_kernels import silu_and_mul_kernel

        width = double_width // 2
        silu_and_mul_kernel[(rows, -(-width // _BLOCK))](
            gate_up, WIDTH=width, BLOCK=_BLOCK, num_warps=4, **pdl_options(gate_up.device)
        )
    return out


def gate_rows(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply ``x`` [rows, heads * head_dim] by sigmoid(``gate``) in place, and return it.

    ``gate`` [rows, heads, head_dim] may be a view of wider rows or heads.
    """
    rows, heads, head_dim = gate.shape
    if launches_on(x.device) and rows:
        from vlfit.kernels.rows.row_kernels import gate_rows_kernel

        numel = x.numel()
        gate_rows_kernel[(-(-numel // _BLOCK),)](
            x,
            gate,
            numel,
            gate.stride(0),
            gate.stride(1),
            WIDTH=heads * head_dim,
            HEAD_DIM=head_dim,
            BLOCK=_BLOCK,
            num_warps=4,
            **pdl_options(x.device),
        )
    return x


def rope_cos_sin(
    positions: Tensor, frequencies: Tensor, axis: Tensor | None, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """RoPE tables (NeoX-style) for ``positions`` [3, rows]: cosines and sines, [rows, 1, 2 * pairs] each.

    Element i pairs with i + ``pairs``; the first half of the sines is negated, so that the rotated x is x *
    cos + (x with its halves swapped) * sin. ``frequencies`` [pairs] float32: radians per position. ``axis``
    [pairs] int64: which of the three positions each pair uses (M-RoPE); None: the first. ``scale`` multiplies
    both tables (the attention factor of scaled RoPE).
    """
    rows, pairs = positions.shape[1], len(frequencies)
    cos, sin = torch.empty((2, rows, 1, 2 * pairs), dtype=dtype, device=positions.device)
    if launches_on(positions.device) and rows:
        from vlfit.kernels.rows.row_kernels import rope_cos_sin_kernel

        rope_cos_sin_kernel[(rows,)](
            positions,
            frequencies,
            frequencies if axis is None else axis,
            cos,
            sin,
            scale,
            positions.stride(0),
            positions.stride(1),
            HAS_AXIS=axis is not None,
            PAIRS=pairs,
            BLOCK=next_power_of_2(pairs),
            num_warps=1,
            **pdl_options(positions.device),
        )
    return cos, sin


def advance_decode_inputs(
    sampled: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    query_spans: Tensor,
    block_tables: Tensor,
    block_size: int,
    pending: Tensor | None = None,
) -> None:
    """Turn a decode step's inputs into the next step's, in place, on the device.

    ``sampled`` [rows] int64 is copied to ``token_ids`` [rows]; ``positions`` [rows], the past (last
    column) in ``query_spans`` [rows, 3] and ``slot_mapping`` [rows] advance by one token, all int32. The
    next slot comes from ``block_tables`` [rows, blocks], with ``block_size`` tokens per block, and is -1
    past its end. ``pending`` [rows] int32, of any stride: how many tokens are not in a row's state yet, set
    to 1; None: there are no states. Rows with a negative past are padding and are not changed. Reference:
    ``StepInputs.fill`` of ``engine/execution/cuda_graphs.py``.
    """
    if launches_on(sampled.device):
        from vlfit.kernels.rows.row_kernels import advance_decode_inputs_kernel

        advance_decode_inputs_kernel[(1,)](
            sampled,
            token_ids,
            positions,
            slot_mapping,
            query_spans,
            block_tables,
            token_ids if pending is None else pending,
            len(token_ids),
            0 if pending is None else pending.stride(0),
            MAX_BLOCKS=block_tables.shape[1],
            BLOCK_SIZE=block_size,
            HAS_STATES=pending is not None,
            BLOCK=max(next_power_of_2(len(token_ids)), _WARP),  # one kernel for all small batches
            num_warps=1,
            **pdl_options(sampled.device),
        )
