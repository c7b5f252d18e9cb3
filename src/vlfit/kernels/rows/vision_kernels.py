"""Kernels of the vision tower: patches, position embeddings, residual add and LayerNorm, 2-D RoPE, attention.

Attention: every patch of a frame attends to all of them, without a mask. Online softmax, one block of scores
at a time (FlashAttention: Dao et al., 2022). A head of 72 elements is computed as 64 and 16, of which 8 are
padding, where torch's kernel pads it to 96. Host side: ``vision_ops.py``.
"""

import math

import triton
import triton.language as tl

from vlfit.kernels.launch import cache_launches

# Multiplied by x + 0.044715 x^3, the exponent of 2 in GELU.
_GELU_SCALE = tl.constexpr(-2 * math.sqrt(2 / math.pi) * math.log2(math.e))


@triton.jit
def patch_position(patch, num_columns, MERGE: tl.constexpr):
    """Row and column of patch number ``patch`` of a frame ``num_columns`` patches wide.

    Patches are in merge order: those of each MERGE x MERGE square are contiguous.
    """
    square = patch // (MERGE * MERGE)
    within = patch % (MERGE * MERGE)
    squares_per_row = num_columns // MERGE
    return (
        square // squares_per_row * MERGE + within // MERGE,
        square % squares_per_row * MERGE + within % MERGE,
    )


