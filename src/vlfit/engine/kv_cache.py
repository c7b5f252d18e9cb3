"""The paged KV cache: one pool of blocks, allocated once, and the account of who holds which.

A sequence holds a block table (a list of block numbers). Token i of it lives in slot
``table[i // block_size] * block_size + i % block_size`` of every layer.
"""

import torch
from torch import Tensor

from vlfit.checkpoint.config import TextConfig


class BlockPool:
    """Numbers of free blocks for ``tokens`` tokens. No tensors; the scheduler reads and changes it."""

    def __init__(self, tokens: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = self.blocks_for(tokens)
        # The lowest number is handed out first.
        self._free = list(range(self.blocks - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks ``tokens`` tokens need."""
        return -(-tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        """``count`` block numbers. The caller has checked that they are free."""
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken

    def give_back(self, blocks: list[int]) -> None:
        self._free.extend(blocks)


def slots_of(blocks: list[int], block_size: int) -> Tensor:
    """All slots [len(blocks) * block_size] of a block table, in the order of the tokens."""
    starts = torch.tensor(blocks, dtype=torch.long) * block_size
    return (starts[:, None] + torch.arange(block_size)).reshape(-1)


class KVCache:
    """Keys and values of all layers: two tensors [layers, slots, kv_heads, head_dim].

    Left unwritten at first: nothing reads a slot before its token has been written.
    """

    def __init__(
        self, config: TextConfig, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (
            config.num_hidden_layers,
            blocks * block_size,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.block_size = block_size
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put ``keys`` and ``values`` [tokens, kv_heads, head_dim] into ``slots`` [tokens]."""
        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of ``slots`` (any shape), each [*slots.shape, kv_heads, head_dim]."""
        flat = slots.reshape(-1)
        shape = (*slots.shape, *self.keys.shape[2:])
        return (
            self.keys[layer].index_select(0, flat).view(shape),
            self.values[layer].index_select(0, flat).view(shape),
        )
