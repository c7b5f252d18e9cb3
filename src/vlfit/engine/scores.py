"""What a forward pass says of the next tokens: logits, and what of them every request wants to know.

Knows: what is computed on the device, so that one trip to the host brings it all. Does not draw
(``sampler.py``).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vlfit.engine import kernels
from vlfit.engine.kernels.ends import best_tokens


@dataclass(frozen=True, slots=True)
class Scores:
    """``logits`` [n, vocabulary] in the dtype of the computation; ``summary`` [2, n] int64: each row's most
    likely token, and 1 if its logits are numbers, else 0.

    ``ready``: what the host waits for before ``summary``, on its way to RAM, may be read; None: nothing.
    """

    logits: Tensor
    summary: Tensor
    ready: torch.cuda.Event | None = None

    def read(self) -> tuple[list[int], list[bool]]:
        """Each row's most likely token, and whether its logits are usable. Waits for the device."""
        if self.ready is not None:
            self.ready.synchronize()
        best, usable = self.summary.tolist()
        return best, [bool(each) for each in usable]


def scores_of(logits: Tensor) -> Scores:
    """The summary of ``logits`` [n, vocabulary], computed where they are."""
    if kernels.used_on(logits.device):
        return Scores(logits, best_tokens(logits))
    largest, best = logits.max(-1)
    return Scores(logits, torch.stack((best, largest.isfinite().long())))