@cache_launches
@triton.jit(do_not_specialize=["num_rows", "num_columns"])
def extract_patches_kernel(
    pixels,
    lookup,
    out,
    num_rows,
    num_columns,
    FRAMES: tl.constexpr,
    CHANNELS: tl.constexpr,
    PATCH: tl.constexpr,
    MERGE: tl.constexpr,
    TEMPORAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Cut ``pixels`` [time * FRAMES, num_rows * PATCH, num_columns * PATCH, CHANNELS] uint8 into patches.

    Grid: (patches,) of ``out`` [time * num_rows * num_columns, CHANNELS * TEMPORAL * PATCH * PATCH]. Each
    byte is normalized by ``lookup`` [256, CHANNELS]. ``FRAMES`` of ``pixels`` per patch: TEMPORAL, or 1 to
    repeat each frame.
    """
    pid = tl.program_id(0).to(tl.int64)
    time = pid // (num_rows * num_columns)
    row, column = patch_position(pid % (num_rows * num_columns), num_columns, MERGE)
    AREA: tl.constexpr = PATCH * PATCH
    NUM_VALUES: tl.constexpr = CHANNELS * TEMPORAL * AREA
    offs = tl.arange(0, BLOCK)
    mask = offs < NUM_VALUES
    channel = offs // (TEMPORAL * AREA)
    frame = time * FRAMES
    if FRAMES > 1:
        frame += offs // AREA % TEMPORAL
    y = row * PATCH + offs // PATCH % PATCH
    x = column * PATCH + offs % PATCH
    pixel_offs = ((frame * num_rows * PATCH + y) * num_columns * PATCH + x) * CHANNELS + channel
    pixel = tl.load(pixels + pixel_offs, mask=mask, other=0).to(tl.int32)
    normalized = tl.load(lookup + pixel * CHANNELS + channel, mask=mask, other=0.0)
    tl.store(out + pid * NUM_VALUES + offs, normalized.to(out.dtype.element_ty), mask=mask)


@triton.jit
def interpolation_point(index, num_points, SIDE: tl.constexpr):
    """Map ``index`` of ``num_points`` to an axis of ``SIDE`` points, end points to end points.

    Returns the lower neighbour (int32) and the fraction past it, its upper neighbour's weight.
    """
    last = tl.maximum(num_points - 1, 1).to(tl.float32)
    position = tl.math.div_rn((index * (SIDE - 1)).to(tl.float32), last)
    lower = tl.floor(position)
    return lower.to(tl.int32), position - lower


@cache_launches
@triton.jit(do_not_specialize=["num_rows", "num_columns"])
def add_position_embedding_kernel(
    hidden,
    table,
    num_rows,
    num_columns,
    SIDE: tl.constexpr,
    MERGE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add position embeddings to ``hidden`` [num_rows * num_columns, WIDTH] in place. Grid: (patches,).

    Bilinear interpolation in ``table`` [SIDE * SIDE, WIDTH], corners aligned.
    """
    pid = tl.program_id(0)
    row, column = patch_position(pid, num_columns, MERGE)
    top, row_weight = interpolation_point(row, num_rows, SIDE)
    left, column_weight = interpolation_point(column, num_columns, SIDE)
    bottom = tl.minimum(top + 1, SIDE - 1)
    right = tl.minimum(left + 1, SIDE - 1)
    offs = tl.arange(0, BLOCK)
    mask = offs < WIDTH
    embedding = load_embedding_row(table, top * SIDE + left, WIDTH, offs, mask) * (
        (1.0 - row_weight) * (1.0 - column_weight)
    )
    embedding += load_embedding_row(table, top * SIDE + right, WIDTH, offs, mask) * (
        (1.0 - row_weight) * column_weight
    )
    embedding += load_embedding_row(table, bottom * SIDE + left, WIDTH, offs, mask) * (
        row_weight * (1.0 - column_weight)
    )
    embedding += load_embedding_row(table, bottom * SIDE + right, WIDTH, offs, mask) * (
        row_weight * column_weight
    )
    hidden_ptrs = hidden + pid.to(tl.int64) * WIDTH + offs
    x = tl.load(hidden_ptrs, mask=mask, other=0.0)
    embedding_rounded = embedding.to(x.dtype).to(tl.float32)
    tl.store(hidden_ptrs, (x.to(tl.float32) + embedding_rounded).to(x.dtype), mask=mask)


@triton.jit
def load_embedding_row(table, row, WIDTH: tl.constexpr, offs, mask):
    """Elements ``offs`` of row ``row`` of ``table``, in float32: 0 where not ``mask``."""
    return tl.load(table + row * WIDTH + offs, mask=mask, other=0.0).to(tl.float32)


@cache_launches
@triton.jit
def add_layer_norm_kernel(
    hidden,
    delta,
    weight,
    bias,
    out,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add ``delta`` to ``hidden`` [rows, WIDTH] in place and store the LayerNorm of the sum in ``out``.

    Grid: (rows,).
    """
    offs_col = tl.arange(0, BLOCK)
    offs = tl.program_id(0).to(tl.int64) * WIDTH + offs_col
    mask = offs_col < WIDTH
    x = tl.load(hidden + offs, mask=mask, other=0.0)
    x = (x.to(tl.float32) + tl.load(delta + offs, mask=mask, other=0.0).to(tl.float32)).to(x.dtype)
    tl.store(hidden + offs, x, mask=mask)
    x_f32 = x.to(tl.float32)
    centered = tl.where(mask, x_f32 - tl.sum(x_f32, 0) * (1.0 / WIDTH), 0.0)
    normed = centered * tl.rsqrt(tl.sum(centered * centered, 0) * (1.0 / WIDTH) + eps)
    w = tl.load(weight + offs_col, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(bias + offs_col, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offs, (normed * w + b).to(x.dtype), mask=mask)


@cache_launches
@triton.jit
def gelu_tanh_kernel(x, numel, BLOCK: tl.constexpr):
    """GELU of the ``numel`` elements of ``x`` in place, by its approximation with tanh.

    x (1 + tanh(u)) / 2 is x / (1 + exp(-2 u)), with u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks and
    Gimpel, 2016). Grid: (blocks of BLOCK elements,).
    """
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < numel
    values = tl.load(x + offs, mask=mask, other=0.0)
    v = values.to(tl.float32)
    exponent = v * (_GELU_SCALE + _GELU_SCALE * 0.044715 * v * v)
    power = tl.exp2(tl.minimum(exponent, 127.0))  # does not overflow
    tl.store(x + offs, (v / (1.0 + power)).to(values.dtype), mask=mask)


@cache_launches
@triton.jit(do_not_specialize=["num_columns", "num_positions"])
def vision_rope_kernel(
    qkv,
    angles,
    num_columns,
    num_positions,
    MERGE: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate q and k of ``qkv`` [patches, 3, WIDTH] in place, WIDTH = heads * HEAD_DIM. Grid: (patches,).

    Element i of a head's first half pairs with i of the second; pairs of the first quarter rotate by the
    patch's row, the others by its column. ``angles`` [2, num_positions, HEAD_DIM / 4] float32: cosines, then
    sines. ``BLOCK`` is at least ``WIDTH``, the number of pairs in q and k.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    QUARTER: tl.constexpr = HEAD_DIM // 4
    pid = tl.program_id(0)
    row, column = patch_position(pid, num_columns, MERGE)
    pair = tl.arange(0, BLOCK)
    mask = pair < WIDTH
    offs_d = pair % HALF
    x_ptrs = qkv + pid.to(tl.int64) * (3 * WIDTH) + pair // HALF * HEAD_DIM + offs_d
    cos_ptrs = angles + tl.where(offs_d < QUARTER, row, column) * QUARTER + offs_d % QUARTER
    cos = tl.load(cos_ptrs, mask=mask, other=1.0)
    sin = tl.load(cos_ptrs + num_positions * QUARTER, mask=mask, other=0.0)
    x = tl.load(x_ptrs, mask=mask, other=0.0)
    partner = tl.load(x_ptrs + HALF, mask=mask, other=0.0)
    x_f32, partner_f32 = x.to(tl.float32), partner.to(tl.float32)
    tl.store(x_ptrs, (x_f32 * cos - partner_f32 * sin).to(x.dtype), mask=mask)
    tl.store(x_ptrs + HALF, (partner_f32 * cos + x_f32 * sin).to(x.dtype), mask=mask)


@triton.jit
def load_head_part(
    base, rows, ROW_STRIDE: tl.constexpr, START: tl.constexpr, SIZE: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Elements from START up to START + SIZE of one head in ``rows`` [n]: [n, SIZE], 0 from HEAD_DIM on.

    ``base`` points to the head in row 0; ``ROW_STRIDE`` elements from row to row.
    """
    offs_d = START + tl.arange(0, SIZE)
    offs = base + rows[:, None].to(tl.int64) * ROW_STRIDE + offs_d[None, :]
    if START + SIZE > HEAD_DIM:
        return tl.load(offs, mask=offs_d[None, :] < HEAD_DIM, other=0.0)
    return tl.load(offs)


@triton.jit
def online_softmax_step(
    k_base,
    v_base,
    q,
    q_rest,
    row_max,
    row_sum,
    acc,
    acc_rest,
    n_start,
    num_patches,
    SCALE_LOG2: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend to the keys and values of ``BLOCK_N`` patches from ``n_start`` on.

    Returns the updated ``row_max``, ``row_sum``, ``acc`` and ``acc_rest``. ``q`` and ``acc`` are the first
    ``BLOCK_D`` elements of the head, ``q_rest`` and ``acc_rest`` the next ``REST_D``, unused if that is 0.
    ``k_base`` and ``v_base``: as ``base`` in ``load_head_part``. ``MASKED``: the block of patches reaches
    past the last one.
    """
    offs_n = n_start + tl.arange(0, BLOCK_N)
    clamped_n = tl.minimum(offs_n, num_patches - 1) if MASKED else offs_n
    k = load_head_part(k_base, clamped_n, ROW_STRIDE, 0, BLOCK_D, HEAD_DIM)
    score = tl.dot(q, tl.trans(k), input_precision="ieee")
    if REST_D > 0:
        k_rest = load_head_part(k_base, clamped_n, ROW_STRIDE, BLOCK_D, REST_D, HEAD_DIM)
        score = tl.dot(q_rest, tl.trans(k_rest), score, input_precision="ieee")
    if MASKED:
        score = tl.where(offs_n[None, :] < num_patches, score, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(score, 1) * SCALE_LOG2)
    p = tl.exp2(score * SCALE_LOG2 - new_max[:, None])
    alpha = tl.exp2(row_max - new_max)
    row_sum = row_sum * alpha + tl.sum(p, 1)
    v = load_head_part(v_base, clamped_n, ROW_STRIDE, 0, BLOCK_D, HEAD_DIM)
    p = p.to(v.dtype)
    acc = tl.dot(p, v, acc * alpha[:, None], input_precision="ieee")
    if REST_D > 0:
        v_rest = load_head_part(v_base, clamped_n, ROW_STRIDE, BLOCK_D, REST_D, HEAD_DIM)
        acc_rest = tl.dot(p, v_rest, acc_rest * alpha[:, None], input_precision="ieee")
    return new_max, row_sum, acc, acc_rest


@cache_launches
@triton.jit(do_not_specialize=["num_patches"])
def vision_attention_kernel(
    qkv,
    out,
    num_patches,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST_D: tl.constexpr,
    SCALE_LOG2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attention: ``out`` [patches, NUM_HEADS, HEAD_DIM] from ``qkv`` [patches, 3, NUM_HEADS, HEAD_DIM].

    Grid: (tiles of BLOCK_M patches, heads). One program computes ``BLOCK_M`` patches of one head over all
    keys, ``BLOCK_N`` at a time. A head is ``BLOCK_D`` elements and ``REST_D`` more, both powers of two,
    padded with 0. ``SCALE_LOG2``: softmax scale times log2(e), for exp2.
    """
    WIDTH: tl.constexpr = NUM_HEADS * HEAD_DIM
    FILLER: tl.constexpr = REST_D if REST_D > 0 else 16  # a valid shape; unused without a rest
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head_start = tl.program_id(1) * HEAD_DIM
    q_base, k_base, v_base = qkv + head_start, qkv + WIDTH + head_start, qkv + 2 * WIDTH + head_start
    clamped_m = tl.minimum(offs_m, num_patches - 1)
    q = load_head_part(q_base, clamped_m, 3 * WIDTH, 0, BLOCK_D, HEAD_DIM)
    q_rest = load_head_part(q_base, clamped_m, 3 * WIDTH, BLOCK_D, REST_D, HEAD_DIM) if REST_D > 0 else q
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    acc_rest = tl.zeros((BLOCK_M, FILLER), tl.float32)
    full = num_patches // BLOCK_N * BLOCK_N
    for n_start in range(0, full, BLOCK_N):
        row_max, row_sum, acc, acc_rest = online_softmax_step(
            k_base, v_base, q, q_rest, row_max, row_sum, acc, acc_rest, n_start, num_patches,
            SCALE_LOG2, 3 * WIDTH, HEAD_DIM, BLOCK_D, REST_D, BLOCK_N, False,
        )  # fmt: skip
    for n_start in range(full, num_patches, BLOCK_N):
        row_max, row_sum, acc, acc_rest = online_softmax_step(
            k_base, v_base, q, q_rest, row_max, row_sum, acc, acc_rest, n_start, num_patches,
            SCALE_LOG2, 3 * WIDTH, HEAD_DIM, BLOCK_D, REST_D, BLOCK_N, True,
        )  # fmt: skip
    out_ptrs = out + offs_m[:, None].to(tl.int64) * WIDTH + head_start
    offs_d = tl.arange(0, BLOCK_D)
    mask = (offs_m[:, None] < num_patches) & (offs_d[None, :] < HEAD_DIM)
    tl.store(out_ptrs + offs_d[None, :], (acc / row_sum[:, None]).to(out.dtype.element_ty), mask=mask)
    if REST_D > 0:
        offs_d = BLOCK_D + tl.arange(0, REST_D)
        mask = (offs_m[:, None] < num_patches) & (offs_d[None, :] < HEAD_DIM)
        acc_rest = acc_rest / row_sum[:, None]
        tl.store(out_ptrs + offs_d[None, :], acc_rest.to(out.dtype.element_ty), mask=mask)
