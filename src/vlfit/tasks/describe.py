"""Captions, questions and chats about pictures, and the prompts of all tasks."""

from collections.abc import Iterator
from typing import Literal, cast

from vlfit.api.conversation import (
    Conversation,
    ImagePart,
    Message,
    TextPart,
    VideoPart,
    single_turn,
)
from vlfit.api.outputs import Answer, Chunk, ImageSeen
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Backend, Stream
from vlfit.errors import InvalidRequest
from vlfit.tasks.files import FilePart, fit_conversation

# Prompts. mini is trained on these sentences: changing one means training it again.

CAPTION_SHORT = "Describe this picture in one sentence."
CAPTION_LONG = "Describe this picture in detail."
CAPTION_VIDEO_SHORT = "Describe this video in one sentence."
CAPTION_VIDEO_LONG = "Describe this video in detail."

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
    picture: FilePart,
    detail: CaptionDetail = "short",
    sampling: SamplingParams | None = None,
) -> Stream:
    """Like ``caption``, with the same parameters and errors, but stream the text.

    The caller reads the stream to the end, or closes it.
    """
    # Greedy by default, so that the same picture always gets the same caption.
    # Without reasoning, where the model has a choice: one sentence needs none, and it takes far more tokens.
    params = backend.without_thinking(sampling or SamplingParams())
    return _stream(backend, _turn(caption_prompt(picture, detail), picture), params)


def caption_prompt(picture: FilePart, detail: CaptionDetail) -> str:
    """The prompt for a caption: of a picture; or of a video if ``picture`` is a clip or any ``MediaFile``."""
    if isinstance(picture, ImagePart):
        return CAPTION_LONG if detail == "long" else CAPTION_SHORT
    return CAPTION_VIDEO_LONG if detail == "long" else CAPTION_VIDEO_SHORT


def caption(
    backend: Backend,
    picture: FilePart,
    detail: CaptionDetail = "short",
    sampling: SamplingParams | None = None,
) -> Answer:
    """Describe a picture, clip or video, in one sentence (``short``) or in detail (``long``).

    Of a video, as many frames as the context has room for. ``sampling``: None: greedy. Raises
    ``PictureError`` if the bytes cannot be decoded, ``DoesNotFit`` if the prompt exceeds the planned context.
    """
    return stream_caption(backend, picture, detail, sampling).answer()


def stream_ask(
    backend: Backend,
    question: str,
    *pictures: FilePart,
    system: str = "",
    sampling: SamplingParams | None = None,
) -> Stream:
    """Like ``ask``, with the same parameters and errors, but stream the answer.

    The caller reads the stream to the end, or closes it.
    """
    if not question.strip():
        raise InvalidRequest(
            "the question is empty", "ask something, such as: what is this?", param="question"
        )
    return _stream(backend, _turn(question, *pictures, system=system), sampling or SamplingParams())


def ask(
    backend: Backend,
    question: str,
    *pictures: FilePart,
    system: str = "",
    sampling: SamplingParams | None = None,
) -> Answer:
    """Answer ``question`` about ``pictures``, which precede the question in the prompt, in their order.

    Of a PDF or a video, as many pages or frames as the context has room for. ``system``: the system prompt;
    empty: none. ``sampling``: None: greedy.

    Raises ``InvalidRequest`` for an empty question, ``PictureError`` for bytes that cannot be decoded,
    ``DoesNotFit`` if the prompt exceeds the planned context.
    """
    return stream_ask(backend, question, *pictures, system=system, sampling=sampling).answer()


class Chat:
    """A conversation, sent in full with each turn. ``system``: the system prompt; empty: none.

    ``sampling``: None: as the checkpoint recommends. A turn is added to the history when its answer is
    complete, or its stream was closed after some text. A failed turn is not added, so that the next can still
    succeed.
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

    def stream(self, text: str, *pictures: FilePart) -> Stream:
        """Send the next message and stream the answer; message and answer join the history when it ends.

        The caller reads the stream to the end, or closes it. Raises ``InvalidRequest`` for empty ``text``,
        and what ``Backend.stream`` raises.
        """
        if not text.strip():
            raise InvalidRequest("the message is empty", "say something", param="messages")
        turn = (*self._history, *_turn(text, *pictures))

        def start(fitted: Conversation) -> Stream:
            return _RecordingStream(self._backend.stream(fitted, self._sampling), self, fitted)

        return fit_conversation(self._backend, turn, start, self._sampling)

    def ask(self, text: str, *pictures: FilePart) -> Answer:
        """Send the next message and wait for the whole answer. Raises as ``stream`` does."""
        return self.stream(text, *pictures).answer()

    def _append_turn(self, turn: Conversation, answer: str) -> None:
        self._history = (*turn, Message("assistant", (TextPart(answer),)))


def _turn(text: str, *pictures: FilePart, system: str = "") -> Conversation:
    """One user message; files in it are expanded by ``fit_conversation``."""
    return single_turn(text, *cast("tuple[ImagePart | VideoPart, ...]", pictures), system=system)


def _stream(backend: Backend, conversation: Conversation, sampling: SamplingParams) -> Stream:
    return fit_conversation(backend, conversation, lambda fitted: backend.stream(fitted, sampling), sampling)


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
