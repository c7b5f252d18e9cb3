"""What the native engine's CUDA graphs hold on a GPU: of decode steps (``engine/graphs.py``) and of the tower
(``engine/qwen3_vl/recorded.py``).

Knows: which tensors of a step live in the pool that its recordings share. What the driver takes for a
recording is less than can be told: five of 36 layers each were within 4 MiB on an H200 (docs/log.md).
"""

from vlfit.checkpoint.config import VisionConfig
from vlfit.plan import allocator
from vlfit.plan.costs import VISION_WHOLE
from vlfit.plan.model import HALF, Model

# Rows of a pass with guesses, at most (``engine/guessing.py``): products read weights once for so many.
GUESS_ROWS = 8
_SMALL_SEGMENTS = 2  # of torch's pool, for all that is smaller than 1 MiB


def pool_bytes(model: Model, sequences: int, guess_rows: int = 0) -> int:
    """What torch takes for recordings of up to ``sequences``: logits in bfloat16, and the rest.

    They share one pool, and the largest is recorded first: that of ``guess_rows`` where fewer requests run.
    """
    logits = max(sequences, guess_rows) * model.text.vocab_size
    return allocator.held_for((logits * HALF,)) + _SMALL_SEGMENTS * allocator.SMALL_SEGMENT


def tower_bytes(vision: VisionConfig, image_tokens: int, workspace: int, scratch: int) -> int:
    """What torch takes for one recording of the tower's blocks, for pictures of up to ``image_tokens``.

    It shares nothing with what is not recorded: the residual and what is found stay, beside it come and go a
    norm's output, q, k and v, or what is inside of the feed-forward, and what they are added to. Recordings
    have a ``workspace`` for matrix products of their own, and narrow weights the ``scratch`` bytes that
    slices of them are widened into.
    """
    merge = vision.spatial_merge_size**2
    patches = min(image_tokens * merge, VISION_WHOLE)
    row = patches * HALF * vision.hidden_size
    output = patches // merge * HALF * vision.out_hidden_size
    found = [output] * (1 + len(vision.deepstack_visual_indexes))
    inner = patches * HALF * vision.intermediate_size
    sizes = [row, *found, row, row, row, 3 * row, inner, workspace, scratch]
    return allocator.held_for(size for size in sizes if size) + allocator.SMALL_SEGMENT
