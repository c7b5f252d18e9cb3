"""The paged KV cache: one pool of blocks, allocated once, and the account of who holds which.

A sequence holds a block table (a list of block numbers). Token i of it lives in slot
``table[i // block_size] * block_size + i % block_size`` of every layer.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping

import torch
from torch import Tensor

from vlfit.checkpoint.config import TextConfig
from vlfit.engine.kv_rows import Rows


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
    """Keys and values of all layers: two tensors [layers, slots, kv_heads, head_dim] of ``dtype``.

    ``narrow``: in FP8, each row with its scale (``kv_rows.py``). Left unwritten at first: nothing reads a
    slot before its token has been written.
    """

    def __init__(
        self,
        config: TextConfig,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        narrow: bool = False,
    ) -> None:
        heads, head_dim = config.num_key_value_heads, config.head_dim
        shape = (config.num_hidden_layers, blocks * block_size, heads, head_dim)
        self.block_size = block_size
        self.dtype = dtype
        self._keys = Rows.empty(shape, dtype, device, narrow=narrow)
        self._values = Rows.empty(shape, dtype, device, narrow=narrow)

    @property
    def keys(self) -> Tensor:
        """[layers, slots, kv_heads, head_dim]; in FP8 codes."""
        return self._keys.numbers

    @property
    def values(self) -> Tensor:
        """As ``keys``."""
        return self._values.numbers

    def scales(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Of the keys and of the values of one layer in FP8, [slots, kv_heads]; else None."""
        if self._keys.scales is None or self._values.scales is None:
            return None
        return self._keys.scales[layer], self._values.scales[layer]

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    @property
    def block_bytes(self) -> int:
        """What one block takes in all layers."""
        return (self._keys.slot_bytes + self._values.slot_bytes) * self.block_size

    def resize(self, blocks: int, kept: Mapping[int, int], release: Callable[[], None]) -> None:
        """Make room for ``blocks`` and carry over those in ``kept``, new numbers by old, through RAM.

        First keys, then values, so that no more than one of the two waits there. ``release`` gives the
        device what was freed. Raises ``torch.OutOfMemoryError`` where there is no room; then all is lost.
        """
        try:
            for name in ("_keys", "_values"):
                self._resize(name, blocks, kept, release)
        except torch.OutOfMemoryError:
            self._keys, self._values = self._keys.resized(0), self._values.resized(0)
            release()
            raise

    def _resize(self, name: str, blocks: int, kept: Mapping[int, int], release: Callable[[], None]) -> None:
        """``_keys`` or ``_values`` anew. The old ones are gone before there is room for both."""
        old: Rows = getattr(self, name)
        waiting = old.taken_out(kept, self.block_size)
        nothing = old.resized(0)
        setattr(self, name, nothing)
        del old
        release()
        fresh = nothing.resized(blocks * self.block_size)
        fresh.put_in(waiting, self.block_size)
        setattr(self, name, fresh)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put ``keys`` and ``values`` [tokens, kv_heads, head_dim] into ``slots`` [tokens]."""
        self._keys.write(layer, slots, keys)
        self._values.write(layer, slots, values)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """The first ``tokens`` tokens of block ``source`` into block ``target``, in all layers."""
        if source == target:
            return
        for rows in (self._keys, self._values):
            rows.copy(source * self.block_size, target * self.block_size, tokens)

    def read(self, layer: int, slots: Tensor, first: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values of ``slots`` (any shape), each [*slots.shape, kv_heads, head_dim].

        Where the slots follow each other and ``first`` is the first, nothing is copied but what is widened.
        """
        return self._keys.read(layer, slots, first), self._values.read(layer, slots, first)
