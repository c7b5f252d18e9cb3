"""The life of one request for words, from its bytes to its last event, whatever its shape.

Knows: the order of the steps and who frees what. Does not know: fields of requests (``chat``,
``completions``, ``responses``), how an answer is written, how a request is refused (``failures``).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from vlfit.api.outputs import Chunk
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import LocalBackend, Prepared, Sleeper, TakenLater, Ticket
from vlfit.errors import EngineStopped, PackedRequest, RequestTooLarge, UnknownModel
from vlfit.server.admin.metrics import Meters
from vlfit.server.http.admission import Held, Places
from vlfit.server.http.disconnect import ClientGone, Closing
from vlfit.server.http.malloc import Trimming
from vlfit.server.http.threads import Threads
from vlfit.server.openai.error_replies import JSONReply, StillToCome, error_body
from vlfit.server.openai.replies import PING, event
from vlfit.server.server_settings import ServerSettings
from vlfit.units import KIB, format_bytes

# The completions of one request while they run: started together, read side by side, ended together.
#
# Knows: tickets, and threads that are not the event loop's. Does not know: what is done with the chunks.


class Choices:
    """One completion of each of ``prepared`` (the same one may be there several times), all started on
    entering, none left running on leaving.

    ``ended`` is called with the last that comes of each of them, however slowly its client reads.
    """

    def __init__(
        self,
        backend: LocalBackend,
        prepared: Sequence[Prepared],
        sampling: SamplingParams,
        ended: Callable[[Chunk | Exception], None],
    ) -> None:
        self._backend = backend
        self._prepared = list(prepared)
        self._sampling = sampling
        self._ended = ended
        self._tickets: list[Ticket] = []
        self._arrived: asyncio.Queue[tuple[int, Chunk | Exception]] = asyncio.Queue()

    def __enter__(self) -> "Choices":
        try:
            for index, prepared in enumerate(self._prepared):
                self._start(index, prepared, asyncio.get_running_loop())
        except BaseException:
            self._cancel()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._cancel()
        # A ticket knows who listens, and that is us: in such a circle pictures would wait for the garbage
        # collector, which in a process of so many objects looks at old ones every few hundred requests.
        self._tickets.clear()
        self._prepared.clear()

    async def taken(self, seconds: float) -> None:
        """Until a server that the backend asks has taken them, or for ``seconds``: who is refused there can
        be told with a status while no byte has gone out. Raises why.
        """
        waited = [asyncio.wrap_future(each.taken) for each in self._tickets if isinstance(each, TakenLater)]
        if not waited:
            return
        await asyncio.wait(waited, timeout=seconds)
        while any(each.done() and not each.result() for each in waited):
            _, item = await self._arrived.get()
            if isinstance(item, Exception):
                raise item

    async def chunks(self, ping_seconds: float) -> AsyncIterator[tuple[int, Chunk | None]]:
        """Chunks as they come, with the number of their choice; ``None`` after each ``ping_seconds`` of
        silence.
        """
        running = len(self._tickets)
        while running:
            try:
                async with asyncio.timeout(ping_seconds):
                    index, item = await self._arrived.get()
            except TimeoutError:
                yield 0, None
                continue
            if isinstance(item, Exception):
                raise item
            if item.finish_reason == "cancelled":  # not by us: we stop listening first
                raise EngineStopped("the engine gave the request up", "try again")
            running -= item.finish_reason is not None
            yield index, item

    def _start(self, index: int, prepared: Prepared, loop: asyncio.AbstractEventLoop) -> None:
        def listen(item: Chunk | Exception) -> None:
            """Called from the engine's thread."""
            with suppress(RuntimeError):  # the event loop has ended: nobody reads any more
                loop.call_soon_threadsafe(self._arrive, index, item)

        # With one seed for all, the choices would be one and the same text.
        seed = self._sampling.seed
        sampling = (
            replace(self._sampling, seed=seed + index) if seed is not None and index else self._sampling
        )
        self._tickets.append(self._backend.start(prepared, sampling, listen))

    def _arrive(self, index: int, item: Chunk | Exception) -> None:
        if isinstance(item, Exception) or item.finish_reason is not None:
            self._ended(item)
        self._arrived.put_nowait((index, item))

    def _cancel(self) -> None:
        for ticket in self._tickets:
            ticket.cancel()


