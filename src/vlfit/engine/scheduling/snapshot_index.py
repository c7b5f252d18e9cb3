"""Which recurrent states the prefix cache has copies of, by the tokens before them. No tensors.

Layers with a state cannot start from KV blocks alone: a prefix is reusable only up to a position of which the
state was copied (a *snapshot*, ``layers/state_snapshots.py``). A snapshot has the key of the block, or of the
block's part, that ends at its position, so it is found as blocks are; it is dropped with that block.

All snapshots are of one size, 19 MiB (Qwen3.5-0.8B) to 50 MiB (9B), as much as the KV cache takes for some
1,600 tokens. So they are few, and when all slots are taken the least valuable is given up: tokens that it
saves beyond the next shorter snapshot of the same prefix, times its uses, of which half count after
``HALF_LIFE`` requests. When a snapshot goes, the next longer ones save its tokens as well: long prompts thin
out evenly.
"""

import heapq
from dataclasses import dataclass

HALF_LIFE = 16  # requests


@dataclass(slots=True)
class StateSnapshot:
    """The state after the first ``tokens`` tokens of a prefix, in ``slot``.

    ``parent``: key of the next shorter snapshot of the prefix; b"": none. ``uses``: saved and reused how
    often, as of request number ``used_at``.
    """

    slot: int
    tokens: int
    parent: bytes
    uses: float
    used_at: int


class SnapshotIndex:
    """Snapshots by content key, in ``slots`` slots numbered from 0. The lowest free slot is taken first.

    ``num_evicted``: how many were given up for others so far.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.num_evicted = 0
        self._snapshots: dict[bytes, StateSnapshot] = {}
        self._free = list(range(slots))  # a heap
        self._requests = 0

    def __len__(self) -> int:
        return len(self._snapshots)

    def __contains__(self, key: object) -> bool:
        return key in self._snapshots

    def tokens(self, key: bytes) -> int:
        """Position of the snapshot ``key``; 0 if there is none."""
        found = self._snapshots.get(key)
        return 0 if found is None else found.tokens

    def count_request(self) -> None:
        """Note that a request was admitted: time passes for ``HALF_LIFE``."""
        self._requests += 1

    def use(self, key: bytes) -> int:
        """The slot of the snapshot ``key``, which must exist, for a request that starts from it."""
        found = self._snapshots[key]
        found.uses = self._uses(found) + 1
        found.used_at = self._requests
        return found.slot

    def add(self, key: bytes, tokens: int, parent: bytes) -> int | None:
        """The slot for a new snapshot ``key`` of the first ``tokens`` tokens; the caller copies the state.

        ``parent``: as in ``StateSnapshot``, whether or not it still exists. None if there is one already, or
        if all slots hold more valuable ones.
        """
        if key in self._snapshots or not self.slots:
            return None
        if not self._free:
            least = min(self._snapshots, key=self._value)
            if self._value(least) > tokens - self.tokens(parent):
                return None
            if least == parent:
                parent = self._snapshots[parent].parent
            self.discard(least)
            self.num_evicted += 1
        slot = heapq.heappop(self._free)
        self._snapshots[key] = StateSnapshot(slot, tokens, parent, 1.0, self._requests)
        return slot

    def discard(self, key: bytes) -> None:
        """Drop the snapshot ``key``, if there is one."""
        gone = self._snapshots.pop(key, None)
        if gone is None:
            return
        if gone.slot < self.slots:
            heapq.heappush(self._free, gone.slot)
        for each in self._snapshots.values():
            if each.parent == key:
                each.parent = gone.parent

    def limit(self, slots: int) -> None:
        """Keep only the first ``slots`` slots: no memory can be had for the others."""
        self.slots = min(slots, self.slots)
        self._free = [slot for slot in self._free if slot < self.slots]
        heapq.heapify(self._free)
        for key in [key for key, each in self._snapshots.items() if each.slot >= self.slots]:
            self.discard(key)

    def _uses(self, snapshot: StateSnapshot) -> float:
        return float(snapshot.uses * 0.5 ** ((self._requests - snapshot.used_at) / HALF_LIFE))

    def _value(self, key: bytes) -> float:
        """Tokens that only this snapshot saves, times its uses."""
        snapshot = self._snapshots[key]
        return (snapshot.tokens - self.tokens(snapshot.parent)) * self._uses(snapshot)
