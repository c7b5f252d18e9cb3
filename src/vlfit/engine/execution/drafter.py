"""Drafts by a model of its own: it follows what the text model computes, and drafts when it is asked.

A draft model's row needs the hidden state of a token and the token after it, which is sampled from that
hidden state. So the last row of a pass waits: of a prompt for its next chunk, of an answer until drafts are
wanted or ``MAX_ROWS_BEHIND`` rows wait. Their hidden states are kept, so that steps without drafts cost a
copy and nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from vlfit.engine.execution.draft_graph import DraftGraph
from vlfit.engine.sampling.sampler import SamplingRow, is_plain_greedy
from vlfit.engine.sampling.verification import draw_draft
from vlfit.engine.scheduling import sequence as scheduling
from vlfit.engine.scheduling.sequence import DraftProbabilities, ScheduledChunk
from vlfit.engine.scheduling.speculative import DraftCosts
from vlfit.layers.attention import AttentionMetadata
from vlfit.layers.kv_cache import KVCache
from vlfit.layers.linear import Linear, first_outputs
from vlfit.loading.pinned import GraphPool
from vlfit.models.decoder import TextModel, VisualRows
from vlfit.models.interface import DraftModel
from vlfit.plan.native.cost import MAX_DRAFT_ROWS, MAX_ROWS_BEHIND


@dataclass(frozen=True, slots=True)
class DraftSpan:
    """Rows of a draft model: ``num_tokens`` of ``sequence`` from its token ``begin`` on.

    ``is_decode``: it is one row that attends to all before it (``model_runner.Rows``).
    """

    sequence: scheduling.Sequence
    begin: int
    num_tokens: int
    is_decode: bool = False


class Drafter:
    """Runs ``model`` beside ``text``, for sequences with ``draft_rows``.

    ``build_metadata``: attention metadata of rows, as ``AttentionMetadataBuilder.build_paged``.
    ``costs``: what a draft token takes, and which drafts the first rows of the output head suffice for.
    ``graph_rows`` [rows, hidden]: where captured steps leave their hidden states, and ``graph``: None until
    ``prepare_graph``.
    """

    def __init__(
        self,
        model: DraftModel,
        text: TextModel,
        cache: KVCache,
        build_metadata: Callable[[Sequence[DraftSpan]], AttentionMetadata],
        device: torch.device,
    ) -> None:
        self.model, self.text = model, text
        self._cache = cache
        self._build_metadata = build_metadata
        self._device = device
        self.costs = DraftCosts(0.0)
        self.graph_rows: Tensor | None = None
        self.graph: DraftGraph | None = None

    def prepare_graph(self, pool: GraphPool, max_model_len: int, rows: int) -> None:
        """Prepare passes of few rows, to be captured into ``pool``.

        ``rows``: most of a decode step, whose hidden states are kept.
        """
        width = self.text.hidden_size
        self.graph_rows = torch.empty((rows, width), dtype=self._cache.dtype, device=self._device)
        heads = (False, True) if self.costs.short_vocabulary else (False,)
        self.graph = DraftGraph(self._pass, self._cache, pool, MAX_DRAFT_ROWS, max_model_len, width, heads)

    def _pass(
        self, hidden: Tensor, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, short: bool
    ) -> tuple[Tensor, Tensor]:
        """Outputs and logits of all rows."""
        rows = torch.arange(len(hidden), device=self._device)
        embedded = self.text.embedding(token_ids)
        output = self.model.predict(hidden, embedded, positions, self._cache, metadata, rows)
        return output, self._head(short)(output)

    def _head(self, short: bool) -> Linear:
        few = first_outputs(self.text.head, self.costs.short_vocabulary) if short else None
        return self.text.head if few is None else few

    def _run(self, spans: Sequence[DraftSpan], hidden: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [n, hidden] and logits [n, vocabulary] of the last rows of ``spans``.

        ``hidden`` [rows, hidden], ``token_ids`` [rows]: of all their rows. Spans of one row come first. The
        logits are of the first ``short_vocabulary`` tokens where ``costs`` says so of all sequences.
        """
        short = all(self.costs.is_short(each.sequence.generated) for each in spans)
        positions = [each.sequence.positions(each.begin, each.begin + each.num_tokens) for each in spans]
        joined = np.concatenate(positions, axis=1)
        lasts = np.cumsum([each.num_tokens for each in spans]) - 1
        if self.graph is not None and len(hidden) <= self.graph.size and (joined == joined[0]).all():
            at = iter(joined[0].tolist())
            rows = [
                (each.sequence, index, next(at))
                for each in spans
                for index in range(each.begin, each.begin + each.num_tokens)
            ]
            output, logits = self.graph.run(rows, hidden, token_ids, short)
            if len(lasts) == len(rows):
                return output, logits
            last_rows = torch.from_numpy(lasts).to(self._device, non_blocking=True)
            return output[last_rows], logits[last_rows]
        output = self.model.predict(
            hidden,
            self.text.embedding(token_ids),
            torch.from_numpy(joined).to(self._device, non_blocking=True),
            self._cache,
            self._build_metadata(spans),
            torch.from_numpy(lasts).to(self._device, non_blocking=True),
        )
        return output, self._head(short)(output)

    def follow(
        self,
        batch: list[ScheduledChunk],
        hidden: Tensor,
        token_ids: Tensor | None = None,
        visual: VisualRows | None = None,
    ) -> None:
        """Take the hidden states [rows, hidden] of a pass of ``batch``, before its tokens count as cached.

        ``token_ids`` [rows] and ``visual`` as the pass had them; not needed if all chunks decode. Rows of
        prompts are stored in the draft model's cache.
        """
        spans: list[DraftSpan] = []
        before: list[Tensor] = []  # hidden states, for each row of ``spans``
        after: list[Tensor] = []  # the rows of the batch whose embeddings go with them
        if all(chunk.sequence.draft_rows is None for chunk in batch):
            return
        start = 0
        all_decode = all(chunk.sequence.is_decoding for chunk in batch)
        if all_decode:  # one copy for all: the next step overwrites the rows of a graph
            hidden = hidden[: sum(chunk.num_tokens for chunk in batch)].clone()
        for chunk in batch:
            rows, start = hidden[start : start + chunk.num_tokens], start + chunk.num_tokens
            drafting = chunk.sequence.draft_rows
            if drafting is None:
                continue
            behind = _hidden_behind(chunk.sequence)
            if chunk.sequence.is_decoding:
                if sum(map(len, behind)) >= MAX_ROWS_BEHIND:
                    if len(batch) >= MAX_DRAFT_ROWS:  # so many are never drafted for
                        chunk.sequence.draft_rows = None
                        continue
                    self._catch_up([chunk.sequence])
                drafting.hidden.append(rows if all_decode else rows.clone())
                continue
            if chunk.begin:
                # After a reused prefix nobody has the hidden state of its last token.
                before.append(behind[-1][-1:] if behind else rows.new_zeros((1, rows.shape[1])))
            before.append(rows[:-1])
            num_rows = len(rows) - (not chunk.begin)
            if num_rows:
                spans.append(DraftSpan(chunk.sequence, max(chunk.begin - 1, 0), num_rows))
                after.append(torch.arange(start - num_rows, start, device=hidden.device))
            drafting.stored = chunk.begin + chunk.num_tokens - 1
            drafting.hidden = [rows[-1:].clone()]
        if spans and token_ids is not None:
            embedded = self.text.embedding(token_ids)
            if visual is not None:
                embedded[visual.index] = visual.rows
            self.model.store(
                torch.cat(before),
                embedded[torch.cat(after)],
                self._positions(spans),
                self._cache,
                self._build_metadata(spans),
            )

    def draft(self, batch: list[ScheduledChunk]) -> list[ScheduledChunk]:
        """``batch`` with tokens drafted where ``wanted_drafts``, in its order, which stays valid."""
        wanting = [chunk for chunk in batch if chunk.wanted_drafts]
        # Sequences that want more come first, so that those that go on are always the first ones.
        wanting.sort(key=lambda chunk: -chunk.wanted_drafts)
        if not wanting:
            return batch
        hidden, logits = self._catch_up([chunk.sequence for chunk in wanting])
        picks = [_Picker(chunk, self._device) for chunk in wanting]
        most = wanting[0].wanted_drafts
        for number in range(1, most + 1):
            tokens = [pick.next(row) for pick, row in zip(picks, logits, strict=False)]
            going = [chunk for chunk in wanting if chunk.wanted_drafts > number]
            if not going:
                break
            spans = [
                DraftSpan(chunk.sequence, chunk.begin - 1 + number, 1, is_decode=True) for chunk in going
            ]
            count = len(going)
            hidden, logits = self._run(spans, hidden[:count], torch.stack(tokens[:count]))
        drafted = {
            id(chunk.sequence): _with_tokens(chunk, *pick.result())
            for chunk, pick in zip(wanting, picks, strict=True)
        }
        return [drafted.get(id(chunk.sequence), chunk) for chunk in batch]

    def finish(self, sequence: scheduling.Sequence) -> None:
        """Store what is missing of a decoding ``sequence`` that ends: others may share its blocks."""
        if _hidden_behind(sequence):
            self._catch_up([sequence])

    def _catch_up(self, sequences: Sequence[scheduling.Sequence]) -> tuple[Tensor, Tensor]:
        """Store the rows up to the last cached token of decoding ``sequences``.

        Returns outputs [sequences, hidden] and logits of their last rows: of the token after the newest.
        """
        waiting = [_hidden_behind(sequence) for sequence in sequences]
        spans, states = [], []
        for sequence, behind in zip(sequences, waiting, strict=True):
            if not behind:
                raise RuntimeError("a sequence is to be drafted whose hidden states nobody kept")
            states.append(torch.cat(behind))
            count = len(states[-1])
            begin = sequence.num_cached_tokens - count
            spans.append(DraftSpan(sequence, begin, count, is_decode=count == 1))
        order = sorted(range(len(spans)), key=lambda index: not spans[index].is_decode)
        ordered = [spans[index] for index in order]
        token_ids = np.concatenate(
            [each.sequence.token_ids(each.begin + 1, each.begin + each.num_tokens + 1) for each in ordered]
        )
        output, logits = self._run(
            ordered,
            torch.cat([states[index] for index in order]),
            torch.from_numpy(token_ids).to(self._device, non_blocking=True),
        )
        for sequence in sequences:
            assert sequence.draft_rows is not None
            sequence.draft_rows.stored = sequence.num_cached_tokens
            sequence.draft_rows.hidden = []
        if order == list(range(len(order))):
            return output, logits
        places = torch.tensor([order.index(index) for index in range(len(spans))])
        places = places.to(self._device, non_blocking=True)
        return output[places], logits[places]

    def _positions(self, spans: Sequence[DraftSpan]) -> Tensor:
        """Positions [3, rows] of the tokens whose hidden states the rows of ``spans`` take."""
        positions = [each.sequence.positions(each.begin, each.begin + each.num_tokens) for each in spans]
        return torch.from_numpy(np.concatenate(positions, axis=1)).to(self._device, non_blocking=True)


