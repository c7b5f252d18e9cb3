"""A sentence, or a paragraph, about a picture. Knows the words to ask with, and nothing of models."""

from typing import Literal

from vlfit.backends.base import Backend, Stream
from vlfit.engine.answer import Answer
from vlfit.engine.conversation import ImagePart, ask
from vlfit.engine.sampling import SamplingParams
from vlfit.tasks.prompts import CAPTION_LONG, CAPTION_SHORT

CaptionDetail = Literal["short", "long"]


def stream_caption(
    backend: Backend,
    picture: ImagePart,
    detail: CaptionDetail = "short",
    sampling: SamplingParams | None = None,
) -> Stream:
    """``caption`` while it is being said."""
    prompt = CAPTION_LONG if detail == "long" else CAPTION_SHORT
    # Greedy unless told otherwise: the same picture gives the same words tomorrow.
    return backend.stream(ask(prompt, picture), sampling or SamplingParams())


def caption(
    backend: Backend,
    picture: ImagePart,
    detail: CaptionDetail = "short",
    sampling: SamplingParams | None = None,
) -> Answer:
    """Say what ``picture`` shows: ``short`` is one sentence, ``long`` is as much as there is to say.

    Raises ``PictureError`` for bytes that are no picture, ``DoesNotFit`` for one that is over the plan.
    """
    return stream_caption(backend, picture, detail, sampling).answer()
