"""How a kernel begins while the one before it still runs, on cards that can do that (from Hopper on).

Each kernel lets the next one start as soon as its own programs run, and waits for the one before only when it
needs its results. What does not depend on them, the weights of a product, is fetched meanwhile. Host code:
``launch.py``.
"""

import triton
import triton.language as tl

LINE = tl.constexpr(128)  # bytes that a cache fetches at a time


@triton.jit
def wait(overlap: tl.constexpr):
    """The next kernel may start; go on when the one before has ended. The first thing that a kernel does."""
    if overlap:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def fetch_and_wait(
    weights,
    first,
    rows,
    row_bytes,
    begin,
    end,
    overlap: tl.constexpr,
    height: tl.constexpr,
    lines: tl.constexpr,
):
    """As ``wait``, and bring what will be read into the cache before.

    That is of ``weights`` the bytes from ``begin`` to before ``end``, at most ``lines`` lines of them, of
    ``height`` rows from ``first`` on; there are ``rows`` rows of ``row_bytes`` bytes each.
    """
    if overlap:
        tl.extra.cuda.gdc_launch_dependents()
        row = first + tl.arange(0, height)
        at = begin + tl.arange(0, lines) * LINE
        place = row[:, None].to(tl.int64) * row_bytes + at[None, :]
        # Past the end it is the last byte, which is fetched anyway.
        place = tl.where((row[:, None] < rows) & (at[None, :] < end), place, begin)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // $0",
            "=r,l",
            [weights.to(tl.int64) + place],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.extra.cuda.gdc_wait()
