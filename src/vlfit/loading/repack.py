"""Codes as AWQ and GPTQ have them in their files, put in the order that the engine's kernels read.

Works in host memory, a slice of a matrix at a time: beside the matrix itself that takes at most twelve times
``SLICE_BYTES``, however large the matrix, and nothing on a device. Knows layouts (``checkpoint/headers.py``
defines them) and words of codes. Does not know files, names, or scales.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import numpy as np
import torch
from torch import Tensor

from vlfit.checkpoint.headers import Layout
from vlfit.errors import CheckpointError

SLICE_BYTES = (
    4 * 1024**2
)  # large enough that torch's threads are worth waking, and the processor's cache has it
# Which of eight outputs each code of a word belongs to, from the lowest bits on (AutoAWQ's ``AWQ_ORDER``).
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_ONE_IN_EACH = 0x11111111
# To exchange halves of two words, then quarters, then eighths: how many codes apart, and which bits.
_EXCHANGES = ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F))


def repack(raw: Tensor, layout: Layout, target: Tensor, order: Tensor | None = None, bits: int = 4) -> None:
    """Fill ``target`` with the matrix ``raw``, which lies in host memory as ``layout`` says.

    ``target`` is [rows, columns] of the same dtype, on any device. With ``order`` [inputs], of a matrix of
    codes of ``bits``, its input i becomes what was input ``order[i]``.
    """
    first = 0
    with ExitStack() as stack:
        ordering = None if order is None else stack.enter_context(closing(_Ordering(order, bits)))
        for rows in _slices(raw, layout):
            target[first : first + len(rows)].copy_(rows if ordering is None else ordering(rows))
            first += len(rows)


def shape_in_file(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """The shape that a tensor has in its file whose name calls for ``shape``."""
    if layout is Layout.AS_NAMED:
        return shape
    rows, columns = shape
    return (columns * 8, rows // 8) if layout is Layout.AWQ_CODES else (columns, rows)


def column_order(groups: Tensor, group_size: int, name: str) -> Tensor:
    """Inputs by the group that they belong to, in their own order within each: [inputs] int64.

    ``groups`` [inputs] is ``g_idx``: the group of each. Raises ``CheckpointError`` unless each group has
    ``group_size`` inputs, without which there is no order in which neighbours share a scale.
    """
    order = groups.argsort(stable=True)
    expected = torch.arange(len(groups), dtype=groups.dtype) // group_size
    if not torch.equal(groups[order], expected):
        raise CheckpointError(
            f"{name} does not put {group_size} inputs into each group",
            "The file is damaged, or made by a program that vlfit does not know. Fetch it again.",
        )
    return order


def _slices(raw: Tensor, layout: Layout) -> Iterator[Tensor]:
    """The rows of the matrix from top to bottom, each slice good until the next is asked for."""
    if layout is Layout.AS_NAMED:
        yield from raw.split(_slice_rows(raw.shape[1], raw.element_size()))
    elif layout is Layout.AWQ_CODES:
        yield from _awq_slices(raw)
    else:
        if layout is Layout.ONE_LESS:
            raw = raw + _ONE_IN_EACH  # few: a word for each group of inputs and eight outputs
        elif layout is Layout.AWQ_ZEROS:
            raw = _codes_in_order(raw)
        yield from _transposed_slices(raw)


def _slice_rows(columns: int, item_bytes: int) -> int:
    return max(SLICE_BYTES // max(columns * item_bytes, 1), 1)


def _transposed_slices(raw: Tensor) -> Iterator[Tensor]:
    columns, rows = raw.shape
    at_once = min(_slice_rows(columns, raw.element_size()), rows)
    buffer = torch.empty(at_once * columns, dtype=raw.dtype)
    for first in range(0, rows, at_once):
        # Torch transposes fast from one dense matrix to another, and only so.
        part = raw[:, first : first + at_once].contiguous()
        turned = buffer[: part.numel()].view(part.shape[1], columns)
        yield turned.copy_(part.T)


def _awq_slices(raw: Tensor) -> Iterator[Tensor]:
    """[inputs, outputs / 8] words of eight outputs each to rows of words of eight inputs each.

    Of eight inputs and eight outputs the 64 codes are a matrix of eight words; turning it over takes three
    exchanges between pairs of words, done for all such matrices of a slice at once.
    """
    words, eights = raw.shape[0] // 8, raw.shape[1]
    at_once = min(max(_slice_rows(words, raw.element_size()) // 8, 1), eights)
    buffer = torch.empty(8 * words * at_once, dtype=raw.dtype)
    spare, turned = torch.empty_like(buffer[: len(buffer) // 8]), torch.empty_like(buffer)
    by_input = raw.view(words, 8, eights).transpose(0, 1)
    for first in range(0, eights, at_once):
        count = min(at_once, eights - first)
        size = words * count
        block = buffer[: 8 * size].view(8, words, count)
        block.copy_(by_input[:, :, first : first + count])
        _exchange(block, spare[:size].view(words, count))
        rows = turned[: 8 * size].view(count, 8, words)
        for place, output in enumerate(AWQ_ORDER):
            dense = spare[:size].view(count, words)
            rows[:, output] = dense.copy_(block[place].T)
        yield rows.view(8 * count, words)


def _exchange(block: Tensor, spare: Tensor) -> None:
    """``block`` [8, ...] of words of eight codes: code i of word j becomes code j of word i, in place."""
    for apart, kept in _EXCHANGES:
        for place in (place for place in range(8) if not place & apart):
            low, high = block[place], block[place + apart]
            torch.bitwise_right_shift(low, 4 * apart, out=spare)
            spare.bitwise_xor_(high).bitwise_and_(kept)
            high.bitwise_xor_(spare)
            low.bitwise_xor_(spare.bitwise_left_shift_(4 * apart))


def _codes_in_order(raw: Tensor) -> Tensor:
    """Words whose codes stand in AWQ's order as words whose codes stand in their own."""
    ordered = torch.zeros_like(raw)
    for place, output in enumerate(AWQ_ORDER):
        ordered |= (raw >> 4 * place & 15) << 4 * output
    return ordered


