"""``POST /v1/chat/completions``: the life of one request, from its bytes to its last event.

Knows: the order of the steps and who frees what. Does not know: how a picture becomes tokens (the
backend), how an answer is written (``replies``), how a request is refused (``failures``).
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from vlfit.backends.base import LocalBackend, Prepared, Sleeper, Ticket
from vlfit.engine.answer import Chunk
from vlfit.engine.sampling import SamplingParams
from vlfit.errors import EngineStopped, InvalidRequest, RequestTooLarge, UnknownModel
from vlfit.server.closing import ClientGone, Closing
from vlfit.server.conversation import build_conversation
from vlfit.server.failures import JSONReply, error_body
from vlfit.server.host_memory import Trimming
from vlfit.server.places import Held, Places
from vlfit.server.replies import PING, Reply, event
from vlfit.server.schemas import ChatRequest, parse_chat_request
from vlfit.server.settings import ServerSettings
from vlfit.server.threads import Threads
from vlfit.units import format_bytes

PREPARED_AT_ONCE = 8
FETCHED_AT_ONCE = 64
EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would otherwise hold the words back
]


class ChatEndpoint:
    """An ASGI application of its own, not a function that returns a response: so that one ``finally``
    holds the tickets from their start to the last byte sent, and a client's hang-up is noticed at every
    step between.
    """

    def __init__(self, backend: LocalBackend, settings: ServerSettings, closing: Closing) -> None:
        self._backend = backend
        self._settings = settings
        self._closing = closing
        self.places = Places(backend, settings.places)
        self._trimming = Trimming(lambda: bool(self.places.taken))
        # Apart, so that waiting for slow web servers never keeps requests from being prepared.
        self._work = Threads(PREPARED_AT_ONCE)
        self._fetches = Threads(FETCHED_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._closing.check()
        request = Request(scope, receive)
        body = await self._closing.watch(read_body(request, self._settings.body_limit))
        streaming = _Streaming(send)
        try:
            await self._closing.watch(self._answer(body, request, streaming), receive)
        except ClientGone:
            raise
        except Exception as error:
            if not streaming.started:
                raise
            # The status line is long gone, so the failure is told as an event, and the stream ends without
            # [DONE].
            await streaming.send(event(error_body(error)))
            await streaming.end()
            raise  # to the door, which logs it
        finally:
            self._trimming.ended()

    async def _answer(self, body: bytes, request: Request, streaming: "_Streaming") -> None:
        wishes = await self._work.run(parse_chat_request, body)
        wishes.refuse_unsupported()
        check_model(wishes.model, self._backend, self._settings)
        sampling = sampling_of(wishes, self._backend.default_sampling())
        # Before anything is fetched or decoded: who is refused should cost next to nothing.
        with self.places.take(wishes.n or 1) as held:
            await self._run(wishes, sampling, request, streaming, held)

    async def _run(
        self,
        wishes: ChatRequest,
        sampling: SamplingParams,
        request: Request,
        streaming: "_Streaming",
        held: Held,
    ) -> None:
        conversation = await build_conversation(wishes, self._settings, self._fetches)
        prepared = await self._work.run_holding(held, self._backend.prepare, conversation, sampling)
        if isinstance(self._backend, Sleeper) and self._backend.asleep:
            # A request would wake it, too, but one that cannot is then told so with a status of its own.
            await asyncio.wrap_future(self._backend.wake())
        reply = self._reply(wishes, prepared, request.state.request_id)
        count = len(reply.choices)
        with Choices(self._backend, prepared, sampling, count, held.give_back) as choices:
            if wishes.stream:
                await streaming.send(reply.opening())
                async for index, chunk in choices.chunks(self._settings.ping_seconds):
                    await streaming.send(PING if chunk is None else reply.step(index, chunk))
                request.state.note = reply.note()
                await streaming.end()
                return
            async for index, chunk in choices.chunks(self._settings.ping_seconds):
                if chunk is not None:
                    reply.choices[index].add(chunk)
        request.state.note = reply.note()
        await JSONReply(reply.whole())(request.scope, request.receive, streaming.raw_send)

    def _reply(self, wishes: ChatRequest, prepared: Prepared, request_id: str) -> Reply:
        return Reply(
            f"chatcmpl-{request_id}",
            self._backend.model,
            wishes.n or 1,
            prompt_tokens=prepared.prompt_tokens,
            image_tokens=prepared.image_tokens,
            images=prepared.images,
            ignored=wishes.ignored(),
            with_logprobs=bool(wishes.logprobs),
            with_usage=bool(wishes.stream_options and wishes.stream_options.include_usage),
        )


class _Streaming:
    """The sending half of a connection; remembers whether events have begun."""

    def __init__(self, send: Send) -> None:
        self.raw_send = send
        self.started = False

    async def send(self, data: bytes) -> None:
        if not self.started:
            self.started = True
            start = {"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS}
            await self.raw_send(start)
        if data:
            await self.raw_send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self.raw_send({"type": "http.response.body", "body": b"", "more_body": False})


class Choices:
    """The completions of one prepared request, all started on entering, none left running on leaving.

    ``ended`` is called when one of them is over, however slowly its client reads.
    """

    def __init__(
        self,
        backend: LocalBackend,
        prepared: Prepared,
        sampling: SamplingParams,
        count: int,
        ended: Callable[[], None],
    ) -> None:
        self._backend = backend
        self._prepared = prepared
        self._sampling = sampling
        self._count = count
        self._ended = ended
        self._tickets: list[Ticket] = []
        self._arrived: asyncio.Queue[tuple[int, Chunk | Exception]] = asyncio.Queue()

    def __enter__(self) -> "Choices":
        try:
            for index in range(self._count):
                self._start(index, asyncio.get_running_loop())
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

    async def chunks(self, ping_seconds: float) -> AsyncIterator[tuple[int, Chunk | None]]:
        """Chunks as they come, with the number of their choice; ``None`` after each ``ping_seconds`` of
        silence.
        """
        running = self._count
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

    def _start(self, index: int, loop: asyncio.AbstractEventLoop) -> None:
        def listen(item: Chunk | Exception) -> None:
            """Called from the engine's thread."""
            with suppress(RuntimeError):  # the event loop has ended: nobody reads any more
                loop.call_soon_threadsafe(self._arrive, index, item)

        # With one seed for all, the choices would be one and the same text.
        seed = self._sampling.seed
        sampling = (
            replace(self._sampling, seed=seed + index) if seed is not None and index else self._sampling
        )
        self._tickets.append(self._backend.start(self._prepared, sampling, listen))

    def _arrive(self, index: int, item: Chunk | Exception) -> None:
        if isinstance(item, Exception) or item.finish_reason is not None:
            self._ended()
        self._arrived.put_nowait((index, item))

    def _cancel(self) -> None:
        for ticket in self._tickets:
            ticket.cancel()


