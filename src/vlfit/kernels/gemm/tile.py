"""Building blocks of the GEMM kernels for few rows: tile indices, loads, the dot product, and the epilogue.

These kernels compute the transposed output: accumulators are [BLOCK_N, BLOCK_M]. Host side: ``quantized.py``
and ``dense.py``.
"""

import triton
import triton.language as tl


@triton.jit
def output_offsets(pid_n, N, BLOCK_N: tl.constexpr, SWIGLU: tl.constexpr):
    """Indices of the GEMM's outputs in tile ``pid_n``: [BLOCK_N], ``N`` or more for those past the end.

    With ``SWIGLU`` the first N / 2 outputs are gates and the rest their up projections; a tile holds BLOCK_N
    / 2 gates and then their up projections.
    """
    lane = tl.arange(0, BLOCK_N)
    if SWIGLU:
        unit = pid_n * (BLOCK_N // 2) + lane % (BLOCK_N // 2)
        offs_n = tl.where(unit < N // 2, lane // (BLOCK_N // 2) * (N // 2) + unit, N)
    else:
        offs_n = pid_n * BLOCK_N + lane
    return offs_n


@triton.jit
def half_tile_starts(pid_n, N, BLOCK_N: tl.constexpr, SWIGLU: tl.constexpr):
    """The first output in each half of tile ``pid_n`` of ``output_offsets``: [2]."""
    half = tl.arange(0, 2)
    step = N // 2 if SWIGLU else BLOCK_N // 2
    return pid_n * (BLOCK_N // 2 if SWIGLU else BLOCK_N) + half * step


@triton.jit
def block_dot(
    weight,
    x_tile,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICE_K: tl.constexpr,
):
    """``weight`` [BLOCK_N, BLOCK_K] @ ``x_tile`` [BLOCK_M, BLOCK_K].T in float32: [BLOCK_N, BLOCK_M].

    With ``SLICE_K`` > 1 the sums of each slice of BLOCK_K are kept apart, one slice per warp: [SLICE_K,
    BLOCK_N, BLOCK_M].
    """
    if SLICE_K == 1:
        acc = tl.dot(weight, tl.trans(x_tile), input_precision="ieee")
    else:
        width: tl.constexpr = BLOCK_K // SLICE_K
        a = tl.permute(tl.reshape(weight, (BLOCK_N, SLICE_K, width)), (1, 0, 2))
        b = tl.permute(tl.reshape(x_tile, (BLOCK_M, SLICE_K, width)), (1, 2, 0))
        acc = tl.dot(a, b, input_precision="ieee")
    return acc


@triton.jit
def load_x(
    x,
    offs_m,
    M,
    k_start,
    K,
    stride_xm,
    EVEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rows ``offs_m`` of ``x`` [M, K] from input ``k_start`` on: [BLOCK_M, BLOCK_K], 0 out of bounds.

    ``EVEN``: the block ends within K, so only rows are checked.
    """
    offs_k = k_start + tl.arange(0, BLOCK_K)
    mask = offs_m[:, None] < M
    if not EVEN:
        mask = mask & (offs_k[None, :] < K)
    return tl.load(x + offs_m[:, None].to(tl.int64) * stride_xm + offs_k[None, :], mask=mask, other=0.0)


@triton.jit
def load_constants(values, offs_n, N, IS_USED: tl.constexpr):
    """Outputs ``offs_n`` of ``values`` [N]: [BLOCK_N], 0 out of bounds; 0.0 unless ``IS_USED``.

    For what no kernel writes (a bias, a norm's weight), before ``pdl_sync``: behind it, and behind the
    products, it would be one more wait for memory.
    """
    loaded = 0.0
    if IS_USED:
        loaded = tl.load(values + offs_n, mask=offs_n < N, other=0.0)
    return loaded


@triton.jit
def load_square_sums(square_sums, offs_m, M, num_sums, BLOCK_SUMS: tl.constexpr):
    """Rows ``offs_m`` of ``square_sums`` [M, num_sums]: [BLOCK_M, BLOCK_SUMS], 0 out of bounds.

    They are the partial sums of squares that the previous GEMM's epilogue stored.
    """
    offs = tl.arange(0, BLOCK_SUMS)
    mask = (offs_m[:, None] < M) & (offs[None, :] < num_sums)
    return tl.load(square_sums + offs_m[:, None] * num_sums + offs[None, :], mask=mask, other=0.0)


@triton.jit
def rms_scale(square_sums, K, eps):
    """RMSNorm's factor for each row, [BLOCK_M], from ``square_sums`` [BLOCK_M, n] over ``K`` elements."""
    return tl.rsqrt(tl.sum(square_sums, 1) / K + eps)


@triton.jit
def split_k_epilogue(
    acc,
    bias,
    partial,
    counter,
    out,
    norm_scale,
    prenorm_out,
    square_sums,
    residual,
    offs_n,
    offs_m,
    pid_k,
    M,
    N,
    HAS_BIAS: tl.constexpr,
    SWIGLU: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    """Finish a tile: reduce over split-K programs, then apply ``epilogue``.

    ``acc`` [BLOCK_N, BLOCK_M] float32 belongs to outputs ``offs_n`` and rows ``offs_m`` of ``out`` [M, N].
    With ``SPLIT_K`` > 1 each program stores its sums in ``partial`` [SPLIT_K, M, N] float32 and increments
    the tile's ``counter``, which starts at 0; the last one adds all sums up, resets the counter and runs the
    epilogue. No second kernel is launched, and the order of additions is fixed, so the result does not depend
    on which program is last. Other parameters: see ``epilogue``.
    """
    mask = (offs_n[:, None] < N) & (offs_m[None, :] < M)
    offs = offs_m[None, :].to(tl.int64) * N + offs_n[:, None]
    if SPLIT_K > 1:
        split_stride = M.to(tl.int64) * N
        tl.store(partial + pid_k * split_stride + offs, acc, mask=mask)
        tl.debug_barrier()  # every thread has stored its sums before the counter is incremented
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLIT_K - 1:
            acc = tl.zeros_like(acc)
            for k in range(SPLIT_K):
                # Bypass L1, which does not see other multiprocessors' writes.
                part_acc = tl.load(
                    partial + k * split_stride + offs, mask=mask, other=0.0, cache_modifier=".cg"
                )
                acc += part_acc
            tl.store(counter, 0)
            epilogue(
                acc,
                bias,
                out,
                norm_scale,
                prenorm_out,
                square_sums,
                residual,
                offs,
                offs_n,
                mask,
                offs_m,
                M,
                N,
                HAS_BIAS,
                SWIGLU,
                ADD_RESIDUAL,
            )
    else:
        epilogue(
            acc,
            bias,
            out,
            norm_scale,
            prenorm_out,
            square_sums,
            residual,
            offs,
            offs_n,
            mask,
            offs_m,
            M,
            N,
            HAS_BIAS,
            SWIGLU,
            ADD_RESIDUAL,
        )


@triton.jit
def epilogue(
    acc,
    bias,
    out,
    norm_scale,
    prenorm_out,
    square_sums,
    residual,
    offs,
    offs_n,
    mask,
    offs_m,
    M,
    N,
    HAS_BIAS: tl.constexpr,
    SWIGLU: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr,
):
    """Add the bias to the finished tile ``acc``, apply SwiGLU or add the residual, and store it.

    ``acc``, ``offs`` (in ``out`` [M, N]) and ``mask`` are [BLOCK_N, BLOCK_M]. ``SWIGLU``: ``out`` [M, N / 2]
    becomes silu(gate) * up, rounded where ``row_ops.silu_and_mul`` rounds. ``ADD_RESIDUAL``: ``residual``
    [BLOCK_N, BLOCK_M], the tile's previous contents of ``out``, is added. The sum times ``norm_scale``
    goes to ``prenorm_out`` [M, N], and the sum's squares, summed over the tile's outputs, to the pointers
    ``square_sums`` [BLOCK_M], for the next GEMM's prologue (``PreNormRows``). ``bias`` and ``norm_scale``
    [BLOCK_N]: as from ``load_constants``.
    """
    if HAS_BIAS:
        acc += bias.to(tl.float32)[:, None]
    rounded = acc.to(out.dtype.element_ty)
    if SWIGLU:
        HALF: tl.constexpr = acc.shape[0] // 2
        halves = tl.permute(tl.reshape(rounded, (2, HALF, acc.shape[1])), (1, 2, 0))
        gate, up = tl.split(halves)
        x = gate.to(tl.float32)
        act = (x / (1.0 + tl.exp(-x))).to(gate.dtype)
        result = act.to(tl.float32) * up.to(tl.float32)
        unit, _ = tl.split(tl.permute(tl.reshape(offs_n, (2, HALF)), (1, 0)))
        unit_mask = (unit[:, None] < N // 2) & (offs_m[None, :] < M)
        unit_offs = offs_m[None, :].to(tl.int64) * (N // 2) + unit[:, None]
        tl.store(out + unit_offs, result.to(gate.dtype), mask=unit_mask)
    elif ADD_RESIDUAL:
        rounded = (residual.to(tl.float32) + rounded.to(tl.float32)).to(rounded.dtype)
        tl.store(out + offs, rounded, mask=mask)
        x = tl.where(mask, rounded.to(tl.float32), 0.0)
        tl.store(prenorm_out + offs, (x * norm_scale.to(tl.float32)[:, None]).to(rounded.dtype), mask=mask)
        tl.store(square_sums, tl.sum(x * x, 0), mask=offs_m < M)
    else:
        tl.store(out + offs, rounded, mask=mask)
