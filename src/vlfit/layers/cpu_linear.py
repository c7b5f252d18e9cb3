"""Linear layers of a CPU that computes in float32: weights in float16, products and sums in float32.

Decoding reads all weights for each token, so half the bytes are half the time, and half the RAM. FBGEMM has
such products in every torch for x86 with AVX2. They are the same numbers: of a bfloat16 weight float16 holds
all 8 bits of the fraction, down to 2**-17; smaller ones lose what is below 2**-25. Where that could be seen,
in a matrix of small numbers only, a power of two is taken out of it. Weights of 8 and 4 bits with scales are
rounded to 11 bits, an eighth of what bfloat16 would lose.

Which matrices are kept so, and what they take, ``plan/native/ram.py`` says. Knows nothing of files.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from threading import Condition
from typing import Any

import torch
from torch import Tensor

from vlfit.layers.linear import Linear
from vlfit.plan.native.ram import BLOCK_OUTPUTS, half_bytes

# Largest weights with which numbers are taken as they are. Below, the weights that float16 cannot hold would
# be more than one in a thousand; above lies the end of float16, 65,504.
SMALL, LARGE = 2.0**-4, 2.0**15

# Weights that are widened at a time on their way, and that wait to be laid out: 256 MiB and 1 GiB in float32.
# The KV cache, whose pages are not taken before they are used, leaves room for as much.
_PIECE = 2**26
_WAITING = 2**28


def halves_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether an engine that computes in ``dtype`` on ``device`` keeps large matrices so."""
    return device.type == "cpu" and dtype == torch.float32 and _available()


@cache
def _available() -> bool:
    """Whether this torch has the products, and this CPU the units."""
    try:
        packed = torch.ops.quantized.linear_prepack_fp16(torch.ones(32, 512), None)
        found = torch.ops.quantized.linear_dynamic_fp16(torch.ones(1, 512), packed)
        return bool((found == 512).all())
    except (RuntimeError, NotImplementedError, AttributeError):
        return False


def piece_rows(columns: int) -> int:
    """How many rows of a large matrix make a piece."""
    return max(_PIECE // columns // BLOCK_OUTPUTS, 1) * BLOCK_OUTPUTS


class Half:
    """A matrix [rows, columns] laid out for products; where torch has it, no tensor knows."""

    __slots__ = ("_back", "_packed", "_size")

    def __init__(self, rows: int, columns: int) -> None:
        self._size = half_bytes(rows, columns)
        self._packed: Any = None
        self._back = 1.0  # what products are multiplied by

    def fill(self, weight: Tensor) -> Callable[[], None]:
        """What is left to do, by any thread, to hold ``weight`` [rows, columns] float32, which may change."""
        largest = max(abs(float(end)) for end in weight.aminmax())
        if not (SMALL <= largest < LARGE) and 0 < largest < math.inf:
            power = 14 - math.frexp(largest)[1]
            weight.mul_(2.0**power)
            self._back = 2.0**-power

        def pack() -> None:
            self._packed = torch.ops.quantized.linear_prepack_fp16.default(weight, None)

        return pack

    def __call__(self, x: Tensor) -> Tensor:
        """``x @ weight.T``: [rows of x, rows] of ``x`` [rows of x, columns]."""
        found: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(x, self._packed)
        return found if self._back == 1.0 else found.mul_(self._back)

    def nbytes(self) -> int:
        """Bytes that it holds."""
        return 0 if self._packed is None else self._size

    def empty(self) -> None:
        """Give them back. It must not be called any more."""
        self._packed = None


class HalfLinear:
    """``parts`` on top of one another, and ``bias`` [out] or None."""

    def __init__(self, parts: Sequence[Half], bias: Tensor | None = None) -> None:
        self.parts = parts
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        found = [part(x) for part in self.parts]
        joined = found[0] if len(found) == 1 else torch.cat(found, dim=1)
        return joined if self.bias is None else joined.add_(self.bias)


class HalfEmbedding:
    """A table of tokens ``weight`` [vocabulary, hidden] in 16 bits; ``head`` has the same numbers, if tied.

    Rows come out in float32.
    """

    def __init__(self, weight: Tensor, head: Linear | None) -> None:
        self.weight = weight
        self._head = head

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self.weight[token_ids].float()

    def head(self) -> Linear:
        """The output head that is this table (tied)."""
        if self._head is None:
            raise RuntimeError("this table was loaded without a head")
        return self._head


class Packing:
    """Lays matrices out beside whoever reads the next ones, on as many threads as torch has."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(torch.get_num_threads(), "vlfit-packing")
        self._changed = Condition()
        self._waiting = 0  # weights that are not laid out yet
        self._pending: list[Future[None]] = []

    def half(self, weight: Tensor) -> Half:
        """``weight`` [rows, columns] float32, not to be used any more; to be called after ``settle``."""
        half, count = Half(*weight.shape), weight.numel()
        pack = half.fill(weight)
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._waiting + count <= _WAITING)
            self._waiting += count

        def run() -> None:
            try:
                pack()
            finally:
                with self._changed:
                    self._waiting -= count
                    self._changed.notify()

        self._pending.append(self._threads.submit(run))
        return half

    def head(self, table: Tensor) -> HalfLinear:
        """The output head that is ``table`` [vocabulary, hidden], in 16 bits, once more."""
        return HalfLinear([self.half(some.float()) for some in table.split(piece_rows(table.shape[1]))])

    def settle(self) -> None:
        """Wait until all is laid out."""
        while self._pending:
            self._pending.pop().result()

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
