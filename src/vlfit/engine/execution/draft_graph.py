"""A CUDA graph of a draft model's pass: few rows, which are launched as one.

A draft token is some twenty kernels, which take longer to launch than to run. The graph takes any rows of any
sequences, as a verify step does (``VerifyInputs``): each row is a sequence of its own to the kernels, all
keys and values are stored before any row attends, and a row's own token counts as cached.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from vlfit.engine.execution.cuda_graphs import UNUSED_ROW, FilledTable
from vlfit.engine.scheduling import sequence as scheduling
from vlfit.kernels.attention.paged import BlockAttentionMetadata
from vlfit.layers.kv_cache import KVCache
from vlfit.loading.pinned import GraphPool

# Hidden states [rows, hidden], token ids [rows], positions [3, rows], metadata, and whether the logits are of
# the first tokens alone: outputs [rows, hidden] and logits [rows, vocabulary].
DraftPass = Callable[[Tensor, Tensor, Tensor, BlockAttentionMetadata, bool], tuple[Tensor, Tensor]]


class DraftGraph:
    """``run_pass`` for up to ``size`` rows of sequences of up to ``max_model_len`` tokens, as a CUDA graph.

    ``width``: of hidden states. ``heads``: whether the logits of a graph are short, for each to capture. They
    are captured into ``pool``, anew after ``release`` and when the KV cache has moved.
    """

    def __init__(
        self,
        run_pass: DraftPass,
        cache: KVCache,
        pool: GraphPool,
        size: int,
        max_model_len: int,
        width: int,
        heads: Sequence[bool] = (False,),
    ) -> None:
        """Allocate the static inputs."""
        self._pass, self._cache, self._pool, self.size = run_pass, cache, pool, size
        device, blocks = cache.device, -(-max_model_len // cache.block_size)
        # Slots, positions and spans of the rows. Not pinned: from other memory a copy has been read when it
        # returns, so the next rows may be written while the last ones still run.
        self._on_host = torch.zeros(5 * size, dtype=torch.int32)
        self._rows = torch.zeros(5 * size, dtype=torch.int32, device=device)
        self._tables_on_host = torch.zeros((size, blocks), dtype=torch.int32)
        self._tables = torch.zeros((size, blocks), dtype=torch.int32, device=device)
        self._filled: list[FilledTable | None] = [None] * size
        self._hidden = torch.zeros((size, width), dtype=cache.dtype, device=device)
        self._token_ids = torch.zeros(size, dtype=torch.int32, device=device)
        slots, self._positions, spans = _parts(self._rows, size)
        self._metadata = BlockAttentionMetadata(
            slots,
            self._tables,
            spans,
            cache.block_size,
            size,
            0,
            no_store_slots=torch.full((size,), UNUSED_ROW, dtype=torch.int32, device=device),
        )
        self._heads = heads
        self._captured: dict[bool, tuple[Callable[[], None], tuple[Tensor, Tensor]]] = {}
        self._captured_addresses: tuple[int, ...] = ()

    def capture(self) -> None:
        """Capture the pass with each head, with all rows unused."""
        self._fill([])
        positions = self._positions.expand(3, self.size)
        for short in self._heads:
            run = partial(self._pass, self._hidden, self._token_ids, positions, self._metadata, short)
            run()  # kernels compile and load outside of a capture
            self._captured[short] = self._pool.capture(run)
        self._captured_addresses = self._cache.addresses

    def release(self) -> None:
        """Drop the graphs. The next ``run`` captures them again."""
        self._captured.clear()

    def run(
        self,
        rows: Sequence[tuple[scheduling.Sequence, int, int]],
        hidden: Tensor,
        token_ids: Tensor,
        short: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Outputs and logits of ``rows``, valid until the next call. Does not wait for the device.

        ``rows``: of each the sequence, the index of its token there, and its position on each axis.
        ``hidden`` [n, width] and ``token_ids`` [n] on the device. There are at most ``size``. ``short``: one
        of ``heads``.
        """
        if not self._captured or self._captured_addresses != self._cache.addresses:
            self.capture()
        self._fill(rows)
        count = len(rows)
        self._hidden[:count].copy_(hidden)
        self._token_ids[:count].copy_(token_ids)
        replay, (output, logits) = self._captured[short]
        replay()
        return output[:count], logits[:count]

    def _fill(self, rows: Sequence[tuple[scheduling.Sequence, int, int]]) -> None:
        """Set the inputs but hidden states and tokens; other rows become unused."""
        size = self._cache.block_size
        slots, positions, spans = (part.numpy() for part in _parts(self._on_host, self.size))
        slots[:], positions[:] = UNUSED_ROW, 0
        spans[:] = [(row, 1, UNUSED_ROW) for row in range(self.size)]
        changed = False
        for number, (sequence, index, position) in enumerate(rows):
            table = sequence.block_table
            slots[number] = table[index // size] * size + index % size
            positions[number] = position
            spans[number, 2] = index + 1
            filled = self._filled[number]
            if filled is None or not filled.has_all_of(table):
                self._tables_on_host[number, : len(table)] = torch.tensor(table, dtype=torch.int32)
                self._filled[number] = FilledTable(table, len(table))
                changed = True
        self._rows.copy_(self._on_host, non_blocking=True)
        if changed:
            self._tables.copy_(self._tables_on_host, non_blocking=True)


def _parts(rows: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots [size], positions [size] and query spans [size, 3] in ``rows``."""
    return rows[:size], rows[size : 2 * size], rows[2 * size :].view(size, 3)
