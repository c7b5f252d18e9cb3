"""Linear layers for float32 on a CPU with weights in float16: half the RAM, half the bytes to read per token.

The GEMMs are FBGEMM's, which every torch for x86 with AVX2 has; they accumulate in float32. float16 holds a
bfloat16 weight exactly down to 2**-17, and values below 2**-25 become 0; a matrix of small values only is
scaled by a power of two. Dequantized weights of 8 and 4 bits are rounded to 11 bits, an eighth of bfloat16's
error. ``plan/native/ram.py`` decides which matrices are kept in float16.
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

# A matrix whose largest absolute weight is in this range is not scaled. Below it, float16 would lose more
# than one weight in a thousand; above it lies float16's largest number, 65,504.
SMALL, LARGE = 2.0**-4, 2.0**15

# Weights converted at a time, and the most that wait to be packed: 256 MiB and 1 GiB in float32. They fit, as
# the KV cache's pages are not resident before they are used.
_PIECE = 2**26
_WAITING = 2**28


def uses_half_weights(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether large matrices are kept in float16 when computing in ``dtype`` on ``device``.

    Only in float32, on a CPU for which torch has FBGEMM's float16 GEMM.
    """
    return device.type == "cpu" and dtype == torch.float32 and _available()


@cache
def _available() -> bool:
    """Whether this torch, on this CPU, has FBGEMM's float16 GEMM."""
    try:
        packed = torch.ops.quantized.linear_prepack_fp16(torch.ones(32, 512), None)
        out = torch.ops.quantized.linear_dynamic_fp16(torch.ones(1, 512), packed)
        return bool((out == 512).all())
    except (RuntimeError, NotImplementedError, AttributeError):
        return False


def rows_per_piece(columns: int) -> int:
    """How many rows of a matrix of ``columns`` are converted at a time: a multiple of ``BLOCK_OUTPUTS``."""
    return max(_PIECE // columns // BLOCK_OUTPUTS, 1) * BLOCK_OUTPUTS


class HalfMatrix:
    """A float16 weight matrix [rows, columns], packed by torch in memory that belongs to no tensor.

    Empty at first: call ``prepare_packing``, then the function that it returns. Then the object itself can
    be called: ``x @ weight.T`` [n, rows] for ``x`` [n, columns] float32.
    """

    __slots__ = ("_output_scale", "_packed", "_size")

    def __init__(self, rows: int, columns: int) -> None:
        self._size = packed_bytes(rows, columns)
        self._packed: Any = None
        self._output_scale = 1.0  # undoes the scaling of weights

    def prepare_packing(self, weight: Tensor) -> Callable[[], None]:
        """Return a function that packs ``weight`` [rows, columns] float32 into this matrix, on any thread.

        If its largest absolute value is below ``SMALL`` or from ``LARGE`` on, ``weight`` is first scaled in
        place, here. It must not change until the function has run.
        """
        largest = max(abs(float(end)) for end in weight.aminmax())
        if not (SMALL <= largest < LARGE) and 0 < largest < math.inf:
            power = 14 - math.frexp(largest)[1]
            weight.mul_(2.0**power)
            self._output_scale = 2.0**-power

        def pack() -> None:
            self._packed = torch.ops.quantized.linear_prepack_fp16.default(weight, None)

        return pack

    def __call__(self, x: Tensor) -> Tensor:
        """``x @ weight.T`` [n, rows] for ``x`` [n, columns] float32."""
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(x, self._packed)
        return out if self._output_scale == 1.0 else out.mul_(self._output_scale)

    def nbytes(self) -> int:
        """Bytes of the packed matrix; 0 before it is packed and after ``free``."""
        return 0 if self._packed is None else self._size

    def free(self) -> None:
        """Free the packed matrix; the object can no longer be called."""
        self._packed = None


class HalfLinear:
    """A linear layer with float16 weights: [rows, out] float32 for ``x`` [rows, in] float32.

    ``parts``: the weight matrix, cut by rows; ``bias``: [out] or None.
    """

    def __init__(self, parts: Sequence[HalfMatrix], bias: Tensor | None = None) -> None:
        self.parts = parts
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        outputs = [part(x) for part in self.parts]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return joined if self.bias is None else joined.add_(self.bias)


class HalfEmbedding:
    """Token embedding with ``weight`` [vocabulary, hidden] in float16 or bfloat16, as stored.

    Called with token ids [n], it returns their rows [n, hidden] in float32. ``head``: the tied output
    head, which keeps a packed copy of the weights of its own; None: the head is not tied, and ``head()``
    raises.
    """

    def __init__(self, weight: Tensor, head: Linear | None) -> None:
        self.weight = weight
        self._head = head

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self.weight[token_ids].float()

    def head(self) -> Linear:
        """The tied output head. Raises ``RuntimeError`` if there is none."""
        if self._head is None:
            raise RuntimeError("this embedding was loaded without a tied head")
        return self._head


class HalfPacker:
    """Packs matrices in the background while the next ones are read, on as many threads as torch has.

    Call ``pack`` and ``pack_tied_head`` for each matrix, ``wait`` before the first use, ``close`` at the end.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(torch.get_num_threads(), "vlfit-packing")
        self._changed = Condition()
        self._waiting = 0  # weights not packed yet
        self._pending: list[Future[None]] = []

    def pack(self, weight: Tensor) -> HalfMatrix:
        """Start packing ``weight`` [rows, columns] float32; call the result only after ``wait``.

        ``weight`` may be scaled in place, and belongs to the packer from then on. Blocks while earlier
        weights that wait to be packed, with this one, exceed 1 GiB.
        """
        matrix, count = HalfMatrix(*weight.shape), weight.numel()
        pack = matrix.prepare_packing(weight)
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
        return matrix

    def pack_tied_head(self, table: Tensor) -> HalfLinear:
        """Start packing a copy of the embedding ``table`` [vocabulary, hidden] as the tied output head.

        Call the result only after ``wait``.
        """
        return HalfLinear([self.pack(some.float()) for some in table.split(rows_per_piece(table.shape[1]))])

    def wait(self) -> None:
        """Wait until all matrices are packed; raises the error of a thread that failed."""
        while self._pending:
            self._pending.pop().result()

    def close(self) -> None:
        """Stop the threads, once each has packed its current matrix; matrices still waiting stay unpacked."""
        self._threads.shutdown(cancel_futures=True)
