"""Linear layers for float32 on a CPU with weights in float16: half the bytes to read per token, half the RAM.

The products are FBGEMM's, which every torch for x86 with AVX2 has; they accumulate in float32. float16 holds
a bfloat16 weight exactly down to 2**-17, and loses what is below 2**-25; matrices of small values only are
scaled by a power of two. Weights of 8 and 4 bits with scales are rounded to 11 bits, an eighth of bfloat16's
error.
``plan/native/ram.py`` decides which matrices are kept so.
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
from vlfit.plan.native.ram import BLOCK_OUTPUTS, packed_bytes

# Largest weights with which numbers are taken as they are. Below, the weights that float16 cannot hold would
# be more than one in a thousand; above lies the end of float16, 65,504.
SMALL, LARGE = 2.0**-4, 2.0**15

# Weights converted at a time, and most that wait to be packed: 256 MiB and 1 GiB in float32. There is room
# for them, as the KV cache's pages are not resident before they are used.
_PIECE = 2**26
_WAITING = 2**28


def uses_half_weights(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether large matrices are kept in float16 when computing in ``dtype`` on ``device``."""
    return device.type == "cpu" and dtype == torch.float32 and _available()


@cache
def _available() -> bool:
    """Whether this torch and this CPU have the products."""
    try:
        packed = torch.ops.quantized.linear_prepack_fp16(torch.ones(32, 512), None)
        found = torch.ops.quantized.linear_dynamic_fp16(torch.ones(1, 512), packed)
        return bool((found == 512).all())
    except (RuntimeError, NotImplementedError, AttributeError):
        return False


def piece_rows(columns: int) -> int:
    """Rows of a matrix of ``columns`` that are converted at a time."""
    return max(_PIECE // columns // BLOCK_OUTPUTS, 1) * BLOCK_OUTPUTS


class HalfMatrix:
    """A float16 weight matrix [rows, columns], packed by torch, which keeps it outside of any tensor.

    Callable once ``fill`` and the call that it returns have run.
    """

    __slots__ = ("_back", "_packed", "_size")

    def __init__(self, rows: int, columns: int) -> None:
        self._size = packed_bytes(rows, columns)
        self._packed: Any = None
        self._back = 1.0  # factor of products, if weights were scaled

    def fill(self, weight: Tensor) -> Callable[[], None]:
        """Scale ``weight`` [rows, columns] float32 in place if need be.

        Returns the call that packs it, for any thread.
        """
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
        """Bytes that the packed matrix holds now; 0 before it is packed and after ``empty``."""
        return 0 if self._packed is None else self._size

    def empty(self) -> None:
        """Free the packed matrix. It cannot be called any more."""
        self._packed = None


class HalfLinear:
    """Stacked ``parts``, and ``bias`` [out] or None."""

    def __init__(self, parts: Sequence[HalfMatrix], bias: Tensor | None = None) -> None:
        self.parts = parts
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        found = [part(x) for part in self.parts]
        joined = found[0] if len(found) == 1 else torch.cat(found, dim=1)
        return joined if self.bias is None else joined.add_(self.bias)


class HalfEmbedding:
    """Token embedding ``weight`` [vocabulary, hidden] in 16 bits, looked up in float32. ``head``: if tied."""

    def __init__(self, weight: Tensor, head: Linear | None) -> None:
        self.weight = weight
        self._head = head

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self.weight[token_ids].float()

    def head(self) -> Linear:
        """The tied output head."""
        if self._head is None:
            raise RuntimeError("this embedding was loaded without a tied head")
        return self._head


class HalfPacker:
    """Packs matrices in the background while the next ones are read, on as many threads as torch has."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(torch.get_num_threads(), "vlfit-packing")
        self._changed = Condition()
        self._waiting = 0  # weights not packed yet
        self._pending: list[Future[None]] = []

    def half(self, weight: Tensor) -> HalfMatrix:
        """Pack ``weight`` [rows, columns] float32, which is consumed. Usable after ``settle``."""
        half, count = HalfMatrix(*weight.shape), weight.numel()
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
        """The tied output head of ``table`` [vocabulary, hidden]: a packed copy."""
        return HalfLinear([self.half(some.float()) for some in table.split(piece_rows(table.shape[1]))])

    def settle(self) -> None:
        """Wait until all are packed."""
        while self._pending:
            self._pending.pop().result()

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
