"""The loss of a batch: draw its pictures, predict its answers, weigh each token."""

import torch
from torch import Tensor
from torch.nn import functional

from training.mini.data import Batch
from training.mini.model import Model
from training.mini.render import Renderer
from training.mini.sequences import visible_mask
from training.mini.teacher import Taught, agreement, distance, multiplies_bfloat16

# How much the token after next counts beside the next, for a model that drafts.
DRAFT = 0.3
# The share of pictures that are learnt as JPEG has left them: blurred colours move the edges of small things.
SAVED = 0.6


def batch_loss(
    model: Model, renderer: Renderer, batch: Batch, learn_to_see: bool = True, taught: Taught | None = None,
    likeness: float = 0.0,
) -> Tensor:  # fmt: skip
    """The weighted mean cross entropy of the tokens to be learnt; one number, with its gradient.

    Without ``learn_to_see`` the vision tower gets none, and needs no memory for one. Where a teacher
    ``taught`` the batch, only the tower's last merger learns, what the teacher says counts beside the truth,
    and how unlike it the layers are counts ``likeness``.
    """
    processor, layout = renderer.processor, batch.layout
    tokens, segments, slots, targets = (
        torch.from_numpy(array).to(processor, non_blocking=True).long()
        for array in (layout.tokens, layout.segments, layout.slots, layout.targets)
    )
    positions = torch.from_numpy(layout.positions).to(processor, non_blocking=True)
    chosen = torch.from_numpy((layout.targets.ravel() >= 0).nonzero()[0]).to(processor, non_blocking=True)
    weights = torch.from_numpy(layout.weights).to(processor, non_blocking=True).view(-1)[chosen]
    trace: list[Tensor] = []
    with torch.autocast(processor.type, torch.bfloat16, enabled=multiplies_bfloat16(processor)):
        if taught is None:
            pictures = renderer.render(batch.numbers, batch.size, batch.scale, SAVED) / 127.5 - 1
            with torch.set_grad_enabled(learn_to_see):
                image, levels = model.encode_pictures(pictures, len(tokens), batch.frames)
        else:
            image = model.model.visual.merger(taught.seen.float()).reshape(
                len(tokens), -1, model.shape.hidden
            )
            levels = []
        visible = visible_mask(segments)
        states = model.read(image, levels, tokens, positions, visible, slots, segments, trace)
        logits = model.logits(states.flatten(0, 1)[chosen])
        drafted = None
        if model.mtp is not None:
            # The place before one whose next token is to be learnt belongs to the same segment.
            drafts = model.draft(states, image, tokens, positions, visible, slots)
            drafted = model.logits(drafts.flatten(0, 1)[chosen - 1])
    wanted = targets.view(-1)[chosen]
    if taught is None:
        loss = weighed(logits, wanted, weights)
        return loss if drafted is None else loss + DRAFT * weighed(drafted, wanted, weights)
    loss = agreement(logits, wanted, weights, taught)
    if drafted is not None:
        loss = loss + DRAFT * agreement(drafted, wanted, weights, taught)
    return loss + likeness * distance(taught, image, trace, slots) if likeness else loss


def weighed(logits: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean cross entropy of scores [tokens, vocabulary]."""
    losses = functional.cross_entropy(logits.float(), wanted, reduction="none")
    return (losses * weights).sum() / weights.sum()