PREPARED_AT_ONCE = 8
FETCHED_AT_ONCE = 64
SHORT_BODY = 16 * KIB
_SMALLER = "send smaller or fewer pictures, or their URLs"
EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would otherwise hold the words back
]


class Workshop:
    """What all requests for words share. Belongs to one event loop."""

    def __init__(
        self, backend: LocalBackend, settings: ServerSettings, closing: Closing, meters: Meters
    ) -> None:
        self.meters = meters
        self.backend = backend
        # Found out once: to look through a protocol's names takes a twentieth of a millisecond.
        self.sleeper = backend if isinstance(backend, Sleeper) else None
        self.settings = settings
        self.closing = closing
        self.places = Places(backend, settings.places)
        self.trimming = Trimming(lambda: bool(self.places.taken))
        # Apart, so that waiting for slow web servers never keeps requests from being prepared.
        self.work = Threads(PREPARED_AT_ONCE)
        self.fetches = Threads(FETCHED_AT_ONCE)

    def check_model(self, name: str | None) -> None:
        check_model(name, self.backend, self.settings)


class Wishes(Protocol):
    """A request's body, read."""

    @property
    def model(self) -> str | None: ...
    @property
    def stream(self) -> bool | None: ...


class Written(Protocol):
    """An answer as it comes about, and how it is written."""

    def opening(self) -> bytes:
        """The first events of a stream."""
        ...

    def step(self, index: int, chunk: Chunk) -> bytes:
        """The events for the next chunk of completion ``index``; the closing ones too if it is the last."""
        ...

    def take(self, index: int, chunk: Chunk) -> None:
        """The same where nothing is written before the end."""
        ...

    def whole(self) -> dict[str, Any]: ...
    def failed(self, error: Exception) -> bytes:
        """The last event of a stream that ends by ``error``."""
        ...

    def note(self) -> str:
        """A few words for the log."""
        ...


Asked = TypeVar("Asked", bound=Wishes)


