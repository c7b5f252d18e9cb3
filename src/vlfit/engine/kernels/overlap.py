"""How a kernel begins while the one before it still runs, on cards that can do that (from Hopper on).

Each kernel waits for the one before when it begins, and lets the next one be made ready from then on: what a
launch costs is over when its turn comes. While it waits, memory may be idle: weights that it, or a later one,
is going to read are asked for by then, into the cache that all multiprocessors share, where they take no
registers. Fetching them into registers before the wait was slower (docs/log.md). Host code: ``launch.py``.
"""

import triton
import triton.language as tl


@triton.jit
def wait(overlap: tl.constexpr, early: tl.constexpr = False, late: tl.constexpr = False):
    """Go on when the kernel before has ended. The first thing that a kernel does.

    ``early``: the next one is made ready before that; ``late``: when ``let_next`` says so.
    """
    if overlap:
        if early:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not early and not late:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def let_next(overlap: tl.constexpr, late: tl.constexpr):
    """Where the next kernel is made ready if it is ``late``."""
    if overlap and late:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def ask_for(place, size):
    """``size`` bytes from each address ``place`` on, multiples of 16 both, on their way to the second cache.

    Cards that overlap kernels have an instruction for it. Nothing waits for them.
    """
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [place, size],
        tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def ask_for_rows(
    matrix,
    index,
    begin,
    rows,
    columns,
    tile_rows: tl.constexpr,
    ahead: tl.constexpr,
):
    """``ahead`` bytes of each row of ``matrix`` [rows, columns] at ``index`` [tile_rows], from the column
    ``begin`` on, into the second cache: by all threads, if there are more of them than rows.
    """
    pieces: tl.constexpr = max(tl.extra.cuda.num_threads() // tile_rows, 1)
    width: tl.constexpr = ahead * 8 // matrix.dtype.element_ty.primitive_bitwidth // pieces
    column = begin + tl.arange(0, pieces) * width
    place = tl.minimum(index, rows - 1)[:, None].to(tl.int64) * columns + column[None, :]
    # What lies behind the last row is not ours.
    place = matrix + tl.minimum(place, rows.to(tl.int64) * columns - width)
    ask_for(place.to(tl.int64), ahead // pieces)
