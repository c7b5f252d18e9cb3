"""What the native engine's CUDA graphs of decode steps hold on a GPU (``engine/graphs.py``).

Knows: which tensors of a step live in the pool that its recordings share. What the driver takes for a
recording is less than can be told: five of 36 layers each were within 4 MiB on an H200 (docs/log.md).
"""

from vlfit.plan import allocator
from vlfit.plan.model import HALF, Model

# Rows of a pass with guesses, at most (``engine/guessing.py``): products read weights once for so many.
GUESS_ROWS = 8
_SMALL_SEGMENTS = 2  # of torch's pool, for all that is smaller than 1 MiB


def pool_bytes(model: Model, sequences: int, guess_rows: int = GUESS_ROWS) -> int:
    """What torch takes for recordings of up to ``sequences``: logits in bfloat16, and the rest.

    They share one pool, and the largest is recorded first: that of ``guess_rows`` where fewer requests run.
    """
    logits = max(sequences, guess_rows) * model.text.vocab_size
    return allocator.held_for((logits * HALF,)) + _SMALL_SEGMENTS * allocator.SMALL_SEGMENT
