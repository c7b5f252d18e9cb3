"""Runs the model on a batch of work: encodes pictures when a prompt reaches them, builds the tensors of one
forward pass, returns logits. Decides nothing about who runs.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from vlfit import kernels
from vlfit.checkpoint.processor_files import ImageProcessing
from vlfit.engine.device import threads_for
from vlfit.engine.execution.attention_metadata import Layout
from vlfit.engine.execution.cuda_graphs import DecodeGraphs
from vlfit.engine.execution.encoder_cache import ImageCache
from vlfit.engine.execution.encoder_graph import Recorded
from vlfit.engine.sampling.sampler import Scores, scores_of
from vlfit.engine.scheduling.scheduler import Work
from vlfit.engine.scheduling.sequence import IntMatrix, IntVector, Sequence
from vlfit.kernels.attention.paged import BlockPlan
from vlfit.kernels.gemm.quantized import means
from vlfit.kernels.sampling.draw import FIELDS, Words, words_of
from vlfit.layers.kv_cache import KVCache
from vlfit.models.decoder import TextModel, VisualRows
from vlfit.models.qwen3_vl.image_processor import PreparedImage, patches_by_time
from vlfit.models.qwen3_vl.vision import WHOLE_ROWS, VisionFeatures, VisionTower


class Runner:
    def __init__(
        self,
        text: TextModel,
        vision: VisionTower | None,
        processing: ImageProcessing | None,
        cache: KVCache,
        image_cache: ImageCache,
        device: torch.device,
    ) -> None:
        self.text = text
        self.vision = vision
        self.processing = processing
        self.cache = cache
        self.image_cache = image_cache
        self.device = device
        self.layout = Layout(cache.block_size, device)
        self.graphs: DecodeGraphs | None = None
        self.recorded: Recorded | None = None
        # What sequences hold, by content; gone with the last of them.
        self._looked_at: WeakValueDictionary[bytes, VisionFeatures] = WeakValueDictionary()

    def run(self, batch: Many[Work]) -> Scores:
        """One forward pass. ``batch`` has its decoding sequences first, of those with guesses the ones behind
        the others.

        Gives what is said of the next token of each work that reaches the end of its tokens, and then of each
        of its guesses; valid until the next pass.
        """
        if self.graphs is not None and all(work.sequence.decoding for work in batch):
            if any(work.guesses for work in batch):
                return self.graphs.run_guesses(batch)
            return self.graphs.run([work.sequence for work in batch])
        speaking = [work.sequence for work in batch if work.finishes_prompt]
        if not speaking or not kernels.used_on(self.device) or any(work.guesses for work in batch):
            with self._threads(batch):
                return scores_of(self._forward(batch))
        words = np.array([(*_asked(each), each.position) for each in speaking], np.int32)
        asked = torch.from_numpy(words.T.copy()).to(self.device, non_blocking=True)
        return scores_of(self._forward(batch), asked[:-1], asked[-1])

    def run_ahead(self, batch: Many[Work]) -> None:
        """Launch the pass after ``run(batch)`` if that was by graphs: all of ``batch`` go on with the token
        that the device chose. ``run`` takes it over if that is asked for next; else it was in vain.
        """
        if self.graphs is not None and all(work.sequence.decoding for work in batch):
            self.graphs.run_ahead([work.sequence for work in batch])

    def is_ahead(self, batch: Many[Work]) -> bool:
        """Whether the pass that ``batch`` asks for was launched by ``run_ahead``."""
        return self.graphs is not None and self.graphs.is_ahead([work.sequence for work in batch])

    def record_graphs(self, context: int, sequences: int, guess_rows: int = 0) -> None:
        """Decode by graphs from now on: up to ``sequences`` at once, of up to ``context`` tokens; a pass with
        guesses is of up to ``guess_rows`` rows.
        """

        def step(token_ids: Tensor, positions: Tensor, plan: BlockPlan) -> Tensor:
            return self.text(token_ids, positions, None, self.cache, plan, None)

        vocabulary = self.text.vocabulary
        self.graphs = DecodeGraphs(step, self.cache, vocabulary, context, sequences, guess_rows)
        if self.vision is not None and means(self.device).tower:
            self.recorded = Recorded(self.device, WHOLE_ROWS)
        with torch.inference_mode():
            self.graphs.record()

    def release_graphs(self) -> None:
        """What was recorded is forgotten: tensors move, or memory is wanted."""
        if self.graphs is not None:
            self.graphs.release()
        if self.recorded is not None:
            self.recorded.release()

    def _forward(self, batch: Many[Work]) -> Tensor:
        """Logits [n, vocabulary] of the rows that speak."""
        visual = self._visual_rows(batch)
        with self._threads(batch):
            return self.text(
                self._to_device(np.concatenate([_token_ids(work) for work in batch])),
                self._to_device(np.concatenate([_positions(work) for work in batch], axis=1)),
                visual,
                self.cache,
                self.layout.plan(batch),
                self._to_device(_speaking(batch)),
            )

    def _threads(self, batch: Many[Work]) -> AbstractContextManager[None]:
        """As many of the CPU's threads as a pass of ``batch`` is worth."""
        rows = sum(work.length for work in batch)
        return threads_for(self.device, rows * self.text.multiplications_per_row)

    def look(self, work: Work) -> None:
        """Encode the pictures that ``work`` reaches. What was encoded stays with its sequence."""
        sequence = work.sequence
        if sequence.decoding or not sequence.prompt.images:
            return
        for number, image, _, _ in _pictures_reached(work):
            if number not in sequence.features:
                sequence.features[number] = self.encode(image)

    def forget(self, work: Work) -> None:
        """Let go of the pictures that ``work`` has brought to their end: it will not be done again.

        Now they go to the cache: their pass is over, so that nothing waits for the device.
        """
        sequence, end = work.sequence, work.sequence.cached + work.length
        ended = [number for number, last in _ends_of(sequence).items() if last <= end]
        keys = [image.key for image in _one_by_one(sequence)] if ended else []
        for number in ended:
            self.image_cache.put(keys[number], sequence.features.pop(number))

    def encode(self, image: PreparedImage) -> VisionFeatures:
        """The features of a picture: of a request that looks at it too, or from the cache, or computed."""
        if self.vision is None or self.processing is None:
            raise RuntimeError("a picture came to a model without eyes")
        features = self._looked_at.get(image.key) or self.image_cache.get(image.key, self.device)
        if features is None:
            patches = patches_by_time(image.pixels, self.processing, self.device, self.cache.dtype)
            features = self.vision(patches, image.grid, self.recorded)
        self._looked_at[image.key] = features
        return features

    def _visual_rows(self, batch: Many[Work]) -> VisualRows | None:
        """Features of every placeholder in the batch, and the rows they go to."""
        index: list[IntVector] = []
        parts: list[VisionFeatures] = []
        start = 0
        for work in batch:
            if not work.sequence.decoding and work.sequence.prompt.images:
                rows, features = self._visual_part(work)
                index.append(rows + start)
                parts.extend(features)
            start += work.length
        if not parts:
            return None
        return VisualRows(
            self._to_device(np.concatenate(index)),
            torch.cat([part.rows for part in parts]),
            tuple(torch.cat(level) for level in zip(*(part.deepstack for part in parts), strict=True)),
        )

    def _visual_part(self, work: Work) -> tuple[IntVector, list[VisionFeatures]]:
        """Rows of the chunk that are placeholders, and the slices of features that belong there."""
        self.look(work)
        sequence = work.sequence
        slices = []
        for number, _, low, high in _pictures_reached(work):
            features = sequence.features[number]
            cut = slice(low, high)
            slices.append(
                VisionFeatures(features.rows[cut], tuple(level[cut] for level in features.deepstack))
            )
        first, last = _placeholders_of(work)
        return sequence.prompt.placeholders[first:last] - sequence.cached, slices

    def _to_device(self, array: IntVector | IntMatrix) -> Tensor:
        # Nobody waits for what the device still does: a prompt is asked for while it looks at the picture.
        # From memory that is not pinned CUDA returns when all is read, so that the array may go.
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def _speaking(batch: Many[Work]) -> IntVector:
    """The rows of ``batch`` behind which a token comes: the last of each work, and before it its guesses."""
    rows: list[int] = []
    end = 0
    for work in batch:
        end += work.length
        if work.finishes_prompt:
            rows += range(end - 1 - len(work.guesses), end)
    return np.array(rows, dtype=np.int64)


