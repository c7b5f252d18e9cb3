"""Model runner: encodes images, builds the input tensors of a forward pass, and runs it on the device.

Attention metadata of a batch are slot mapping, block tables and query spans for Triton kernels, or slots and
masks for plain PyTorch.
"""

import math
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Batch
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import accumulate, takewhile
from typing import Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from vlfit import kernels
from vlfit.api.engine_options import KernelGroup
from vlfit.engine.device import threads_for_work
from vlfit.engine.execution.cuda_graphs import DecodeGraphs
from vlfit.engine.execution.draft_graph import DraftGraph
from vlfit.engine.execution.drafter import Drafter
from vlfit.engine.execution.encoder_cache import EncoderCache
from vlfit.engine.execution.encoder_graph import EncoderGraph
from vlfit.engine.execution.prompt_graphs import PictureRows, PromptGraphs, PromptOutput
from vlfit.engine.sampling.sampler import StepOutput, select_tokens
from vlfit.engine.sampling.verification import drawn_drafts
from vlfit.engine.scheduling.sequence import IntMatrix, IntVector, ScheduledChunk, Sequence
from vlfit.kernels.attention.paged import BlockAttentionMetadata
from vlfit.kernels.gemm.quantized import dequant_config
from vlfit.kernels.sampling.draw import NUM_FIELDS, PackedParams, pack_params_or_greedy
from vlfit.layers.attention import AttentionMetadata, DecodeGroup, PrefillChunk, SlotAttentionMetadata
from vlfit.layers.gated_delta import StateSpans
from vlfit.layers.kv_cache import KVCache, slots_of_blocks
from vlfit.loading.pinned import GraphPool
from vlfit.models.decoder import DecoderLayer, TextModel, VisualRows
from vlfit.models.interface import DraftModel, PreparedImage, VisionEncoder, VisionFeatures
from vlfit.plan.native.cost import longest_captured_prompt, prompt_graph_rows


