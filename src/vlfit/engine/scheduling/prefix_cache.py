"""Prefix cache: KV blocks by the content of the tokens up to their end.

A full block's key is SHA-256 over the key of the block before it, its token ids, and the content and grid of
the images in it. M-RoPE positions follow from these, and so do keys and values. The part of a block up to the
end of an image has a key too, as images rarely end with a block: such a part is copied into a block of the
new request, while full blocks are shared. Blocks without references stay known until they are allocated
again.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from vlfit.engine.scheduling.sequence import IntVector, PromptKeys
from vlfit.models.base import PreparedImage

ROOT_KEY = bytes(32)  # key of the empty prefix


class PrefixCache:
    """Maps content keys to the KV blocks with that content. A block may have several keys.

    It takes no references: the caller adds them to matched blocks (``BlockManager.incref``) and calls
    ``evict`` before blocks are overwritten.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, list[bytes]] = {}

    def __len__(self) -> int:
        """Number of blocks with at least one key."""
        return len(self._keys)

    def __contains__(self, block: object) -> bool:
        """Whether the block number ``block`` has a key."""
        return block in self._keys

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
        """Remove all keys of ``blocks``, some of which may have none, before they are overwritten."""
        for block in blocks:
            for key in self._keys.pop(block, ()):
                del self._blocks[key]


def prompt_keys(
    token_ids: IntVector, placeholders: IntVector, images: Sequence[PreparedImage], block_size: int
) -> PromptKeys:
    """Prefix cache keys of a prompt without its last token, which is always computed.

    ``placeholders``: indices of image tokens; the k-th takes the k-th feature row of all ``images``.
    ``block_size``: tokens in a KV block, each of which gets a key.
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
    return PromptKeys(tuple(blocks), tuple(ends))


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
