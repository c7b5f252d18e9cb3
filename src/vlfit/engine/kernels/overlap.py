"""How a kernel begins while the one before it still runs, on cards that can do that (from Hopper on).

Each kernel waits for the one before when it begins, and lets the next one be made ready from then on: what a
launch costs is over when its turn comes. Starting more than one ahead, letting the next go later, or fetching
weights before the wait, into registers or the second cache, was slower (docs/log.md). Host code:
``launch.py``.
"""

import triton
import triton.language as tl


@triton.jit
def wait(overlap: tl.constexpr):
    """Go on when the kernel before has ended. The first thing that a kernel does."""
    if overlap:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
