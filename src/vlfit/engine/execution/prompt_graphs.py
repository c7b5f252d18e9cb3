"""CUDA graphs of prompts: a pass over the rows of one sequence, launched as one.

Such a pass is hundreds of kernels that take the host longer to launch than the device to run. With few rows
that is so on every card (a question about a picture whose rows are cached, the text behind a picture, the
next turn of a chat): a few numbers of rows are captured at the start. Rows without a token store nothing, no
row attends to them, and nothing is read of what they compute. On a large card it is so of whole prompts,
pictures included: numbers of rows that repeat are captured exactly, as torch's products take up to a third
longer with a few rows more. The tensors of a graph are static.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from vlfit.engine.execution.cuda_graphs import UNUSED_ROW
from vlfit.engine.scheduling.sequence import IntMatrix, IntVector, ScheduledChunk
from vlfit.kernels.attention.paged import BlockAttentionMetadata
from vlfit.kernels.gemm.quantized import DequantBuffer
from vlfit.layers.gated_delta import SPAN_COLUMNS, StateSpans
from vlfit.layers.kv_cache import KVCache, slots_of_blocks
from vlfit.loading.pinned import GraphPool
from vlfit.models.decoder import VisualRows
from vlfit.models.interface import VisionFeatures

logger = logging.getLogger(__name__)

# Token ids [rows], positions [3, rows], image features or None, metadata, index of the last row [1]: hidden
# states after the final norm, of all rows or of the last one, and the last row's logits [1, vocabulary].
PromptPass = Callable[
    [Tensor, Tensor, VisualRows | None, BlockAttentionMetadata, Tensor], tuple[Tensor, Tensor]
]

REPEATS_BEFORE_CAPTURE = 1  # passes of a number of rows above ``PromptGraphs.largest``
MOST_LONG_GRAPHS = 16  # that are kept: each has hundreds of launches in the driver's memory
_MOST_COUNTED = 256  # kinds of long passes whose repeats are counted at a time
_ALIGNED = 4  # int32 values: 16 bytes, the alignment that kernels are compiled for
_INT64 = 2  # int32 values


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """What a pass computed; its tensors are valid until the next one.

    ``hidden`` and ``logits``: as of ``PromptPass``, but ``hidden`` may have more rows. ``token_ids`` [rows]
    and ``visual``: its input.
    """

    hidden: Tensor
    logits: Tensor
    token_ids: Tensor
    visual: VisualRows | None


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a graph is captured for: so many ``rows``, and how many of them are image tokens."""

    rows: int
    image_rows: int = 0


