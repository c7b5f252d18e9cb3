"""Memory and FLOPs of Qwen3-VL's vision tower (``vision.py``), counted phase by phase from its code.

A test runs the tower on torch's meta device at the true shapes of 2B, 4B and 8B and compares live bytes with
these functions.
"""

from vlfit.checkpoint.config import VisionConfig
from vlfit.plan import allocator
from vlfit.plan.shapes import HALF, SINGLE

# Patches (those of 1024x768 pixels) up to which the feed-forward runs whole; for more it runs in two halves.
MAX_UNSPLIT_PATCHES = 3072


class QwenTowerCost:
    """``TowerCost`` of Qwen3-VL's vision tower; its parameters are described there."""

    max_unsplit_patches = MAX_UNSPLIT_PATCHES
    min_pixels = 65536  # ``shortest_edge`` of the official checkpoints

    def feature_bytes(self, vision: VisionConfig, image_tokens: int) -> int:
        """Bytes of the features of one encoded image: its rows, and as many more per deepstack level."""
        levels = 1 + len(vision.deepstack_visual_indexes)
        return levels * image_tokens * vision.out_hidden_size * HALF

    def peak_bytes(self, vision: VisionConfig, image_tokens: int, scratch: int) -> int:
        """Peak bytes while one image of up to ``image_tokens`` is encoded, without weights.

        Not always the peak of the largest image: above ``MAX_UNSPLIT_PATCHES`` the feed-forward runs in
        halves, which take less. ``scratch``: bytes of the buffer for dequantized weights, or 0.
        """
        whole = min(image_tokens, MAX_UNSPLIT_PATCHES // vision.spatial_merge_size**2)
        return max(_peak_of_image(vision, tokens, scratch) for tokens in (image_tokens, whole))

    def graph_bytes(self, vision: VisionConfig, image_tokens: int, workspace: int, scratch: int) -> int:
        """Bytes that torch reserves for CUDA graphs of the tower's blocks, besides the memory of eager runs.

        Of images up to ``image_tokens``, at most ``MAX_UNSPLIT_PATCHES`` patches. Counted: residual and
        outputs, and beside them a norm's output with q, k and v, or the feed-forward's inner rows; cuBLAS's
        ``workspace`` and ``scratch`` (as in ``peak_bytes``), both in bytes.
        """
        merge = vision.spatial_merge_size**2
        patches = min(image_tokens * merge, MAX_UNSPLIT_PATCHES)
        row = patches * HALF * vision.hidden_size
        output = patches // merge * HALF * vision.out_hidden_size
        outputs = [output] * (1 + len(vision.deepstack_visual_indexes))
        inner = patches * HALF * vision.intermediate_size
        sizes = [row, *outputs, row, row, row, 3 * row, inner, workspace, scratch]
        return allocator.reserved_bytes(size for size in sizes if size) + allocator.SMALL_SEGMENT

    def flops(self, vision: VisionConfig, image_tokens: int) -> float:
        """FLOPs for one image: GEMMs per patch, attention of each patch to all, mergers per image token."""
        patches = image_tokens * vision.spatial_merge_size**2
        in_block = vision.hidden_size * (4 * vision.hidden_size + 2 * vision.intermediate_size)
        merged = vision.hidden_size * vision.spatial_merge_size**2
        mergers = (1 + len(vision.deepstack_visual_indexes)) * merged * (merged + vision.out_hidden_size)
        linear = 2.0 * (patches * vision.depth * in_block + image_tokens * mergers)
        return linear + 4.0 * patches**2 * vision.hidden_size * vision.depth

    def vllm_peak_values(self, vision: VisionConfig, image_tokens: int, cards: int) -> int:
        """Values (not bytes) that vLLM holds at its peak, with feed-forwards split over ``cards``.

        Per patch: two feed-forward rows, residual and norm, pixels, positions, deepstack outputs; for 2B in
        16 bits 28 KiB.
        """
        merged = vision.spatial_merge_size**2
        pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        deepstack = len(vision.deepstack_visual_indexes) * vision.out_hidden_size // merged
        row = 2 * vision.intermediate_size // cards + 3 * vision.hidden_size + pixels + deepstack
        return image_tokens * merged * row


def _peak_of_image(vision: VisionConfig, image_tokens: int, scratch: int) -> int:
    """Peak bytes for an image of exactly ``image_tokens``.

    Always held: deepstack outputs, each patch's residual in 16 bits, the RoPE angles of rows and columns. In
    a block: q, k and v beside the output of a norm or of attention, then a norm's output and the feed-forward
    of one half.
    """
    hidden, merge = vision.hidden_size, vision.spatial_merge_size**2
    patches = image_tokens * merge
    places = patches // vision.spatial_merge_size  # of the longest image: two rows
    output = image_tokens * vision.out_hidden_size * HALF
    always = len(vision.deepstack_visual_indexes) * output
    always += patches * HALF * hidden + places * 2 * SINGLE * (vision.head_dim // 4)
    pixels = vision.in_channels * vision.patch_size**2 * vision.temporal_patch_size
    entering = patches * (pixels + HALF * pixels)  # bytes, and the values that they become
    inner = feed_forward_patches(patches, merge) * HALF * (vision.intermediate_size + hidden)
    in_blocks = max(patches * 4 * HALF * hidden, patches * HALF * hidden + inner)
    merging = output + patches * HALF * (hidden + max(hidden, vision.out_hidden_size // merge))
    return always + max(entering, scratch + max(in_blocks, merging))


def feed_forward_patches(patches: int, merge: int) -> int:
    """Most patches that the feed-forward computes at once: all, or of large images the larger half.

    ``merge``: patches per image token.
    """
    return patches if patches <= MAX_UNSPLIT_PATCHES else -(-patches // (2 * merge)) * merge


TOWER_COST = QwenTowerCost()