async def read_body(request: Request, limit: int) -> bytes:
    """The body, at most ``limit`` bytes. Raises ``RequestTooLarge``.

    A body somewhat too large is read to its end and thrown away: a client that is still sending would see
    a broken connection instead of the answer.
    """
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
        raise RequestTooLarge(
            f"the request is larger than the {format_bytes(limit)} that this server takes",
            "send smaller or fewer pictures, or their URLs",
        )
    return b"".join(pieces)


def check_model(name: str | None, backend: LocalBackend, settings: ServerSettings) -> None:
    """Raises ``UnknownModel`` unless ``name`` means the one model that is served; no name means it too."""
    if name and name not in (backend.model, *settings.aliases):
        raise UnknownModel(
            f"the model {name[:200]!r} is not served here",
            f"this server runs {backend.model!r}",
            param="model",
        )


def sampling_of(wishes: ChatRequest, default: SamplingParams) -> SamplingParams:
    """What was asked for, over the checkpoint's own settings. Raises ``InvalidRequest``."""
    if wishes.top_logprobs is not None and not wishes.logprobs:
        raise InvalidRequest(
            "top_logprobs is set without logprobs", "set logprobs to true", param="top_logprobs"
        )
    max_tokens = wishes.max_tokens if wishes.max_completion_tokens is None else wishes.max_completion_tokens
    if wishes.max_tokens not in (None, max_tokens):
        raise InvalidRequest(
            f"max_tokens is {wishes.max_tokens} and max_completion_tokens is {max_tokens}",
            "they are two names of one limit: send one of them",
            param="max_tokens",
        )
    stop = [wishes.stop] if isinstance(wishes.stop, str) else wishes.stop
    asked: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": wishes.temperature,
        "top_p": wishes.top_p,
        "top_k": 0 if wishes.top_k == -1 else wishes.top_k,  # vLLM writes "off" as -1
        "min_p": wishes.min_p,
        "presence_penalty": wishes.presence_penalty,
        "frequency_penalty": wishes.frequency_penalty,
        "repetition_penalty": wishes.repetition_penalty,
        "seed": wishes.seed,
        "stop": None if stop is None else tuple(stop),
        "stop_token_ids": None if wishes.stop_token_ids is None else tuple(wishes.stop_token_ids),
        "ignore_eos": wishes.ignore_eos,
        "top_logprobs": (wishes.top_logprobs or 0) if wishes.logprobs else None,
        "loop_guard": wishes.loop_guard,
    }
    return replace(default, **{name: value for name, value in asked.items() if value is not None})
