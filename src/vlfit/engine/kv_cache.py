"""The paged KV cache: one pool of blocks, allocated once, and the account of who holds which.

A sequence holds a block table (a list of block numbers). Token i of it lives in slot
``table[i // block_size] * block_size + i % block_size`` of every layer.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping

import torch
from torch import Tensor

from vlfit.checkpoint.config import TextConfig


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

    @property
    def block_bytes(self) -> int:
        """What one block takes in all layers."""
        layers, _, heads, head_dim = self.keys.shape
        return 2 * layers * self.block_size * heads * head_dim * self.keys.dtype.itemsize

    def resize(self, blocks: int, kept: Mapping[int, int], release: Callable[[], None]) -> None:
        """Make room for ``blocks`` and carry over those in ``kept``, new numbers by old, through RAM.

        First keys, then values, so that no more than one of the two waits there. ``release`` gives the
        device what was freed. Raises ``torch.OutOfMemoryError`` where there is no room; then all is lost.
        """
        for name in ("keys", "values"):
            try:
                setattr(self, name, self._resized(name, blocks, kept, release))
            except torch.OutOfMemoryError:
                self.keys, self.values = self.keys[:, :0].clone(), self.values[:, :0].clone()
                release()
                raise

    def _resized(
        self, name: str, blocks: int, kept: Mapping[int, int], release: Callable[[], None]
    ) -> Tensor:
        """``keys`` or ``values`` anew. The old ones are gone before there is room for both."""
        old: Tensor = getattr(self, name)
        size = self.block_size
        waiting = {
            new: old[:, number * size : (number + 1) * size].to("cpu", copy=True)
            for number, new in kept.items()
        }
        nothing = old[:, :0].clone()
        setattr(self, name, nothing)
        del old
        release()
        layers, _, heads, head_dim = nothing.shape
        fresh = nothing.new_empty((layers, blocks * size, heads, head_dim))
        for new, block in waiting.items():
            fresh[:, new * size : (new + 1) * size] = block
        return fresh

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put ``keys`` and ``values`` [tokens, kv_heads, head_dim] into ``slots`` [tokens]."""
        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """The first ``tokens`` tokens of block ``source`` into block ``target``, in all layers."""
        if source == target:
            return
        for values in (self.keys, self.values):
            of, to = (block * self.block_size for block in (source, target))
            values[:, to : to + tokens].copy_(values[:, of : of + tokens])

    def read(self, layer: int, slots: Tensor, first: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values of ``slots`` (any shape), each [*slots.shape, kv_heads, head_dim].

        Where the slots follow each other and ``first`` is the first, nothing is copied.
        """
        shape = (*slots.shape, *self.keys.shape[2:])
        if first is not None:
            run = slice(first, first + slots.numel())
            return self.keys[layer, run].view(shape), self.values[layer, run].view(shape)
        flat = slots.reshape(-1)
        return (
            self.keys[layer].index_select(0, flat).view(shape),
            self.values[layer].index_select(0, flat).view(shape),
        )