class PictureRows:
    """Image features of a pass of up to ``rows`` rows, at fixed addresses.

    ``width``: of the text model's hidden states. ``levels``: of deepstack. Allocated when first needed.
    """

    def __init__(self, rows: int, width: int, levels: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = (1 + levels, rows, width), dtype, device
        self._features: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._features is None else self._features.nbytes

    def release(self) -> None:
        """Free the memory, once no graph reads it."""
        self._features = None

    def visual_rows(self, index: Tensor) -> VisualRows:
        """The first ones as the features of the rows ``index`` [n] int64."""
        rows, *deepstack = self._allocated()[:, : len(index)]
        return VisualRows(index, rows, tuple(deepstack))

    def _allocated(self) -> Tensor:
        if self._features is None:
            self._features = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        return self._features

    def fill(self, features: Sequence[VisionFeatures]) -> None:
        """Copy ``features``, one after the other. Does not wait for the device."""
        start = 0
        for each in features:
            end = start + len(each.rows)
            for target, source in zip(self._allocated(), (each.rows, *each.deepstack), strict=True):
                target[start:end].copy_(source)
            start = end


class PromptGraphs:
    """``run_pass`` by CUDA graph, for a sequence of up to ``max_model_len`` tokens.

    ``capture`` once, into ``pool``, then ``run``: passes of up to ``sizes`` rows of text, and others of up to
    ``longest`` (0: none) whose numbers of rows have come ``REPEATS_BEFORE_CAPTURE`` times before. With
    ``pictures`` those may have image tokens. ``largest``: most rows of ``sizes``. A graph is captured again
    when needed, after ``release`` or when the KV cache has moved.
    """

    def __init__(
        self,
        run_pass: PromptPass,
        cache: KVCache,
        pool: GraphPool,
        max_model_len: int,
        sizes: tuple[int, ...],
        longest: int = 0,
        pictures: PictureRows | None = None,
    ) -> None:
        """Allocate the static inputs of ``sizes``."""
        self._pass, self._cache, self._pool, self._sizes = run_pass, cache, pool, sizes
        self._longest, self._pictures = longest, pictures
        self._blocks = -(-max_model_len // cache.block_size)
        self._inputs = {_Kind(size): PromptInputs(size, self._blocks, cache) for size in sizes}
        self._captured: dict[_Kind, Callable[[], None]] = {}
        self._came: dict[_Kind, int] = {}  # how often, of long ones
        self._dequantized = DequantBuffer()
        # Hidden states and logits of all sizes, outside of the pool: so each graph may use all of it.
        self._output: tuple[Tensor, Tensor] | None = None
        self._captured_addresses: tuple[int, ...] = ()

    @property
    def largest(self) -> int:
        return self._sizes[-1]

    @property
    def kept_bytes(self) -> int:
        """Bytes beside the graphs' pool: features of pictures, outputs, the dequantization buffer."""
        pictures = 0 if self._pictures is None else self._pictures.nbytes
        outputs = sum(tensor.nbytes for tensor in self._output or ())
        return pictures + outputs + self._dequantized.nbytes

    def capture(self) -> None:
        """Capture the longest graph first, as the others share its memory, and one for each of ``sizes``."""
        if self._longest:
            self._capture(_Kind(self._longest, (self._longest - 1) * (self._pictures is not None)))
        for size in reversed(self._sizes):
            self._capture(_Kind(size))

    def release(self) -> None:
        """Drop all graphs, and what they keep beside their pool."""
        self._captured.clear()
        self._output = None
        self._dequantized = DequantBuffer()
        if self._pictures is not None:
            self._pictures.release()

    def takes(self, num_tokens: int, image_tokens: int) -> bool:
        """Whether ``run`` is to run a chunk of ``num_tokens``, of which ``image_tokens`` are of images.

        Counts a long one, and captures it if it came often enough.
        """
        kind = self._kind(num_tokens, image_tokens)
        if kind is None:
            return False
        if not self._is_long(kind) or self._is_captured(kind):
            return True
        if len(self._came) >= _MOST_COUNTED:
            self._came.clear()
        came = self._came[kind] = self._came.get(kind, 0) + 1
        return came > REPEATS_BEFORE_CAPTURE and self._capture_long(kind)

    def run(
        self,
        chunk: ScheduledChunk,
        token_ids: IntVector,
        positions: IntMatrix,
        placeholders: IntVector | None = None,
        features: Sequence[VisionFeatures] = (),
    ) -> PromptOutput:
        """Run ``chunk``, which ``takes`` has taken. Does not wait for the device.

        ``token_ids`` [tokens], ``positions`` [3, tokens]: of its tokens. ``placeholders``: which of them are
        image tokens, and ``features``: for these; None: none are.
        """
        kind = self._kind(chunk.num_tokens, 0 if placeholders is None else len(placeholders))
        assert kind is not None
        if not self._is_captured(kind):
            self._capture(kind)
        assert self._output is not None
        inputs = self._inputs[kind]
        inputs.fill(chunk, token_ids, positions, placeholders)
        if self._pictures is not None:
            self._pictures.fill(features)
        replay = self._captured[kind] = self._captured.pop(kind)  # the last one is the most recently used
        replay()
        return PromptOutput(*self._output, inputs.token_ids, self._visual_rows(inputs))

    def _kind(self, num_tokens: int, image_tokens: int) -> _Kind | None:
        """Of the smallest graph that may take so many tokens; None: none may."""
        if num_tokens <= self.largest and not image_tokens:
            return _Kind(self._sizes[bisect_left(self._sizes, num_tokens)])
        possible = num_tokens <= self._longest and (self._pictures is not None or not image_tokens)
        return _Kind(num_tokens, image_tokens) if possible else None

    def _is_long(self, kind: _Kind) -> bool:
        return kind.image_rows > 0 or kind.rows > self.largest

    def _is_captured(self, kind: _Kind) -> bool:
        if self._cache.addresses != self._captured_addresses:
            self.release()
        return kind in self._captured

    def _capture_long(self, kind: _Kind) -> bool:
        """Capture a graph, in place of the least recently used of many.

        It is an optimization only: False if that fails, as where memory is short. From then on there are no
        long ones.
        """
        longs = list(filter(self._is_long, self._captured))
        if len(longs) >= MOST_LONG_GRAPHS:
            del self._captured[longs[0]], self._inputs[longs[0]]
            self._came.pop(longs[0], None)
        try:
            self._capture(kind)
        except Exception as error:  # an error of the pass itself comes again without the graph
            self._longest = 0
            for each in filter(self._is_long, list(self._captured)):
                del self._captured[each]
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            logger.warning("long prompts run without CUDA graphs from now on: %s", reason)
            return False
        return True

    def _visual_rows(self, inputs: "PromptInputs") -> VisualRows | None:
        if self._pictures is None or inputs.placeholders is None:
            return None
        return self._pictures.visual_rows(inputs.placeholders)

    def _capture(self, kind: _Kind) -> None:
        if kind not in self._inputs:
            self._inputs[kind] = PromptInputs(kind.rows, self._blocks, self._cache, kind.image_rows)
        inputs = self._inputs[kind]
        self._captured_addresses = self._cache.addresses
        inputs.clear()
        visual = self._visual_rows(inputs)
        arguments = inputs.token_ids, inputs.positions, visual, inputs.metadata, inputs.last_row

        def compute() -> tuple[Tensor, Tensor]:
            with self._dequantized.in_use():
                return self._pass(*arguments)

        hidden, logits = compute()  # kernels compile and load outside of a capture
        if self._output is None:
            rows = len(hidden) if len(hidden) == 1 else max(self.largest, self._longest)
            self._output = hidden.new_empty((rows, hidden.shape[1])), torch.empty_like(logits)
        output = self._output

        def run() -> None:
            for kept, computed in zip(output, compute(), strict=True):
                kept[: len(computed)].copy_(computed)

        self._captured[kind], _ = self._pool.capture(run)


class PromptInputs:
    """Inputs of a captured pass over up to ``size`` rows of a sequence of up to ``blocks`` blocks.

    All are parts of one device tensor that ``fill`` sets by one copy: ``token_ids`` [size], ``positions``
    [3, size], ``last_row`` [1] int64, the ``placeholders`` [image_rows] int64 (None without) and, in
    ``metadata``, slot mapping [size], query span [1, 3], block table [1, blocks] and, where layers keep
    states, ``StateSpans`` with a table [1, 5].
    """

    def __init__(self, size: int, blocks: int, cache: KVCache, image_rows: int = 0) -> None:
        self._block_size, self._cache = cache.block_size, cache
        lengths = (_INT64, _INT64 * image_rows, size, 3 * size, size, 3, SPAN_COLUMNS, blocks)
        ends = list(accumulate(-(-length // _ALIGNED) * _ALIGNED for length in lengths))
        # Not pinned: from other memory a copy has been read when it returns, so the next chunk may be written
        # while the last one still runs.
        self._on_host = torch.zeros(ends[-1], dtype=torch.int32)
        self._on_device = torch.zeros(ends[-1], dtype=torch.int32, device=cache.device)

        def parts(whole: Tensor) -> list[Tensor]:
            return [
                whole[begin : begin + length] for begin, length in zip([0, *ends[:-1]], lengths, strict=True)
            ]

        last, images_at, *numbers = (part.numpy() for part in parts(self._on_host))
        tokens, positions, slots, span, state, table = numbers
        self._last_row, self._placeholders = last.view("int64"), images_at.view("int64")
        self._tokens, self._positions, self._slots = tokens, positions.reshape(3, size), slots
        self._span, self._state, self._table = span, state, table

        device_last, device_images, self.token_ids, *rest = parts(self._on_device)
        device_positions, device_slots, device_span, device_state, device_table = rest
        self.last_row = device_last.view(torch.int64)
        self.placeholders = device_images.view(torch.int64) if image_rows else None
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

    def fill(
        self,
        chunk: ScheduledChunk,
        token_ids: IntVector,
        positions: IntMatrix,
        placeholders: IntVector | None = None,
    ) -> None:
        """Set the inputs to the tokens of ``chunk``; the remaining rows have none. Does not wait.

        ``placeholders`` [image_rows]: which of the tokens are of images.
        """
        sequence, count, begin = chunk.sequence, chunk.num_tokens, chunk.begin
        table = sequence.block_table
        self._last_row[0] = count - 1
        self._tokens[:count] = token_ids
        self._positions[:, :count] = positions
        self._table[: len(table)] = table
        first, skipped = divmod(begin, self._block_size)
        blocks = table[first : -(-(begin + count) // self._block_size)]
        slots = slots_of_blocks(blocks, self._block_size).numpy()
        self._slots[:count] = slots[skipped : skipped + count]
        self._tokens[count:] = 0
        self._positions[:, count:] = 0
        self._slots[count:] = UNUSED_ROW
        if placeholders is not None:
            self._placeholders[:] = placeholders
        self._span[:] = (0, count, begin)
        self._state[:] = (0, count, sequence.state_slot, not begin, sequence.pending_tokens)
        self._on_device.copy_(self._on_host, non_blocking=True)
