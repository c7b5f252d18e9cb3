"""CUDA graphs for decoding: all kernels of a step, launched as one.

A decode step is hundreds of small kernels that take longer to launch one by one than to run. It is captured
for a few batch sizes over static tensors and replayed; unused rows write nothing. A step ends by computing
the inputs of the next, so that the next can be launched before the host has read a token. Forward pass and
sampling are two graphs: with grammars only the forward pass is launched ahead, and while it runs the host
reads the last token and computes the next bitmask.

Where layers keep states, a step leaves its own token pending and commits the one before (``StateSpans``). So
a step that was launched ahead and is discarded has done no harm: what it committed is part of the sequence,
and what it left pending is not committed by anyone.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vlfit.engine.sampling.grammar import TOKENS_PER_WORD
from vlfit.engine.sampling.sampler import StepOutput, is_plain_greedy, select_tokens
from vlfit.engine.sampling.verification import drawn_drafts
from vlfit.engine.scheduling.sequence import ScheduledChunk, Sequence
from vlfit.kernels.attention.paged import BlockAttentionMetadata
from vlfit.kernels.rows.row_ops import advance_decode_inputs
from vlfit.kernels.sampling.draw import (
    GRAMMAR_FIELD,
    NUM_FIELDS,
    DrawnDrafts,
    pack_params_or_greedy,
    samples_on_gpu,
)
from vlfit.layers.gated_delta import PENDING, SPAN_COLUMNS, UNUSED_SLOT, StateSpans
from vlfit.layers.kv_cache import KVCache
from vlfit.loading.pinned import GraphPool
from vlfit.plan.native.cost import capture_sizes


def masks_on_device(sequence: Sequence) -> bool:
    """Whether ``sequence`` has a grammar, and the device applies it as a bitmask when it samples.

    False without a grammar, and with sampling parameters for which the host samples.
    """
    params = sequence.params
    return sequence.grammar_matcher is not None and (is_plain_greedy(params) or samples_on_gpu(params))


class GrammarBitmask:
    """The ``bitmask`` of ``sample_tokens`` as a tensor at a fixed address: ``on_device`` [rows, words] int32.

    A bit for each of ``vocabulary`` tokens, 32 in a word. Rows of sequences without a grammar are not read.
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        shape = rows, -(-vocabulary // TOKENS_PER_WORD)
        # The device has read it before the host has a token of the step, and so before it is rewritten.
        on_host = torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.on_device = torch.zeros(shape, dtype=torch.int32, device=device)
        self._on_host, self._words = on_host, on_host.numpy().view("uint32")

    def fill(self, sequences: list[Sequence]) -> None:
        """Set row i to the allowed next tokens of ``sequences[i]`` if ``masks_on_device``; other rows stay.

        Does not wait for the device. Raises ``InvalidRequest`` as ``GrammarMatcher.bitmask``.
        """
        changed = False
        for row, sequence in enumerate(sequences):
            if sequence.grammar_matcher is not None and masks_on_device(sequence):
                bits = sequence.grammar_matcher.bitmask()[: self._words.shape[1]]
                self._words[row, : len(bits)] = bits
                self._words[row, len(bits) :] = 0
                changed = True
        if changed:
            rows = len(sequences)
            self.on_device[:rows].copy_(self._on_host[:rows], non_blocking=True)


_ALIGNED = 4  # int32 values: 16 bytes, the alignment that kernels are compiled for
UNUSED_ROW = -1  # slot and context length of a row without a sequence

# Token ids [n], positions [3, n], attention metadata: logits [n, vocabulary].
Step = Callable[[Tensor, Tensor, BlockAttentionMetadata], Tensor]


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A decode step launched before the host has read its input tokens.

    ``output``: None if only the forward pass is launched, because sampling needs a bitmask. ``tokens`` [n]:
    the input tokens, in host memory. ``block_tables`` and ``num_cached_tokens`` identify the sequences;
    references to the sequences themselves would keep them alive.
    """

    output: StepOutput | None
    tokens: Tensor
    block_tables: tuple[list[int], ...]
    num_cached_tokens: tuple[int, ...]

    def matches(self, sequences: list[Sequence]) -> bool:
        """Whether this is the next step of ``sequences``: same sequences, input tokens and blocks.

        Reads ``tokens``, so ``StepOutput.read`` of the previous step must have returned.
        """
        return (
            len(sequences) == len(self.block_tables)
            and all(
                each.block_table is table for each, table in zip(sequences, self.block_tables, strict=True)
            )
            and tuple(each.num_cached_tokens for each in sequences) == self.num_cached_tokens
            and [each.generated[-1] for each in sequences] == self.tokens.tolist()
        )


class DecodeGraphs:
    """Decode steps by CUDA graph: up to ``max_num_seqs`` sequences of up to ``max_model_len`` tokens.

    ``capture`` once, then for each step ``run`` or ``run_verify``, and optionally ``launch_next``. ``step``:
    the forward pass to capture, into ``pool``. ``vocabulary``: tokens in a row of logits. ``num_captures``:
    steps captured so far, one per batch size and again after ``release``.
    """

    def __init__(
        self,
        step: Step,
        cache: KVCache,
        pool: GraphPool,
        vocabulary: int,
        max_model_len: int,
        max_num_seqs: int,
        verify_rows: int = 0,
    ) -> None:
        """Allocate the static inputs. ``verify_rows``: most rows of ``run_verify``; 0: it is not used."""

        self._step, self._pool = step, pool
        shape = -(-max_model_len // cache.block_size), cache.block_size, cache.device, bool(cache.states)
        self._inputs = [StepInputs(size, *shape) for size in capture_sizes(max_num_seqs)]
        self._verify_inputs = VerifyInputs(verify_rows, *shape) if verify_rows else None
        self._cache = cache
        self._captured: dict[StepInputs, CapturedStep] = {}
        self._captured_addresses: tuple[int, ...] = ()
        self._in_flight: InFlightStep | None = None
        self._staging = OutputStaging(max(max_num_seqs, verify_rows), cache.device)
        self._bitmask = GrammarBitmask(max(max_num_seqs, verify_rows), vocabulary, cache.device)
        self.num_captures = 0  # steps captured so far

    def capture(self) -> None:
        """Capture graphs for all batch sizes; the largest first, as the others share its memory."""
        verify_inputs = [self._verify_inputs] if self._verify_inputs is not None else []
        for inputs in sorted([*self._inputs, *verify_inputs], key=lambda inputs: inputs.size, reverse=True):
            self._captured_step(inputs)

    def release(self) -> None:
        """Drop all graphs and the step in flight. The next steps capture the graphs that they need again."""
        if self._in_flight is not None and self._cache.device.type == "cuda":
            torch.cuda.synchronize(self._cache.device)  # the step in flight may still run
        self._in_flight = None
        self._captured.clear()

    def run(self, sequences: list[Sequence]) -> StepOutput:
        """Run one decode step of ``sequences``, without waiting for the device.

        The output has one row per sequence and is valid until the next call. If ``launch_next`` has launched
        this step, its output is returned. A launched step that does not match is discarded: what it wrote to
        the KV cache lies behind all cached tokens and is rewritten before it is read. Raises
        ``InvalidRequest`` if a grammar allows no token.
        """
        if self._addresses() != self._captured_addresses:
            self.release()  # the KV cache was reallocated
        in_flight, self._in_flight = self._in_flight, None
        inputs = self._inputs_for(sequences)
        launched = in_flight if in_flight is not None and in_flight.matches(sequences) else None
        if launched is None:
            graph = self._captured_step(inputs)
            inputs.fill(sequences)
            graph.forward()
        self._leave_pending(sequences)
        if launched is not None and launched.output is not None:
            return launched.output
        self._bitmask.fill(sequences)
        return self._sample(inputs, len(sequences))

    def run_verify(self, batch: list[ScheduledChunk]) -> StepOutput:
        """Run one verify step of decoding chunks, some with draft tokens, without waiting for the device.

        The output has a row for the newest token of each chunk, followed by one for each of its draft tokens,
        and is valid until the next call. A step that ``launch_next`` launched is discarded.
        """
        if self._verify_inputs is None:
            raise RuntimeError("draft tokens reached decode graphs without a verify step")
        if self._addresses() != self._captured_addresses:
            self.release()
        self._in_flight = None
        graph = self._captured_step(self._verify_inputs)
        rows = self._verify_inputs.fill_drafts(batch)
        graph.forward()
        self._leave_pending([chunk.sequence for chunk in batch])
        drafts = drawn_drafts(batch, self._verify_inputs.size, self._cache.device)
        if drafts is None:
            return self._sample(self._verify_inputs, rows)
        # Not captured, so that nobody compiles and captures it whose drafts are never drawn.
        output = self._select_tokens(self._verify_inputs, graph.logits, drafts)
        return self._staging.copy_out(output, rows)

    def is_launched(self, sequences: list[Sequence]) -> bool:
        """Whether ``launch_next`` has launched the step that ``run(sequences)`` would run."""
        return self._in_flight is not None and self._in_flight.matches(sequences)

    def launch_next(self, sequences: list[Sequence]) -> None:
        """Launch the step that follows ``run(sequences)``, before the host has read the tokens of that run.

        ``run(sequences)`` must be the last call. If ``masks_on_device`` for a sequence, only the forward pass
        is launched, and the next ``run`` samples. Does nothing if a sequence had no slot for its next token
        in the block table by which ``run(sequences)`` was launched.
        """
        inputs = self._inputs_for(sequences)
        if not inputs.covers_next(sequences):
            return
        inputs.extend_tables(sequences)
        tokens = self._staging.last[0, : len(sequences)]
        self._captured[inputs].forward()
        for sequence in sequences:  # this is committed whether or not anyone uses the launched step
            sequence.pending_tokens = 0
        waits_for_grammar = any(masks_on_device(sequence) for sequence in sequences)
        self._in_flight = InFlightStep(
            None if waits_for_grammar else self._sample(inputs, len(sequences)),
            tokens,
            tuple(sequence.block_table for sequence in sequences),
            tuple(sequence.num_cached_tokens + 1 for sequence in sequences),
        )

    def _leave_pending(self, sequences: list[Sequence]) -> None:
        """Record that the newest token of each of ``sequences`` was computed and is not in the states yet."""
        if self._cache.states:
            for sequence in sequences:
                sequence.pending_tokens = 1

    def _sample(self, inputs: "StepInputs", rows: int) -> StepOutput:
        """Sample from the logits computed last."""
        graph = self._captured[inputs]
        graph.sample()
        return self._staging.copy_out(graph.output, rows)

    def _inputs_for(self, sequences: list[Sequence]) -> "StepInputs":
        return next(inputs for inputs in self._inputs if inputs.size >= len(sequences))

    def _captured_step(self, inputs: "StepInputs") -> "CapturedStep":
        graph = self._captured.get(inputs)
        if graph is None:
            self._captured_addresses = self._addresses()
            inputs.fill([])
            forward = partial(self._step, inputs.token_ids, inputs.positions, inputs.metadata)
            sample = partial(self._select_tokens, inputs)
            graph = CapturedStep(forward, sample, self._pool)
            self._captured[inputs] = graph
            self.num_captures += 1
        return graph

    def _addresses(self) -> tuple[int, ...]:
        return self._cache.addresses

    def _select_tokens(
        self, inputs: "StepInputs", logits: Tensor, drafts: DrawnDrafts | None = None
    ) -> StepOutput:
        bitmask = self._bitmask.on_device[: inputs.size]
        output = select_tokens(logits, inputs.sampling_fields, inputs.positions[0], bitmask, drafts=drafts)
        inputs.advance(output.summary[0])
        return output


class OutputStaging:
    """Double-buffered pinned RAM for ``StepOutput.summary`` of steps of up to ``rows`` rows.

    One buffer receives the running step's summary while the host reads the other. ``last``: the summary
    copied last, [2 or 3, rows of the graph].
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._buffers = [torch.zeros(3 * rows, dtype=torch.int64, pin_memory=on_gpu) for _ in range(2)]
        self._ready = [torch.cuda.Event() if on_gpu else None for _ in range(2)]
        self._index = 0
        self.last = self._buffers[0].view(3, -1)

    def copy_out(self, output: StepOutput, rows: int) -> StepOutput:
        """Start copying the summary of ``output``, launched last on the device, to pinned RAM. Does not wait.

        Returns the first ``rows`` rows: their logits stay on the device until the next launch of the graph
        that computes them; their summary may be read after ``StepOutput.ready``, and is overwritten by the
        second call from now.
        """
        self._index = 1 - self._index
        buffer, ready = self._buffers[self._index], self._ready[self._index]
        summary = output.summary
        self.last = buffer[: summary.numel()].view(summary.shape)
        self.last.copy_(summary, non_blocking=True)
        if ready is not None:
            ready.record()
        return StepOutput(output.logits[:rows], self.last[:, :rows], ready)


class CapturedStep:
    """Two CUDA graphs, captured from the constructor's arguments: ``forward`` and ``sample`` replay them.

    ``forward`` computes ``logits`` and ``sample`` chooses tokens from them; both are in ``output``, at fixed
    addresses.
    """

    def __init__(
        self,
        forward: Callable[[], Tensor],
        sample: Callable[[Tensor], StepOutput],
        pool: GraphPool,
    ) -> None:
        sample(forward())  # kernels compile and load outside of a capture
        self.forward, self.logits = pool.capture(forward)
        self.sample, self.output = pool.capture(partial(sample, self.logits))


@dataclass(frozen=True, slots=True)
class FilledTable:
    """A block table, which grows in place, of which an input of a graph has the first ``length`` blocks."""

    table: list[int]
    length: int

    def has_all_of(self, table: list[int]) -> bool:
        """Whether it is this ``table``, and has not grown."""
        return self.table is table and self.length == len(table)


class StepInputs:
    """Inputs of a captured step of up to ``size`` sequences of up to ``blocks`` blocks, at fixed addresses.

    ``block_size``: tokens in a block. All inputs are parts of one device tensor that ``fill`` sets by one
    copy: ``token_ids`` [size], ``positions`` [3, size], ``sampling_fields`` [NUM_FIELDS, size] and, in
    ``metadata``, slot mapping [size], query spans [size, 3] and block tables [size, blocks]; ``has_states``:
    also ``StateSpans`` with a table [size, 5].
    """

    def __init__(
        self, size: int, blocks: int, block_size: int, device: torch.device, has_states: bool = False
    ) -> None:
        self.size = size
        self._block_size = block_size
        spans = size * SPAN_COLUMNS if has_states else 0
        lengths = (size, size, size, 3 * size, NUM_FIELDS * size, size * blocks, spans)
        ends = np.cumsum([-(-length // _ALIGNED) * _ALIGNED for length in lengths]).tolist()
        self._on_host = torch.zeros(ends[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
        self._on_device = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        begins = [0, *ends[:-1]]

        def views(whole: Tensor) -> list[Tensor]:
            return [whole[begin : begin + length] for begin, length in zip(begins, lengths, strict=True)]

        on_host = views(self._on_host)
        self._tables_on_host = on_host[5].view(size, blocks)
        tokens, positions, slot_mapping, query_spans, sampling_fields, block_tables, state_spans = (
            part.numpy() for part in on_host
        )
        self._tokens, self._positions, self._slot_mapping = tokens, positions, slot_mapping
        self._query_spans, self._block_tables = (
            query_spans.reshape(size, 3),
            block_tables.reshape(size, blocks),
        )
        self._sampling_fields = sampling_fields.reshape(NUM_FIELDS, size)
        self._state_spans = state_spans.reshape(-1, SPAN_COLUMNS)  # no rows without states
        self._filled: list[FilledTable | None] = [None] * size
        self._query_spans[:] = [(row, 1, UNUSED_ROW) for row in range(size)]
        self.token_ids, self._position_row, *others = views(self._on_device)
        device_slots, device_spans, device_fields, device_tables, device_states = others
        self.sampling_fields = device_fields.view(NUM_FIELDS, size)
        self.positions = self._position_row.expand(3, size)
        self.metadata = BlockAttentionMetadata(
            device_slots, device_tables.view(size, blocks), device_spans.view(size, 3), block_size, size, 0
        )
        if has_states:
            table = device_states.view(size, SPAN_COLUMNS)
            states = StateSpans(table, size, size, self.max_step_len, 0, commit=False)
            self.metadata = replace(self.metadata, states=states)

    @property
    def max_step_len(self) -> int:
        """Most rows of one sequence."""
        return 1

    def fill(self, sequences: list[Sequence]) -> None:
        """Set the inputs to the newest token of each of ``sequences``; the remaining rows become unused.

        [] makes all rows unused. Does not wait for the device.
        """
        count = len(sequences)
        size = self._block_size
        for row, sequence in enumerate(sequences):
            cached = sequence.num_cached_tokens
            self._tokens[row] = sequence.generated[-1]
            self._positions[row] = sequence.position
            self._slot_mapping[row] = sequence.block_table[cached // size] * size + cached % size
            self._query_spans[row, 2] = cached
            if self._fill_table(row, sequence):
                self._sampling_fields[:, row] = pack_params_or_greedy(sequence.params, sequence.seed)
                self._sampling_fields[GRAMMAR_FIELD, row] = masks_on_device(sequence)
        self._fill_states([(row, 1, sequence) for row, sequence in enumerate(sequences)])
        self._slot_mapping[count:] = UNUSED_ROW
        self._query_spans[count:, 2] = UNUSED_ROW
        self._sampling_fields[:, count:] = 0  # greedy
        self._filled[count:] = [None] * (self.size - count)
        self._on_device.copy_(self._on_host, non_blocking=True)

    def advance(self, chosen: Tensor) -> None:
        """Set the inputs to those of the next step, on the device: ``chosen`` [size] int64 are its tokens.

        Captured as the end of each step.
        """
        metadata = self.metadata
        states = metadata.states
        advance_decode_inputs(
            *(
                chosen,
                self.token_ids,
                self._position_row,
                metadata.slot_mapping,
                metadata.query_spans,
                metadata.block_tables,
            ),
            self._block_size,
            None if states is None else states.table[:, PENDING],
        )

    def _fill_states(self, spans: list[tuple[int, int, Sequence]]) -> None:
        """Set the states' table: of each sequence the first row and the number of rows. Others are unused.

        Each unused row has a span of its own, without a slot, so that its output is zeros.
        """
        if not len(self._state_spans):
            return
        end = 0
        for index, (start, length, sequence) in enumerate(spans):
            self._state_spans[index] = (start, length, sequence.state_slot, 0, sequence.pending_tokens)
            end = start + length
        self._state_spans[len(spans) :] = (0, 0, UNUSED_SLOT, 0, 0)
        for row in range(end, self.size):
            self._state_spans[len(spans) + row - end] = (row, 1, UNUSED_SLOT, 0, 0)

    def covers_next(self, sequences: list[Sequence]) -> bool:
        """Whether the last step launched is of ``sequences``, and ``advance`` had a slot for the next token.

        It took that slot from the block tables that the device had then. Call it before ``extend_tables``.
        """
        return all(
            filled is not None
            and sequence.block_table is filled.table
            and sequence.num_cached_tokens + 1 < filled.length * self._block_size
            for sequence, filled in zip(sequences, self._filled, strict=False)
        )

    def extend_tables(self, sequences: list[Sequence]) -> None:
        """Copy block tables that have grown since they were filled, for the steps launched from now on.

        Does not wait, and all other inputs stay. Should the copy begin late, it has the blocks of further
        tokens as well, or it is for a step that is discarded, whose slots were set before.
        """
        grown = [row for row, sequence in enumerate(sequences) if self._fill_table(row, sequence)]
        if grown:
            self.metadata.block_tables.copy_(self._tables_on_host, non_blocking=True)

    def _fill_table(self, row: int, sequence: Sequence) -> bool:
        """Set the block table of ``row`` on the host. Returns whether it was another one, or has grown."""
        table, filled = sequence.block_table, self._filled[row]
        if filled is not None and filled.has_all_of(table):
            return False
        self._block_tables[row, : len(table)] = table
        self._filled[row] = FilledTable(table, len(table))
        return True


class VerifyInputs(StepInputs):
    """Inputs of a verify step of up to ``size`` rows: newest tokens, each followed by its draft tokens.

    ``fill_drafts`` sets them instead of ``fill``. Each row is a sequence of its own to the kernels; the rows
    of one sequence have its block table, and each has one more cached token than the row before. As they
    attend to each other, all keys and values are stored before any row attends, and a row's own token counts
    as cached.
    """

    def __init__(
        self, size: int, blocks: int, block_size: int, device: torch.device, has_states: bool = False
    ) -> None:
        super().__init__(size, blocks, block_size, device, has_states)
        no_slots = torch.full((size,), UNUSED_ROW, dtype=torch.int32, device=device)
        self.metadata = replace(self.metadata, no_store_slots=no_slots)

    @property
    def max_step_len(self) -> int:
        """Most rows of one sequence: all."""
        return self.size

    def fill_drafts(self, batch: list[ScheduledChunk]) -> int:
        """Set the inputs to the newest token and the draft tokens of each chunk; other rows become unused.

        Returns the number of rows used. Each row is sampled by its sequence's parameters at its own position,
        without a grammar.
        """
        size, row = self._block_size, 0
        spans = []
        for chunk in batch:
            sequence = chunk.sequence
            spans.append((row, chunk.num_tokens, sequence))
            for offset, token in enumerate((sequence.generated[-1], *chunk.draft_tokens)):
                index = sequence.num_cached_tokens + offset
                self._tokens[row] = token
                self._positions[row] = sequence.position + offset
                self._slot_mapping[row] = sequence.block_table[index // size] * size + index % size
                self._query_spans[row, 2] = index + 1
                if self._fill_table(row, sequence):
                    self._sampling_fields[:, row] = pack_params_or_greedy(sequence.params, sequence.seed)
                row += 1
        self._fill_states(spans)
        self._slot_mapping[row:] = UNUSED_ROW
        self._query_spans[row:, 2] = UNUSED_ROW
        self._sampling_fields[:, row:] = 0  # greedy
        self._filled[row:] = [None] * (self.size - row)
        self._on_device.copy_(self._on_host, non_blocking=True)
        return row

    def advance(self, chosen: Tensor) -> None:
        """Do nothing: the next step depends on which draft tokens the host accepts."""
