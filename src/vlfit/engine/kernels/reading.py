"""A kernel that reads memory and does next to nothing else: how fast a card can read at all.

Sums of whole numbers, so that nothing that was read can be left out. torch's own sum is slower than reading
is, and so is a copy, which writes as much as it reads. Host code: ``engine/bandwidth.py``.
"""

import triton
import triton.language as tl


@triton.jit
def sum_kernel(numbers, sums, block: tl.constexpr, steps: tl.constexpr):
    """``numbers`` [programs * steps * block] int32 to ``sums`` [programs] int32, which may wrap around."""
    program = tl.program_id(0).to(tl.int64)
    place = program * (steps * block) + tl.arange(0, block)
    total = tl.zeros([block], tl.int32)
    for step in tl.static_range(steps):  # all on their way before the first is needed
        total += tl.load(numbers + place + step * block)
    tl.store(sums + program, tl.sum(total, 0))
