"""Product of one row with a matrix, which waits for memory and for little else.

Weights in 4 to 8 bits are multiplied as integers (``row_integers.py``), those in FP8 and in 16 bits as floats
(``row_floats.py``). Here is what both share: the loop over the inputs, which loads weights several steps
ahead, the first of them before the previous kernel has ended, and the epilogue.

In Gluon, as registers must be laid out by hand: a lane holds neighbouring inputs of a few outputs, so that
weights never move between lanes. Triton, left to itself, moved weights through shared memory and took a
quarter more time with 30 multiprocessors (docs/log.md). Host side: ``one_row.py``. Reference:
``layers/linear.py``.
"""

from typing import Any  # noqa: F401  in the comment of a type

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vlfit.kernels.gemm.row_floats import float_product, load_floats, spread_row, wanted_sums
from vlfit.kernels.gemm.row_integers import integer_product, load_integers, quantize_row
from vlfit.kernels.launch import cache_launches

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # the second until Triton 3.6


@cache_launches
@gluon.jit(do_not_specialize=["num_sums"])
def one_row_kernel(
    x,
    codes,
    scales,
    zeros,
    bias,
    out,
    norm_weight,
    prenorm_out,
    square_sums,
    N,
    num_sums,
    eps,
    FORM: gl.constexpr,
    SWIGLU: gl.constexpr,
    ONE_TILE: gl.constexpr,
    PRENORM: gl.constexpr,
    ADD_RESIDUAL: gl.constexpr,
    BLOCK_SUMS: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """``out`` [N] = weight @ ``x`` [K] + ``bias``; with ``SWIGLU`` silu(gate) * up, [N / 2].

    Grid: at most as many programs as there are tiles of N, each with every n-th of them; as many if
    ``ONE_TILE``. ``FORM``: the ``RowForm``. ``codes``, ``scales`` and ``zeros``: as the kernels of
    ``quantized_kernels.py`` take them. Epilogue and prologue are those of ``tile.epilogue`` and of
    ``quantized_matmul_kernel``.
    """
    multiply_row(
        x,
        codes,
        scales,
        zeros,
        bias,
        out,
        norm_weight,
        prenorm_out,
        square_sums,
        N,
        num_sums,
        eps,
        gl.program_id(0),
        gl.num_programs(0),
        FORM,
        SWIGLU,
        ONE_TILE,
        PRENORM,
        ADD_RESIDUAL,
        BLOCK_SUMS,
        USE_PDL,
    )


@cache_launches
@gluon.jit(do_not_specialize=["num_sums", "first_tiles"])
def two_matrices_kernel(
    x,
    first_codes,
    first_scales,
    first_zeros,
    first_bias,
    second_codes,
    second_scales,
    second_zeros,
    second_bias,
    out,
    square_sums,
    first_outputs,
    second_outputs,
    first_tiles,
    num_sums,
    eps,
    FIRST: gl.constexpr,
    SECOND: gl.constexpr,
    PRENORM: gl.constexpr,
    BLOCK_SUMS: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """One row ``x`` by two matrices in different forms, outputs side by side in ``out``.

    Grid: (tiles of the first + those of the second,), so that a small matrix is multiplied beside a large one
    and not after it. Arguments as in ``one_row_kernel``.
    """
    pid = gl.program_id(0)
    if pid < first_tiles:
        multiply_row(
            x,
            first_codes,
            first_scales,
            first_zeros,
            first_bias,
            out,
            x,
            x,
            square_sums,
            first_outputs,
            num_sums,
            eps,
            pid,
            1,
            FIRST,
            False,
            True,
            PRENORM,
            False,
            BLOCK_SUMS,
            USE_PDL,
        )
    else:
        multiply_row(
            x,
            second_codes,
            second_scales,
            second_zeros,
            second_bias,
            out + first_outputs,
            x,
            x,
            square_sums,
            second_outputs,
            num_sums,
            eps,
            pid - first_tiles,
            1,
            SECOND,
            False,
            True,
            PRENORM,
            False,
            BLOCK_SUMS,
            USE_PDL,
        )


@gluon.jit
def multiply_row(
    x,
    codes,
    scales,
    zeros,
    bias,
    out,
    norm_weight,
    prenorm_out,
    square_sums,
    N,
    num_sums,
    eps,
    first,
    stride,
    FORM: gl.constexpr,
    SWIGLU: gl.constexpr,
    ONE_TILE: gl.constexpr,
    PRENORM: gl.constexpr,
    ADD_RESIDUAL: gl.constexpr,
    BLOCK_SUMS: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """Compute tiles ``first``, ``first + stride``, ... of the outputs. Arguments as in ``one_row_kernel``.

    While the last steps of a tile are multiplied, the first ones of the next are loaded. What does not depend
    on the previous kernel is loaded before it has ended. Of the rest all loads are issued before the first is
    used, so that nothing waits for memory twice.
    """
    # A step is 16 lanes by ``warps_k`` warps, of ``lane_inputs`` each, of ``tiles.lane_outputs`` outputs.
    WARPS: gl.constexpr = gl.num_warps()
    WARPS_K: gl.constexpr = FORM.tiles.warps_k
    BLOCK_N: gl.constexpr = FORM.tiles.outputs
    AHEAD: gl.constexpr = FORM.ahead
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WARPS // WARPS_K, WARPS_K], [1, 0])
    offs_n = output_indices(first, N, BLOCK_N, SWIGLU, gl.SliceLayout(1, LAYOUT))
    row = gl.where(offs_n < N, offs_n, 0)
    ahead = ()  # type: Any
    for i in gl.static_range(AHEAD):
        weights = load_weights(codes, scales, zeros, row, i, FORM, LAYOUT)
        ahead = ahead + (weights,)  # noqa: RUF005  Triton reads no star
    constants = load_constants(scales, bias, norm_weight, offs_n, N, FORM, ADD_RESIDUAL)
    if USE_PDL:  # weights are there before the previous kernel has ended
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, is_pure=False, pack=1)
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1
        )
    residual = load_residual(out, offs_n, N, ADD_RESIDUAL)
    norm = 1.0
    norm_sums = norm
    if PRENORM:
        SUM_LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        offs = gl.arange(0, BLOCK_SUMS, layout=SUM_LAYOUT)
        norm_sums = gl.load(square_sums + offs, mask=offs < num_sums, other=0.0)
    if FORM.floats:  # noqa: SIM108  each has its own tensors
        inputs = spread_row(x, FORM, WARPS)
    else:
        inputs = quantize_row(x, FORM, 16 * WARPS_K, WARPS)
    if PRENORM:  # after the row, so that both are loaded at once
        norm = gl.rsqrt(gl.sum(norm_sums, 0) / FORM.inputs + eps)
    barrier()  # here, or there would be one in each step
    if ONE_TILE:
        multiply_tile(
            codes,
            scales,
            zeros,
            bias,
            out,
            norm_weight,
            prenorm_out,
            square_sums,
            N,
            first,
            inputs,
            norm,
            (ahead, constants, residual),
            FORM,
            SWIGLU,
            ADD_RESIDUAL,
            None,
        )
    else:
        loaded = (ahead, constants, residual)
        for tile in range(first, num_tiles(N, BLOCK_N, SWIGLU), stride):
            loaded = multiply_tile(
                codes,
                scales,
                zeros,
                bias,
                out,
                norm_weight,
                prenorm_out,
                square_sums,
                N,
                tile,
                inputs,
                norm,
                loaded,
                FORM,
                SWIGLU,
                ADD_RESIDUAL,
                tile + stride,
            )


@gluon.jit
def multiply_tile(
    codes,
    scales,
    zeros,
    bias,
    out,
    norm_weight,
    prenorm_out,
    square_sums,
    N,
    tile,
    inputs,
    norm,
    loaded,
    FORM: gl.constexpr,
    SWIGLU: gl.constexpr,
    ADD_RESIDUAL: gl.constexpr,
    next_tile,
):
    """Compute ``tile``; returns what is loaded of ``next_tile``.

    ``loaded`` of ``tile``: weights of its first steps, ``load_constants``, ``load_residual``. ``inputs``: the
    row as ``step_product`` takes it. ``norm``: factor of all products. ``next_tile``: None, or beyond the
    outputs, if there is none.
    """
    WARPS: gl.constexpr = gl.num_warps()
    WARPS_K: gl.constexpr = FORM.tiles.warps_k
    BLOCK_N: gl.constexpr = FORM.tiles.outputs
    AHEAD: gl.constexpr = FORM.ahead
    REST: gl.constexpr = FORM.steps % AHEAD
    LAST: gl.constexpr = FORM.steps - REST - AHEAD  # steps before it are of the loop
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WARPS // WARPS_K, WARPS_K], [1, 0])
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    TYPES: gl.constexpr = (out.dtype.element_ty, scales.dtype.element_ty)
    offs_n = output_indices(tile, N, BLOCK_N, SWIGLU, ROW_LAYOUT)
    row = gl.where(offs_n < N, offs_n, 0)  # out of bounds: computed, and not stored
    ahead, constants, residual = loaded
    scale, addend, norm_scale = constants
    none = gl.zeros([BLOCK_N, 16 * WARPS_K], gl.float32, LAYOUT)
    acc = (none, none, none, none)  # type: Any
    for block in range(LAST // AHEAD):
        for i in gl.static_range(AHEAD):
            step = block * AHEAD + i
            weights = load_weights(codes, scales, zeros, row, step + AHEAD, FORM, LAYOUT)
            acc = step_product(inputs, ahead[0], row, step, acc, TYPES, FORM, LAYOUT)
            ahead = ahead[1:] + (weights,)  # noqa: RUF005
    for i in gl.static_range(REST):
        weights = load_weights(codes, scales, zeros, row, LAST + AHEAD + i, FORM, LAYOUT)
        acc = step_product(inputs, ahead[0], row, LAST + i, acc, TYPES, FORM, LAYOUT)
        ahead = ahead[1:] + (weights,)  # noqa: RUF005
    if next_tile is None:
        for i in gl.static_range(AHEAD):
            acc = step_product(inputs, ahead[i], row, LAST + REST + i, acc, TYPES, FORM, LAYOUT)
    else:
        next_offs = output_indices(next_tile, N, BLOCK_N, SWIGLU, ROW_LAYOUT)
        next_row = gl.where(next_offs < N, next_offs, 0)
        wanted = next_tile < num_tiles(N, BLOCK_N, SWIGLU)
        constants = load_constants(scales, bias, norm_weight, next_offs, N, FORM, ADD_RESIDUAL, wanted)
        next_residual = load_residual(out, next_offs, N, ADD_RESIDUAL, wanted)
        for i in gl.static_range(AHEAD):
            weights = load_weights(codes, scales, zeros, next_row, i, FORM, LAYOUT, wanted)
            acc = step_product(inputs, ahead[0], row, LAST + REST + i, acc, TYPES, FORM, LAYOUT)
            ahead = ahead[1:] + (weights,)  # noqa: RUF005
        loaded = (ahead, constants, next_residual)
    total = acc[0]
    if FORM.floats:
        total = wanted_sums(acc, FORM, LAYOUT)
    product = gl.sum(total, 1) * (scale * norm) + addend
    rounded = product.to(out.dtype.element_ty)
    if SWIGLU:
        halves = gl.permute(gl.reshape(rounded, [2, BLOCK_N // 2]), [1, 0])
        gate, up = gl.split(halves)
        value = gate.to(gl.float32)
        act = (value / (1.0 + gl.exp(-value))).to(gate.dtype)
        result = (act.to(gl.float32) * up.to(gl.float32)).to(gate.dtype)
        unit, _ = gl.split(gl.permute(gl.reshape(offs_n, [2, BLOCK_N // 2]), [1, 0]))
        gl.store(out + unit, result, mask=unit < N // 2)
    elif ADD_RESIDUAL:
        inside = offs_n < N
        rounded = (residual + rounded.to(gl.float32)).to(rounded.dtype)
        gl.store(out + offs_n, rounded, mask=inside)
        value = gl.where(inside, rounded.to(gl.float32), 0.0)
        gl.store(prenorm_out + offs_n, (value * norm_scale).to(rounded.dtype), mask=inside)
        # One sum for each warp's outputs: a sum over all warps would cost two barriers.
        WARPS_N: gl.constexpr = FORM.tiles.warps_n
        squares = gl.reshape(value * value, [BLOCK_N // (2 * WARPS_N), WARPS_N, 2])
        sums = gl.sum(gl.sum(squares, 2), 0)
        warp = gl.arange(0, WARPS_N, layout=sums.type.layout)
        gl.store(square_sums + tile * WARPS_N + warp, sums)
    else:
        gl.store(out + offs_n, rounded, mask=offs_n < N)
    return loaded


@gluon.jit
def load_constants(
    scales, bias, norm_weight, offs_n, N, FORM: gl.constexpr, ADD_RESIDUAL: gl.constexpr, wanted=None
):
    """Scale, bias and weight of the norm of outputs ``offs_n``: three of [BLOCK_N] float32.

    Without one, the scale is 1, bias and weight are 0. ``wanted``: as in ``load_weights``.
    """
    inside = offs_n < N
    if wanted is not None:
        inside = inside & wanted
    scale = gl.full(offs_n.shape, 1.0, gl.float32, offs_n.type.layout)
    if FORM.one_scale:
        scale = gl.load(scales + offs_n // FORM.weights.scale_n, mask=inside, other=0.0).to(gl.float32)
    addend = gl.full(offs_n.shape, 0.0, gl.float32, offs_n.type.layout)
    if FORM.has_bias:
        addend = gl.load(bias + offs_n, mask=inside, other=0.0).to(gl.float32)
    norm_scale = gl.full(offs_n.shape, 0.0, gl.float32, offs_n.type.layout)
    if ADD_RESIDUAL:
        norm_scale = gl.load(norm_weight + offs_n, mask=inside, other=0.0).to(gl.float32)
    return scale, addend, norm_scale


@gluon.jit
def load_residual(out, offs_n, N, ADD_RESIDUAL: gl.constexpr, wanted=None):
    """What the products of outputs ``offs_n`` are added to: [BLOCK_N] float32, zeros without."""
    residual = gl.full(offs_n.shape, 0.0, gl.float32, offs_n.type.layout)
    if ADD_RESIDUAL:
        inside = offs_n < N
        if wanted is not None:
            inside = inside & wanted
        residual = gl.load(out + offs_n, mask=inside, other=0.0).to(gl.float32)
    return residual


@gluon.jit
def load_weights(codes, scales, zeros, row, step, FORM: gl.constexpr, LAYOUT: gl.constexpr, wanted=None):
    """What ``step`` needs of the outputs ``row``, for ``step_product``. Beyond the row's end all are 0.

    ``wanted``: whether anything is; None: it is.
    """
    if FORM.floats:
        weights = load_floats(codes, scales, row, step, FORM, LAYOUT, wanted)
    else:
        weights = load_integers(codes, scales, zeros, row, step, FORM, LAYOUT, wanted)
    return weights


@gluon.jit
def step_product(
    inputs, weights, row, step, acc, TYPES: gl.constexpr, FORM: gl.constexpr, LAYOUT: gl.constexpr
):
    """Add products of the inputs of ``step``, scaled, to ``acc``: four of [BLOCK_N, LANES] float32.

    Of integers only the first is used. ``TYPES``: of the row and of the scales.
    """
    if FORM.floats:
        acc = float_product(inputs, weights, step, acc, FORM, LAYOUT, TYPES[0])
    else:
        product = integer_product(inputs, weights, row, step, TYPES[1], FORM)
        acc = (acc[0] + product, acc[1], acc[2], acc[3])
    return acc


@gluon.jit
def num_tiles(N, BLOCK_N: gl.constexpr, SWIGLU: gl.constexpr):
    """Tiles of the outputs; with ``SWIGLU`` a gate and its factor are one output of two rows."""
    WIDTH: gl.constexpr = BLOCK_N // 2 if SWIGLU else BLOCK_N
    return ((N // 2 if SWIGLU else N) + WIDTH - 1) // WIDTH


@gluon.jit
def output_indices(tile, N, BLOCK_N: gl.constexpr, SWIGLU: gl.constexpr, LAYOUT: gl.constexpr):
    """Indices of the outputs of ``tile``: [BLOCK_N], as from ``tile.output_offsets``."""
    lane = gl.arange(0, BLOCK_N, layout=LAYOUT)
    if SWIGLU:
        unit = tile * (BLOCK_N // 2) + lane % (BLOCK_N // 2)
        offs_n = gl.where(unit < N // 2, lane // (BLOCK_N // 2) * (N // 2) + unit, N)
    else:
        offs_n = tile * BLOCK_N + lane
    return offs_n
