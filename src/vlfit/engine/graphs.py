"""Decoding as CUDA graphs: the kernels of a whole step, launched as one.

A step of one token is hundreds of small kernels, and launching them one by one takes longer than they take.
So the step is recorded once for each of a few numbers of sequences, over tensors that stay where they are,
and replayed from then on; rows of a graph that no sequence needs leave nothing behind. Knows: what a step
reads, and where it is recorded. Does not know who runs (``scheduler.py``) or what a step is (``runner.py``).
"""

from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vlfit.engine.kernels.attention import BlockPlan
from vlfit.engine.kv_cache import KVCache
from vlfit.engine.scores import Scores, scores_of
from vlfit.engine.sequence import Sequence
from vlfit.engine.streams import side_stream

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

_ALIGNED = 4  # int32: 16 bytes, as kernels are compiled for
_NOBODY = -1  # the past of a row without a sequence, and its slot

# Token ids [n], positions [3, n], and where keys and values are: logits [n, vocabulary] in float32.
Step = Callable[[Tensor, Tensor, BlockPlan], Tensor]


def sizes_for(sequences: int) -> tuple[int, ...]:
    """For how many sequences there are graphs: powers of two, and the most that run at once."""
    powers = [1 << power for power in range(sequences.bit_length()) if 1 << power < sequences]
    return (*powers, sequences)


class DecodeGraphs:
    """``step`` for up to ``sequences`` sequences of up to ``context`` tokens in ``cache``."""

    def __init__(self, step: Step, cache: KVCache, context: int, sequences: int) -> None:
        self._step = step
        self._inputs = [
            StepInputs(size, -(-context // cache.block_size), cache.block_size, cache.keys.device)
            for size in sizes_for(sequences)
        ]
        self._cache = cache
        self._recorded: dict[int, Graph] = {}
        self._recorded_at = (0, 0)
        self.nbytes = 0  # what torch took for what is recorded
        self._pool: _POOL_HANDLE | None = None

    def record(self) -> None:
        """All of them, the largest first: the others find room in what it took."""
        for inputs in reversed(self._inputs):
            self._graph(inputs)

    def release(self) -> None:
        """Forget what was recorded, because tensors move or their memory is wanted; it is recorded anew when
        it is needed.
        """
        self._recorded.clear()
        self._pool = None
        self.nbytes = 0

    def run(self, sequences: Many[Sequence]) -> Scores:
        """The next token of each of ``sequences``, which all decode; valid until the next call."""
        inputs = next(inputs for inputs in self._inputs if inputs.size >= len(sequences))
        if self._place() != self._recorded_at:
            self.release()  # the cache was made anew
        graph = self._graph(inputs)
        inputs.fill(sequences)
        graph.replay()
        return graph.scores.first(len(sequences))

    def _graph(self, inputs: "StepInputs") -> "Graph":
        graph = self._recorded.get(inputs.size)
        if graph is None:
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            self._recorded_at = self._place()
            inputs.fill([])
            graph = Graph(partial(self._run, inputs), self._pool, self._cache.keys.device)
            self._recorded[inputs.size] = graph
            self.nbytes = _bytes_of(self._pool)
        return graph

    def _place(self) -> tuple[int, int]:
        return self._cache.keys.data_ptr(), self._cache.values.data_ptr()

    def _run(self, inputs: "StepInputs") -> Scores:
        return scores_of(self._step(inputs.token_ids, inputs.positions, inputs.plan))


def _bytes_of(pool: "_POOL_HANDLE") -> int:
    """What torch took from the driver for ``pool``."""
    segments = torch.cuda.memory_snapshot() if torch.cuda.is_available() else []
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == pool)


class Graph:
    """``run`` as it went once: ``scores`` are where it left them, and ``replay`` writes them anew."""

    def __init__(self, run: Callable[[], Scores], pool: "_POOL_HANDLE", device: torch.device) -> None:
        run()  # kernels are compiled and loaded outside of a recording
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        # Not by torch.cuda.graph, which makes streams of its own.
        with torch.cuda.stream(side_stream(device)):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self.scores = run()
            finally:
                graph.capture_end()
        self.replay = graph.replay


class StepInputs:
    """What a step of ``size`` sequences reads: one tensor on the device, filled by one copy.

    It holds token ids, positions, slots [size] each, spans [size, 3] and block tables [size, blocks].
    """

    def __init__(self, size: int, blocks: int, block_size: int, device: torch.device) -> None:
        self.size = size
        self._block_size = block_size
        lengths = (size, size, size, 3 * size, size * blocks)
        ends = np.cumsum([-(-length // _ALIGNED) * _ALIGNED for length in lengths]).tolist()
        self._on_host = torch.zeros(ends[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
        self._on_device = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        begins = [0, *ends[:-1]]

        def views(whole: Tensor) -> list[Tensor]:
            return [whole[begin : begin + length] for begin, length in zip(begins, lengths, strict=True)]

        tokens, positions, slots, spans, table = (part.numpy() for part in views(self._on_host))
        self._tokens, self._positions, self._slots = tokens, positions, slots
        self._spans, self._table = spans.reshape(size, 3), table.reshape(size, blocks)
        self._tabled: list[list[int] | None] = [None] * size
        self._spans[:] = [(row, 1, _NOBODY) for row in range(size)]
        self.token_ids, on_axis, write_slots, on_spans, on_table = views(self._on_device)
        self.positions = on_axis.expand(3, size)
        self.plan = BlockPlan(
            write_slots, on_table.view(size, blocks), on_spans.view(size, 3), block_size, size, 0
        )

    def fill(self, sequences: Many[Sequence]) -> None:
        """The newest token of each of ``sequences``; rows behind them have none."""
        count = len(sequences)
        size = self._block_size
        for row, sequence in enumerate(sequences):
            cached = sequence.cached
            self._tokens[row] = sequence.generated[-1]
            self._positions[row] = sequence.prompt.next_position + len(sequence.generated) - 1
            self._slots[row] = sequence.blocks[cached // size] * size + cached % size
            self._spans[row, 2] = cached
            if self._tabled[row] is not sequence.blocks:
                self._table[row, : len(sequence.blocks)] = sequence.blocks
                self._tabled[row] = sequence.blocks
        self._slots[count:] = _NOBODY
        self._spans[count:, 2] = _NOBODY
        self._on_device.copy_(self._on_host, non_blocking=True)
