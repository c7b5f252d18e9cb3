"""Row operations between GEMMs: residual add and RMSNorm, RoPE and KV cache store, SwiGLU, RoPE tables, and
the inputs of the next decode step.

Each rounds where the plain PyTorch of ``layers/`` does, so that half precision gives the same numbers. Host
side: ``row_ops.py``.
"""

import triton
import triton.language as tl

from vlfit.kernels.launch import cache_launches
from vlfit.kernels.primitives import pdl_sync, quantize_kv_rows


@cache_launches
@triton.jit
def add_rms_norm_kernel(
    hidden,
    delta,
    weight,
    out,
    eps,
    WIDTH: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Add ``delta`` to ``hidden`` [rows, WIDTH] in place and store the RMSNorm of the sum in ``out``.

    Grid: (rows,). Without ``HAS_DELTA`` nothing is added.
    """
    offs_col = tl.arange(0, BLOCK)
    offs = tl.program_id(0).to(tl.int64) * WIDTH + offs_col
    mask = offs_col < WIDTH
    w = tl.load(weight + offs_col, mask=mask, other=0.0)  # before the wait: it is constant
    pdl_sync(USE_PDL)
    x = tl.load(hidden + offs, mask=mask, other=0.0)
    if HAS_DELTA:
        total = x.to(tl.float32) + tl.load(delta + offs, mask=mask, other=0.0).to(tl.float32)
        x = total.to(x.dtype)
        tl.store(hidden + offs, x, mask=mask)
    tl.store(out + offs, rms_normalize(x, w, WIDTH, eps), mask=mask)


@triton.jit
def rms_normalize(x, weight, WIDTH: tl.constexpr, eps):
    """RMSNorm of one row ``x`` [BLOCK], which is 0 past ``WIDTH``, in the dtype of ``x``.

    Rounded to that dtype before the multiplication by ``weight`` [BLOCK], too, unless that is in float32.
    """
    x_f32 = x.to(tl.float32)
    mean_square = tl.sum(x_f32 * x_f32, 0) * (1.0 / WIDTH)
    normed = x_f32 * tl.rsqrt(mean_square + eps)
    if weight.dtype != tl.float32:
        normed = normed.to(x.dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(x.dtype)


@cache_launches
@triton.jit
def rope_store_kv_kernel(
    qkv,
    qk_norm_weight,
    cos,
    sin,
    slot_mapping,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    q_out,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HAS_QK_NORM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FP8_KV: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Normalize (``HAS_QK_NORM``) and rotate queries and keys; store keys and values in the cache.

    Grid: (rows, tiles of BLOCK_H heads) of ``qkv`` [rows, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM]. Queries go
    to ``q_out`` [rows, NUM_HEADS, HEAD_DIM], keys and values to the row's slot in ``k_cache`` and ``v_cache``
    [slots, NUM_KV_HEADS, HEAD_DIM]; with ``FP8_KV`` as FP8 codes, and their scales to ``k_scales`` and
    ``v_scales`` [slots, NUM_KV_HEADS]. A row with a negative slot stores nothing in the cache.
    """
    pdl_sync(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    mask = (offs_d < HEAD_DIM) & (offs_h < NUM_HEADS + 2 * NUM_KV_HEADS)
    is_qk = mask & (offs_h < NUM_HEADS + NUM_KV_HEADS)
    qkv_ptrs = qkv + (row * (NUM_HEADS + 2 * NUM_KV_HEADS) + offs_h) * HEAD_DIM + offs_d
    norm_ptrs = qk_norm_weight + offs_h * HEAD_DIM + offs_d
    rope_offs = row * ROTARY_DIM + offs_d
    slot = tl.load(slot_mapping + row).to(tl.int64)
    qk = load_norm_rope(
        qkv_ptrs,
        norm_ptrs,
        cos + rope_offs,
        sin + rope_offs,
        offs_d,
        is_qk,
        eps,
        HEAD_DIM,
        ROTARY_DIM,
        HAS_QK_NORM,
    )
    tl.store(q_out + (row * NUM_HEADS + offs_h) * HEAD_DIM + offs_d, qk, mask=is_qk & (offs_h < NUM_HEADS))
    k_mask = is_qk & (offs_h >= NUM_HEADS) & (slot >= 0)
    k_row = slot * NUM_KV_HEADS + offs_h - NUM_HEADS
    v_mask = mask & (offs_h >= NUM_HEADS + NUM_KV_HEADS) & (slot >= 0)
    v_row = k_row - NUM_KV_HEADS
    v = tl.load(qkv_ptrs, mask=v_mask, other=0.0)
    if FP8_KV:
        qk, scale = quantize_kv_rows(tl.where(offs_h < NUM_HEADS + NUM_KV_HEADS, qk, v))
        v = qk
        is_key = (offs_h >= NUM_HEADS) & (offs_h < NUM_HEADS + NUM_KV_HEADS) & (slot >= 0)
        is_value = (
            (offs_h >= NUM_HEADS + NUM_KV_HEADS) & (offs_h < NUM_HEADS + 2 * NUM_KV_HEADS) & (slot >= 0)
        )
        tl.store(k_scales + k_row, scale, mask=is_key)
        tl.store(v_scales + v_row, scale, mask=is_value)
    tl.store(k_cache + k_row * HEAD_DIM + offs_d, qk, mask=k_mask)
    tl.store(v_cache + v_row * HEAD_DIM + offs_d, v, mask=v_mask)


@triton.jit
def load_norm_rope(
    x_ptrs,
    norm_ptrs,
    cos_ptrs,
    sin_ptrs,
    offs_d,
    mask,
    eps,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Load heads of one row, apply RMSNorm if ``HAS_NORM``, and RoPE to their first ``ROTARY_DIM`` elements.

    Returns [heads, dim] in the dtype loaded; 0 where not ``mask``. ``x_ptrs`` and ``norm_ptrs`` [heads, dim]
    point to the elements and their norm weights, ``cos_ptrs`` and ``sin_ptrs`` [1, dim] to the row's RoPE
    tables (``rope_cos_sin_kernel``). ``offs_d`` [1, dim]: index of each element in its head.
    """
    weights = load_with_partners(norm_ptrs, offs_d, mask, ROTARY_DIM, HAS_NORM)
    tables = load_rope_tables(cos_ptrs, sin_ptrs, offs_d, ROTARY_DIM)
    heads = load_with_partners(x_ptrs, offs_d, mask, ROTARY_DIM, True)
    return norm_rope(heads, weights, tables, eps, HEAD_DIM, HAS_NORM)


@triton.jit
def load_with_partners(pointers, offs_d, mask, ROTARY_DIM: tl.constexpr, WANTED: tl.constexpr):
    """Load [heads, dim] elements, and for each the one that RoPE rotates with it; itself if there is none.

    Not ``WANTED``: nothing is loaded, and ``mask`` stands in for both.
    """
    HALF: tl.constexpr = ROTARY_DIM // 2
    if WANTED:
        to_partner = tl.where(offs_d < ROTARY_DIM, tl.where(offs_d < HALF, HALF, -HALF), 0)
        elements = tl.load(pointers, mask=mask, other=0.0)
        partners = tl.load(pointers + to_partner, mask=mask, other=0.0)
    else:
        elements = mask
        partners = mask
    return elements, partners


@triton.jit
def load_rope_tables(cos_ptrs, sin_ptrs, offs_d, ROTARY_DIM: tl.constexpr):
    """Cosines and sines [1, dim] of one row; 1 and 0 beyond ``ROTARY_DIM``."""
    is_rotary = offs_d < ROTARY_DIM
    cos = tl.load(cos_ptrs, mask=is_rotary, other=1.0)
    sin = tl.load(sin_ptrs, mask=is_rotary, other=0.0)
    return cos, sin


@triton.jit
def norm_rope(heads, weights, tables, eps, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr):
    """RMSNorm if ``HAS_NORM``, and RoPE, of ``heads`` [heads, dim].

    ``heads`` and ``weights`` of the norm: from ``load_with_partners``; ``tables``: from
    ``load_rope_tables``.
    """
    x, partner = heads
    if HAS_NORM:
        w, w_partner = weights
        x_f32 = x.to(tl.float32)
        rms = tl.rsqrt(tl.sum(x_f32 * x_f32, 1) * (1.0 / HEAD_DIM) + eps)[:, None]
        x = ((x_f32 * rms).to(x.dtype).to(tl.float32) * w.to(tl.float32)).to(x.dtype)
        partner = (partner.to(tl.float32) * rms).to(x.dtype).to(tl.float32) * w_partner.to(tl.float32)
        partner = partner.to(x.dtype)
    cos, sin = tables
    x_cos = (x.to(tl.float32) * cos.to(tl.float32)).to(x.dtype).to(tl.float32)
    return (x_cos + partner.to(tl.float32) * sin.to(tl.float32)).to(x.dtype)


@cache_launches
@triton.jit
def silu_and_mul_kernel(gate_up, WIDTH: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr):
    """silu(gate) * up of ``gate_up`` [rows, 2 * WIDTH], gates first, stored over the gates.

    Grid: (rows, blocks of BLOCK elements).
    """
    pdl_sync(USE_PDL)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < WIDTH
    gates = gate_up + tl.program_id(0).to(tl.int64) * (2 * WIDTH) + offs
    gate = tl.load(gates, mask=mask, other=0.0)
    up = tl.load(gates + WIDTH, mask=mask, other=0.0)
    gate_f32 = gate.to(tl.float32)
    act = (gate_f32 / (1.0 + tl.exp(-gate_f32))).to(gate.dtype)
    tl.store(gates, (act.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=mask)


@cache_launches
@triton.jit
def gate_rows_kernel(
    x,
    gate,
    numel,
    stride_gate_row,
    stride_gate_head,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Multiply ``x`` [rows, WIDTH = heads * HEAD_DIM] by sigmoid(``gate`` [rows, heads, HEAD_DIM]) in place.

    Grid: (blocks of BLOCK of the ``numel`` = rows * WIDTH elements,). The sigmoid is rounded, too.
    """
    pdl_sync(USE_PDL)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < numel
    column = index % WIDTH
    offs = index // WIDTH * stride_gate_row + column // HEAD_DIM * stride_gate_head + column % HEAD_DIM
    value = tl.load(gate + offs, mask=mask, other=0.0)
    share = (1.0 / (1.0 + tl.exp(-value.to(tl.float32)))).to(value.dtype)
    rows = tl.load(x + index, mask=mask, other=0.0)
    tl.store(x + index, (rows.to(tl.float32) * share.to(tl.float32)).to(rows.dtype), mask=mask)


@cache_launches
@triton.jit(do_not_specialize=["stride_axis", "stride_row"])
def rope_cos_sin_kernel(
    positions,
    frequencies,
    axis,
    cos_out,
    sin_out,
    attention_scale,
    stride_axis,
    stride_row,
    HAS_AXIS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """RoPE tables of each row: cosines, and sines whose first half is negated (``layers/rope.py``).

    Grid: (rows,) of ``cos_out`` and ``sin_out`` [rows, 2 * PAIRS]. ``positions`` [3, rows] with strides
    ``stride_axis`` and ``stride_row``; ``frequencies`` [PAIRS]; ``axis`` [PAIRS]: the row of ``positions``
    that a pair uses; without ``HAS_AXIS`` the first. Both tables are multiplied by ``attention_scale``.
    """
    pdl_sync(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    mask = pair < PAIRS
    position_ptrs = positions + row * stride_row + pair * 0
    if HAS_AXIS:
        position_ptrs += tl.load(axis + pair, mask=mask, other=0) * stride_axis
    position = tl.load(position_ptrs, mask=mask, other=0).to(tl.float32)
    angle = position * tl.load(frequencies + pair, mask=mask, other=0.0)
    cos = (tl.cos(angle) * attention_scale).to(cos_out.dtype.element_ty)
    sin = (tl.sin(angle) * attention_scale).to(sin_out.dtype.element_ty)
    offs = row * 2 * PAIRS + pair
    tl.store(cos_out + offs, cos, mask=mask)
    tl.store(cos_out + offs + PAIRS, cos, mask=mask)
    tl.store(sin_out + offs, -sin, mask=mask)
    tl.store(sin_out + offs + PAIRS, sin, mask=mask)


@cache_launches
@triton.jit(do_not_specialize=["num_rows"])
def advance_decode_inputs_kernel(
    sampled,
    token_ids,
    positions,
    slot_mapping,
    query_spans,
    block_tables,
    pending,
    num_rows,
    pending_stride,
    MAX_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_STATES: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Advance the decode inputs of all rows by one token (``row_ops.advance_decode_inputs``). Grid: (1,)."""
    pdl_sync(USE_PDL)
    row = tl.arange(0, BLOCK)
    mask = row < num_rows
    past = tl.load(query_spans + row * 3 + 2, mask=mask, other=-1) + 1
    active = mask & (past > 0)
    position = tl.load(positions + row, mask=active, other=0) + 1
    block = past // BLOCK_SIZE
    has_block = active & (block < MAX_BLOCKS)
    slot = (
        tl.load(block_tables + row * MAX_BLOCKS + block, mask=has_block, other=0) * BLOCK_SIZE
        + past % BLOCK_SIZE
    )
    tl.store(token_ids + row, tl.load(sampled + row, mask=active, other=0).to(tl.int32), mask=active)
    tl.store(positions + row, position, mask=active)
    tl.store(query_spans + row * 3 + 2, past, mask=active)
    tl.store(slot_mapping + row, tl.where(has_block, slot, -1), mask=active)
    if HAS_STATES:
        tl.store(pending + row * pending_stride, 1, mask=active)
