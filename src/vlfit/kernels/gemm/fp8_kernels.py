"""FP8 x FP8 GEMM for many rows on tensor cores, and the row operations that quantize its input.

Activations get one scale for every 128 neighbours in a row: amax / 448. Before quantizing, each fused
operation rounds as its half-precision counterpart in ``rows/row_kernels.py`` does. Host side and references:
``fp8.py``.
"""

import triton
import triton.language as tl

from vlfit.kernels.launch import cache_launches
from vlfit.kernels.primitives import FP8_MAX
from vlfit.kernels.rows.row_kernels import rms_normalize

MIN_AMAX = tl.constexpr(1e-12)  # lower bound of a group's amax, against division by 0


@triton.jit
def swizzled_block(pid, tiles_n, tiles_m, GROUP_N: tl.constexpr):
    """Tile indices (N, M) of program ``pid``, in an order that keeps shared operands in L2.

    Groups of ``GROUP_N`` column tiles are traversed together over all row tiles.
    """
    tiles_per_group = GROUP_N * tiles_m
    first_n = pid // tiles_per_group * GROUP_N
    group_size = tl.minimum(tiles_n - first_n, GROUP_N)
    pid_in_group = pid % tiles_per_group
    return first_n + pid_in_group % group_size, pid_in_group // group_size


