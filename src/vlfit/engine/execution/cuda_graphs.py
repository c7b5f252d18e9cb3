"""Decoding as CUDA graphs: the kernels of a whole step, launched as one.

A step of one token is hundreds of small kernels, and launching them one by one takes longer than they take.
So the step is recorded once for each of a few numbers of sequences, over tensors that stay where they are,
and replayed from then on; rows of a graph that no sequence needs leave nothing behind. A step ends with the
inputs of the next, so that it may be launched before the host has read a token. It is two recordings: what
comes next is computed, then chosen. Where answers keep to a form only the first is launched ahead, and while
it runs the host reads the token before and finds what the form allows next.

Knows: what a step reads, and where it is recorded. Does not know who runs (``scheduler.py``) or what a step
is (``runner.py``).
"""

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vlfit.engine.sampling.grammar import BITS
from vlfit.engine.sampling.sampler import Scores, is_plain_greedy, scores_of
from vlfit.engine.scheduling.scheduler import Work
from vlfit.engine.scheduling.sequence import Sequence
from vlfit.kernels.attention.paged import BlockPlan
from vlfit.kernels.rows.row_ops import next_inputs
from vlfit.kernels.sampling.draw import FIELDS, FORMED, draws, words_of
from vlfit.layers.kv_cache import KVCache
from vlfit.loading.pinned import bytes_of, record

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


# Which tokens the rows of a recorded step may have, where answers keep to a form.
#
# A step is computed before anybody knows what may come next: the token before it is read meanwhile, and its
# form says then. Knows how bits lie on the device. Does not know forms (``engine/sampling/grammar.py``) or
# when a step wants them (``graphs.py``).


def keeps_to_form(sequence: Sequence) -> bool:
    """Whether the device chooses its tokens, of those that its form allows."""
    sampling = sequence.sampling
    return sequence.constraint is not None and (is_plain_greedy(sampling) or draws(sampling))


