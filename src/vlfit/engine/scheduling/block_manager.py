"""The paged KV cache: one pool of blocks, allocated once, and the account of who holds which.

A sequence holds a block table (a list of block numbers). Token i of it lives in slot
``table[i // block_size] * block_size + i % block_size`` of every layer.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable


class BlockPool:
    """Who holds which block, of enough for ``tokens`` tokens. No tensors; the scheduler reads and changes it.

    Several may hold one block: requests that begin alike. A block that nobody holds is free. What is in it
    may still be wanted (``kept``), so blank blocks are handed out first, then those freed longest ago.
    """

    def __init__(self, tokens: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = self.blocks_for(tokens)
        self._holders = [0] * self.blocks
        # In the order in which they are handed out; the lowest number first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.blocks))

    @property
    def free(self) -> int:
        """Blocks that a request can have now, kept ones among them."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks ``tokens`` tokens need."""
        return -(-tokens // self.block_size)

    def held(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` somebody holds."""
        return sum(self._holders[block] > 0 for block in blocks)

    def take(self, count: int) -> list[int]:
        """``count`` block numbers in order, so that neighbours stay neighbours. The caller has checked that
        they are free, and forgets what they held.
        """
        taken = sorted(self._free.popitem(last=False)[0] for _ in range(count))
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more holds each of ``blocks``, for what is in them."""
        for block in blocks:
            self._holders[block] += 1
            self._free.pop(block, None)

    def give_back(self, blocks: Iterable[int], kept: Container[int] = ()) -> None:
        """One less holds each of ``blocks``. Those of them that are ``kept`` are handed out as late as can
        be, the first of a table last of all: without it those that follow are of no use.
        """
        for block in reversed(list(blocks)):
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block] = None
                if block not in kept:
                    self._free.move_to_end(block, last=False)

    def resize(self, blocks: int) -> dict[int, int]:
        """From now on there are ``blocks``, and those that somebody holds are the first of them.

        Gives their new numbers by the old ones. There must be room for them, unless there is none for any.
        """
        held = [block for block, holders in enumerate(self._holders) if holders][:blocks]
        self._holders = [self._holders[block] for block in held] + [0] * (blocks - len(held))
        self._free = OrderedDict.fromkeys(range(len(held), blocks))
        self.blocks = blocks
        return {block: number for number, block in enumerate(held)}
