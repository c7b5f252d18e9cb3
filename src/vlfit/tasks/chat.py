"""A conversation that goes on: remembers the turns and sends them all each time. Knows nothing of models."""

from collections.abc import Iterator

from vlfit.backends.base import Backend, Stream
from vlfit.engine.answer import Answer, Chunk, ImageSeen
from vlfit.engine.conversation import Conversation, ImagePart, Message, TextPart, VideoPart
from vlfit.engine.sampling import SamplingParams
from vlfit.errors import InvalidRequest


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