class FormRows:
    """``on_device`` [rows, words] int32: a bit for each of ``vocabulary`` tokens, as ``choose_tokens`` reads
    them; what a row holds that keeps to no form means nothing.
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        shape = rows, -(-vocabulary // BITS)
        # Read by the device before the host has a token of the step, and so before it is written again.
        on_host = torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.on_device = torch.zeros(shape, dtype=torch.int32, device=device)
        self._on_host, self._words = on_host, on_host.numpy().view("uint32")

    def fill(self, sequences: Many[Sequence]) -> None:
        """What may come next of each of ``sequences``, a row each. Raises as ``Constraint.bits`` does."""
        formed = False
        for row, sequence in enumerate(sequences):
            if sequence.constraint is not None and keeps_to_form(sequence):
                bits = sequence.constraint.bits()[: self._words.shape[1]]
                self._words[row, : len(bits)] = bits
                self._words[row, len(bits) :] = 0
                formed = True
        if formed:
            rows = len(sequences)
            self.on_device[:rows].copy_(self._on_host[:rows], non_blocking=True)


_ALIGNED = 4  # int32: 16 bytes, as kernels are compiled for
_NOBODY = -1  # the past of a row without a sequence, and its slot

# Token ids [n], positions [3, n], and where keys and values are: logits [n, vocabulary].
Step = Callable[[Tensor, Tensor, BlockPlan], Tensor]


def sizes_for(sequences: int) -> tuple[int, ...]:
    """For how many sequences there are graphs: powers of two, and the most that run at once."""
    powers = [1 << power for power in range(sequences.bit_length()) if 1 << power < sequences]
    return (*powers, sequences)


@dataclass(frozen=True, slots=True)
class Ahead:
    """A step that was launched before the tokens it begins with were read: its ``scores``, None where nothing
    is chosen yet, and the ``tokens`` [n] that it took for the newest. Its sequences held ``blocks`` then, a
    list of each sequence's own, and had ``cached`` tokens before those. None of them is kept alive.
    """

    scores: Scores | None
    tokens: Tensor
    blocks: tuple[list[int], ...]
    cached: tuple[int, ...]

    def fits(self, sequences: Many[Sequence]) -> bool:
        """Whether it is what ``sequences`` want now: the same ones, a token further, and where they were."""
        return (
            len(sequences) == len(self.blocks)
            and all(each.blocks is blocks for each, blocks in zip(sequences, self.blocks, strict=True))
            and tuple(each.cached for each in sequences) == self.cached
            and [each.generated[-1] for each in sequences] == self.tokens.tolist()
        )


class DecodeGraphs:
    """``step`` for up to ``sequences`` sequences of up to ``context`` tokens in ``cache``."""

    def __init__(
        self, step: Step, cache: KVCache, vocabulary: int, context: int, sequences: int, guess_rows: int = 0
    ) -> None:
        """``guess_rows``: rows of passes with guesses; 0: there are none."""

        self._step = step
        self._inputs = [
            StepInputs(size, -(-context // cache.block_size), cache.block_size, cache.keys.device)
            for size in sizes_for(sequences)
        ]
        shape = (guess_rows, -(-context // cache.block_size), cache.block_size, cache.keys.device)
        self._guesses = GuessInputs(*shape) if guess_rows else None
        self._cache = cache
        self._recorded: dict[StepInputs, Graph] = {}
        self._recorded_at = (0, 0)
        self._ahead: Ahead | None = None
        self._told = Told(max(sequences, guess_rows), cache.keys.device)
        self._forms = FormRows(max(sequences, guess_rows), vocabulary, cache.keys.device)
        self.nbytes = 0  # what torch took for what is recorded
        self.recordings = 0  # how often a step was recorded
        self._pool: _POOL_HANDLE | None = None

    def record(self) -> None:
        """All of them, the largest first: the others find room in what it took."""
        guesses = [self._guesses] if self._guesses is not None else []
        for inputs in sorted([*self._inputs, *guesses], key=lambda inputs: inputs.size, reverse=True):
            self._graph(inputs)

    def release(self) -> None:
        """Forget what was recorded, because tensors move or their memory is wanted; it is recorded anew when
        it is needed.
        """
        if self._ahead is not None and self._cache.keys.device.type == "cuda":
            torch.cuda.synchronize(self._cache.keys.device)  # it runs, or has
        self._ahead = None
        self._recorded.clear()
        self._pool = None
        self.nbytes = 0

    def run(self, sequences: Many[Sequence]) -> Scores:
        """The next token of each of ``sequences``, which all decode; valid until the next call.

        What ``run_ahead`` has launched for them is not computed again. For others it was in vain: what it
        wrote into the cache lies behind all that is known there, and is written anew before it is read.

        Raises ``InvalidRequest`` where an answer's form has no way on.
        """
        if self._place() != self._recorded_at:
            self.release()  # the cache was made anew
        ahead, self._ahead = self._ahead, None
        inputs = self._inputs_for(sequences)
        if ahead is None or not ahead.fits(sequences):
            graph = self._graph(inputs)
            inputs.fill(sequences)
            graph.compute()
        elif ahead.scores is not None:
            return ahead.scores
        self._forms.fill(sequences)
        return self._chosen(inputs, len(sequences))

    def run_guesses(self, batch: Many["Work"]) -> Scores:
        """What comes behind the newest token of each of ``batch``, and behind each of its guesses, a row each
        in this order; valid until the next call. What ``run_ahead`` has launched was in vain.
        """
        if self._guesses is None:
            raise RuntimeError("guesses came to graphs that were made without")
        if self._place() != self._recorded_at:
            self.release()
        self._ahead = None
        graph = self._graph(self._guesses)
        rows = self._guesses.fill_guessed(batch)
        graph.compute()
        return self._chosen(self._guesses, rows)

    def is_ahead(self, sequences: Many[Sequence]) -> bool:
        """Whether ``run_ahead`` has launched what ``run`` would be asked for with ``sequences``."""
        return self._ahead is not None and self._ahead.fits(sequences)

    def run_ahead(self, sequences: Many[Sequence]) -> None:
        """Launch the step after the one that ``run`` has just launched for ``sequences``, each of which goes
        on with the token that the device has chosen, and knows already; where one keeps to a form, up to what
        is chosen.

        Nothing is launched where somebody's next token has no block yet.
        """
        inputs = self._inputs_for(sequences)
        if not inputs.reach(sequences, 1):
            return
        tokens = self._told.latest[0, : len(sequences)]
        self._recorded[inputs].compute()
        formed = any(keeps_to_form(sequence) for sequence in sequences)
        self._ahead = Ahead(
            None if formed else self._chosen(inputs, len(sequences)),
            tokens,
            tuple(sequence.blocks for sequence in sequences),
            tuple(sequence.cached + 1 for sequence in sequences),
        )

    def _chosen(self, inputs: "StepInputs", rows: int) -> Scores:
        """What comes next, of what was computed last."""
        graph = self._recorded[inputs]
        graph.choose()
        return self._told.by(graph, rows)

    def _inputs_for(self, sequences: Many[Sequence]) -> "StepInputs":
        return next(inputs for inputs in self._inputs if inputs.size >= len(sequences))

    def _graph(self, inputs: "StepInputs") -> "Graph":
        graph = self._recorded.get(inputs)
        if graph is None:
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            self._recorded_at = self._place()
            inputs.fill([])
            compute = partial(self._step, inputs.token_ids, inputs.positions, inputs.plan)
            choose = partial(self._choose, inputs)
            graph = Graph(compute, choose, self._pool, self._cache.keys.device)
            self._recorded[inputs] = graph
            self.recordings += 1
            self.nbytes = bytes_of(self._pool)
        return graph

    def _place(self) -> tuple[int, int]:
        return self._cache.keys.data_ptr(), self._cache.values.data_ptr()

    def _choose(self, inputs: "StepInputs", logits: Tensor) -> Scores:
        scores = scores_of(logits, inputs.asked, inputs.positions[0], self._forms.on_device[: inputs.size])
        inputs.move_on(scores.summary[0])
        return scores


class Told:
    """Where the host reads what steps of up to ``sequences`` have found, while the next one may run.

    Two places in turn: of a step that runs, and of one that is being read. ``latest`` is where the last one's
    summary arrives.
    """

    def __init__(self, sequences: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._places = [torch.zeros(3 * sequences, dtype=torch.int64, pin_memory=on_gpu) for _ in range(2)]
        self._ready = [torch.cuda.Event() if on_gpu else None for _ in range(2)]
        self._turn = 0
        self.latest = self._places[0].view(3, -1)

    def by(self, graph: "Graph", count: int) -> Scores:
        """The first ``count`` rows of what ``graph``, which was just launched, finds."""
        self._turn = 1 - self._turn
        place, ready = self._places[self._turn], self._ready[self._turn]
        summary = graph.scores.summary
        self.latest = place[: summary.numel()].view(summary.shape)
        self.latest.copy_(summary, non_blocking=True)
        if ready is not None:
            ready.record()
        return Scores(graph.scores.logits[:count], self.latest[:, :count], ready)


class Graph:
    """A step as it went once: ``compute`` writes its logits anew, and then ``choose`` the ``scores``, which
    are where they were left.
    """

    def __init__(
        self,
        compute: Callable[[], Tensor],
        choose: Callable[[Tensor], Scores],
        pool: "_POOL_HANDLE",
        device: torch.device,
    ) -> None:
        choose(compute())  # kernels are compiled and loaded outside of a recording
        self.compute, logits = record(device, compute, pool)
        self.choose, self.scores = record(device, partial(choose, logits), pool)


class StepInputs:
    """What a step of ``size`` sequences reads: one tensor on the device, filled by one copy.

    It holds token ids, positions, slots [size] each, spans [size, 3], what is asked of tokens [FIELDS, size],
    and block tables [size, blocks].
    """

    def __init__(self, size: int, blocks: int, block_size: int, device: torch.device) -> None:
        self.size = size
        self._block_size = block_size
        lengths = (size, size, size, 3 * size, FIELDS * size, size * blocks)
        ends = np.cumsum([-(-length // _ALIGNED) * _ALIGNED for length in lengths]).tolist()
        self._on_host = torch.zeros(ends[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
        self._on_device = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        begins = [0, *ends[:-1]]

        def views(whole: Tensor) -> list[Tensor]:
            return [whole[begin : begin + length] for begin, length in zip(begins, lengths, strict=True)]

        tokens, positions, slots, spans, asked, table = (part.numpy() for part in views(self._on_host))
        self._tokens, self._positions, self._slots = tokens, positions, slots
        self._spans, self._table = spans.reshape(size, 3), table.reshape(size, blocks)
        self._asked = asked.reshape(FIELDS, size)
        self._tabled: list[list[int] | None] = [None] * size
        self._spans[:] = [(row, 1, _NOBODY) for row in range(size)]
        self.token_ids, self._on_axis, write_slots, on_spans, on_asked, on_table = views(self._on_device)
        self.asked = on_asked.view(FIELDS, size)
        self.positions = self._on_axis.expand(3, size)
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
            self._positions[row] = sequence.position
            self._slots[row] = sequence.blocks[cached // size] * size + cached % size
            self._spans[row, 2] = cached
            if self._tabled[row] is not sequence.blocks:
                self._table[row, : len(sequence.blocks)] = sequence.blocks
                self._asked[:, row] = words_of(sequence.sampling, sequence.seed)
                self._asked[FORMED, row] = keeps_to_form(sequence)
                self._tabled[row] = sequence.blocks
        self._slots[count:] = _NOBODY
        self._spans[count:, 2] = _NOBODY
        self._asked[:, count:] = 0  # nobody wishes for anything
        self._tabled[count:] = [None] * (self.size - count)
        self._on_device.copy_(self._on_host, non_blocking=True)

    def move_on(self, chosen: Tensor) -> None:
        """What the next step reads, if every sequence goes on with its ``chosen`` token, [size] int64."""
        plan = self.plan
        next_inputs(
            *(chosen, self.token_ids, self._on_axis, plan.write_slots, plan.spans, plan.table),
            self._block_size,
        )

    def reach(self, sequences: Many[Sequence], further: int) -> bool:
        """Whether the block tables here know where each of ``sequences`` goes on ``further`` tokens on."""
        return all(
            sequence.blocks is tabled and sequence.cached + further < len(tabled) * self._block_size
            for sequence, tabled in zip(sequences, self._tabled, strict=False)
        )


# What a recorded pass with guesses reads: the newest token of each sequence, and its guesses behind it.
#
# A row for each of them, as if each were a sequence: the same blocks, and one token more of the past each.
# Rows of one sequence look at keys and values of each other, so all are stored before any row looks
# (``BlockPlan.stored_before``), and a row's own token is part of its past. Knows how guesses lie in rows.
# Does not know when such a pass is recorded (``graphs.py``) or whether guesses are right
# (``engine/scheduling/speculative.py``).


_NOWHERE = -1  # a slot: nothing is left in the cache


class GuessInputs(StepInputs):
    """As ``StepInputs``, of up to ``size`` rows, of which several may be of one sequence."""

    def __init__(self, size: int, blocks: int, block_size: int, device: torch.device) -> None:
        super().__init__(size, blocks, block_size, device)
        nowhere = torch.full((size,), _NOWHERE, dtype=torch.int32, device=device)
        self.plan = replace(self.plan, stored_before=nowhere)

    def fill_guessed(self, batch: Many[Work]) -> int:
        """The newest token of each of ``batch``, then its guesses. Gives how many rows that is."""
        size, row = self._block_size, 0
        for work in batch:
            sequence = work.sequence
            for further, token in enumerate((sequence.generated[-1], *work.guesses)):
                place = sequence.cached + further
                self._tokens[row] = token
                self._positions[row] = sequence.position + further
                self._slots[row] = sequence.blocks[place // size] * size + place % size
                self._spans[row, 2] = place + 1
                if self._tabled[row] is not sequence.blocks:
                    self._table[row, : len(sequence.blocks)] = sequence.blocks
                    self._tabled[row] = sequence.blocks
                row += 1
        self._slots[row:] = _NOWHERE
        self._spans[row:, 2] = _NOWHERE
        self._tabled[row:] = [None] * (self.size - row)
        self._on_device.copy_(self._on_host, non_blocking=True)
        return row

    def move_on(self, best: Tensor) -> None:
        """Nothing: which step is the next one, the host decides."""
