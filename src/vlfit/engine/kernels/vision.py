"""What the vision tower does to rows between products, in one kernel where plain PyTorch takes five.

Knows: how many programs it gets. Allocates nothing. The reference is ``turn`` in
``engine/qwen3_vl/vision.py``.
"""

from torch import Tensor

_TILE = 1024  # elements that one program writes


def turn_into(fresh: Tensor, cosines: Tensor, sines: Tensor, target: Tensor) -> None:
    """q and k of ``fresh`` turned by their position in float32, and v as it is, into ``target``.

    ``fresh`` and ``target`` [rows, 3, heads, head_dim], ``cosines`` and ``sines`` [rows, 1, 1, head_dim] in
    float32 (``rope.vision_tables``), all contiguous.
    """
    rows, _, heads, head_dim = fresh.shape
    if fresh.device.type == "meta" or not rows:
        return
    from vlfit.engine.kernels.turn import turn_into as kernel

    cells = fresh.numel()
    kernel[(-(-cells // _TILE),)](
        fresh,
        cosines,
        sines,
        target,
        cells,
        width=heads * head_dim,
        head_dim=head_dim,
        tile=_TILE,
        num_warps=4,
    )