def _placeholders_of(work: Work) -> tuple[int, int]:
    """The first and behind the last of the prompt's placeholders that ``work`` computes."""
    begin = work.sequence.cached
    first, last = np.searchsorted(work.sequence.prompt.placeholders, (begin, begin + work.length))
    return int(first), int(last)


def _pictures_reached(work: Work) -> Iterator[tuple[int, PreparedImage, int, int]]:
    """Each picture with placeholders in ``work``: its number, itself, and which of its rows they are.

    Of a clip each temporal patch is a picture, so that no more of it is held than a pass needs.
    """
    first, last = _placeholders_of(work)
    start = 0
    for number, image in enumerate(_one_by_one(work.sequence)):
        low, high = max(first, start), min(last, start + image.tokens)
        if low < high:
            yield number, image, low - start, high - start
        start += image.tokens


def _ends_of(sequence: Sequence) -> dict[int, int]:
    """Behind which token of the prompt each picture ends that is encoded."""
    if not sequence.features:
        return {}
    placeholders = sequence.prompt.placeholders
    behind = np.cumsum([image.tokens for image in _one_by_one(sequence)])
    return {number: int(placeholders[behind[number] - 1]) + 1 for number in sequence.features}


def _one_by_one(sequence: Sequence) -> Iterator[PreparedImage]:
    return (step for image in sequence.prompt.images for step in image.steps())


def _asked(sequence: Sequence) -> Words:
    """What the device is asked to draw for ``sequence``: nothing where its form must be looked at first."""
    if sequence.constraint is not None:
        return np.zeros(FIELDS, dtype=np.int32)
    return words_of(sequence.sampling, sequence.seed)


def _token_ids(work: Work) -> IntVector:
    sequence = work.sequence
    said = sequence.token_ids(sequence.cached, sequence.cached + work.length - len(work.guesses))
    return np.concatenate((said, np.array(work.guesses, dtype=np.int64))) if work.guesses else said


def _positions(work: Work) -> IntMatrix:
    return work.sequence.positions(work.sequence.cached, work.sequence.cached + work.length)
