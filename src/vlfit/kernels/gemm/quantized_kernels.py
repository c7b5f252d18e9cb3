"""The kernel for up to a few hundred rows: tiles of narrow weights, unpacked on the fly, times those rows.

``matmul`` computes a tile of the transposed output, so that unpacked weights are the product's first operand:
that one may stay in registers. One row is computed as eight: matrix units wait for memory all the same, while
a kernel without them took twice as long on an H200 (converting and adding up weights one by one). With few
rows there are too few tiles to keep a card busy, so the inputs of a tile are shared out: among the warps of a
program, each of which sums over a part of every step of inputs, and where that is not enough among ``splits``
programs, the last of which to finish adds up their sums, always in the same order (``kernels/gemm/tile.py``).
Reference: ``layers/linear.py`` widens and calls ``F.linear``.
"""

import triton
import triton.language as tl

from vlfit.kernels.gemm.tile import finish, inputs_tile, product, shrink, squares_of, tile_index
from vlfit.kernels.gemm.unpack import (
    fp8_tile,
    groups_of,
    int4_tile,
    int8_tile,
    marked_codes,
    scales,
    shuffle,
    shuffle_words,
    spread,
    zero_points,
)
from vlfit.kernels.primitives import wait


@triton.jit(do_not_specialize=["rows", "steps", "square_tiles"])
def matmul(
    x,
    codes,
    scale,
    zero_point,
    bias,
    partial,
    arrivals,
    output,
    norm_weight,
    scaled,
    squares,
    rows,
    outputs,
    code_columns,
    x_stride,
    scale_columns,
    steps,
    square_tiles,
    eps,
    form: tl.constexpr,
    hardware: tl.constexpr,
    by_hand: tl.constexpr,
    has_zero_point: tl.constexpr,
    has_bias: tl.constexpr,
    gated: tl.constexpr,
    normed: tl.constexpr,
    adds: tl.constexpr,
    tile_squares: tl.constexpr,
    scale_rows: tl.constexpr,
    scale_width: tl.constexpr,
    span: tl.constexpr,
    apart: tl.constexpr,
    one_scale: tl.constexpr,
    whole: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
    parts: tl.constexpr,
    splits: tl.constexpr,
    stages: tl.constexpr,
    overlap: tl.constexpr,
):
    """``output`` [rows, outputs] = ``x`` [rows, inputs] @ weights.T + ``bias``, summed in float32.

    With ``splits`` > 1 each program sums over ``steps`` tiles of inputs, and ``finish`` says what ``partial``
    and ``arrivals`` are, and ``gated``. ``code_columns``: bytes (FP8) or words of codes in a row. ``whole``:
    tiles fill outputs and inputs exactly. ``parts``: into how many a tile of inputs is cut, one for each
    warp, if not 1.
    Where a part of a tile shares its scale, codes are multiplied as they are and the scale is applied to the
    sum; else a weight is its code times its scale, rounded once to the dtype of ``x``. ``one_scale``: all
    inputs share one. ``apart``: one row of int4 (``apart_sums``). ``normed``: times what makes norms of
    ``x``, by the sums of ``squares`` [rows, square_tiles]. ``adds``: to what stands in ``output``; see
    ``finish`` for ``scaled``, and ``squares`` [rows, tiles].
    """
    in_word: tl.constexpr = 8 if form == "int4" else 4 if form == "int8" else 1
    inputs = code_columns * in_word
    row_tiles = tl.cdiv(rows, tile_rows)
    # Neighbours share weights, which are then read from memory once, whatever the number of rows.
    output_index = tile_index(tl.program_id(0) // row_tiles, outputs, tile_outputs, gated)
    row = (tl.program_id(0) % row_tiles) * tile_rows + tl.arange(0, tile_rows)
    split = tl.program_id(1)
    begin = split * steps * tile_inputs
    wait(overlap)
    written = tl.arange(0, 1) if apart else row
    if normed:
        found = squares_of(squares, written, rows, square_tiles, tile_squares)
    before = 0.0
    if adds:
        place = written[None, :].to(tl.int64) * outputs + output_index[:, None]
        inside = (output_index[:, None] < outputs) & (written[None, :] < rows)
        before = tl.load(output + place, mask=inside, other=0.0)
    end = tl.minimum(begin + steps * tile_inputs, inputs)
    if parts > 1:
        total = tl.zeros((parts, tile_outputs, tile_rows), tl.float32)
    else:
        total = tl.zeros((tile_outputs, tile_rows), tl.float32)
    # Said here, the number of stages is that of scales too, which else would be waited for in every step.
    for start in tl.range(begin, end, tile_inputs, num_stages=stages):
        if apart:
            total += apart_sums(
                x,
                codes,
                scale,
                zero_point,
                output_index,
                start,
                outputs,
                inputs,
                scale_columns,
                by_hand,
                has_zero_point,
                scale_width,
                span,
                whole,
                tile_rows,
                tile_outputs,
                tile_inputs,
                parts,
            )
        else:
            total += sums(
                x,
                codes,
                scale,
                zero_point,
                output_index,
                row,
                start,
                rows,
                outputs,
                inputs,
                x_stride,
                scale_columns,
                form,
                hardware,
                by_hand,
                has_zero_point,
                scale_rows,
                scale_width,
                span,
                one_scale,
                whole,
                tile_rows,
                tile_outputs,
                tile_inputs,
                parts,
            )
    if form == "fp8" and not hardware:
        total *= 256.0
    if parts > 1:
        total = tl.sum(total, 0)
    if one_scale:
        total *= scales(scale, output_index, tl.arange(0, 1), outputs, scale_columns, scale_rows).to(
            tl.float32
        )
    if apart:
        total = tl.sum(total, 1)[:, None]
    if normed:
        total *= shrink(found, inputs, eps)[None, :]
    finish(
        total,
        bias,
        partial,
        arrivals + tl.program_id(0),
        output,
        norm_weight,
        scaled,
        squares + written * (tl.num_programs(0) // row_tiles) + tl.program_id(0) // row_tiles,
        before,
        output_index,
        written,
        split,
        rows,
        outputs,
        has_bias,
        gated,
        adds,
        splits,
    )


@triton.jit
def sums(
    x,
    codes,
    scale,
    zero_point,
    output_index,
    row,
    start,
    rows,
    outputs,
    inputs,
    x_stride,
    groups,
    form: tl.constexpr,
    hardware: tl.constexpr,
    by_hand: tl.constexpr,
    has_zero_point: tl.constexpr,
    scale_rows: tl.constexpr,
    scale_width: tl.constexpr,
    span: tl.constexpr,
    one_scale: tl.constexpr,
    whole: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
    parts: tl.constexpr,
):
    """What the tile of inputs from ``start`` on adds: ``product``, with scales but for ``one_scale``."""
    part_width: tl.constexpr = tile_inputs // parts
    spans: tl.constexpr = tile_inputs // span
    x_tile = inputs_tile(x, row, rows, start, inputs, x_stride, whole, tile_inputs)
    group = groups_of(start, scale_width, span, spans)
    if form == "int4":
        x_tile = shuffle(x_tile, tile_rows, tile_inputs)
        value = int4_tile(
            codes,
            zero_point,
            output_index,
            start,
            group,
            outputs,
            inputs,
            groups,
            x_tile.dtype,
            has_zero_point,
            True,
            tile_outputs,
            tile_inputs,
            spans,
            by_hand,
            whole,
        )
    elif form == "int8":
        x_tile = shuffle_words(x_tile, tile_rows, tile_inputs)
        value = int8_tile(
            codes,
            output_index,
            start,
            outputs,
            inputs,
            x_tile.dtype,
            True,
            tile_outputs,
            tile_inputs,
            by_hand,
            whole,
        )
    else:
        column = start + tl.arange(0, tile_inputs)
        value = fp8_tile(codes, output_index, column, outputs, inputs, hardware, whole)
    if one_scale:
        found = product(value.to(x_tile.dtype), x_tile, tile_rows, tile_outputs, tile_inputs, parts)
    elif span >= part_width:
        found = product(value.to(x_tile.dtype), x_tile, tile_rows, tile_outputs, tile_inputs, parts)
        part = groups_of(start, scale_width, part_width, parts)
        factor = scales(scale, output_index, part, outputs, groups, scale_rows, whole).to(tl.float32)
        if parts > 1:
            found *= tl.trans(factor)[:, :, None]
        else:
            found *= factor
    else:
        factor = scales(scale, output_index, group, outputs, groups, scale_rows, whole)
        if factor.dtype != value.dtype:
            # Where both are of one half precision, their product is rounded once as it is.
            factor = factor.to(tl.float32)
            value = value.to(tl.float32)
        weight = value * spread(factor, form == "int4", tile_outputs, tile_inputs, spans)
        found = product(weight.to(x_tile.dtype), x_tile, tile_rows, tile_outputs, tile_inputs, parts)
    return found


@triton.jit
def apart_sums(
    x,
    codes,
    scale,
    zero_point,
    output_index,
    start,
    outputs,
    inputs,
    groups,
    by_hand: tl.constexpr,
    has_zero_point: tl.constexpr,
    scale_width: tl.constexpr,
    span: tl.constexpr,
    whole: tl.constexpr,
    columns: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
    parts: tl.constexpr,
):
    """What a tile of inputs of one row adds to each output, in ``columns``: [tile_outputs, columns] float32.

    Matrix units want ``columns`` rows. As there is one, each of them has a share of its inputs and zeros: so
    they sum up inputs that share a scale, which is applied to sums. Codes are multiplied as they come, in the
    last bits of a number; what that and their zero point are too much is taken from the sum. That sum is
    some 200 times what is left of it at most, which float32 has the digits for beside half precision.
    With several ``parts`` (``product``) each is cut into as many shares: [parts, tile_outputs, columns].
    """
    width: tl.constexpr = tile_inputs // parts // columns
    column = tl.arange(0, tile_inputs)
    lane = tl.arange(0, columns)
    mine = ((column // width) & (columns - 1))[None, :] == lane[:, None]
    known = start + column < inputs
    x_place = (start + column)[None, :] + tl.zeros((columns, 1), tl.int32)
    x_tile = tl.load(x + x_place, mask=mine if whole else mine & known[None, :], other=0.0)
    dtype: tl.constexpr = x_tile.dtype
    code = marked_codes(
        codes, output_index, start, outputs, inputs, dtype, True, tile_outputs, tile_inputs, by_hand, whole
    )
    if dtype == tl.float32:  # no digits to spare
        code -= 8388608.0
    too_much: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0 if dtype == tl.float16 else 0.0
    x_tile = shuffle(x_tile, columns, tile_inputs)
    found = product(code, x_tile, columns, tile_outputs, tile_inputs, parts)
    # [shares], of which ``columns`` belong to each part
    share = tl.load(x + start + column, mask=known, other=0.0).to(tl.float32)
    share = tl.sum(tl.reshape(share, (parts * columns, width)), 1)
    spans: tl.constexpr = tile_inputs // span
    group = groups_of(start, scale_width, span, spans)
    factor = scales(scale, output_index, group, outputs, groups, 1, whole)
    factor = repeated(factor.to(tl.float32), tile_outputs, spans, parts * columns)
    if has_zero_point:
        zero = zero_points(zero_point, output_index, group, outputs, groups)
        less = (too_much + repeated(zero, tile_outputs, spans, parts * columns)) * share[None, :]
    else:
        less = (too_much + 8.0) * share[None, :]
    if parts > 1:
        less = by_part(less, columns, parts)
        factor = by_part(factor, columns, parts)
    return (found - less) * factor


@triton.jit
def repeated(value, outputs: tl.constexpr, spans: tl.constexpr, shares: tl.constexpr):
    """``value`` [outputs, spans] for each of the ``shares`` of a tile, of which each span has as many."""
    wide = tl.broadcast_to(value[:, :, None], (outputs, spans, shares // spans))
    return tl.reshape(wide, (outputs, shares))


@triton.jit
def by_part(value, columns: tl.constexpr, parts: tl.constexpr):
    """``value`` [outputs, parts * columns] as [parts, outputs, columns]."""
    return tl.permute(tl.reshape(value, (value.shape[0], parts, columns)), (1, 0, 2))


# The kernel for many rows: narrow weights as numbers of the computation's dtype, for torch to multiply
# with.
#
# Reference: ``dequantize_fp8``, ``_int8`` and ``_int4`` of ``layers/linear.py``, to the bit.


@triton.jit(do_not_specialize=["first", "outputs"])
def widen(
    codes,
    scale,
    zero_point,
    output,
    first,
    outputs,
    inputs,
    scale_columns,
    form: tl.constexpr,
    hardware: tl.constexpr,
    has_zero_point: tl.constexpr,
    scale_rows: tl.constexpr,
    scale_width: tl.constexpr,
    span: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
):
    """``output`` [outputs - first, inputs]: rows ``first`` to ``outputs`` of the weights, rounded once."""
    tile_spans: tl.constexpr = tile_inputs // span
    output_index = first + tl.program_id(0) * tile_outputs + tl.arange(0, tile_outputs)
    start = tl.program_id(1) * tile_inputs
    column = start + tl.arange(0, tile_inputs)
    group = (start + tl.arange(0, tile_spans) * span) // scale_width
    if form == "int4":
        value = int4_tile(
            codes,
            zero_point,
            output_index,
            start,
            group,
            outputs,
            inputs,
            scale_columns,
            output.dtype.element_ty,
            has_zero_point,
            False,
            tile_outputs,
            tile_inputs,
            tile_spans,
        )
    elif form == "int8":
        value = int8_tile(
            codes,
            output_index,
            start,
            outputs,
            inputs,
            output.dtype.element_ty,
            False,
            tile_outputs,
            tile_inputs,
        )
    else:
        value = fp8_tile(codes, output_index, column, outputs, inputs, hardware)
    factor = scales(scale, output_index, group, outputs, scale_columns, scale_rows).to(tl.float32)
    if form == "fp8" and not hardware:
        factor *= 256.0
    weight = value.to(tl.float32) * spread(factor, False, tile_outputs, tile_inputs, tile_spans)
    inside = (output_index[:, None] < outputs) & (column[None, :] < inputs)
    place = (output_index - first)[:, None].to(tl.int64) * inputs + column[None, :]
    tl.store(output + place, weight.to(output.dtype.element_ty), mask=inside)
