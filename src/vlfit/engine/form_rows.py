"""Which tokens the rows of a recorded step may have, where answers keep to a form.

A step is computed before anybody knows what may come next: the token before it is read meanwhile, and its
form says then. Knows how bits lie on the device. Does not know forms (``constraint.py``) or when a step wants
them (``graphs.py``).
"""

from collections.abc import Sequence as Many

import torch

from vlfit.engine.constraint import BITS
from vlfit.engine.kernels.draw import draws
from vlfit.engine.sampler import is_plain_greedy
from vlfit.engine.sequence import Sequence


def keeps_to_form(sequence: Sequence) -> bool:
    """Whether the device chooses its tokens, of those that its form allows."""
    sampling = sequence.sampling
    return sequence.constraint is not None and (is_plain_greedy(sampling) or draws(sampling))


class FormRows:
    """``on_device`` [rows, words] int32: a bit for each of ``vocabulary`` tokens, as ``choose_tokens`` reads
    them; what a row holds that keeps to no form means nothing.
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        shape = rows, -(-vocabulary // BITS)
        # Read by the device before the host has a token of the step, and so before it is written again.
        on_host = torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.on_device = torch.zeros(shape, dtype=torch.int32, device=device)
        self._on_host, self._words = on_host, on_host.numpy().view("uint32")

    def fill(self, sequences: Many[Sequence]) -> None:
        """What may come next of each of ``sequences``, a row each. Raises as ``Constraint.bits`` does."""
        formed = False
        for row, sequence in enumerate(sequences):
            if sequence.constraint is not None and keeps_to_form(sequence):
                bits = sequence.constraint.bits()[: self._words.shape[1]]
                self._words[row, : len(bits)] = bits
                self._words[row, len(bits) :] = 0
                formed = True
        if formed:
            rows = len(sequences)
            self.on_device[:rows].copy_(self._on_host[:rows], non_blocking=True)