class _Ordering:
    """Puts the inputs that codes of ``bits`` belong to in ``order`` [inputs], a few rows in each thread.

    By NumPy, whose threads of Python work side by side: its ``take`` takes a fifth of the time of torch's.
    """

    def __init__(self, order: Tensor, bits: int) -> None:
        self._bits = bits
        self._order = order.numpy()
        if bits == 4:
            # Codes are taken from their bytes the lower ones first, then the higher ones.
            self._order = self._order % 2 * (len(order) // 2) + self._order // 2
        self._threads = max(torch.get_num_threads(), 1)
        self._pool = ThreadPoolExecutor(self._threads, "vlfit-order")

    def __call__(self, words: Tensor) -> Tensor:
        """``words`` [rows, words] int32 in new memory."""
        ordered = torch.empty_like(words)
        parts = (each.tensor_split(self._threads) for each in (words, ordered))
        list(self._pool.map(self._fill, *parts))
        return ordered

    def close(self) -> None:
        self._pool.shutdown()

    def _fill(self, words: Tensor, ordered: Tensor) -> None:
        stored, target = words.numpy().view(np.uint8), ordered.numpy().view(np.uint8)
        # "clip" only says that no index is looked at twice: all are inside.
        if self._bits == 8:
            np.take(stored, self._order, axis=1, out=target, mode="clip")
            return
        width = stored.shape[1]
        codes = np.empty((len(stored), 2 * width), np.uint8)
        np.bitwise_and(stored, 15, out=codes[:, :width])
        np.right_shift(stored, 4, out=codes[:, width:])
        np.take(codes, self._order[::2], axis=1, out=target, mode="clip")
        target |= np.take(codes, self._order[1::2], axis=1, mode="clip") << 4
