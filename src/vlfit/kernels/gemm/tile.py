"""What kernels for few rows have in common, whatever their weights: which outputs and inputs, and a product.

Host code: ``linear.py`` and ``kernels/gemm/dense.py``.
"""

import triton
import triton.language as tl


@triton.jit
def tile_index(tile, outputs, tile_outputs: tl.constexpr, gated: tl.constexpr):
    """Which of ``outputs`` the tile of that number computes: [tile_outputs], ``outputs`` or more for none.

    ``gated``: the first half of all outputs are gates, of which a tile has some and the others that belong to
    them (``kernels/gemm/tile.py``).
    """
    lane = tl.arange(0, tile_outputs)
    if gated:
        unit = tile * (tile_outputs // 2) + lane % (tile_outputs // 2)
        index = tl.where(unit < outputs // 2, lane // (tile_outputs // 2) * (outputs // 2) + unit, outputs)
    else:
        index = tile * tile_outputs + lane
    return index


@triton.jit
def product(
    weight,
    x_tile,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
    parts: tl.constexpr,
):
    """``weight`` [tile_outputs, tile_inputs] times ``x_tile`` [tile_rows, tile_inputs].T.

    [tile_outputs, tile_rows], or that for each of several ``parts`` of the inputs, in float32.
    """
    if parts == 1:
        found = tl.dot(weight, tl.trans(x_tile), input_precision="ieee")
    else:
        width: tl.constexpr = tile_inputs // parts
        left = tl.permute(tl.reshape(weight, (tile_outputs, parts, width)), (1, 0, 2))
        right = tl.permute(tl.reshape(x_tile, (tile_rows, parts, width)), (1, 2, 0))
        found = tl.dot(left, right, input_precision="ieee")
    return found


@triton.jit
def inputs_tile(
    x,
    row,
    rows,
    start,
    inputs,
    x_stride,
    whole: tl.constexpr,
    tile_inputs: tl.constexpr,
):
    """The inputs from ``start`` on of the rows ``row``: [rows of the tile, tile_inputs], 0 outside."""
    column = start + tl.arange(0, tile_inputs)
    inside = row[:, None] < rows
    if not whole:
        inside = inside & (column[None, :] < inputs)
    return tl.load(x + row[:, None].to(tl.int64) * x_stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def squares_of(squares, row, rows, square_tiles, tile_squares: tl.constexpr):
    """What tiles of the product before have left of the rows ``row``, [rows of the tile, tile_squares]."""
    tile = tl.arange(0, tile_squares)
    known = (row[:, None] < rows) & (tile[None, :] < square_tiles)
    return tl.load(squares + row[:, None] * square_tiles + tile[None, :], mask=known, other=0.0)


@triton.jit
def shrink(found, inputs, eps):
    """What sums over rows are multiplied by, that the rows become their norms: [rows].

    ``found`` [rows, some] are sums of squares of ``inputs`` numbers.
    """
    return tl.rsqrt(tl.sum(found, 1) / inputs + eps)


# How a tile of a product ends, one program's or several programs': sums written, with the bias, or gated.
#
# Where the inputs of a tile are shared out, no second kernel waits for the first: each program leaves its
# sums, and the last one to come adds them up, always in the same order, so that the result does not depend
# on who was last. Host code: ``launch.py``.


@triton.jit
def finish(
    total,
    bias,
    partial,
    arrived,
    output,
    norm_weight,
    scaled,
    squares,
    before,
    index,
    row,
    split,
    rows,
    outputs,
    has_bias: tl.constexpr,
    gated: tl.constexpr,
    adds: tl.constexpr,
    splits: tl.constexpr,
):
    """``total`` [tile of outputs, tile of rows] float32 to ``output`` [rows, outputs], at ``index``, ``row``.

    ``adds``: it is added to ``before``, what stands there. What becomes of that goes times ``norm_weight``
    [outputs] to ``scaled`` [rows, outputs], too, and its squares are summed up in ``squares`` [tile of rows].

    ``gated``: the outputs are gates and as many others (``tile_index``), and ``output`` [rows, outputs / 2]
    is silu(gate) * other, rounded where ``row_steps.silu_and_multiply`` rounds.
    With ``splits`` > 1 ``partial`` is [splits, rows, outputs] float32, and ``arrived`` counts the programs of
    this tile that have left their sums there: 0 before the first and after the last.
    """
    inside = (index[:, None] < outputs) & (row[None, :] < rows)
    place = row[None, :].to(tl.int64) * outputs + index[:, None]
    if splits > 1:
        cells = rows.to(tl.int64) * outputs
        tl.store(partial + split * cells + place, total, mask=inside)
        tl.debug_barrier()  # all threads' sums are on their way before the one that counts says so
        if tl.atomic_add(arrived, 1, sem="acq_rel") == splits - 1:
            total = tl.zeros_like(total)
            for other in range(splits):
                # Past the first cache, which does not see what other multiprocessors write.
                found = tl.load(partial + other * cells + place, mask=inside, other=0.0, cache_modifier=".cg")
                total += found
            tl.store(arrived, 0)
            write(
                total,
                bias,
                output,
                norm_weight,
                scaled,
                squares,
                before,
                place,
                index,
                inside,
                row,
                rows,
                outputs,
                has_bias,
                gated,
                adds,
            )
    else:
        write(
            total,
            bias,
            output,
            norm_weight,
            scaled,
            squares,
            before,
            place,
            index,
            inside,
            row,
            rows,
            outputs,
            has_bias,
            gated,
            adds,
        )


@triton.jit
def write(
    total,
    bias,
    output,
    norm_weight,
    scaled,
    squares,
    before,
    place,
    index,
    inside,
    row,
    rows,
    outputs,
    has_bias: tl.constexpr,
    gated: tl.constexpr,
    adds: tl.constexpr,
):
    """``total`` and ``bias`` to ``output`` at ``place``; ``gated`` and ``adds``: see ``finish``."""
    if has_bias:
        total += tl.load(bias + index, mask=index < outputs, other=0.0).to(tl.float32)[:, None]
    rounded = total.to(output.dtype.element_ty)
    if gated:
        half: tl.constexpr = total.shape[0] // 2
        pairs = tl.permute(tl.reshape(rounded, (2, half, total.shape[1])), (1, 2, 0))
        gate, other = tl.split(pairs)
        wide = gate.to(tl.float32)
        active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
        product = active.to(tl.float32) * other.to(tl.float32)
        unit, _ = tl.split(tl.permute(tl.reshape(index, (2, half)), (1, 0)))
        there = (unit[:, None] < outputs // 2) & (row[None, :] < rows)
        unit_place = row[None, :].to(tl.int64) * (outputs // 2) + unit[:, None]
        tl.store(output + unit_place, product.to(gate.dtype), mask=there)
    elif adds:
        rounded = (before.to(tl.float32) + rounded.to(tl.float32)).to(rounded.dtype)
        tl.store(output + place, rounded, mask=inside)
        wide = tl.where(inside, rounded.to(tl.float32), 0.0)
        factor = tl.load(norm_weight + index, mask=index < outputs, other=0.0).to(tl.float32)[:, None]
        tl.store(scaled + place, (wide * factor).to(rounded.dtype), mask=inside)
        tl.store(squares, tl.sum(wide * wide, 0), mask=row < rows)
    else:
        tl.store(output + place, rounded, mask=inside)
