"""A device for tests that runs what is launched as late as it can, and a model that notices every wrong read.

So whoever reads or writes too early, or in another slot, gets another token in the end.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.test_cuda_graphs import FakeCapturedStep
from vlfit import kernels
from vlfit.engine.execution import cuda_graphs
from vlfit.engine.execution.cuda_graphs import UNUSED_ROW, OutputStaging
from vlfit.engine.sampling.sampler import StepOutput, select_tokens
from vlfit.engine.scheduling.sequence import IntVector
from vlfit.kernels.attention.paged import BlockAttentionMetadata
from vlfit.kernels.sampling.draw import GRAMMAR_FIELD

CPU = torch.device("cpu")
VOCABULARY = 12
_WEIGHTS = np.random.default_rng(5).integers(1, 1 << 30, 64)  # by position
_copy_now, _copy_out = Tensor.copy_, OutputStaging.copy_out


class LateDevice:
    """A queue of launched work that runs in order, and only when the host waits for it.

    As on a GPU, copies that do not block are launched, too, and read their source when they run. ``haste``:
    how likely a launch is to let part of the queue run, as a faster device would; ``chance`` decides.
    """

    def __init__(self) -> None:
        self.chance, self.haste = random.Random(0), 0.0
        self._queue: deque[Callable[[], object]] = deque()
        self._num_launched = 0

    def launch(self, work: Callable[[], object]) -> None:
        """Append ``work`` to the queue."""
        self._queue.append(work)
        self._num_launched += 1
        if self.chance.random() < self.haste:
            self._run_until(self._num_launched - self.chance.randint(0, len(self._queue)))

    def finish(self) -> None:
        """Run all that was launched."""
        self._run_until(self._num_launched)

    def event(self) -> Any:
        """In place of a CUDA event that was recorded now."""
        return SimpleNamespace(synchronize=partial(self._run_until, self._num_launched))

    def _run_until(self, number: int) -> None:
        """Run what is in the queue, up to launch ``number``."""
        while self._queue and self._num_launched - len(self._queue) < number:
            self._queue.popleft()()

    def replace_gpu(self, patch: pytest.MonkeyPatch) -> None:
        """Have decode graphs and copies run here, and metadata built for kernels, which are those below."""

        def copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            if non_blocking:
                self.launch(partial(_copy_now, target, source))
                return target
            return _copy_now(target, source)

        def copy_out(staging: OutputStaging, output: StepOutput, rows: int) -> StepOutput:
            copied = _copy_out(staging, output, rows)
            return replace(copied, ready=self.event())

        patch.setattr(Tensor, "copy_", copy)
        patch.setattr(OutputStaging, "copy_out", copy_out)
        patch.setattr(kernels, "enabled_for", lambda group, device: group == "attention")
        patch.setattr(cuda_graphs, "CapturedStep", partial(LateStep, self))
        patch.setattr(cuda_graphs, "select_tokens", select_allowed)
        patch.setattr(cuda_graphs, "advance_decode_inputs", advance_inputs)


class LateStep(FakeCapturedStep):
    """In place of a captured step: ``device`` computes its outputs, which stay where they are."""

    def __init__(
        self,
        device: LateDevice,
        forward: Callable[[], Tensor],
        sample: Callable[[Tensor], StepOutput],
        pool: object,
    ) -> None:
        device.finish()
        super().__init__(forward, sample, pool)
        self.logits, self._device = self.output.logits, device

    def forward(self) -> None:
        self._device.launch(lambda: self.logits.copy_(self._forward()))

    def sample(self) -> None:
        self._device.launch(lambda: self.output.summary.copy_(self._sample(self.logits).summary))


def select_allowed(
    logits: Tensor, fields: Tensor, positions: Tensor, bitmask: Tensor, *, drafts: object
) -> StepOutput:
    """In place of the kernel that samples: greedy, by the bitmask in rows with a grammar."""
    scores = logits
    if fields[GRAMMAR_FIELD].any():
        bits = np.unpackbits(bitmask.numpy().view(np.uint8), axis=1, bitorder="little")
        forbidden = torch.from_numpy(bits[:, : logits.shape[1]] == 0) & (fields[GRAMMAR_FIELD] != 0)[:, None]
        scores = logits.masked_fill(forbidden, -torch.inf)
    return StepOutput(logits, select_tokens(scores).summary)


def advance_inputs(*tensors_and_size: Any) -> None:
    """In place of the kernel ``advance_decode_inputs``, for layers without states."""
    *tensors, size, _ = tensors_and_size
    chosen, token_ids, positions, slots, spans, tables = (tensor.numpy() for tensor in tensors)
    for row in np.flatnonzero(spans[:, 2] != UNUSED_ROW):
        past = spans[row, 2] + 1
        block, offset = divmod(past, size)
        slots[row] = tables[row, block] * size + offset if block < tables.shape[1] else UNUSED_ROW
        token_ids[row], spans[row, 2] = chosen[row], past
        positions[row] += 1


def next_token(token_ids: IntVector, positions: IntVector) -> int:
    """The likeliest token after these. As to attention, their order is that of their positions."""
    return int(((token_ids + 1) * _WEIGHTS[positions]).sum() >> 9) % VOCABULARY


class Model:
    """In place of the text model and its KV cache, which has the token and the position of each slot.

    The second likeliest token is the number after the likeliest one.
    """

    multiplications_per_row, states, addresses, device = 1, (), (1,), CPU

    def __init__(self, late: LateDevice, blocks: int, block_size: int) -> None:
        self.block_size, self._late = block_size, late
        self._cached = np.zeros((blocks, block_size, 2), np.int64)

    def __call__(self, *inputs: Any) -> Tensor:
        """A pass outside of graphs: logits of the rows that are sampled, which the host reads at once."""
        token_ids, positions, _, _, metadata, rows = inputs
        self._late.finish()
        return self.step(token_ids, positions, metadata)[rows]

    def step(self, token_ids: Tensor, positions: Tensor, metadata: BlockAttentionMetadata) -> Tensor:
        """Store all rows, then let each attend to the past in its block table and to its own sequence."""
        new = torch.stack((token_ids, positions[0]), 1).numpy()
        slots = metadata.slot_mapping.numpy()
        self._cached.reshape(-1, 2)[slots[slots >= 0]] = new[slots >= 0]
        logits = torch.zeros(len(new), VOCABULARY)
        tables = metadata.block_tables.numpy()
        for table, (first, length, past) in zip(tables, metadata.query_spans.tolist(), strict=True):
            if past == UNUSED_ROW:
                continue
            cached = self._cached[table].reshape(-1, 2)[:past]
            for row in range(first, first + length):
                own = new[first : row + 1] if metadata.no_store_slots is None else new[:0]
                likeliest = next_token(*np.concatenate((cached, own)).T)
                logits[row, likeliest], logits[row, (likeliest + 1) % VOCABULARY] = 2, 1
        return logits