def _hidden_behind(sequence: scheduling.Sequence) -> list[Tensor]:
    """Hidden states of the cached tokens whose rows are not stored yet, as ``DraftRows.hidden``.

    Those of drafts that were not accepted are dropped.
    """
    drafting = sequence.draft_rows
    if drafting is None:
        return []
    surplus = sum(map(len, drafting.hidden)) - max(sequence.num_cached_tokens - drafting.stored, 0)
    while surplus > 0:
        last = drafting.hidden.pop()
        if surplus < len(last):
            drafting.hidden.append(last[: len(last) - surplus])
        surplus -= len(last)
    return drafting.hidden


def _with_tokens(
    chunk: ScheduledChunk, tokens: tuple[int, ...], probabilities: DraftProbabilities | None
) -> ScheduledChunk:
    return replace(
        chunk,
        num_tokens=1 + len(tokens),
        draft_tokens=tokens,
        draft_probabilities=probabilities,
        wanted_drafts=0,
        by_draft_model=True,
    )


class _Picker:
    """Picks the draft tokens of one chunk: the likeliest for a greedy request, else drawn."""

    def __init__(self, chunk: ScheduledChunk, device: torch.device) -> None:
        self._chunk = chunk
        self._device = device
        self._on_device: list[Tensor] = []  # of plain greedy requests, not read until the end
        self._tokens: list[int] = []
        self._distributions: list[tuple[Tensor, Tensor]] = []

    def next(self, logits: Tensor) -> Tensor:
        """The next token, from ``logits`` [vocabulary], on the device."""
        sequence = self._chunk.sequence
        if is_plain_greedy(sequence.params):
            self._on_device.append(logits.argmax())
            return self._on_device[-1]
        row = SamplingRow(
            sequence.params,
            sequence.prompt.token_ids,
            [*sequence.generated, *self._tokens],
            sequence.seed,
            # Of the token after the newest one and the drafts so far.
            sequence.position + 1 + len(self._tokens),
        )
        token, distribution = draw_draft(logits, row)
        self._tokens.append(token)
        if distribution is not None:
            self._distributions.append(distribution)
        return torch.tensor(token, device=self._device)

    def result(self) -> tuple[tuple[int, ...], DraftProbabilities | None]:
        """The picked tokens, and what they were drawn from, as ``Draft`` has it."""
        tokens = torch.stack(self._on_device).tolist() if self._on_device else self._tokens
        tokens = tokens[: self._chunk.wanted_drafts]
        if not self._distributions:
            return tuple(tokens), None
        width = max(len(ids) for ids, _ in self._distributions)
        shape = (len(self._distributions), width)
        token_ids, probabilities = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        for number, (ids, shares) in enumerate(self._distributions):
            token_ids[number, : len(ids)], probabilities[number, : len(ids)] = ids, shares
        return tuple(tokens), DraftProbabilities(token_ids, probabilities)
