"""What a forward pass says of the next tokens: logits, and what of them every request wants to know.

Knows: what is computed on the device, so that one trip to the host brings it all. Does not draw
(``sampler.py``).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scores:
    """``logits`` [n, vocabulary] float32; ``summary`` [2, n] int64: each row's most likely token, and 1 if
    its logits are numbers, else 0.
    """

    logits: Tensor
    summary: Tensor

    def first(self, count: int) -> "Scores":
        """Those of the first ``count`` rows."""
        return Scores(self.logits[:count], self.summary[:, :count])

    def read(self) -> tuple[list[int], list[bool]]:
        """Each row's most likely token, and whether its logits are usable. Waits for the device."""
        best, usable = self.summary.tolist()
        return best, [bool(each) for each in usable]


def scores_of(logits: Tensor) -> Scores:
    """The summary of ``logits`` [n, vocabulary], computed where they are."""
    largest, best = logits.max(-1)
    return Scores(logits, torch.stack((best, largest.isfinite().long())))
