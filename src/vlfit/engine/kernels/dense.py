"""The kernel for few rows times weights in the dtype of the computation: it reads the weights once.

``multiply`` computes a tile of the transposed output over a share of the inputs. The last program of a tile
to finish adds up what all of them found, always in the same order: no second kernel waits for the first.
Reference: ``F.linear``. Host code: ``few_rows.py``.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "steps"])
def multiply(
    x,
    weight,
    bias,
    partial,
    arrivals,
    output,
    rows,
    outputs,
    inputs,
    steps,
    has_bias: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
    splits: tl.constexpr,
):
    """``output`` [rows, outputs] = ``x`` [rows, inputs] @ ``weight`` [outputs, inputs].T + ``bias``.

    ``partial`` [tiles of outputs, splits, tile_outputs, tile_rows] float32 and ``arrivals`` [tiles of
    outputs] int32, zeros before and after, are used if ``splits`` > 1. All rows are one tile.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    index = tile * tile_outputs + tl.arange(0, tile_outputs)
    row = tl.arange(0, tile_rows)
    begin = split * steps * tile_inputs
    end = tl.minimum(begin + steps * tile_inputs, inputs)
    total = tl.zeros((tile_outputs, tile_rows), tl.float32)
    for start in range(begin, end, tile_inputs):
        column = start + tl.arange(0, tile_inputs)
        place = index[:, None].to(tl.int64) * inputs + column[None, :]
        inside = (index[:, None] < outputs) & (column[None, :] < inputs)
        tile_weight = tl.load(weight + place, mask=inside, other=0.0, eviction_policy="evict_first")
        x_inside = (row[:, None] < rows) & (column[None, :] < inputs)
        tile_x = tl.load(x + row[:, None] * inputs + column[None, :], mask=x_inside, other=0.0)
        total = tl.dot(tile_weight, tl.trans(tile_x), total, input_precision="ieee")
    if splits > 1:
        cell = tl.arange(0, tile_outputs)[:, None] * tile_rows + row[None, :]
        own = partial + (tile * splits + split).to(tl.int64) * (tile_outputs * tile_rows)
        tl.store(own + cell, total)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + tile, 1, sem="acq_rel")
        if arrived == splits - 1:
            total = tl.zeros((tile_outputs, tile_rows), tl.float32)
            for other in range(splits):
                theirs = partial + (tile * splits + other).to(tl.int64) * (tile_outputs * tile_rows)
                total += tl.load(theirs + cell, cache_modifier=".cg")
            tl.store(arrivals + tile, 0)
            write(total, bias, output, index, row, rows, outputs, has_bias)
    else:
        write(total, bias, output, index, row, rows, outputs, has_bias)


@triton.jit
def write(total, bias, output, index, row, rows, outputs, has_bias: tl.constexpr):
    if has_bias:
        total += tl.load(bias + index, mask=index < outputs, other=0.0).to(tl.float32)[:, None]
    written = (index[:, None] < outputs) & (row[None, :] < rows)
    place = row[None, :].to(tl.int64) * outputs + index[:, None]
    tl.store(output + place, total.to(output.dtype.element_ty), mask=written)
