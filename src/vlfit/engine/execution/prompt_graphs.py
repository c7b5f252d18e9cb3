"""CUDA graphs of short prompts: a pass over few rows of one sequence, launched as one.

Such a pass is hundreds of kernels that take the host longer to launch than the device to run: a question
about a picture whose rows are cached, the text behind a picture, the next turn of a chat. It is captured for
a few numbers of rows over static tensors. Rows without a token store nothing, no row attends to them, and
nothing is read of what they compute.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from vlfit.engine.execution.cuda_graphs import UNUSED_ROW
from vlfit.engine.scheduling.sequence import IntMatrix, IntVector, ScheduledChunk
from vlfit.kernels.attention.paged import BlockAttentionMetadata
from vlfit.layers.gated_delta import SPAN_COLUMNS, StateSpans
from vlfit.layers.kv_cache import KVCache
from vlfit.loading.pinned import GraphPool

# Token ids [rows], positions [3, rows], metadata, index of the last row [1]: hidden states after the final
# norm, of all rows or of the last one, and the last row's logits [1, vocabulary].
PromptPass = Callable[[Tensor, Tensor, BlockAttentionMetadata, Tensor], tuple[Tensor, Tensor]]

_ALIGNED = 4  # int32 values: 16 bytes, the alignment that kernels are compiled for


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """What a pass computed; its tensors are valid until the next one.

    ``hidden`` and ``logits``: as of ``PromptPass``, but ``hidden`` may have more rows. ``token_ids`` [rows]:
    its input.
    """

    hidden: Tensor
    logits: Tensor
    token_ids: Tensor


class PromptGraphs:
    """``run_pass`` by CUDA graph for ``sizes`` rows of a sequence of up to ``max_model_len`` tokens.

    ``capture`` once, into ``pool``, then ``run``. ``largest``: most rows. A graph is captured again when
    needed, after ``release`` or when the KV cache has moved.
    """

    def __init__(
        self,
        run_pass: PromptPass,
        cache: KVCache,
        pool: GraphPool,
        max_model_len: int,
        sizes: tuple[int, ...],
    ) -> None:
        """Allocate the static inputs."""
        self._pass, self._cache, self._pool, self._sizes = run_pass, cache, pool, sizes
        blocks = -(-max_model_len // cache.block_size)
        self._inputs = {size: PromptInputs(size, blocks, cache) for size in sizes}
        self._captured: dict[int, Callable[[], None]] = {}
        # Hidden states and logits of all sizes, outside of the pool: so each graph may use all of it.
        self._output: tuple[Tensor, Tensor] | None = None
        self._captured_addresses: tuple[int, ...] = ()

    @property
    def largest(self) -> int:
        return self._sizes[-1]

    def capture(self) -> None:
        """Capture a graph for each size; the largest first, as the others share its memory."""
        for size in reversed(self._sizes):
            self._capture(size)

    def release(self) -> None:
        """Drop all graphs."""
        self._captured.clear()

    def run(self, chunk: ScheduledChunk, token_ids: IntVector, positions: IntMatrix) -> PromptOutput:
        """Run ``chunk``, of at most ``largest`` tokens, none of an image. Does not wait for the device.

        ``token_ids`` [tokens], ``positions`` [3, tokens]: of its tokens.
        """
        if self._cache.addresses != self._captured_addresses:
            self.release()
        size = self._sizes[bisect_left(self._sizes, chunk.num_tokens)]
        if size not in self._captured:
            self._capture(size)
        assert self._output is not None
        inputs = self._inputs[size]
        inputs.fill(chunk, token_ids, positions)
        self._captured[size]()
        return PromptOutput(*self._output, inputs.token_ids)

    def _capture(self, size: int) -> None:
        inputs = self._inputs[size]
        self._captured_addresses = self._cache.addresses
        inputs.clear()
        compute = partial(self._pass, inputs.token_ids, inputs.positions, inputs.metadata, inputs.last_row)
        hidden, logits = compute()  # kernels compile and load outside of a capture
        if self._output is None:
            rows = len(hidden) if len(hidden) == 1 else self.largest
            self._output = hidden.new_empty((rows, hidden.shape[1])), torch.empty_like(logits)
        output = self._output

        def run() -> None:
            for kept, computed in zip(output, compute(), strict=True):
                kept[: len(computed)].copy_(computed)

        self._captured[size], _ = self._pool.capture(run)


class PromptInputs:
    """Inputs of a captured pass over up to ``size`` rows of a sequence of up to ``blocks`` blocks.

    All are parts of one device tensor that ``fill`` sets by one copy: ``token_ids`` [size], ``positions``
    [3, size], ``last_row`` [1] int64 and, in ``metadata``, slot mapping [size], query span [1, 3], block
    table [1, blocks] and, where layers keep states, ``StateSpans`` with a table [1, 5].
    """

    def __init__(self, size: int, blocks: int, cache: KVCache) -> None:
        self._size, self._block_size, self._cache = size, cache.block_size, cache
        lengths = (2, size, 3 * size, size, 3, SPAN_COLUMNS, blocks)
        ends = list(accumulate(-(-length // _ALIGNED) * _ALIGNED for length in lengths))
        # Not pinned: from other memory a copy has been read when it returns, so the next chunk may be written
        # while the last one still runs.
        self._on_host = torch.zeros(ends[-1], dtype=torch.int32)
        self._on_device = torch.zeros(ends[-1], dtype=torch.int32, device=cache.device)

        def parts(whole: Tensor) -> list[Tensor]:
            return [
                whole[begin : begin + length] for begin, length in zip([0, *ends[:-1]], lengths, strict=True)
            ]

        last, tokens, positions, slots, span, state, table = (part.numpy() for part in parts(self._on_host))
        self._last_row = last.view("int64")
        self._tokens, self._positions, self._slots = tokens, positions.reshape(3, size), slots
        self._span, self._state, self._table = span, state, table

        device_last, self.token_ids, device_positions, device_slots, *rest = parts(self._on_device)
        device_span, device_state, device_table = rest
        self.last_row = device_last.view(torch.int64)
        self.positions = device_positions.view(3, size)
        states = None
        if cache.states:
            states = StateSpans(device_state.view(1, SPAN_COLUMNS), 0, 0, 0, size)
        self.metadata = BlockAttentionMetadata(
            device_slots,
            device_table.view(1, blocks),
            device_span.view(1, 3),
            cache.block_size,
            0,
            size,
            states=states,
        )

    def clear(self) -> None:
        """Set the inputs to no tokens: the pass stores nothing."""
        self._on_host.zero_()
        self._slots[:] = UNUSED_ROW
        self._state[:] = (0, 0, UNUSED_ROW, 1, 0)
        self._on_device.copy_(self._on_host, non_blocking=True)

    def fill(self, chunk: ScheduledChunk, token_ids: IntVector, positions: IntMatrix) -> None:
        """Set the inputs to the tokens of ``chunk``; the remaining rows have none. Does not wait."""
        sequence, count, begin = chunk.sequence, chunk.num_tokens, chunk.begin
        table = sequence.block_table
        self._last_row[0] = count - 1
        self._tokens[:count] = token_ids
        self._positions[:, :count] = positions
        self._table[: len(table)] = table
        at = range(begin, begin + count)
        self._slots[:count] = [
            table[index // self._block_size] * self._block_size + index % self._block_size for index in at
        ]
        self._tokens[count:] = 0
        self._positions[:, count:] = 0
        self._slots[count:] = UNUSED_ROW
        self._span[:] = (0, count, begin)
        self._state[:] = (0, count, sequence.state_slot, not begin, sequence.pending_tokens)
        self._on_device.copy_(self._on_host, non_blocking=True)
