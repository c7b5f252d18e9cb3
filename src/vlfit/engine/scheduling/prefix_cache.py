"""Which blocks of the KV cache hold what: a prompt that begins as an earlier one did takes that over.

A full block is known by a key: SHA-256 over the key of the block before it, its token ids, and for pictures
that stand in it their content and grid. So a key stands for everything up to the block's end. The M-RoPE
positions follow from just that (``mrope.py``), and with them the keys and values in the block. In the
same way the part of a block up to the end of a picture is known: a picture hardly ever ends with a block, and
another question about it should not need it again. Such a part is copied, full blocks are shared.

Knows keys and block numbers. Does not know tensors, nor who holds a block (``BlockPool``) or runs
(``scheduler.py``). What blocks hold stays known when nobody holds them, until the pool hands them out again.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vlfit.models.qwen3_vl.image_processor import PreparedImage

if TYPE_CHECKING:
    from vlfit.engine.scheduling.sequence import IntVector


ROOT = bytes(32)  # the key of what comes before the first block


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """What the blocks of a prompt will hold, but for its last token, which is always computed.

    ``blocks``: a key for each full block. ``ends``: for each picture that ends within a block the number of
    tokens up to there, and the key of the block's part that they fill.
    """

    blocks: tuple[bytes, ...]
    ends: tuple[tuple[int, bytes], ...]


class PrefixCache:
    """Block numbers by key, and back."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, list[bytes]] = {}

    def __len__(self) -> int:
        """How many blocks hold something that is known."""
        return len(self._keys)

    def __contains__(self, block: object) -> bool:
        """Whether ``block`` holds something that another request may take over."""
        return block in self._keys

    def find(self, keys: Many[bytes]) -> list[int]:
        """The blocks of as many of ``keys`` as are known, from the first on without a gap."""
        found = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def find_part(self, ends: Many[tuple[int, bytes]], begin: int, end: int) -> tuple[int, int] | None:
        """The block that holds most of the tokens from ``begin`` to before ``end``, and up to which one."""
        for tokens, key in reversed(ends):
            if begin < tokens < end and key in self._blocks:
                return self._blocks[key], tokens
        return None

    def keep(self, key: bytes, block: int) -> None:
        """``block`` holds what ``key`` stands for. The first block with a key stays its only one."""
        if key not in self._blocks:
            self._blocks[key] = block
            self._keys.setdefault(block, []).append(key)

    def forget(self, blocks: Many[int]) -> None:
        """``blocks`` will hold something else, or what they hold is not to be trusted."""
        for block in blocks:
            for key in self._keys.pop(block, ()):
                del self._blocks[key]


def prompt_keys(
    token_ids: "IntVector", placeholders: "IntVector", images: Many[PreparedImage], block_size: int
) -> PromptKeys:
    """Keys of a prompt whose k-th placeholder takes the k-th feature row of ``images``."""
    shareable = len(token_ids) - 1
    rows = np.cumsum([image.tokens for image in images]).tolist()
    # How many placeholders stand before each block: asked for all at once, as there are many.
    before = np.searchsorted(placeholders, np.arange(0, shareable + 1, block_size)).tolist()
    blocks: list[bytes] = []
    for number, begin in enumerate(range(0, shareable - block_size + 1, block_size)):
        inside: Many[PreparedImage] = ()
        if before[number] < before[number + 1]:
            last = bisect_right(rows, before[number + 1] - 1)
            inside = images[bisect_right(rows, before[number]) : last + 1]
        blocks.append(key_of(blocks[-1] if blocks else ROOT, token_ids[begin : begin + block_size], inside))
    ends = []
    for count in rows:
        end = int(placeholders[count - 1]) + 1
        number, part = divmod(end, block_size)
        if part and end <= shareable:
            begin = number * block_size
            inside = images_between(placeholders, images, begin, end)
            ends.append((end, key_of(blocks[number - 1] if number else ROOT, token_ids[begin:end], inside)))
    return PromptKeys(tuple(blocks), tuple(ends))


def images_between(
    placeholders: "IntVector", images: Many[PreparedImage], begin: int, end: int
) -> Many[PreparedImage]:
    """The pictures and clips with placeholders among the tokens from ``begin`` to before ``end``."""
    first, last = np.searchsorted(placeholders, (begin, end))
    if first == last:
        return ()
    rows = np.cumsum([image.tokens for image in images])
    from_image, to_image = np.searchsorted(rows, (first, last - 1), side="right")
    return images[from_image : to_image + 1]


def key_of(before: bytes, token_ids: "IntVector", images: Many[PreparedImage]) -> bytes:
    """The key of a block, or of its first part, with ``token_ids`` and ``images`` in it."""
    digest = hashlib.sha256(before)
    digest.update(np.ascontiguousarray(token_ids, dtype=np.int64).tobytes())
    for image in images:
        digest.update(repr((image.key, image.grid)).encode())
    return digest.digest()
