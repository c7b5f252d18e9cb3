"""How a batch lies in the cache: who attends to what in one forward pass, for attention to read.

For the kernels by blocks (``BlockPlan``), for plain PyTorch by slots and masks (``SlotPlan``). Decides
nothing about who runs.
"""

from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from vlfit import kernels
from vlfit.engine.scheduling.scheduler import Work
from vlfit.kernels.attention.paged import BlockPlan
from vlfit.layers.attention import AttentionPlan, DecodeGroup, PrefillChunk, SlotPlan


class Layout:
    def __init__(self, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.device = device
        self._tabled: list[list[int]] = []
        self._table = torch.empty((0, 0), dtype=torch.int32, device=device)

    def plan(self, batch: Many[Work]) -> AttentionPlan:
        """``batch`` has its decoding sequences first, of those with guesses the ones behind the others."""
        return self._by_blocks(batch) if kernels.used_on(self.device) else self._by_slots(batch)

    def _by_blocks(self, batch: Many[Work]) -> BlockPlan:
        lengths = [work.length for work in batch]
        starts = np.cumsum([0, *lengths[:-1]])
        spans = np.stack([starts, lengths, [work.sequence.cached for work in batch]], axis=1)
        decoding = sum(work.decodes for work in batch)
        return BlockPlan(
            torch.cat([_slots(work)[work.sequence.cached :] for work in batch]),
            self._table_of([work.sequence.blocks for work in batch]),
            torch.from_numpy(spans.astype(np.int32)).to(self.device, non_blocking=True),
            self.block_size,
            decoding,
            max(lengths[decoding:], default=0),
        )

    def _table_of(self, tables: list[list[int]]) -> Tensor:
        """``tables`` as one [sequences, most blocks]; the last one is kept, as most steps want it again."""
        if tables != self._tabled:
            filled = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
            for row, blocks in zip(filled, tables, strict=True):
                row[: len(blocks)] = blocks
            self._tabled = tables
            self._table = torch.from_numpy(filled).to(self.device, non_blocking=True)
        return self._table

    def _by_slots(self, batch: Many[Work]) -> SlotPlan:
        decoding = [work for work in batch if work.decodes]
        chunks, start = [], len(decoding)
        for work in batch[len(decoding) :]:
            past = work.sequence.cached
            mask = self._causal_mask(past, work.length) if past else None
            chunks.append(PrefillChunk(start, work.length, _slots(work), mask, self._first(work)))
            start += work.length
        write_slots = torch.cat([_slots(work)[work.sequence.cached :] for work in batch])
        return SlotPlan(write_slots, self._decode_group(decoding) if decoding else None, tuple(chunks))

    def _decode_group(self, batch: Many[Work]) -> DecodeGroup:
        slots = [_slots(work) for work in batch]
        lengths = [len(each) for each in slots]
        longest = max(lengths)
        if len(batch) == 1:
            return DecodeGroup(slots[0][None], None, self._first(batch[0]))
        if min(lengths) == longest:
            return DecodeGroup(torch.stack(slots), None)
        counter = torch.arange(longest, device=self.device)
        rows = [each[counter.clamp(max=length - 1)] for each, length in zip(slots, lengths, strict=True)]
        mask = counter < torch.tensor(lengths, device=self.device)[:, None]
        return DecodeGroup(torch.stack(rows), mask)

    def _first(self, work: Work) -> int | None:
        """The first slot of a sequence whose blocks follow each other, as those of one alone mostly do."""
        blocks = work.sequence.blocks
        if blocks != list(range(blocks[0], blocks[0] + len(blocks))):
            return None
        return blocks[0] * self.block_size

    def _causal_mask(self, past: int, length: int) -> Tensor:
        """[length, past + length]: token i of the chunk sees the past and the chunk up to itself."""
        columns = torch.arange(past + length, device=self.device)
        return columns <= torch.arange(past, past + length, device=self.device)[:, None]


def _slots(work: Work) -> Tensor:
    """The slots of all tokens of a sequence up to the last that this pass computes."""
    if work.sequence.slots is None:
        raise RuntimeError("a sequence runs before it was admitted")
    return work.sequence.slots[: work.sequence.cached + work.length]
