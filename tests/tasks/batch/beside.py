"""A scripted backend that runs requests concurrently, for tests of batches."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.scripted_backend import ScriptedBackend, png
from vlfit.api.conversation import Conversation, ImagePart, TextPart, Tool
from vlfit.api.outputs import Chunk, ImageSeen, Listener, Usage
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Ticket
from vlfit.errors import PictureNotFound, VlfitError
from vlfit.images.decode import decode
from vlfit.tasks.batch.items import Item

Say = Callable[[bytes, str], "str | Exception"]


@dataclass(frozen=True)
class Bytes:
    """Reader of an item: its bytes; None: the file is missing."""

    data: bytes | None

    def read(self) -> bytes:
        if self.data is None:
            raise PictureNotFound("gone.png: no such file", "look elsewhere")
        return self.data


def item(key: str, data: bytes | None = None, *, missing: bool = False) -> Item:
    """An item of ``data``, or of a picture whose size depends on its key."""
    size = 8 + sum(map(ord, key)) % 50
    return Item(key, Bytes(None if missing else data or png(size, 8 + len(key) % 7)).read)


@dataclass
class Items:
    """A source of the given items."""

    items: list[Item]

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self.items)

    def count(self) -> int | None:
        return len(self.items)

    def notes(self) -> list[str]:
        return []


@dataclass(frozen=True)
class Ready:
    picture: bytes
    prompt: str
    images: tuple[ImageSeen, ...]
    prompt_tokens: int = 10
    image_tokens: int = 4
    max_tokens: int = 100


@dataclass
class ConcurrentBackend(ScriptedBackend):
    """``say`` answers a picture's bytes and a prompt. Answers come from threads, or on ``release``.

    ``most``: the most requests that ran at once.
    """

    answers: list[str | VlfitError] = field(default_factory=list)
    say: Say = lambda data, prompt: f"seen {len(data)} bytes"
    hold: bool = False
    kind: str = "scripted"
    context: int = 1000
    device: str = "cpu"
    started: list[bytes] = field(default_factory=list)
    cancelled: int = 0
    most: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _held: list[tuple[Ready, Listener]] = field(default_factory=list)
    _running: int = 0

    def prepare(
        self, conversation: Conversation, sampling: SamplingParams, tools: tuple[Tool, ...] = ()
    ) -> Ready:
        parts = conversation[-1].parts
        picture = next(part for part in parts if isinstance(part, ImagePart))
        prompt = "".join(part.text for part in parts if isinstance(part, TextPart))
        width, height = decode(bytes(picture.data), picture.label).image.size
        return Ready(bytes(picture.data), prompt, (ImageSeen(width, height, width, height, tokens=4),))

    def prepare_text(self, prompt: str | tuple[int, ...], sampling: SamplingParams) -> Ready:
        raise NotImplementedError

    def start(self, prepared: object, sampling: SamplingParams, listener: Listener) -> Ticket:
        assert isinstance(prepared, Ready)
        with self._lock:
            self.started.append(prepared.picture)
            self._running += 1
            self.most = max(self.most, self._running)
            if self.hold:
                self._held.append((prepared, listener))
                return _Ticket(self)
        threading.Thread(target=self._answer, args=(prepared, listener), daemon=True).start()
        return _Ticket(self)

    def release(self, *, last: bool = False) -> None:
        """Answer one of the held requests: the first, or the last."""
        with self._lock:
            prepared, listener = self._held.pop(-1 if last else 0)
        self._answer(prepared, listener)

    def _answer(self, prepared: Ready, listener: Listener) -> None:
        said = self.say(prepared.picture, prepared.prompt)
        with self._lock:
            self._running -= 1
        if isinstance(said, Exception):
            listener(said)
            return
        for word in said.split(" "):
            listener(Chunk(word + " "))
        listener(Chunk("", (), "stop", Usage(10, 4, len(said.split()))))


@dataclass
class _Ticket(Ticket):
    backend: ConcurrentBackend

    def cancel(self) -> None:
        self.backend.cancelled += 1
