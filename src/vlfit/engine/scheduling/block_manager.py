"""Reference-counted blocks of the paged KV cache. No tensors.

Token i of a sequence lives in slot ``block_table[i // block_size] * block_size + i % block_size`` of every
layer.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable


class BlockManager:
    """Allocates and reference-counts the blocks of a KV cache of ``tokens`` tokens, rounded up to blocks.

    ``block_size``: tokens in a block. Blocks are numbered from 0. Requests with a common prefix share
    blocks. A block without references is free, even while the prefix cache still has an entry for it. Free
    blocks with an entry are allocated last, those freed longest ago first.
    """

    def __init__(self, tokens: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = self.blocks_for(tokens)
        self._ref_counts = [0] * self.num_blocks
        # In allocation order; initially the lowest number first.
        self._free_blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))

    @property
    def num_free(self) -> int:
        """Number of blocks without references, including those in the prefix cache."""
        return len(self._free_blocks)

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that ``tokens`` tokens need, rounded up."""
        return -(-tokens // self.block_size)

    def num_referenced(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` are in use (have at least one reference)."""
        return sum(self._ref_counts[block] > 0 for block in blocks)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks, with one reference each. Returns their numbers in ascending order.

        The caller checks ``num_free`` before, and evicts the blocks from the prefix cache afterwards.
        """
        blocks = sorted(self._free_blocks.popitem(last=False)[0] for _ in range(count))
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def incref(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of ``blocks``, used or free, to share their contents."""
        for block in blocks:
            self._ref_counts[block] += 1
            self._free_blocks.pop(block, None)

    def free(self, blocks: Iterable[int], cached: Container[int] = ()) -> None:
        """Drop one reference from each of ``blocks``; those left without references become free.

        ``blocks``: a block table, in order. ``cached``: all blocks in the prefix cache; freed blocks in it
        are allocated last. Among these a later block is allocated before an earlier one, as it can be matched
        only after the earlier one.
        """
        for block in reversed(list(blocks)):
            self._ref_counts[block] -= 1
            if not self._ref_counts[block]:
                self._free_blocks[block] = None
                if block not in cached:
                    self._free_blocks.move_to_end(block, last=False)

    def resize(self, num_blocks: int) -> dict[int, int]:
        """Change the number of blocks to ``num_blocks`` and renumber those in use from 0.

        Returns the new number of each block in use by its old one. If more than ``num_blocks`` are in use,
        those with the highest numbers are lost with their references, and are not in the result; with 0, all.
        """
        referenced = [old for old, count in enumerate(self._ref_counts) if count][:num_blocks]
        self._ref_counts = [self._ref_counts[old] for old in referenced] + [0] * (
            num_blocks - len(referenced)
        )
        self._free_blocks = OrderedDict.fromkeys(range(len(referenced), num_blocks))
        self.num_blocks = num_blocks
        return {old: new for new, old in enumerate(referenced)}
