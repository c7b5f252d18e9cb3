"""Captions, questions and chats about pictures, and the prompts of all tasks."""

from collections.abc import Iterator
from typing import Literal

from vlfit.api import conversation
from vlfit.api.conversation import Conversation, ImagePart, Message, TextPart, VideoPart
from vlfit.api.conversation import ask as as_messages
from vlfit.api.outputs import Answer, Chunk, ImageSeen
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Backend, Stream
from vlfit.errors import InvalidRequest

# Prompts. mini is trained on these sentences: changing one means training it again.

CAPTION_SHORT = "Describe this picture in one sentence."
CAPTION_LONG = "Describe this picture in detail."

# Qwen3-VL answers with boxes as `bbox_2d`, in thousandths of width and height, inside a ```json fence.
SCENE = (
    'Analyse this picture. Answer with JSON: {"summary": "one sentence", '
    '"objects": [{"label": "name", "bbox_2d": [x1, y1, x2, y2]}], "text": ["words seen"]}. '
    "Boxes are in thousandths of the picture's width and height."
)

# From Qwen3-VL's own grounding examples; `{}` is one thing, or several separated by commas.
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
    """``caption`` as a stream."""
    prompt = CAPTION_LONG if detail == "long" else CAPTION_SHORT
    # Greedy by default, so that the same picture always gets the same caption.
    return backend.stream(as_messages(prompt, picture), sampling or SamplingParams())


def caption(
    backend: Backend,
    picture: ImagePart,
    detail: CaptionDetail = "short",
    sampling: SamplingParams | None = None,
) -> Answer:
    """Describe ``picture``, in one sentence (``short``) or in detail (``long``).

    Raises ``PictureError`` if the bytes are not a picture, ``DoesNotFit`` if it exceeds the planned context.
    """
    return stream_caption(backend, picture, detail, sampling).answer()


def stream_ask(
    backend: Backend,
    question: str,
    *pictures: ImagePart | VideoPart,
    system: str = "",
    sampling: SamplingParams | None = None,
) -> Stream:
    """``ask`` as a stream."""
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
    """Answer ``question`` about ``pictures``, which precede it in the prompt, in order.

    Raises ``InvalidRequest`` for an empty question, ``PictureError`` for bytes that are not a picture,
    ``DoesNotFit`` if the whole prompt exceeds the planned context.
    """
    return stream_ask(backend, question, *pictures, system=system, sampling=sampling).answer()


class Chat:
    """A conversation, sent in full with each turn. By default it samples as the checkpoint recommends.

    A turn is added to the history when its answer is complete, or was closed early with some text. A failed
    turn is not, so that the next one can still succeed.
    """

    def __init__(self, backend: Backend, *, system: str = "", sampling: SamplingParams | None = None) -> None:
        self._backend = backend
        self._sampling = sampling or backend.default_sampling()
        self._initial: Conversation = (Message("system", (TextPart(system),)),) if system else ()
        self._history: Conversation = self._initial

    @property
    def history(self) -> Conversation:
        """All messages so far, the system message first."""
        return self._history

    def reset(self) -> None:
        """Remove all turns; the system message stays."""
        self._history = self._initial

    def stream(self, text: str, *pictures: ImagePart | VideoPart) -> Stream:
        """Send the next message and stream the answer.

        Raises ``InvalidRequest`` for empty text, and what ``Backend.stream`` raises.
        """
        if not text.strip():
            raise InvalidRequest("the message is empty", "say something", param="messages")
        turn = (*self._history, Message("user", (*pictures, TextPart(text))))
        return _RecordingStream(self._backend.stream(turn, self._sampling), self, turn)

    def ask(self, text: str, *pictures: ImagePart | VideoPart) -> Answer:
        """``stream``, read to the end."""
        return self.stream(text, *pictures).answer()

    def _append_turn(self, turn: Conversation, answer: str) -> None:
        self._history = (*turn, Message("assistant", (TextPart(answer),)))


class _RecordingStream:
    """A stream that adds its turn to the chat's history when it ends."""

    def __init__(self, stream: Stream, chat: Chat, turn: Conversation) -> None:
        self._stream = stream
        self._chat = chat
        self._turn = turn
        self._text: list[str] = []

    @property
    def images(self) -> tuple[ImageSeen, ...]:
        return self._stream.images

    def __iter__(self) -> Iterator[Chunk]:
        for chunk in self._stream:
            self._text.append(chunk.text)
            if chunk.finish_reason is not None:
                self._record("".join(self._text))
            yield chunk

    def answer(self) -> Answer:
        answer = self._stream.answer()
        self._record(answer.text)
        return answer

    def close(self) -> None:
        self._stream.close()
        if text := "".join(self._text):
            self._record(text)

    def _record(self, text: str) -> None:
        # Only once: closing a finished stream must not restore a history that was reset or continued since.
        if self._turn:
            self._chat._append_turn(self._turn, text)
            self._turn = ()
