"""A question about pictures, or about none. Knows the order that the parts go in, and nothing of models."""

from vlfit.backends.base import Backend, Stream
from vlfit.engine import conversation
from vlfit.engine.answer import Answer
from vlfit.engine.conversation import ImagePart, VideoPart
from vlfit.engine.sampling import SamplingParams
from vlfit.errors import InvalidRequest


def stream_ask(
    backend: Backend,
    question: str,
    *pictures: ImagePart | VideoPart,
    system: str = "",
    sampling: SamplingParams | None = None,
) -> Stream:
    """``ask`` while it is being answered."""
    if not question.strip():
        raise InvalidRequest(
            "the question is empty", "ask something, such as: what is this?", param="question"
        )
    return backend.stream(conversation.ask(question, *pictures, system=system), sampling or SamplingParams())


def ask(
    backend: Backend,
    question: str,
    *pictures: ImagePart | VideoPart,
    system: str = "",
    sampling: SamplingParams | None = None,
) -> Answer:
    """Answer ``question`` about ``pictures``, which stand before it in the prompt, in their order.

    Raises ``InvalidRequest`` for an empty question, ``PictureError`` for bytes that are no picture,
    ``DoesNotFit`` when all of it together is over the plan.
    """
    return stream_ask(backend, question, *pictures, system=system, sampling=sampling).answer()
