"""How a pass begins and ends on a GPU: rows of a table in 8 bits, what positions turn by, and what the step
after it reads.

Knows: what each allocates, and how many programs it gets. References: ``layers/embedding.py`` and
``decoder/rope.py``, which also decide where these run; of ``next_inputs`` ``graphs.StepInputs.fill``.
"""

import torch
from torch import Tensor

from vlfit.engine.kernels.launch import overlapping, power_of_two


def look_up(token_ids: Tensor, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [n, width] of ``codes`` [tokens, width] int8 times ``scale`` [tokens, groups]."""
    rows, width = len(token_ids), codes.shape[1]
    output = torch.empty((rows, width), dtype=dtype, device=codes.device)
    if codes.device.type != "meta" and rows:
        from vlfit.engine.kernels.end_steps import look_up as kernel

        kernel[(rows,)](
            token_ids,
            codes,
            scale,
            output,
            width=width,
            groups=scale.shape[1],
            tile=power_of_two(width),
            num_warps=4,
            **overlapping(codes.device),
        )
    return output


def rotation_tables(
    positions: Tensor, frequencies: Tensor, axis: Tensor | None, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines [rows, 1, 2 * pairs], times ``factor``, for ``positions`` [3, rows].

    ``frequencies`` [pairs] float32; ``axis`` [pairs] int64: which of the three each pair stands on; None: the
    first.
    """
    rows, pairs = positions.shape[1], len(frequencies)
    cosines, sines = torch.empty((2, rows, 1, 2 * pairs), dtype=dtype, device=positions.device)
    if positions.device.type != "meta" and rows:
        from vlfit.engine.kernels.end_steps import rotation_tables as kernel

        kernel[(rows,)](
            positions,
            frequencies,
            frequencies if axis is None else axis,
            cosines,
            sines,
            factor,
            positions.stride(0),
            positions.stride(1),
            has_axis=axis is not None,
            pairs=pairs,
            tile=power_of_two(pairs),
            num_warps=1,
            **overlapping(positions.device),
        )
    return cosines, sines


def next_inputs(
    chosen: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    spans: Tensor,
    table: Tensor,
    block_size: int,
) -> None:
    """What a decode step reads, as the next one is to read it, in place.

    ``chosen`` [rows] int64 become ``token_ids`` [rows]; ``positions`` [rows], the past in ``spans`` [rows, 3]
    and ``slots`` [rows] move on by a token, all int32. ``table`` [rows, blocks] says where the next slot is;
    past its end it is -1. A row whose past is negative stays as it is.
    """
    if chosen.device.type != "meta":
        from vlfit.engine.kernels.end_steps import next_inputs as kernel

        kernel[(1,)](
            chosen,
            token_ids,
            positions,
            slots,
            spans,
            table,
            len(token_ids),
            blocks=table.shape[1],
            block_size=block_size,
            tile=power_of_two(len(token_ids)),
            num_warps=1,
            **overlapping(chosen.device),
        )