@triton.jit
def block_offsets(start, num_rows, K, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Offsets [BLOCK, GROUP] of the first ``GROUP`` inputs of ``BLOCK`` rows from row ``start`` on.

    Relative to the pointer to row ``start`` of a matrix [num_rows, K]. Rows past the end are clamped to the
    last one, and the caller does not store their results; this saves masked loads.
    """
    row = tl.minimum(tl.arange(0, BLOCK), num_rows - 1 - start)
    return row[:, None] * K + tl.arange(0, GROUP)[None, :]


@triton.jit
def weight_scale_pointers(scales, n_start, N, num_groups, SCALE_N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pointers to the scales of ``BLOCK_N`` outputs from ``n_start`` on, in the first group of inputs.

    ``scales`` [N / SCALE_N, num_groups]. One pointer if all ``BLOCK_N`` outputs share a scale, else
    [BLOCK_N].
    """
    if SCALE_N % BLOCK_N == 0:
        pointers = scales + n_start // SCALE_N * num_groups
    else:
        offs_n = tl.minimum(n_start + tl.arange(0, BLOCK_N), N - 1)
        pointers = scales + offs_n // SCALE_N * num_groups
    return pointers


@triton.jit
def apply_scales(acc, x_scale, w_scale, ONE_SCALE: tl.constexpr):
    """``acc`` [BLOCK_M, BLOCK_N] times ``x_scale`` [BLOCK_M] and ``w_scale`` [BLOCK_N].

    ``ONE_SCALE``: ``w_scale`` is a scalar.
    """
    return acc * (x_scale * w_scale)[:, None] if ONE_SCALE else acc * x_scale[:, None] * w_scale[None, :]


@cache_launches
@triton.jit(do_not_specialize=["M", "x_scale_stride"])
def fp8_matmul_kernel(
    x,
    x_scales,
    weight,
    w_scales,
    bias,
    out,
    M,
    x_scale_stride,
    N,
    K,
    num_groups,
    HAS_BIAS: tl.constexpr,
    SCALE_N: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    GROUP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_N: tl.constexpr,
):
    """``out`` [M, N] = ``x`` [M, K] @ ``weight`` [N, K].T + ``bias``, both e4m3, accumulated in float32.

    Grid: (tiles of M x tiles of N,), swizzled; one program computes a tile [BLOCK_M, BLOCK_N]. ``x_scales``
    [K / GROUP_K, x_scale_stride] holds a scale per row and ``GROUP_K`` inputs. In ``w_scales`` [N / SCALE_N,
    num_groups] ``SCALE_N`` outputs and ``GROUP_K`` inputs share a scale (all inputs if ``ONE_GROUP``). The
    sums of each ``GROUP_K`` inputs are scaled and added up in float32.
    """
    ONE_SCALE: tl.constexpr = SCALE_N % BLOCK_N == 0
    tiles_n, tiles_m = tl.cdiv(N, BLOCK_N), tl.cdiv(M, BLOCK_M)
    pid_n, pid_m = swizzled_block(tl.program_id(0), tiles_n, tiles_m, GROUP_N)
    m_start, n_start = pid_m * BLOCK_M, pid_n * BLOCK_N
    offs_m, offs_n = m_start + tl.arange(0, BLOCK_M), n_start + tl.arange(0, BLOCK_N)
    x_offs = block_offsets(m_start, M, K, BLOCK_M, GROUP_K)
    w_offs = block_offsets(n_start, N, K, BLOCK_N, GROUP_K)
    x += m_start.to(tl.int64) * K
    weight += n_start.to(tl.int64) * K
    clamped_m = tl.minimum(offs_m, M - 1)
    w_scale_ptrs = weight_scale_pointers(w_scales, n_start, N, num_groups, SCALE_N, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(K // GROUP_K):
        block_acc = tl.dot(tl.load(x + x_offs), tl.trans(tl.load(weight + w_offs)))
        x_scale = tl.load(x_scales + clamped_m)
        if ONE_GROUP:
            acc += block_acc * x_scale[:, None]
        else:
            acc += apply_scales(block_acc, x_scale, tl.load(w_scale_ptrs + step).to(tl.float32), ONE_SCALE)
        x += GROUP_K
        weight += GROUP_K
        x_scales += x_scale_stride
    if ONE_GROUP:
        w_scale = tl.load(w_scale_ptrs).to(tl.float32)
        acc *= w_scale if ONE_SCALE else w_scale[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + tl.minimum(offs_n, N - 1)).to(tl.float32)[None, :]
    offs = offs_m[:, None].to(tl.int64) * N + offs_n[None, :]
    mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    tl.store(out + offs, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def round_to_e4m3(x):
    """Round float32 ``x`` to the nearest e4m3 value, ties to even; the result is still float32.

    For conversions that would truncate, as in Triton's interpreter.
    """
    exponent = (x.to(tl.int32, bitcast=True) >> 23) & 0xFF
    # Added to 1.5 x 2^(e + 20), a float32 with exponent e keeps 3 mantissa bits.
    magic = (((tl.maximum(exponent, 127 - 6) + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
    return (x + magic) - magic


@triton.jit
def quantize_store(
    x,
    codes,
    scales,
    row,
    scale_stride,
    start,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Quantize ``x`` [BLOCK], the elements of ``row`` from ``start`` on, and store codes and scales.

    ``codes`` [rows, WIDTH], ``scales`` [WIDTH / GROUP, scale_stride]: one for each ``GROUP`` neighbours of a
    row. ``x`` is 0 past the end of the row. ``NATIVE_FP8``: the card rounds in hardware; otherwise
    ``round_to_e4m3`` does.
    """
    NUM_GROUPS: tl.constexpr = BLOCK // GROUP
    grouped = tl.reshape(x.to(tl.float32), (NUM_GROUPS, GROUP))
    amax = tl.maximum(tl.max(tl.abs(grouped), 1), MIN_AMAX)
    scale = amax / FP8_MAX
    inverse = 448.0 / amax
    scaled = grouped * inverse[:, None]
    if not NATIVE_FP8:
        scaled = round_to_e4m3(scaled)
    code = scaled.to(tl.float8e4nv)
    group = start // GROUP + tl.arange(0, NUM_GROUPS)
    offs_col = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = group < WIDTH // GROUP
    offs = row.to(tl.int64) * WIDTH + offs_col
    tl.store(codes + offs, code, mask=mask[:, None])
    tl.store(scales + group.to(tl.int64) * scale_stride + row, scale, mask=mask)


@cache_launches
@triton.jit(do_not_specialize=["scale_stride"])
def quantize_activations_kernel(
    x,
    codes,
    scales,
    scale_stride,
    stride_xm,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Quantize ``x`` [rows, WIDTH], ``stride_xm`` elements from row to row; outputs as in ``quantize_store``.

    Grid: (rows, blocks of BLOCK elements).
    """
    row = tl.program_id(0)
    start = tl.program_id(1) * BLOCK
    offs = start + tl.arange(0, BLOCK)
    values = tl.load(x + row.to(tl.int64) * stride_xm + offs, mask=offs < WIDTH, other=0.0)
    quantize_store(values, codes, scales, row, scale_stride, start, WIDTH, BLOCK, GROUP, NATIVE_FP8)


@cache_launches
@triton.jit(do_not_specialize=["scale_stride"])
def add_rms_norm_quantize_kernel(
    hidden,
    delta,
    weight,
    codes,
    scales,
    scale_stride,
    eps,
    WIDTH: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Add ``delta`` to ``hidden`` [rows, WIDTH] in place and quantize the RMSNorm of the sum.

    Grid: (rows,). Without ``HAS_DELTA`` nothing is added. Outputs as in ``quantize_store``.
    """
    row = tl.program_id(0)
    offs_col = tl.arange(0, BLOCK)
    offs = row.to(tl.int64) * WIDTH + offs_col
    mask = offs_col < WIDTH
    x = tl.load(hidden + offs, mask=mask, other=0.0)
    if HAS_DELTA:
        total = x.to(tl.float32) + tl.load(delta + offs, mask=mask, other=0.0).to(tl.float32)
        x = total.to(x.dtype)
        tl.store(hidden + offs, x, mask=mask)
    w = tl.load(weight + offs_col, mask=mask, other=0.0)
    quantize_store(
        rms_normalize(x, w, WIDTH, eps), codes, scales, row, scale_stride, 0, WIDTH, BLOCK, GROUP, NATIVE_FP8
    )


@cache_launches
@triton.jit(do_not_specialize=["scale_stride"])
def silu_and_mul_quantize_kernel(
    gate_up,
    codes,
    scales,
    scale_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Quantize silu(gate) * up of ``gate_up`` [rows, 2 * WIDTH], gates first.

    Grid: (rows, blocks of BLOCK elements). Outputs as in ``quantize_store``.
    """
    row = tl.program_id(0)
    start = tl.program_id(1) * BLOCK
    offs_col = start + tl.arange(0, BLOCK)
    mask = offs_col < WIDTH
    offs = row.to(tl.int64) * (2 * WIDTH) + offs_col
    gate = tl.load(gate_up + offs, mask=mask, other=0.0)
    up = tl.load(gate_up + offs + WIDTH, mask=mask, other=0.0)
    gate_f32 = gate.to(tl.float32)
    act = (gate_f32 / (1.0 + tl.exp(-gate_f32))).to(gate.dtype)
    result = (act.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    quantize_store(result, codes, scales, row, scale_stride, start, WIDTH, BLOCK, GROUP, NATIVE_FP8)
