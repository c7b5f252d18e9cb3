"""A sentence, or a paragraph, about a picture. Knows the words to ask with, and nothing of models."""

from collections.abc import Iterator
from typing import Literal

from vlfit.api import conversation
from vlfit.api.conversation import Conversation, ImagePart, Message, TextPart, VideoPart
from vlfit.api.conversation import ask as as_messages
from vlfit.api.outputs import Answer, Chunk, ImageSeen
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Backend, Stream
from vlfit.errors import InvalidRequest

# The words that tasks put to the model. mini is trained on these very sentences, so a change here is a
# change of its training text.


CAPTION_SHORT = "Describe this picture in one sentence."
CAPTION_LONG = "Describe this picture in detail."

# Qwen3-VL answers boxes as `bbox_2d` in thousandths of width and height, inside a ```json fence.
SCENE = (
    'Analyse this picture. Answer with JSON: {"summary": "one sentence", '
    '"objects": [{"label": "name", "bbox_2d": [x1, y1, x2, y2]}], "text": ["words seen"]}. '
    "Boxes are in thousandths of the picture's width and height."
)

# The sentence of Qwen3-VL's own examples of grounding; `{}` stands for one thing, or several with commas.
DETECT = (
    'Locate every instance that belongs to the following categories: "{}". '
    "Report bbox coordinates in JSON format."
)

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
    return backend.stream(as_messages(prompt, picture), sampling or SamplingParams())


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


# A question about pictures, or about none. Knows the order that the parts go in, and nothing of models.


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


# A conversation that goes on: remembers the turns and sends them all each time. Knows nothing of models.


class Chat:
    """Turns with one model. Samples as the checkpoint's own settings say, unless ``sampling`` is given.

    A turn is remembered once its answer is whole, or was closed early with some words said. One that failed
    is not remembered, so that the next can still work.
    """

    def __init__(self, backend: Backend, *, system: str = "", sampling: SamplingParams | None = None) -> None:
        self._backend = backend
        self._sampling = sampling or backend.default_sampling()
        self._opening: Conversation = (Message("system", (TextPart(system),)),) if system else ()
        self._history: Conversation = self._opening

    @property
    def history(self) -> Conversation:
        """Every message so far, the system's first."""
        return self._history

    def reset(self) -> None:
        """Forget every turn; the system message stays."""
        self._history = self._opening

    def stream(self, text: str, *pictures: ImagePart | VideoPart) -> Stream:
        """Say ``text`` about ``pictures`` and what went before; the answer while it is being said.

        Raises ``InvalidRequest`` for empty text, and what ``Backend.stream`` raises.
        """
        if not text.strip():
            raise InvalidRequest("the message is empty", "say something", param="messages")
        turn = (*self._history, Message("user", (*pictures, TextPart(text))))
        return _Remembering(self._backend.stream(turn, self._sampling), self, turn)

    def ask(self, text: str, *pictures: ImagePart | VideoPart) -> Answer:
        """``stream``, read to its end."""
        return self.stream(text, *pictures).answer()

    def _remember(self, turn: Conversation, words: str) -> None:
        self._history = (*turn, Message("assistant", (TextPart(words),)))


class _Remembering:
    """A stream that tells its chat what was said, when it ends."""

    def __init__(self, stream: Stream, chat: Chat, turn: Conversation) -> None:
        self._stream = stream
        self._chat = chat
        self._turn = turn
        self._words: list[str] = []

    @property
    def images(self) -> tuple[ImageSeen, ...]:
        return self._stream.images

    def __iter__(self) -> Iterator[Chunk]:
        for chunk in self._stream:
            self._words.append(chunk.text)
            if chunk.finish_reason is not None:
                self._remember("".join(self._words))
            yield chunk

    def answer(self) -> Answer:
        answer = self._stream.answer()
        self._remember(answer.text)
        return answer

    def close(self) -> None:
        self._stream.close()
        if said := "".join(self._words):
            self._remember(said)

    def _remember(self, words: str) -> None:
        # Only the first time: closing a finished stream again must not bring back a conversation that
        # was reset or has gone on since.
        if self._turn:
            self._chat._remember(self._turn, words)
            self._turn = ()
