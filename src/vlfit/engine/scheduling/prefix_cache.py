"""Prefix cache: KV blocks by the content of the tokens up to their end.

A full block's key is SHA-256 over the key of the block before it, its token ids, and the content and grid of
the images in it. M-RoPE positions follow from these, and so do keys and values. The part of a block up to the
end of an image has a key too, as images rarely end with a block: such a part is copied into a block of the
new request, while full blocks are shared. Blocks without references stay known until they are allocated
again.

For layers with a state, a prefix ends where there is a snapshot of that, too (``snapshot_index.py``). Prompt
chunks end where one is wanted: at the end of each picture or clip, of turns, and of the prompt. A cut costs
about as much time as computing ``MIN_SNAPSHOT_TOKENS`` tokens, so positions are no closer than that, but for
pictures, which save the vision tower's time as well. In between, and in answers, a snapshot is taken every
``SNAPSHOT_INTERVAL`` tokens where chunks and blocks end anyway, and one at the end of an answer.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vlfit.engine.scheduling.sequence import IntVector, PromptKeys
from vlfit.engine.scheduling.snapshot_index import SnapshotIndex
from vlfit.models.cache_spec import MAX_PENDING_TOKENS
from vlfit.models.interface import PreparedImage

ROOT_KEY = bytes(32)  # key of the empty prefix

MIN_SNAPSHOT_TOKENS = 64
# A snapshot of 50 MiB (9B) for each 1,024 tokens is 1.5 times their KV cache; without one, 512 of them are
# computed again on average, half a second on an RTX 4060.
SNAPSHOT_INTERVAL = 1024
RECENT_TURNS = 4  # the turns that people go back to; older ones get snapshots as far apart as
OLD_TURN_TOKENS = 256


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """What a sequence can start from: its first ``tokens`` tokens.

    ``blocks``: full blocks to share. ``source``: block whose first part is copied, with the tokens beyond
    these; None: there are none. ``snapshot``: key of the state to start from; None for layers without.
    """

    blocks: list[int]
    tokens: int
    source: int | None = None
    snapshot: bytes | None = None


class PrefixCache:
    """Maps content keys to the KV blocks with that content. A block may have several keys.

    It takes no references: the caller adds them to matched blocks (``BlockManager.incref``) and calls
    ``evict`` before blocks are overwritten. ``snapshots``: for models with layers that keep a state; None:
    blocks are enough.
    """

    def __init__(self, snapshots: SnapshotIndex | None = None) -> None:
        self.snapshots = snapshots
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, list[bytes]] = {}

    def __len__(self) -> int:
        """Number of blocks with at least one key."""
        return len(self._keys)

    def __contains__(self, block: object) -> bool:
        """Whether the block number ``block`` has a key."""
        return block in self._keys

    def find(self, block_keys: Sequence[bytes], keys: PromptKeys, block_size: int) -> CachedPrefix:
        """The longest cached prefix of a sequence.

        ``block_keys``: of its full blocks so far. ``keys``: of its prompt.
        """
        blocks = self.match(block_keys)
        if self.snapshots is not None:
            return self._find_state(blocks, block_keys, keys, block_size)
        begin = len(blocks) * block_size
        source, end = self.match_partial(keys.image_ends, begin, begin + block_size) or (None, begin)
        return CachedPrefix(blocks, end, source)

    def _find_state(
        self, blocks: list[int], block_keys: Sequence[bytes], keys: PromptKeys, block_size: int
    ) -> CachedPrefix:
        """The longest prefix within the matched ``blocks`` that ends at a snapshot."""
        full = next((end for end in range(len(blocks), 0, -1) if block_keys[end - 1] in self._states), 0)
        for tokens, key in reversed(keys.part_ends):
            number = tokens // block_size
            if number < full:
                break
            if number <= len(blocks) and key in self._states and key in self._blocks:
                return CachedPrefix(blocks[:number], tokens, self._blocks[key], key)
        if not full:
            return CachedPrefix([], 0)
        return CachedPrefix(blocks[:full], full * block_size, snapshot=block_keys[full - 1])

    @property
    def _states(self) -> SnapshotIndex:
        assert self.snapshots is not None
        return self.snapshots

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest prefix of ``keys`` that is cached; [] if the first is not."""
        matched = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            matched.append(block)
        return matched

    def match_partial(
        self, ends: Sequence[tuple[int, bytes]], begin: int, end: int
    ) -> tuple[int, int] | None:
        """Find a cached block that starts like the prompt's block of tokens ``begin`` to ``end`` (exclusive).

        Returns the block with the longest common part and the index of the prompt token after that part; None
        if there is no such block. Only parts that end with an image are known: ``ends`` are the prompt's
        ``PromptKeys.image_ends``.
        """
        for tokens, key in reversed(ends):
            if begin < tokens < end and key in self._blocks:
                return self._blocks[key], tokens
        return None

    def insert(self, key: bytes, block: int) -> None:
        """Add ``key`` for ``block``. Does nothing if another block has this key already."""
        if key not in self._blocks:
            self._blocks[key] = block
            self._keys.setdefault(block, []).append(key)

    def evict(self, blocks: Sequence[int]) -> None:
        """Remove all keys of ``blocks``, some of which may have none, before they are overwritten.

        Snapshots at the ends of these blocks or of their parts go with them.
        """
        for block in blocks:
            for key in self._keys.pop(block, ()):
                del self._blocks[key]
                if self.snapshots is not None:
                    self.snapshots.discard(key)


