"""A backend that says what it is told to, and remembers what it was asked.

Sizes of pictures are true; everything else is made up.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass, field

from PIL import Image

from vlfit.api.conversation import Conversation, ImagePart, Tool
from vlfit.api.outputs import Answer, Chunk, FinishReason, ImageSeen, Listener, Timings, Usage
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Backend, Prepared, Ticket
from vlfit.errors import VlfitError


def png(width: int = 64, height: int = 48, colour: str = "red") -> bytes:
    """A one-coloured picture as PNG bytes."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "PNG")
    return file.getvalue()


def answer(text: str, *, width: int = 64, height: int = 48, finish_reason: FinishReason = "stop") -> Answer:
    """An answer about one picture of ``width`` x ``height`` pixels."""
    tokens = len(text.split())
    seen = ImageSeen(width, height, width, height, tokens=6)
    return Answer(text, finish_reason, Usage(20, 6, tokens), "scripted", (seen,))


@dataclass
class ScriptedBackend(Backend):
    """Gives ``answers`` in turn, word by word; an exception among them is raised instead."""

    answers: list[str | VlfitError]
    kind: str = "scripted"
    model: str = "scripted"
    context: int | None = None
    device: str = "cpu"
    finish_reason: FinishReason = "stop"
    notes: list[str] = field(default_factory=list)  # one for the pictures of each request
    asked: list[tuple[Conversation, SamplingParams]] = field(default_factory=list)
    streams: list["ScriptedStream"] = field(default_factory=list)
    closed: bool = False

    def stream(self, conversation: Conversation, sampling: SamplingParams) -> "ScriptedStream":
        self.asked.append((conversation, sampling))
        text = self.answers[len(self.asked) - 1]
        if isinstance(text, VlfitError):
            raise text
        pictures = [part for message in conversation for part in message.parts if isinstance(part, ImagePart)]
        notes = tuple(self.notes[len(self.asked) - 1 : len(self.asked)])
        seen = tuple(_seen(part, notes) for part in pictures)
        self.streams.append(ScriptedStream(text, seen, self.model, self.finish_reason))
        return self.streams[-1]

    def prepare(
        self, conversation: Conversation, sampling: SamplingParams, tools: tuple[Tool, ...] = ()
    ) -> Prepared:
        raise NotImplementedError("tasks stream")

    def prepare_text(self, prompt: str | tuple[int, ...], sampling: SamplingParams) -> Prepared:
        raise NotImplementedError("tasks stream")

    def start(self, prepared: Prepared, sampling: SamplingParams, listener: Listener) -> Ticket:
        raise NotImplementedError("tasks stream")

    def default_sampling(self) -> SamplingParams:
        return SamplingParams(temperature=0.7, top_p=0.8)

    def close(self) -> None:
        self.closed = True


@dataclass
class ScriptedStream:
    text: str
    images: tuple[ImageSeen, ...]
    model: str
    finish_reason: FinishReason
    closed: bool = False

    def __post_init__(self) -> None:
        # Split so that the words joined again are the text.
        self._words = [word for word in self.text.replace(" ", " \0").split("\0") if word]
        self._chunks = self._run()

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks

    def _run(self) -> Iterator[Chunk]:
        for word in self._words:
            yield Chunk(word)
        yield Chunk("", finish_reason=self.finish_reason, usage=self._usage(), timings=self._timings())

    def _usage(self) -> Usage:
        return Usage(10 + sum(image.tokens for image in self.images), 0, len(self._words))

    def _timings(self) -> Timings:
        return Timings(0.0, 0.25, 0.5, len(self._words))

    def answer(self) -> Answer:
        for _ in self._chunks:
            pass
        return Answer(self.text, self.finish_reason, self._usage(), self.model, self.images, self._timings())

    def close(self) -> None:
        self.closed = True


def _seen(part: ImagePart, notes: tuple[str, ...]) -> ImageSeen:
    with Image.open(io.BytesIO(bytes(part.data))) as image:
        return ImageSeen(image.width, image.height, image.width, image.height, tokens=6, notes=notes)
