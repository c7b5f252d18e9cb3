"""A trained mini as the teacher of a hybrid: what it holds possible and has in mind, token by token.

A label says one word; a teacher says how likely each is, and what every layer makes of every token. Both look
through one vision tower, mini's own, which the student has taken over and leaves as it is.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from training.mini.data import Batch, Stream
from training.mini.export import load
from training.mini.inherit import LAYERS
from training.mini.model import Model
from training.mini.render import Renderer
from training.mini.sequences import PADDING, Layout, visible_mask
from training.mini.tokenizer import added_id

# How much the teacher's word counts beside the true one, where it says any.
SHARE = 0.7
# So many of the likeliest tokens hold all but a trifle of the probability.
LIKELIEST = 32
# The share of pictures that are shown as JPEG has left them: the tower knows them already.
SAVED = 0.3


@dataclass(frozen=True)
class Taught:
    """What the teacher makes of a batch.

    ``seen``: [pictures, patches, vision hidden], before the tower's last merger. ``image``: [batch, image
    tokens, hidden], what the student's merger should make of it: the teacher's tokens and all its deepstack
    levels. ``tokens``, ``chances``: [learnt tokens, LIKELIEST], the likeliest next ones; ``known``: [learnt
    tokens], 0 where the teacher knows nothing. ``states``: [student's layers + 1, batch, length, hidden],
    what its layers should make of what they read; ``real``: [batch, length], where.
    """

    seen: Tensor
    image: Tensor
    tokens: Tensor
    chances: Tensor
    known: Tensor
    states: Tensor
    real: Tensor


@dataclass(frozen=True)
class Lesson:
    """A batch as the teacher reads it, without the thoughts that mini's template does not have.

    ``source``: [batch, length], for each token the place where the teacher says what comes next; -1 inside
    thoughts, of which it knows nothing.
    """

    layout: Layout
    source: npt.NDArray[np.int64]


def without_thoughts(layout: Layout) -> Lesson:
    """Thoughts are put out of sight, and what follows them in a segment moves up in position."""
    tokens, segments = layout.tokens, layout.segments
    opening, closing = tokens == added_id("<think>"), tokens == added_id("</think>")
    # The line break after a thought belongs to it.
    over = np.pad(closing, ((0, 0), (2, 0)))[:, : tokens.shape[1]]
    hidden = (np.cumsum(opening, 1) - np.cumsum(over, 1)) > 0
    count = np.cumsum(hidden, 1)
    index = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    begins = np.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    start = np.maximum.accumulate(np.where(begins, index, 0), 1)
    before = np.take_along_axis(count - hidden, start, 1)
    positions = layout.positions - (count - before) * ~hidden
    opened = np.maximum.accumulate(np.where(opening, index, 0), 1)
    last = hidden & ~np.pad(hidden[:, 1:], ((0, 0), (0, 1)))
    source = np.where(hidden, np.where(last, opened - 1, -1), index)
    plain = replace(
        layout,
        positions=positions.astype(layout.positions.dtype),
        segments=np.where(hidden, PADDING, segments).astype(segments.dtype),
    )
    return Lesson(plain, source)


class Teacher:
    """The mini in a folder, which learns nothing more."""

    def __init__(self, folder: Path, renderer: Renderer) -> None:
        self.renderer, processor = renderer, renderer.processor
        self.model: Model = load(folder).to(processor).requires_grad_(False)

    def shares_tower(self, student: Model) -> bool:
        """Whether both see the same: all of the tower but its mergers."""
        theirs = student.model.visual.state_dict()
        return all(
            name in theirs and torch.equal(value, theirs[name])
            for name, value in self.model.model.visual.state_dict().items()
            if "merger" not in name
        )

    @torch.no_grad()
    def teach(self, batch: Batch) -> Taught:
        """Draw the pictures of a batch, look at them, read its texts."""
        processor, model = self.renderer.processor, self.model
        pictures = self.renderer.render(batch.numbers, batch.size, batch.scale, SAVED) / 127.5 - 1
        lesson = without_thoughts(batch.layout)
        layout = lesson.layout
        tokens, segments, slots = (
            torch.from_numpy(each).to(processor).long()
            for each in (layout.tokens, layout.segments, layout.slots)
        )
        positions = torch.from_numpy(layout.positions).to(processor)
        rows, length = tokens.shape
        with torch.autocast(processor.type, torch.bfloat16, enabled=multiplies_bfloat16(processor)):
            tower, text = model.model.visual, model.model.language_model
            seen, levels = tower.see(pictures, batch.frames)
            width = model.shape.hidden
            image = tower.merger(seen).reshape(rows, -1, width)
            levels = [level.reshape(rows, -1, width) for level in levels]
            read: list[Tensor] = []
            last = text(tokens, positions, visible_mask(segments), slots, image, levels, trace=read)
            chosen = torch.from_numpy((batch.layout.targets.ravel() >= 0).nonzero()[0]).to(processor)
            source = torch.from_numpy(lesson.source).to(processor)
            begins = torch.arange(rows, device=processor)[:, None] * length
            places = torch.where(source >= 0, source + begins, -1).flatten()[chosen]
            logits = model.logits(last.flatten(0, 1)[places.clamp_min(0)])
        chances, likeliest = logits.float().softmax(-1).topk(LIKELIEST)
        shows, picked = text.standing(slots)
        states = []
        for reached in (0, *(layer + 1 for layer in LAYERS)):
            state = read[reached]
            # What the deepstack adds further on the student has to know from the beginning.
            for level in levels[reached:]:
                state = state + level.gather(1, picked) * shows
            states.append(state.bfloat16())
        real = (source == torch.arange(length, device=processor)) & (segments != PADDING)
        return Taught(
            seen.bfloat16(), torch.stack([image, *levels]).float().sum(0).bfloat16(), likeliest.int(),
            chances.bfloat16(), (places >= 0).float(), torch.stack(states), real,
        )  # fmt: skip


class TaughtStream(torch.utils.data.IterableDataset[tuple[Batch, Taught]]):
    """Batches with what the teacher makes of them, so that a process of its own can prepare them."""

    def __init__(self, stream: Stream, teacher: Teacher) -> None:
        self.stream, self.teacher = stream, teacher

    def __iter__(self) -> Iterator[tuple[Batch, Taught]]:
        for batch in self.stream:
            yield batch, self.teacher.teach(batch)


def multiplies_bfloat16(processor: torch.device) -> bool:
    """Whether products of bfloat16 are the faster ones: on a GPU, and on a CPU with tiles for them (AMX)."""
    return processor.type == "cuda" or torch.cpu._is_amx_tile_supported()


def distance(taught: Taught, image: Tensor, states: list[Tensor], slots: Tensor) -> Tensor:
    """How far a student's layers are from the teacher's: the mean of the merger's and each layer's squared
    distance, as a share of what the teacher's layer changes.

    ``image``: the student's image tokens; ``states``: what its layers gave, the first before all of them.
    """
    wanted = taught.image.float()
    apart = [functional.mse_loss(image.float(), wanted) / wanted.var()]
    for layer in range(1, len(states)):
        # Nothing reads image tokens after the last layer.
        where = taught.real & (slots < 0) if layer == len(states) - 1 else taught.real
        before, after = (taught.states[layer - back][where].float() for back in (1, 0))
        apart.append(
            functional.mse_loss(states[layer][where].float(), after) / (after - before).square().mean()
        )
    return torch.stack(apart).mean()


def agreement(logits: Tensor, wanted: Tensor, weights: Tensor, taught: Taught) -> Tensor:
    """The weighted mean cross entropy of scores [tokens, vocabulary] with the truth and the teacher."""
    share = SHARE * taught.known
    tokens = torch.cat([wanted[:, None], taught.tokens.long()], 1)
    chances = torch.cat([(1 - share)[:, None], taught.chances.float() * share[:, None]], 1)
    losses: Tensor = _SparseCrossEntropy.apply(logits, tokens, chances)  # type: ignore[no-untyped-call]
    return (losses * weights).sum() / weights.sum()


class _SparseCrossEntropy(torch.autograd.Function):
    """The cross entropy of scores with the chances of a few tokens, without tables of zeros."""

    @staticmethod
    def forward(context: Any, logits: Tensor, tokens: Tensor, chances: Tensor) -> Tensor:
        """``logits``: [rows, vocabulary]; ``tokens``, ``chances``: [rows, few]. Returns [rows]."""
        scores = logits.float()
        total = scores.logsumexp(-1, keepdim=True)
        context.save_for_backward(scores, total, tokens, chances)
        return (chances * (total - scores.gather(1, tokens))).sum(-1)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        """The chances the scores stand for minus those that are wanted."""
        scores, total, tokens, chances = context.saved_tensors
        back = (scores - total).exp_()
        back *= (chances.sum(-1) * gradient)[:, None]
        back.scatter_add_(1, tokens, chances * -gradient[:, None])
        return back, None, None