def prompt_keys(
    token_ids: IntVector,
    placeholders: IntVector,
    images: Sequence[PreparedImage],
    block_size: int,
    turn_ends: Sequence[int] | None = None,
) -> PromptKeys:
    """Prefix cache keys of a prompt without its last token, which is always computed.

    ``placeholders``: indices of image tokens; the k-th takes the k-th feature row of all ``images``.
    ``block_size``: tokens in a KV block, each of which gets a key. ``turn_ends``: numbers of tokens up to the
    end of each turn, ascending, for a model with states; None: one without.
    """
    cacheable = len(token_ids) - 1
    row_ends = np.cumsum([image.tokens for image in images]).tolist()
    # Placeholders before each block, in one vectorized search.
    before = np.searchsorted(placeholders, np.arange(0, cacheable + 1, block_size)).tolist()
    blocks: list[bytes] = []
    for number, begin in enumerate(range(0, cacheable - block_size + 1, block_size)):
        block_images: Sequence[PreparedImage] = ()
        if before[number] < before[number + 1]:
            last = bisect_right(row_ends, before[number + 1] - 1)
            block_images = images[bisect_right(row_ends, before[number]) : last + 1]
        blocks.append(
            block_key(blocks[-1] if blocks else ROOT_KEY, token_ids[begin : begin + block_size], block_images)
        )
    ends = []
    for count in row_ends:
        end = int(placeholders[count - 1]) + 1
        number, part = divmod(end, block_size)
        if part and end <= cacheable:
            begin = number * block_size
            block_images = images_between(placeholders, images, begin, end)
            ends.append(
                (
                    end,
                    block_key(blocks[number - 1] if number else ROOT_KEY, token_ids[begin:end], block_images),
                )
            )
    if turn_ends is None:
        return PromptKeys(tuple(blocks), tuple(ends))
    image_ends = [int(placeholders[count - 1]) + 1 for count in row_ends]
    wanted = tuple(_snapshot_positions(image_ends, turn_ends, cacheable))
    # An answer ends with the token before its turn's end, and its last tokens may not be in the state yet.
    before_ends = (end - 1 - waiting for end in turn_ends for waiting in range(MAX_PENDING_TOKENS + 1))
    parts = []
    for end in sorted({*wanted, *image_ends, *turn_ends, *before_ends}):
        number, part = divmod(end, block_size)
        if part and 0 < end <= cacheable:
            begin = number * block_size
            inside = images_between(placeholders, images, begin, end)
            parts.append(
                (end, block_key(blocks[number - 1] if number else ROOT_KEY, token_ids[begin:end], inside))
            )
    return PromptKeys(tuple(blocks), tuple(ends), tuple(parts), wanted)


def _snapshot_positions(image_ends: Sequence[int], turn_ends: Sequence[int], cacheable: int) -> Iterator[int]:
    """Where chunks of a prompt end for a snapshot, ascending: numbers of tokens, at most ``cacheable``."""
    pictures, recent = set(image_ends), {*turn_ends[-RECENT_TURNS:], cacheable}
    last = 0
    for end in sorted({*pictures, *turn_ends, cacheable}):
        distance = MIN_SNAPSHOT_TOKENS if end in recent else OLD_TURN_TOKENS
        if end <= cacheable and (end in pictures or end - last >= distance):
            yield end
            last = end


def images_between(
    placeholders: IntVector, images: Sequence[PreparedImage], begin: int, end: int
) -> Sequence[PreparedImage]:
    """Those of ``images`` with a placeholder among the prompt's tokens ``begin`` to ``end`` (exclusive).

    ``placeholders``: as in ``prompt_keys``.
    """
    first, last = np.searchsorted(placeholders, (begin, end))
    if first == last:
        return ()
    row_ends = np.cumsum([image.tokens for image in images])
    first_image, last_image = np.searchsorted(row_ends, (first, last - 1), side="right")
    return images[first_image : last_image + 1]


def block_key(prefix_key: bytes, token_ids: IntVector, images: Sequence[PreparedImage]) -> bytes:
    """SHA-256 key of a block, or of the first part of a block, with ``token_ids`` and ``images``.

    ``prefix_key``: key of the preceding block, or ``ROOT_KEY``. ``images``: all with a placeholder in
    ``token_ids``; the key depends on their content and grid.
    """
    digest = hashlib.sha256(prefix_key)
    digest.update(np.ascontiguousarray(token_ids, dtype=np.int64).tobytes())
    for image in images:
        digest.update(repr((image.key, image.grid)).encode())
    return digest.digest()
