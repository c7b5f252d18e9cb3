"""Repack AWQ and GPTQ codes into the layout of the engine's kernels.

Works in RAM on slices of a matrix: beside the matrix it takes at most twelve times ``SLICE_BYTES``.
``checkpoint/headers.py`` defines the layouts.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import numpy as np
import torch
from torch import Tensor

from vlfit.checkpoint.headers import StoredLayout
from vlfit.errors import CheckpointError

# Large enough for torch's threads to pay off, small enough for the CPU's cache.
SLICE_BYTES = 4 * 1024**2
# Output of each of a word's eight codes, from the lowest bits on (AutoAWQ's ``AWQ_ORDER``).
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_ONE_IN_EACH = 0x11111111
# Exchanges of halves, quarters and eighths of two words: distance in codes, and mask.
_EXCHANGES = ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F))


def repack(
    raw: Tensor, layout: StoredLayout, target: Tensor, order: Tensor | None = None, bits: int = 4
) -> None:
    """Fill ``target`` [rows, columns] with ``raw``, a matrix in RAM in the ``layout`` of its file.

    ``target`` has the same dtype, on any device. ``order`` [inputs], only for packed codes: input i of
    ``target`` is input ``order[i]`` of ``raw``; None: inputs keep their order. ``bits`` (4 or 8): of a code,
    ignored without ``order``.
    """
    first = 0
    with ExitStack() as stack:
        reorder = None if order is None else stack.enter_context(closing(_Reorder(order, bits)))
        for rows in _slices(raw, layout):
            target[first : first + len(rows)].copy_(rows if reorder is None else reorder(rows))
            first += len(rows)


def shape_in_file(shape: tuple[int, ...], layout: StoredLayout) -> tuple[int, ...]:
    """Shape that a tensor stored in ``layout`` has in its file.

    ``shape``: the one that it has once repacked to ``PLAIN`` layout (``TensorInfo.shape``).
    """
    if layout is StoredLayout.PLAIN:
        return shape
    rows, columns = shape
    return (columns * 8, rows // 8) if layout is StoredLayout.AWQ_CODES else (columns, rows)


def column_order(groups: Tensor, group_size: int, name: str) -> Tensor:
    """Input indices sorted by group, in ascending order within each group: [inputs] int64.

    ``groups`` [inputs]: GPTQ's ``g_idx``, the group of each input. Raises ``CheckpointError`` unless each
    group has ``group_size`` inputs, as the kernels need; ``name`` is the module's name, for the error.
    """
    order = groups.argsort(stable=True)
    expected = torch.arange(len(groups), dtype=groups.dtype) // group_size
    if not torch.equal(groups[order], expected):
        raise CheckpointError(
            f"the groups of {name} do not have {group_size} inputs each",
            "The file is damaged, or written by a program that vlfit does not know: fetch it again.",
        )
    return order


def _slices(raw: Tensor, layout: StoredLayout) -> Iterator[Tensor]:
    """Slices of the matrix from top to bottom, each valid until the next."""
    if layout is StoredLayout.PLAIN:
        yield from raw.split(_slice_rows(raw.shape[1], raw.element_size()))
    elif layout is StoredLayout.AWQ_CODES:
        yield from _awq_slices(raw)
    else:
        if layout is StoredLayout.GPTQ_ZEROS:
            raw = raw + _ONE_IN_EACH  # small: a word for each group of inputs and eight outputs
        elif layout is StoredLayout.AWQ_ZEROS:
            raw = _codes_in_order(raw)
        yield from _transposed_slices(raw)


def _slice_rows(columns: int, item_bytes: int) -> int:
    return max(SLICE_BYTES // max(columns * item_bytes, 1), 1)


def _transposed_slices(raw: Tensor) -> Iterator[Tensor]:
    columns, rows = raw.shape
    slice_rows = min(_slice_rows(columns, raw.element_size()), rows)
    buffer = torch.empty(slice_rows * columns, dtype=raw.dtype)
    for first in range(0, rows, slice_rows):
        # torch transposes fast only between two contiguous matrices.
        part = raw[:, first : first + slice_rows].contiguous()
        transposed = buffer[: part.numel()].view(part.shape[1], columns)
        yield transposed.copy_(part.T)


def _awq_slices(raw: Tensor) -> Iterator[Tensor]:
    """[inputs, outputs / 8] words of eight outputs to rows of words of eight inputs.

    The 64 codes of eight inputs and eight outputs are eight words; transposing them takes three exchanges
    between pairs of words, done for all such blocks of a slice at once.
    """
    words, columns = raw.shape[0] // 8, raw.shape[1]
    slice_words = min(max(_slice_rows(words, raw.element_size()) // 8, 1), columns)
    buffer = torch.empty(8 * words * slice_words, dtype=raw.dtype)
    scratch, transposed = torch.empty_like(buffer[: len(buffer) // 8]), torch.empty_like(buffer)
    by_input = raw.view(words, 8, columns).transpose(0, 1)
    for first in range(0, columns, slice_words):
        count = min(slice_words, columns - first)
        size = words * count
        block = buffer[: 8 * size].view(8, words, count)
        block.copy_(by_input[:, :, first : first + count])
        _exchange(block, scratch[:size].view(words, count))
        rows = transposed[: 8 * size].view(count, 8, words)
        for code, output in enumerate(AWQ_ORDER):
            dense = scratch[:size].view(count, words)
            rows[:, output] = dense.copy_(block[code].T)
        yield rows.view(8 * count, words)


def _exchange(block: Tensor, scratch: Tensor) -> None:
    """Transpose ``block`` [8, ...] of words of eight codes in place: code i of word j becomes code j of word
    i.
    """
    for distance, mask in _EXCHANGES:
        for word in (word for word in range(8) if not word & distance):
            low, high = block[word], block[word + distance]
            torch.bitwise_right_shift(low, 4 * distance, out=scratch)
            scratch.bitwise_xor_(high).bitwise_and_(mask)
            high.bitwise_xor_(scratch)
            low.bitwise_xor_(scratch.bitwise_left_shift_(4 * distance))


def _codes_in_order(raw: Tensor) -> Tensor:
    """Words with codes in AWQ order to words with codes in natural order."""
    ordered = torch.zeros_like(raw)
    for code, output in enumerate(AWQ_ORDER):
        ordered |= (raw >> 4 * code & 15) << 4 * output
    return ordered


class _Reorder:
    """Reorders the inputs of packed codes of ``bits`` by ``order`` [inputs], in row slices on several
    threads.

    With numpy, whose ``take`` releases the GIL and needs a fifth of the time of torch's.
    """

    def __init__(self, order: Tensor, bits: int) -> None:
        self._bits = bits
        self._order = order.numpy()
        if bits == 4:
            # Bytes are unpacked into all low codes, then all high codes.
            self._order = self._order % 2 * (len(order) // 2) + self._order // 2
        self._threads = max(torch.get_num_threads(), 1)
        self._pool = ThreadPoolExecutor(self._threads, "vlfit-repack")

    def __call__(self, words: Tensor) -> Tensor:
        """``words`` [rows, words] int32 reordered, in new memory."""
        ordered = torch.empty_like(words)
        parts = (each.tensor_split(self._threads) for each in (words, ordered))
        list(self._pool.map(self._fill, *parts))
        return ordered

    def close(self) -> None:
        self._pool.shutdown()

    def _fill(self, words: Tensor, ordered: Tensor) -> None:
        stored, target = words.numpy().view(np.uint8), ordered.numpy().view(np.uint8)
        # mode="clip" skips the bounds check: all indices are valid.
        if self._bits == 8:
            np.take(stored, self._order, axis=1, out=target, mode="clip")
            return
        width = stored.shape[1]
        codes = np.empty((len(stored), 2 * width), np.uint8)
        np.bitwise_and(stored, 15, out=codes[:, :width])
        np.right_shift(stored, 4, out=codes[:, width:])
        np.take(codes, self._order[::2], axis=1, out=target, mode="clip")
        target |= np.take(codes, self._order[1::2], axis=1, mode="clip") << 4