class Endpoint(Generic[Asked]):
    """An ASGI application of its own, not a function that returns a response: so that one ``finally``
    holds the tickets from their start to the last byte sent, and a client's hang-up is noticed at every
    step between. Those who fill it in say what its requests mean.
    """

    def __init__(self, workshop: Workshop) -> None:
        self.workshop = workshop

    def parse(self, body: bytes) -> Asked:
        """Called in a thread if ``body`` is long. Raises ``InvalidRequest``."""
        raise NotImplementedError

    def sampling(self, wishes: Asked) -> SamplingParams:
        """Raises ``InvalidRequest``."""
        raise NotImplementedError

    def count(self, wishes: Asked) -> int:
        """How many completions are asked for."""
        raise NotImplementedError

    async def prepare(self, wishes: Asked, sampling: SamplingParams, held: Held) -> Sequence[Prepared]:
        """As many as ``count`` says; blocking work goes to the workshop's threads."""
        raise NotImplementedError

    def reply(self, wishes: Asked, prepared: Sequence[Prepared], request_id: str) -> Written:
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shop = self.workshop
        shop.closing.check()
        request = Request(scope, receive)
        body = await shop.closing.watch(read_body(request, shop.settings.body_limit))
        streaming = _Streaming(send)
        try:
            await shop.closing.watch(self._answer(body, request, streaming), receive)
        except ClientGone:
            raise
        except Exception as error:
            shop.closing.judge(error)
            if not streaming.started:
                raise
            # The status line is long gone, so the failure is told as an event, and the stream ends without
            # [DONE].
            await streaming.send(streaming.failed(error))
            await streaming.end()
            raise  # to the door, which logs it
        finally:
            shop.trimming.ended()

    async def _answer(self, body: bytes, request: Request, streaming: "_Streaming") -> None:
        shop = self.workshop
        # A short one is read in less time than a thread takes to begin.
        wishes = self.parse(body) if len(body) <= SHORT_BODY else await shop.work.run(self.parse, body)
        shop.check_model(wishes.model)
        sampling = self.sampling(wishes)
        # Before anything is fetched or decoded: who is refused should cost next to nothing.
        with shop.places.take(self.count(wishes)) as held:
            await self._run(wishes, sampling, request, streaming, held)

    async def _run(
        self, wishes: Asked, sampling: SamplingParams, request: Request, streaming: "_Streaming", held: Held
    ) -> None:
        shop, ping = self.workshop, self.workshop.settings.ping_seconds
        prepared = await self.prepare(wishes, sampling, held)
        if shop.sleeper is not None and shop.sleeper.asleep:
            # A request would wake it, too, but one that cannot is then told so with a status of its own.
            await asyncio.wrap_future(shop.sleeper.wake())
        reply = self.reply(wishes, prepared, request.state.request_id)

        def ended(last: Chunk | Exception) -> None:
            held.give_back()
            if isinstance(last, Chunk):
                shop.meters.ended(last)

        with Choices(shop.backend, prepared, sampling, ended) as choices:
            if wishes.stream:
                streaming.failed = reply.failed
                await choices.taken(ping)
                await streaming.send(reply.opening())
                async for index, chunk in choices.chunks(ping):
                    await streaming.send(PING if chunk is None else reply.step(index, chunk))
                request.state.note = reply.note()
                await streaming.end()
                return
            async for index, chunk in choices.chunks(ping):
                if chunk is not None:
                    reply.take(index, chunk)
        request.state.note = reply.note()
        await JSONReply(reply.whole())(request.scope, request.receive, streaming.raw_send)


class _Streaming:
    """The sending half of a connection; remembers whether events have begun."""

    def __init__(self, send: Send) -> None:
        self.raw_send = send
        self.started = False
        self.failed: Callable[[Exception], bytes] = failure_event

    async def send(self, data: bytes) -> None:
        if not self.started:
            self.started = True
            start = {"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS}
            await self.raw_send(start)
        if data:
            await self.raw_send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self.raw_send({"type": "http.response.body", "body": b"", "more_body": False})


def failure_event(error: Exception) -> bytes:
    """The end of a stream that broke off, as OpenAI's chats have it."""
    return event(error_body(error))


async def read_body(request: Request, limit: int) -> bytes:
    """The body, at most ``limit`` bytes, as it is. Raises ``RequestTooLarge`` and ``PackedRequest``; before
    any of it has come if its head says enough.

    A body somewhat too large is read to its end and thrown away: a client that is still sending would see
    a broken connection instead of the answer.
    """
    packed = request.headers.get("content-encoding", "identity")
    if packed.strip().lower() != "identity":
        raise PackedRequest(
            f"the body has the Content-Encoding {packed[:40]!r}, and this server unpacks none",
            "send it as it is",
        )
    if int(request.headers.get("content-length", 0)) > limit:  # h11 lets nothing through but digits
        raise StillToCome(_too_large(limit), _SMALLER)
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size <= limit:
            pieces.append(piece)
        else:
            pieces.clear()
        if size > 4 * limit:
            break
    if size > limit:
        raise RequestTooLarge(_too_large(limit), _SMALLER)
    return b"".join(pieces)


def _too_large(limit: int) -> str:
    return f"the request is larger than the {format_bytes(limit)} that this server takes"


def check_model(name: str | None, backend: LocalBackend, settings: ServerSettings) -> None:
    """Raises ``UnknownModel`` unless ``name`` means the one model that is served; no name means it too."""
    if name and name not in (backend.model, *settings.aliases):
        raise UnknownModel(
            f"the model {name[:200]!r} is not served here",
            f"this server runs {backend.model!r}",
            param="model",
        )
