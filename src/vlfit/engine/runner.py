"""Runs the model on a batch of work: encodes pictures when a prompt reaches them, builds the tensors of one
forward pass, returns logits. Decides nothing about who runs.
"""

from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from vlfit.checkpoint.sidecar import ImageProcessing
from vlfit.engine.image_cache import ImageCache
from vlfit.engine.images import PreparedImage, patchify
from vlfit.engine.kv_cache import KVCache
from vlfit.engine.layout import Layout
from vlfit.engine.qwen3_vl.text import TextModel, VisualRows
from vlfit.engine.qwen3_vl.vision import VisionFeatures, VisionTower
from vlfit.engine.scheduler import Work
from vlfit.engine.sequence import IntMatrix, IntVector
from vlfit.engine.threads import threads_for


class Runner:
    def __init__(
        self,
        text: TextModel,
        vision: VisionTower,
        processing: ImageProcessing,
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

    def run(self, batch: Many[Work]) -> Tensor:
        """One forward pass. ``batch`` has its decoding sequences first.

        Gives logits [n, vocabulary] of the newest token of each work that reaches the end of its tokens.
        """
        visual = self._visual_rows(batch)
        ends = np.cumsum([work.length for work in batch]) - 1
        speaking = np.array([work.finishes_prompt for work in batch])
        multiplications = sum(work.length for work in batch) * self.text.multiplications_per_row
        with threads_for(self.device, multiplications):
            return self.text(
                self._to_device(np.concatenate([_token_ids(work) for work in batch])),
                self._to_device(np.concatenate([_positions(work) for work in batch], axis=1)),
                visual,
                self.cache,
                self.layout.plan(batch),
                self._to_device(ends[speaking]),
            )

    def encode(self, image: PreparedImage) -> VisionFeatures:
        """The features of a picture, from the cache if its content was seen before."""
        features = self.image_cache.get(image.key)
        if features is None:
            pixels = torch.from_numpy(image.pixels).to(self.device)
            features = self.vision(patchify(pixels, self.processing), image.grid)
            self.image_cache.put(image.key, features)
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
        sequence = work.sequence
        begin, end = sequence.cached, sequence.cached + work.length
        first, last = np.searchsorted(sequence.prompt.placeholders, (begin, end))
        slices = []
        image_start = 0
        for number, image in enumerate(sequence.prompt.images):
            image_end = image_start + image.tokens
            low, high = max(first, image_start), min(last, image_end)
            if low < high:
                if number not in sequence.features:
                    sequence.features[number] = self.encode(image)
                features = sequence.features[number]
                cut = slice(low - image_start, high - image_start)
                slices.append(
                    VisionFeatures(features.rows[cut], tuple(level[cut] for level in features.deepstack))
                )
                if high == image_end:
                    del sequence.features[number]
            image_start = image_end
        return sequence.prompt.placeholders[first:last] - begin, slices

    def _to_device(self, array: IntVector | IntMatrix) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _token_ids(work: Work) -> IntVector:
    sequence = work.sequence
    if sequence.decoding:
        return np.array(sequence.generated[-1:], dtype=np.int64)
    return sequence.prompt.token_ids[sequence.cached : sequence.cached + work.length]


def _positions(work: Work) -> IntMatrix:
    sequence = work.sequence
    if sequence.decoding:
        position = sequence.prompt.next_position + len(sequence.generated) - 1
        return np.full((3, 1), position, dtype=np.int64)
    return sequence.prompt.positions[:, sequence.cached : sequence.cached + work.length]
