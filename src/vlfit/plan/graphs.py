"""What the native engine's CUDA graphs of decode steps hold on a GPU (``engine/graphs.py``).

Knows: which tensors of a step live in the pool that its recordings share, and what the driver takes for them.
Recordings themselves are as small as the driver makes them; it does not tell.
"""

from vlfit.plan import allocator
from vlfit.plan.calibration import Constant
from vlfit.plan.model import HALF, SINGLE, Model
from vlfit.units import MIB

# The process beside torch's pool, before and after the first recordings (four, of 1 to 8 sequences); more of
# them, and of larger models, took no more.
DRIVER = Constant(
    72 * MIB, "measured", "Qwen3-VL 2B in bf16, one H200, driver 580.159.04, torch 2.11.0+cu130, 2026-11-21"
)
_SMALL_SEGMENTS = 2  # of torch's pool, for all that is smaller than 1 MiB


def pool_bytes(model: Model, sequences: int) -> int:
    """What torch takes for recordings of up to ``sequences``: logits in bfloat16 and float32, and the rest.

    They share one pool, and the largest is recorded first.
    """
    logits = sequences * model.text.vocab_size
    return allocator.held_for((logits * HALF, logits * SINGLE)) + _SMALL_SEGMENTS * allocator.SMALL_SEGMENT