class ModelRunner:
    """Runs forward passes: text model, vision tower, KV cache, encoder cache and CUDA graphs on one device.

    ``image_patches``: patches of a picture or clip on the device, one time step at a time. ``image_patches``
    and ``vision`` are None for a text-only model, ``decode_graphs``, ``prompt_graphs`` and ``encoder_graph``
    until ``capture_graphs``, ``drafter`` without a draft model. ``score_tokens``: ids of the tokens whose
    logits make scores.
    """

    score_tokens: tuple[int, ...] = ()

    def __init__(
        self,
        text: TextModel,
        vision: VisionEncoder | None,
        image_patches: Callable[[PreparedImage], Iterator[Tensor]] | None,
        cache: KVCache,
        encoder_cache: EncoderCache,
        device: torch.device,
        draft_model: DraftModel | None = None,
    ) -> None:
        self.text = text
        self.vision = vision
        self.image_patches = image_patches
        self.cache = cache
        self.encoder_cache = encoder_cache
        self.device = device
        self.metadata_builder = AttentionMetadataBuilder(
            cache.block_size, device, has_states=bool(cache.states)
        )
        self.drafter: Drafter | None = None
        if draft_model is not None:
            build = self.metadata_builder.build_paged
            self.drafter = Drafter(draft_model, text, cache, build, device)
        self.decode_graphs: DecodeGraphs | None = None
        self.prompt_graphs: PromptGraphs | None = None
        self.encoder_graph: EncoderGraph | None = None
        self._graph_pool = GraphPool(device)  # of all but the tower's
        self._captured_layers: Batch[DecoderLayer] = ()  # those that graphs of prompts run
        # Features in use by sequences, by content.
        self._features_in_use: WeakValueDictionary[bytes, VisionFeatures] = WeakValueDictionary()

    @property
    def models(self) -> tuple[TextModel, VisionEncoder | None, DraftModel | None]:
        """All that has weights; None for what the checkpoint has not."""
        return self.text, self.vision, None if self.drafter is None else self.drafter.model

    @models.setter
    def models(self, models: tuple[TextModel, VisionEncoder | None, DraftModel | None]) -> None:
        self.text, self.vision, draft_model = models
        self._captured_layers = self.text.layers
        if self.drafter is not None and draft_model is not None:
            self.drafter.model, self.drafter.text = draft_model, self.text

    @property
    def graph_bytes(self) -> int:
        """GPU memory of all CUDA graphs, and of what prompts keep for theirs."""
        kept = self.prompt_graphs.kept_bytes if self.prompt_graphs else 0
        return self._graph_pool.nbytes + kept + (self.encoder_graph.nbytes if self.encoder_graph else 0)

    @property
    def draft_graph(self) -> DraftGraph | None:
        """The captured pass of the draft model; None without one, or before ``capture_graphs``."""
        return None if self.drafter is None else self.drafter.graph

    def run(self, batch: list[ScheduledChunk]) -> StepOutput:
        """Run one forward pass over ``batch`` and choose tokens on the device, without waiting for it.

        ``batch``: decoding sequences first, and of these the ones with draft tokens last; with slot mappings
        built. The output has, in that order, a row for each chunk with ``needs_sampling``, followed by one
        for each draft token of the chunk, and ``pooled`` for the chunks with ``needs_pooling``; it is valid
        until the next pass.
        """
        if self.decode_graphs is not None and all(chunk.sequence.is_decoding for chunk in batch):
            if any(chunk.draft_tokens for chunk in batch):
                output = self.decode_graphs.run_verify(batch)
            else:
                output = self.decode_graphs.run([chunk.sequence for chunk in batch])
            if self.drafter is not None and self.drafter.graph_rows is not None:
                self.drafter.follow(batch, self.drafter.graph_rows)
            return output
        if not any(chunk.needs_sampling for chunk in batch) or not kernels.enabled_for(
            "sampler", self.device
        ):
            with self._cpu_threads(batch):
                logits, pooled = self._forward(batch)
                return replace(select_tokens(logits), pooled=pooled)
        packed = np.array(
            [
                (*_packed_params(chunk.sequence), chunk.sequence.position + offset)
                for chunk in batch
                if chunk.needs_sampling
                for offset in range(1 + len(chunk.draft_tokens))
            ],
            np.int32,
        )
        sampling_params = torch.from_numpy(packed.T.copy()).to(self.device, non_blocking=True)
        drafts = drawn_drafts(batch, len(packed), self.device)
        logits, pooled = self._forward(batch)
        output = select_tokens(logits, sampling_params[:-1], sampling_params[-1], drafts=drafts)
        return replace(output, pooled=pooled)

    def launch_next(self, batch: list[ScheduledChunk]) -> None:
        """Launch the pass that follows ``run(batch)``, before the host has read the tokens of that run.

        Does nothing without decode graphs, or if ``batch`` has a prompt chunk. The next ``run`` returns the
        launched pass if it is for the same sequences, and discards it otherwise.
        """
        if self.decode_graphs is not None and all(chunk.sequence.is_decoding for chunk in batch):
            self.decode_graphs.launch_next([chunk.sequence for chunk in batch])

    def is_launched(self, batch: list[ScheduledChunk]) -> bool:
        """Whether ``launch_next`` has launched the pass that ``run(batch)`` would run."""
        return self.decode_graphs is not None and self.decode_graphs.is_launched(
            [chunk.sequence for chunk in batch]
        )

    def capture_graphs(
        self, max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int, verify_rows: int = 0
    ) -> None:
        """Capture decode steps of up to ``max_num_seqs`` sequences of up to ``max_model_len`` tokens.

        Also short prompts; ``max_num_batched_tokens``: most tokens of a pass. ``verify_rows``: most rows of a
        verify step of speculative decoding; 0: there are none. Where the device's ``DequantConfig`` captures
        prompts, also long ones, and creates ``encoder_graph``, which captures later.
        """

        drafter = self.drafter
        if drafter is not None:
            drafter.prepare_graph(self._graph_pool, max_model_len, max(max_num_seqs, verify_rows))

        def step(token_ids: Tensor, positions: Tensor, metadata: BlockAttentionMetadata) -> Tensor:
            if drafter is None or drafter.graph_rows is None:
                return self.text(token_ids, positions, None, self.cache, metadata, None)
            hidden = self.text.hidden_states(token_ids, positions, None, self.cache, metadata, None)
            drafter.graph_rows[: len(hidden)].copy_(hidden)
            return self.text.head(hidden)

        vocabulary = self.text.vocabulary
        self.decode_graphs = DecodeGraphs(
            step, self.cache, self._graph_pool, vocabulary, max_model_len, max_num_seqs, verify_rows
        )
        self._captured_layers = self.text.layers
        captures_prompts = dequant_config(self.device).captures_prompts
        chunk = min(max_num_batched_tokens, max_model_len)
        longest = longest_captured_prompt(chunk) if captures_prompts else 0
        pictures = None
        if longest and self.vision is not None:
            width, levels = self.text.hidden_size, self.vision.deepstack_levels
            pictures = PictureRows(longest, width, levels, self.cache.dtype, self.device)
        self.prompt_graphs = PromptGraphs(
            self._prompt_pass,
            self.cache,
            self._graph_pool,
            max_model_len,
            prompt_graph_rows(chunk),
            longest,
            pictures,
        )
        if self.vision is not None and kernels.enabled_for("tower", self.device) and captures_prompts:
            self.encoder_graph = EncoderGraph(self.device, self.vision.max_graph_patches)
        with torch.inference_mode():
            self.decode_graphs.capture()
            self.prompt_graphs.capture()
            if drafter is not None and drafter.graph is not None:
                drafter.graph.capture()

    def release_graphs(self) -> None:
        """Drop captured graphs, before tensors move or to free memory. Captured again when needed."""
        for each in (self.decode_graphs, self.prompt_graphs, self.draft_graph, self.encoder_graph):
            if each is not None:
                each.release()
        self._graph_pool.release()

    def _prompt_pass(
        self,
        token_ids: Tensor,
        positions: Tensor,
        visual: VisualRows | None,
        metadata: BlockAttentionMetadata,
        last_row: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """What ``prompt_graphs`` captures: with a draft model the hidden states of all rows."""
        rows = last_row if self.drafter is None else None
        hidden = self.text.hidden_states(token_ids, positions, visual, self.cache, metadata, rows)
        return hidden, self.text.head(hidden if self.drafter is None else hidden[last_row])

    def _run_captured(self, batch: list[ScheduledChunk]) -> PromptOutput | None:
        """Run ``batch`` by ``prompt_graphs``; None if it is not one chunk of a prompt that they take.

        Nor one to be pooled, nor if the layers are others than were captured, as while they are warmed up.
        """
        graphs, [chunk, *others] = self.prompt_graphs, batch
        if (
            graphs is None
            or others
            or chunk.sequence.is_decoding
            or chunk.needs_pooling
            or self.text.layers is not self._captured_layers
        ):
            return None
        first, last = _placeholder_range(chunk)
        if not graphs.takes(chunk.num_tokens, last - first):
            return None
        if first == last:
            return graphs.run(chunk, _token_ids(chunk), _positions(chunk))
        rows, features = self._chunk_features(chunk)
        return graphs.run(chunk, _token_ids(chunk), _positions(chunk), rows, features)

    def _forward(self, batch: list[ScheduledChunk]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Logits [n, vocabulary] of the rows to sample, and ``StepOutput.pooled``."""
        logits, pooled = self._compute(batch)
        if self.cache.states:
            pending = any(chunk.draft_tokens for chunk in batch)
            for chunk in batch:
                chunk.sequence.pending_tokens = int(pending)
        return logits, pooled

    def _compute(self, batch: list[ScheduledChunk]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See ``_forward``."""
        if (captured := self._run_captured(batch)) is not None:
            if self.drafter is not None:
                self.drafter.follow(batch, captured.hidden, captured.token_ids, captured.visual)
            return captured.logits[: len(_output_rows(batch))], ()
        visual = self._visual_rows(batch)
        with self._cpu_threads(batch):
            token_ids = self._to_device(
                np.concatenate([_token_ids(chunk) for chunk in batch]), read_by="rows"
            )
            inputs = (
                token_ids,
                self._to_device(
                    np.concatenate([_positions(chunk) for chunk in batch], axis=1), read_by="rows"
                ),
                visual,
                self.cache,
                self.metadata_builder.build(batch),
            )
            rows = self._to_device(_output_rows(batch))
            pools = any(chunk.needs_pooling for chunk in batch)
            if self.drafter is not None and any(chunk.sequence.draft_rows is not None for chunk in batch):
                hidden = self.text.hidden_states(*inputs, None)
                self.drafter.follow(batch, hidden, token_ids, visual)
                hidden = hidden[rows]
                return self._pool(batch, hidden) if pools else (self.text.head(hidden), ())
            if not pools:
                return self.text(*inputs, rows), ()
            return self._pool(batch, self.text.hidden_states(*inputs, rows))

    def _pool(self, batch: list[ScheduledChunk], hidden: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As ``_forward``, from the hidden states of ``_output_rows``. No more rows than a step of sampling
        has get logits, so the plan's workspace covers it.
        """
        ends = [chunk for chunk in batch if chunk.reaches_end]
        pooled: list[Tensor] = []
        for row, chunk in enumerate(ends):
            if chunk.sequence.pooling is None:
                continue
            state = hidden[row]
            if chunk.sequence.pooling.task == "score":
                state = self.text.head(state[None])[0, list(self.score_tokens)]
            pooled.append(state)
        sampled = [row for row, chunk in enumerate(ends) if chunk.needs_sampling]
        return self.text.head(hidden[sampled]), tuple(pooled)

    def draft(self, batch: list[ScheduledChunk]) -> list[ScheduledChunk]:
        """``batch`` with the tokens that a draft model drafts for chunks with ``wanted_drafts``."""
        if self.drafter is None:
            raise RuntimeError("drafts are wanted of a draft model, and there is none")
        for chunk in batch:
            self.build_slots(chunk.sequence)
        with self._cpu_threads(batch):
            return sorted(self.drafter.draft(batch), key=lambda chunk: bool(chunk.draft_tokens))

    def build_slots(self, sequence: Sequence) -> None:
        """Build the slot mapping of ``sequence`` if it has none, as before its first pass."""
        if sequence.slot_mapping is None:
            slots = slots_of_blocks(sequence.block_table, self.cache.block_size).numpy()
            sequence.slot_mapping = self._to_device(slots, read_by="attention")

    def _cpu_threads(self, batch: list[ScheduledChunk]) -> AbstractContextManager[None]:
        """Limit torch to one CPU thread for a pass of ``batch`` that is too small for more."""
        rows = sum(chunk.num_tokens for chunk in batch)
        return threads_for_work(self.device, rows * self.text.multiplications_per_row)

    def encode_images(
        self, chunk: ScheduledChunk, until: float = math.inf, *, at_least_one: bool = False
    ) -> int:
        """Encode the images with tokens in ``chunk`` into ``chunk.sequence.features``.

        Images whose features it has already are not encoded again; a clip is encoded by time step, as far
        as needed. From the time ``until`` (``time.perf_counter``) on no further image is encoded, except the
        first with ``at_least_one``. Returns the number of ``chunk``'s tokens before the first image without
        features: all of them, or fewer.
        """
        sequence = chunk.sequence
        if sequence.is_decoding or not sequence.prompt.images:
            return chunk.num_tokens
        row, _ = _placeholder_range(chunk)
        for number, image, low, high in _images_in(chunk):
            if number not in sequence.features:
                if time.perf_counter() >= until and not at_least_one:
                    return int(sequence.prompt.placeholders[row]) - sequence.num_cached_tokens
                sequence.features[number] = self.encode_image(image)
                at_least_one = False
            row += high - low
        return chunk.num_tokens

    def release_images(self, chunk: ScheduledChunk) -> None:
        """Move features of images that end in ``chunk`` from ``sequence.features`` to the encoder cache.

        Call it after the results of the pass are read: the copy to RAM waits for the device.
        """
        sequence, end = chunk.sequence, chunk.sequence.num_cached_tokens + chunk.num_tokens
        finished = [number for number, image_end in _image_ends(sequence).items() if image_end <= end]
        keys = [image.key for image in _time_steps(sequence)] if finished else []
        for number in finished:
            self.encoder_cache.put(keys[number], sequence.features.pop(number))

    def encode_image(self, image: PreparedImage) -> VisionFeatures:
        """Features of an image on the device: another request's, the encoder cache's, or computed now.

        ``image``: a picture or one time step of a clip. Does not fill the encoder cache.
        """
        if self.vision is None or self.image_patches is None:
            raise RuntimeError("an image reached a model without a vision tower")
        features = self._features_in_use.get(image.key) or self.encoder_cache.get(image.key, self.device)
        if features is None:
            features = self.vision(self.image_patches(image), image.grid, self.encoder_graph)
        self._features_in_use[image.key] = features
        return features

    def _visual_rows(self, batch: list[ScheduledChunk]) -> VisualRows | None:
        """Features of all image tokens of the batch, and the rows they replace."""
        index: list[IntVector] = []
        parts: list[VisionFeatures] = []
        start = 0
        for chunk in batch:
            if not chunk.sequence.is_decoding and chunk.sequence.prompt.images:
                rows, features = self._chunk_features(chunk)
                index.append(rows + start)
                parts.extend(features)
            start += chunk.num_tokens
        if not parts:
            return None
        return VisualRows(
            self._to_device(np.concatenate(index)),
            torch.cat([part.rows for part in parts]),
            tuple(torch.cat(level) for level in zip(*(part.deepstack for part in parts), strict=True)),
        )

    def _chunk_features(self, chunk: ScheduledChunk) -> tuple[IntVector, list[VisionFeatures]]:
        """Rows of ``chunk`` that are image tokens, and the slices of features for them."""
        self.encode_images(chunk)
        sequence = chunk.sequence
        slices = []
        for number, _, low, high in _images_in(chunk):
            features = sequence.features[number]
            cut = slice(low, high)
            slices.append(
                VisionFeatures(features.rows[cut], tuple(level[cut] for level in features.deepstack))
            )
        first, last = _placeholder_range(chunk)
        return sequence.prompt.placeholders[first:last] - sequence.num_cached_tokens, slices

    def _to_device(self, array: IntVector | IntMatrix, *, read_by: KernelGroup | None = None) -> Tensor:
        """``array`` on the device; for the kernels ``read_by`` in 32 bits, as captured steps have it.

        So both launch the same kernels, each of which takes a second to compile.
        """
        if read_by is not None and kernels.enabled_for(read_by, self.device):
            return torch.from_numpy(array.astype(np.int32)).to(self.device, non_blocking=True)
        # Asynchronous, so that a prompt is launched while the device still encodes its image. From unpinned
        # memory CUDA returns once all is read, so the array may be freed.
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def _output_rows(batch: list[ScheduledChunk]) -> IntVector:
    """Rows that are sampled or pooled: the last of each chunk, and those before its draft tokens."""
    rows: list[int] = []
    end = 0
    for chunk in batch:
        end += chunk.num_tokens
        if chunk.reaches_end:
            rows += range(end - 1 - len(chunk.draft_tokens), end)
    return np.array(rows, dtype=np.int64)


def _placeholder_range(chunk: ScheduledChunk) -> tuple[int, int]:
    """Range of the prompt's placeholders that ``chunk`` computes."""
    begin = chunk.sequence.num_cached_tokens
    first, last = np.searchsorted(chunk.sequence.prompt.placeholders, (begin, begin + chunk.num_tokens))
    return int(first), int(last)


def _images_in(chunk: ScheduledChunk) -> Iterator[tuple[int, PreparedImage, int, int]]:
    """Each image with placeholders in ``chunk``: number, image, first and last (exclusive) of its feature
    rows.

    Each temporal patch of a clip counts as an image, so that a pass holds no more of a clip than it needs.
    """
    first, last = _placeholder_range(chunk)
    start = 0
    for number, image in enumerate(_time_steps(chunk.sequence)):
        low, high = max(first, start), min(last, start + image.tokens)
        if low < high:
            yield number, image, low - start, high - start
        start += image.tokens


def _image_ends(sequence: Sequence) -> dict[int, int]:
    """End of each encoded image: number of prompt tokens up to and including its last one."""
    if not sequence.features:
        return {}
    placeholders = sequence.prompt.placeholders
    row_ends = np.cumsum([image.tokens for image in _time_steps(sequence)])
    return {number: int(placeholders[row_ends[number] - 1]) + 1 for number in sequence.features}


def _time_steps(sequence: Sequence) -> Iterator[PreparedImage]:
    return (step for image in sequence.prompt.images for step in image.time_steps())


def _packed_params(sequence: Sequence) -> PackedParams:
    """Sampling parameters for the device: all zeros if a grammar has to be applied on the host."""
    if sequence.grammar_matcher is not None:
        return np.zeros(NUM_FIELDS, dtype=np.int32)
    return pack_params_or_greedy(sequence.params, sequence.seed)


def _token_ids(chunk: ScheduledChunk) -> IntVector:
    sequence = chunk.sequence
    token_ids = sequence.token_ids(
        sequence.num_cached_tokens, sequence.num_cached_tokens + chunk.num_tokens - len(chunk.draft_tokens)
    )
    return (
        np.concatenate((token_ids, np.array(chunk.draft_tokens, dtype=np.int64)))
        if chunk.draft_tokens
        else token_ids
    )


def _positions(chunk: ScheduledChunk) -> IntMatrix:
    return chunk.sequence.positions(
        chunk.sequence.num_cached_tokens, chunk.sequence.num_cached_tokens + chunk.num_tokens
    )


class Rows(Protocol):
    """Consecutive rows of one sequence in a pass: ``num_tokens`` of them, from its token ``begin`` on.

    ``is_decode``: it is one row, which attends to all tokens before it.
    """

    @property
    def sequence(self) -> Sequence: ...

    @property
    def begin(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def is_decode(self) -> bool: ...


class AttentionMetadataBuilder:
    """Builds the attention metadata of each step: for Triton kernels on a GPU, for plain PyTorch elsewhere.

    The device tensor of block tables is reused if the tables equal those of the last step. ``has_states``:
    whether layers keep states, so that the metadata have ``StateSpans``.
    """

    def __init__(self, block_size: int, device: torch.device, *, has_states: bool = False) -> None:
        self.block_size = block_size
        self.device = device
        self.has_states = has_states
        self._cached_tables: list[list[int]] = []
        self._cached_tensor = torch.empty((0, 0), dtype=torch.int32, device=device)

    def build(self, batch: list[ScheduledChunk]) -> AttentionMetadata:
        """Metadata for a step of ``batch``, which must be ordered as for ``ModelRunner.run``.

        Raises ``RuntimeError`` if the slot mapping of a sequence is not built.
        """
        metadata = self.build_paged(batch)
        return replace(metadata, states=self._state_spans(batch)) if self.has_states else metadata

    def build_paged(self, batch: Batch[Rows]) -> AttentionMetadata:
        """``build`` for layers without states; ``Rows.is_decode`` come first."""
        by_blocks = kernels.enabled_for("attention", self.device)
        return self._block_metadata(batch) if by_blocks else self._slot_metadata(batch)

    def _state_spans(self, batch: list[ScheduledChunk]) -> StateSpans:
        """Where each sequence's rows and state are. A sequence without cached tokens has no state yet."""
        starts = accumulate((chunk.num_tokens for chunk in batch), initial=0)
        table = [
            (
                start,
                chunk.num_tokens,
                chunk.sequence.state_slot,
                not chunk.sequence.num_cached_tokens,
                chunk.sequence.pending_tokens,
            )
            for start, chunk in zip(starts, batch, strict=False)
        ]
        steps = list(takewhile(lambda chunk: chunk.sequence.is_decoding, batch))
        return StateSpans(
            torch.from_numpy(np.array(table, dtype=np.int32)).to(self.device, non_blocking=True),
            len(steps),
            sum(chunk.num_tokens for chunk in steps),
            max((chunk.num_tokens for chunk in steps), default=0),
            max((chunk.num_tokens for chunk in batch[len(steps) :]), default=0),
            commit=not any(chunk.draft_tokens for chunk in batch),
        )

    def _block_metadata(self, batch: Batch[Rows]) -> BlockAttentionMetadata:
        lengths = [chunk.num_tokens for chunk in batch]
        starts = np.cumsum([0, *lengths[:-1]])
        query_spans = np.stack([starts, lengths, [chunk.begin for chunk in batch]], axis=1)
        num_decodes = sum(chunk.is_decode for chunk in batch)
        return BlockAttentionMetadata(
            torch.cat([_slot_mapping(chunk)[chunk.begin :] for chunk in batch]),
            self._block_tables([chunk.sequence.block_table for chunk in batch]),
            torch.from_numpy(query_spans.astype(np.int32)).to(self.device, non_blocking=True),
            self.block_size,
            num_decodes,
            max(lengths[num_decodes:], default=0),
        )

    def _block_tables(self, tables: list[list[int]]) -> Tensor:
        """``tables`` padded to [sequences, most blocks]; the last result is cached, as most steps reuse
        it.
        """
        if tables != self._cached_tables:
            padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
            for row, blocks in zip(padded, tables, strict=True):
                row[: len(blocks)] = blocks
            self._cached_tables = [[*blocks] for blocks in tables]  # copies, as tables grow in place
            self._cached_tensor = torch.from_numpy(padded).to(self.device, non_blocking=True)
        return self._cached_tensor

    def _slot_metadata(self, batch: Batch[Rows]) -> SlotAttentionMetadata:
        decodes = [chunk for chunk in batch if chunk.is_decode]
        chunks, start = [], len(decodes)
        for chunk in batch[len(decodes) :]:
            num_cached = chunk.begin
            mask = self._causal_mask(num_cached, chunk.num_tokens) if num_cached else None
            chunks.append(
                PrefillChunk(start, chunk.num_tokens, _slot_mapping(chunk), mask, self._first_slot(chunk))
            )
            start += chunk.num_tokens
        slot_mapping = torch.cat([_slot_mapping(chunk)[chunk.begin :] for chunk in batch])
        return SlotAttentionMetadata(
            slot_mapping, self._decode_group(decodes) if decodes else None, tuple(chunks)
        )

    def _decode_group(self, batch: Batch[Rows]) -> DecodeGroup:
        slots = [_slot_mapping(chunk) for chunk in batch]
        lengths = [len(row_slots) for row_slots in slots]
        longest = max(lengths)
        if len(batch) == 1:
            return DecodeGroup(slots[0][None], None, self._first_slot(batch[0]))
        if min(lengths) == longest:
            return DecodeGroup(torch.stack(slots), None)
        columns = torch.arange(longest, device=self.device)
        rows = [
            row_slots[columns.clamp(max=length - 1)] for row_slots, length in zip(slots, lengths, strict=True)
        ]
        mask = columns < torch.tensor(lengths, device=self.device)[:, None]
        return DecodeGroup(torch.stack(rows), mask)

    def _first_slot(self, chunk: Rows) -> int | None:
        """First slot of a sequence with adjacent blocks, as a lone sequence mostly has; else None."""
        table = chunk.sequence.block_table
        if table != list(range(table[0], table[0] + len(table))):
            return None
        return table[0] * self.block_size

    def _causal_mask(self, past: int, length: int) -> Tensor:
        """[length, past + length]: token i of the chunk sees the past and the chunk up to itself."""
        columns = torch.arange(past + length, device=self.device)
        return columns <= torch.arange(past, past + length, device=self.device)[:, None]


def _slot_mapping(chunk: Rows) -> Tensor:
    """Slots of all tokens of the sequence up to the last one of ``chunk``."""
    if chunk.sequence.slot_mapping is None:
        raise RuntimeError("a chunk was scheduled before its sequence was admitted")
    return chunk.sequence.slot_mapping[: chunk.begin + chunk.num_tokens]
