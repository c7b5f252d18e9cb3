"""What a forward pass says of the next tokens: logits, and what of them every request wants to know.

Knows: what is computed on the device, so that one trip to the host brings it all. Does not draw
(``sampler.py``, ``kernels/draw.py``).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vlfit.engine import kernels
from vlfit.engine.kernels.draw import choose_tokens


@dataclass(frozen=True, slots=True)
class Scores:
    """``logits`` [n, vocabulary] in the dtype of the computation; ``summary`` [2 or 3, n] int64: each row's
    token, which is the most likely one if none was drawn; 1 if its logits are numbers, else 0; and 1 if it
    was drawn as it was asked for, else 0, where the device was asked.

    ``ready``: what the host waits for before ``summary``, on its way to RAM, may be read; None: nothing.
    """

    logits: Tensor
    summary: Tensor
    ready: torch.cuda.Event | None = None

    def read(self) -> tuple[list[int], list[bool], list[bool] | None]:
        """Each row's token, whether its logits are usable, and whether it was drawn. Waits for the device."""
        if self.ready is not None:
            self.ready.synchronize()
        tokens, usable, *drawn = self.summary.tolist()
        return tokens, [bool(each) for each in usable], [bool(each) for each in drawn[0]] if drawn else None


def scores_of(
    logits: Tensor,
    asked: Tensor | None = None,
    positions: Tensor | None = None,
    forms: Tensor | None = None,
) -> Scores:
    """The summary of ``logits`` [n, vocabulary], computed where they are.

    A GPU draws as it is ``asked`` to, for rows of tokens at ``positions``, of what ``forms`` allow
    (``kernels/draw.py``).
    """
    if kernels.used_on(logits.device):
        return Scores(logits, choose_tokens(logits, asked, positions, forms))
    largest, best = logits.max(-1)
    return Scores(logits, torch.stack((best, largest.isfinite().long())))
