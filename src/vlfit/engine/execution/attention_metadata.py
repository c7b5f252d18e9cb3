"""Attention metadata of a batch: slot mapping, block tables and query spans, or slots and masks for plain
PyTorch.
"""

import numpy as np
import torch
from torch import Tensor

from vlfit import kernels
from vlfit.engine.scheduling.sequence import ScheduledChunk
from vlfit.kernels.attention.paged import BlockAttentionMetadata
from vlfit.layers.attention import AttentionMetadata, DecodeGroup, PrefillChunk, SlotAttentionMetadata


class AttentionMetadataBuilder:
    def __init__(self, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.device = device
        self._cached_tables: list[list[int]] = []
        self._cached_tensor = torch.empty((0, 0), dtype=torch.int32, device=device)

    def build(self, batch: list[ScheduledChunk]) -> AttentionMetadata:
        """Metadata of one step. ``batch`` has decoding sequences first, those with draft tokens last among
        them.
        """
        return self._block_metadata(batch) if kernels.enabled_on(self.device) else self._slot_metadata(batch)

    def _block_metadata(self, batch: list[ScheduledChunk]) -> BlockAttentionMetadata:
        lengths = [chunk.num_tokens for chunk in batch]
        starts = np.cumsum([0, *lengths[:-1]])
        query_spans = np.stack(
            [starts, lengths, [chunk.sequence.num_cached_tokens for chunk in batch]], axis=1
        )
        num_decodes = sum(chunk.is_decode for chunk in batch)
        return BlockAttentionMetadata(
            torch.cat([_slot_mapping(chunk)[chunk.sequence.num_cached_tokens :] for chunk in batch]),
            self._block_tables([chunk.sequence.block_table for chunk in batch]),
            torch.from_numpy(query_spans.astype(np.int32)).to(self.device, non_blocking=True),
            self.block_size,
            num_decodes,
            max(lengths[num_decodes:], default=0),
        )

    def _block_tables(self, tables: list[list[int]]) -> Tensor:
        """``tables`` padded to [sequences, most blocks]; the last result is cached, as most steps reuse
        it.
        """
        if tables != self._cached_tables:
            padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
            for row, blocks in zip(padded, tables, strict=True):
                row[: len(blocks)] = blocks
            self._cached_tables = tables
            self._cached_tensor = torch.from_numpy(padded).to(self.device, non_blocking=True)
        return self._cached_tensor

    def _slot_metadata(self, batch: list[ScheduledChunk]) -> SlotAttentionMetadata:
        decodes = [chunk for chunk in batch if chunk.is_decode]
        chunks, start = [], len(decodes)
        for chunk in batch[len(decodes) :]:
            num_cached = chunk.sequence.num_cached_tokens
            mask = self._causal_mask(num_cached, chunk.num_tokens) if num_cached else None
            chunks.append(
                PrefillChunk(start, chunk.num_tokens, _slot_mapping(chunk), mask, self._first_slot(chunk))
            )
            start += chunk.num_tokens
        slot_mapping = torch.cat(
            [_slot_mapping(chunk)[chunk.sequence.num_cached_tokens :] for chunk in batch]
        )
        return SlotAttentionMetadata(
            slot_mapping, self._decode_group(decodes) if decodes else None, tuple(chunks)
        )

    def _decode_group(self, batch: list[ScheduledChunk]) -> DecodeGroup:
        slots = [_slot_mapping(chunk) for chunk in batch]
        lengths = [len(row_slots) for row_slots in slots]
        longest = max(lengths)
        if len(batch) == 1:
            return DecodeGroup(slots[0][None], None, self._first_slot(batch[0]))
        if min(lengths) == longest:
            return DecodeGroup(torch.stack(slots), None)
        columns = torch.arange(longest, device=self.device)
        rows = [
            row_slots[columns.clamp(max=length - 1)] for row_slots, length in zip(slots, lengths, strict=True)
        ]
        mask = columns < torch.tensor(lengths, device=self.device)[:, None]
        return DecodeGroup(torch.stack(rows), mask)

    def _first_slot(self, chunk: ScheduledChunk) -> int | None:
        """First slot of a sequence with adjacent blocks, as a lone sequence mostly has; else None."""
        table = chunk.sequence.block_table
        if table != list(range(table[0], table[0] + len(table))):
            return None
        return table[0] * self.block_size

    def _causal_mask(self, past: int, length: int) -> Tensor:
        """[length, past + length]: token i of the chunk sees the past and the chunk up to itself."""
        columns = torch.arange(past + length, device=self.device)
        return columns <= torch.arange(past, past + length, device=self.device)[:, None]


def _slot_mapping(chunk: ScheduledChunk) -> Tensor:
    """Slots of all tokens of the sequence up to the last one of ``chunk``."""
    if chunk.sequence.slot_mapping is None:
        raise RuntimeError("a chunk was scheduled before its sequence was admitted")
    return chunk.sequence.slot_mapping[: chunk.sequence.num_cached_tokens + chunk.num_tokens]
