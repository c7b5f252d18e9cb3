"""What a recorded pass with guesses reads: the newest token of each sequence, and its guesses behind it.

A row for each of them, as if each were a sequence: the same blocks, and one token more of the past each. Rows
of one sequence look at keys and values of each other, so all are stored before any row looks
(``BlockPlan.stored_before``), and a row's own token is part of its past. Knows how guesses lie in rows. Does
not know when such a pass is recorded (``graphs.py``) or whether guesses are right (``guessing.py``).
"""

from collections.abc import Sequence as Many
from dataclasses import replace

import torch
from torch import Tensor

from vlfit.engine.graphs import StepInputs
from vlfit.engine.scheduler import Work

_NOWHERE = -1  # a slot: nothing is left in the cache


class GuessInputs(StepInputs):
    """As ``StepInputs``, of up to ``size`` rows, of which several may be of one sequence."""

    def __init__(self, size: int, blocks: int, block_size: int, device: torch.device) -> None:
        super().__init__(size, blocks, block_size, device)
        nowhere = torch.full((size,), _NOWHERE, dtype=torch.int32, device=device)
        self.plan = replace(self.plan, stored_before=nowhere)

    def fill_guessed(self, batch: Many[Work]) -> int:
        """The newest token of each of ``batch``, then its guesses. Gives how many rows that is."""
        size, row = self._block_size, 0
        for work in batch:
            sequence = work.sequence
            for further, token in enumerate((sequence.generated[-1], *work.guesses)):
                place = sequence.cached + further
                self._tokens[row] = token
                self._positions[row] = sequence.position + further
                self._slots[row] = sequence.blocks[place // size] * size + place % size
                self._spans[row, 2] = place + 1
                if self._tabled[row] is not sequence.blocks:
                    self._table[row, : len(sequence.blocks)] = sequence.blocks
                    self._tabled[row] = sequence.blocks
                row += 1
        self._slots[row:] = _NOWHERE
        self._spans[row:, 2] = _NOWHERE
        self._tabled[row:] = [None] * (self.size - row)
        self._on_device.copy_(self._on_host, non_blocking=True)
        return row

    def move_on(self, best: Tensor) -> None:
        """Nothing: which step is the next one, the host decides."""
