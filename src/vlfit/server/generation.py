"""The life cycle of a generation request, from its body to its last event, for all dialects.

``Endpoint`` runs the steps: read, parse, admit, prepare, generate, write. Its subclasses in the dialects'
folders define the fields and the output format.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from vlfit.api.outputs import Chunk
from vlfit.api.pooling import ModelKind
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Backend, Prepared, Ticket
from vlfit.errors import EngineStopped, PackedRequest, RequestTooLarge
from vlfit.plan.actual import Expectation
from vlfit.server.admin.metrics import RequestMetrics
from vlfit.server.chat.inline_files import BodyReader, ReceivedBody, parse_request, use_files
from vlfit.server.error_replies import BodyNotRead, EncodedJSON, JSONReply
from vlfit.server.http.admission import AdmissionQueue, Slots
from vlfit.server.http.disconnect import ClientDisconnected, Shutdown
from vlfit.server.http.malloc import HeapTrimmer
from vlfit.server.http.threads import DaemonThreadPool
from vlfit.server.models.served_models import ServedModel, ServedModels
from vlfit.server.server_settings import ServerSettings
from vlfit.units import KIB, format_bytes

MAX_PREPARE_THREADS = 8
MAX_PICTURE_THREADS = 64  # they wait for decode workers most of the time
MAX_FETCH_THREADS = 64
MAX_INLINE_BODY = 16 * KIB  # bytes; parsing takes less time than starting a thread
_SMALLER_HINT = "Send a smaller request."
_SMALLER_FILES_HINT = "Send smaller or fewer pictures, or their URLs."
STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would otherwise buffer the stream
]


class CompletionGroup:
    """The completions of one request: all started on entering the context, all cancelled on leaving.

    Inside, for a stream await ``wait_until_accepted``, then iterate over ``chunks``. There is one completion
    for each of ``prepared``, in which the same prompt may occur several times; if a seed is set, completion
    ``i`` uses ``seed + i``. ``on_end`` is called on the event loop with the last chunk of each completion, or
    its error, as soon as it ends, no matter how slowly the client reads. ``window``: completions that run at
    a time, the next as one ends; None: all at once.
    """

    def __init__(
        self,
        backend: Backend,
        prepared: Sequence[Prepared],
        sampling: SamplingParams,
        on_end: Callable[[Chunk | Exception], None],
        window: int | None = None,
    ) -> None:
        self._backend = backend
        self._prepared = deque(enumerate(prepared))  # not started yet
        self._count = len(prepared)
        self._window = window or len(prepared)
        self._sampling = sampling
        self._on_end = on_end
        self._tickets: list[Ticket] = []
        self._chunks: asyncio.Queue[tuple[int, Chunk | Exception]] = asyncio.Queue()

    def __enter__(self) -> "CompletionGroup":
        try:
            for _ in range(min(self._window, self._count)):
                self._start(*self._prepared.popleft(), asyncio.get_running_loop())
        except BaseException:
            self._cancel()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._cancel()
        # Break the reference cycle ticket -> listener -> self -> ticket: pictures would otherwise stay in
        # memory until a full garbage collection, which comes every few hundred requests.
        self._tickets.clear()
        self._prepared.clear()

    async def wait_until_accepted(self, seconds: float) -> None:
        """Wait, at most ``seconds``, until a remote backend's server has accepted all completions.

        Returns at once for engines of this process, and after ``seconds`` even if some are not accepted yet.
        Raises that server's refusal, so that it can become a status code before any byte is sent.
        """
        waited = [
            asyncio.wrap_future(ticket.accepted) for ticket in self._tickets if ticket.accepted is not None
        ]
        if not waited:
            return
        await asyncio.wait(waited, timeout=seconds)
        while any(each.done() and not each.result() for each in waited):
            _, item = await self._chunks.get()
            if isinstance(item, Exception):
                raise item

    async def chunks(self, ping_seconds: float) -> AsyncIterator[tuple[int, Chunk | None]]:
        """Yield (completion index, chunk) until all have ended; (0, None) after ``ping_seconds`` of silence.

        Raises the error of a completion, and ``EngineStopped`` if the engine cancelled one.
        """
        running = self._count
        while running:
            try:
                async with asyncio.timeout(ping_seconds):
                    index, item = await self._chunks.get()
            except TimeoutError:
                yield 0, None
                continue
            if isinstance(item, Exception):
                raise item
            if item.finish_reason == "cancelled":  # by the engine: our own cancel comes after the last read
                raise EngineStopped("the engine cancelled the request", "Try again.")
            running -= item.finish_reason is not None
            yield index, item

    def _start(self, index: int, prepared: Prepared, loop: asyncio.AbstractEventLoop) -> None:
        def listen(item: Chunk | Exception) -> None:
            """Called from the engine's thread."""
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(self._receive, index, item)

        # With the same seed, all choices would be the same text.
        seed = self._sampling.seed
        sampling = (
            replace(self._sampling, seed=seed + index) if seed is not None and index else self._sampling
        )
        self._tickets.append(self._backend.start(prepared, sampling, listen))

    def _receive(self, index: int, item: Chunk | Exception) -> None:
        if isinstance(item, Exception) or item.finish_reason is not None:
            self._on_end(item)
            self._start_next()
        self._chunks.put_nowait((index, item))

    @property
    def all_started(self) -> bool:
        """Whether no completion waits for one before it to end."""
        return not self._prepared

    def _start_next(self) -> None:
        """Start the next completion, if any is left, in place of one that has ended."""
        if not self._prepared:
            return
        index, prepared = self._prepared.popleft()
        try:
            self._start(index, prepared, asyncio.get_running_loop())
        except Exception as error:
            self._chunks.put_nowait((index, error))

    def _cancel(self) -> None:
        for ticket in self._tickets:
            ticket.cancel()


# The model of the request that this asyncio task runs; None: no request has named one yet.
_model_in_use: ContextVar[ServedModel | None] = ContextVar("vlfit_model", default=None)


class ServerContext:
    """What all requests of a server share: models, limits, thread pools. Belongs to one event loop.

    ``facts``: returns the server's status (docs/top.md), at most a moment old; ``create_app`` sets it.
    ``prepare_threads``: for parsing and text prompts; ``picture_threads``: for prompts with pictures;
    ``fetch_threads``: for downloads.
    """

    facts: Callable[[], Awaitable[dict[str, Any]]]

    def __init__(
        self,
        backend: Backend,
        settings: ServerSettings,
        shutdown: Shutdown,
        metrics: RequestMetrics,
        models: ServedModels | None = None,
    ) -> None:
        """``backend``: the only model, or all of ``models`` as one; ``models`` None: that only one."""
        self.metrics = metrics
        self.settings = settings
        self.shutdown = shutdown
        self.models = models or ServedModels(ServedModel(backend, settings.aliases, settings.context))
        self.admission = AdmissionQueue(backend, settings.max_completions)
        self.heap_trimmer = HeapTrimmer(lambda: bool(self.admission.in_use))
        # Three pools, so that neither slow downloads nor pictures that are decoded delay other requests.
        self.prepare_threads = DaemonThreadPool(MAX_PREPARE_THREADS)
        self.picture_threads = DaemonThreadPool(MAX_PICTURE_THREADS)
        self.fetch_threads = DaemonThreadPool(MAX_FETCH_THREADS)

    def use_model(self, name: str | None, kind: ModelKind = "chat") -> ServedModel:
        """Find the model that a request names, and make it the ``model`` of this asyncio task.

        ``name`` None or empty: the server's first for ``kind``, else its first. Raises ``UnknownModel``.
        """
        model = self.models.find(name, kind)
        _model_in_use.set(model)
        return model

    @property
    def model(self) -> ServedModel:
        """The model that the request of this asyncio task uses (``use_model``), else the server's first.

        In threads always the first: take it before.
        """
        return _model_in_use.get() or self.models.all[0]

    @property
    def backend(self) -> Backend:
        """The backend of ``model``."""
        return self.model.backend

    @property
    def expectation(self) -> Expectation:
        """The plan of ``model``; without lines if one of several was never loaded."""
        return self.models.expectation(self.model) or self.settings.expectation


class RequestParams(Protocol):
    """The fields of a parsed request body that every endpoint has."""

    @property
    def model(self) -> str | None:
        """The name of the model that the request asks for; None: the server's default."""
        ...

    @property
    def stream(self) -> bool | None:
        """Whether the response is to be a stream; None: not said."""
        ...


class ResponseWriter(Protocol):
    """Formats the chunks of one request's completions as its response.

    Streaming: ``first_events``, then ``events`` per chunk, ``ping`` in silences, ``error_event`` if it fails.
    Not streaming: ``add`` per chunk, then ``body``. After either, ``log_note``.
    """

    def first_events(self) -> bytes:
        """Events sent before the first chunk; may be empty."""

    def events(self, index: int, chunk: Chunk) -> bytes:
        """Events for the next chunk of completion ``index``; may be empty.

        With the last chunk of the last completion to end, also the events that end the stream.
        """

    def ping(self) -> bytes:
        """An event without content, sent into a silent stream so that proxies do not hang up."""

    def add(self, index: int, chunk: Chunk) -> None:
        """Collect the next chunk of completion ``index``, for a response that is not streamed."""

    def body(self) -> dict[str, Any] | EncodedJSON:
        """The whole response of a request that is not streamed."""

    def error_event(self, error: Exception) -> bytes:
        """The last event of a stream that ends with ``error``."""

    def log_note(self) -> str:
        """A few words for the log line."""


Params = TypeVar("Params", bound=RequestParams)


class Endpoint(Generic[Params]):
    """Base of the generation endpoints; subclasses define the fields and the response format.

    Called for each request, in this order: ``parse``, ``sampling_params``, ``reply_without_completion``,
    ``num_completions``, ``prepare``, ``fitted_sampling``, ``response_writer``, ``finished``.

    An ASGI application rather than a function that returns a response, so that one context manager owns
    the running completions until the last byte is sent, and a disconnect is noticed at every step.
    ``stream_type``: media type of a streamed response. ``bare_files``: requests have files as plain base64,
    not as data: URLs; ``file_urls`` returns ``bare_file_url`` of them. ``takes_files``: whether requests may
    have pictures or other files. ``max_tokens_is_cap``: ``max_tokens`` is only the most there may be, as in
    APIs whose clients send limits beyond any context; it is lowered to what the prompt leaves. ``window``:
    as in ``CompletionGroup``; ``num_completions`` is then at most that. ``model_kind``: of the model of a
    request that names none.
    """

    stream_type = "text/event-stream; charset=utf-8"
    bare_files = False
    takes_files = True
    max_tokens_is_cap = False
    window: int | None = None
    model_kind: ModelKind = "chat"

    def __init__(self, context: ServerContext) -> None:
        self.context = context

    def parse(self, body: bytes | bytearray) -> Params:
        """Parse and validate ``body``; called in a thread if it is longer than ``MAX_INLINE_BODY``.

        Raises ``InvalidRequest``.
        """
        raise NotImplementedError

    def file_urls(self, params: Params) -> Sequence[str]:
        """URLs of the pictures and other files in a request, as in ``parse_request``.

        By default none: large files then stay in the parsed request. Raises ``InvalidRequest`` for a part
        that is invalid.
        """
        return ()

    def streams(self, params: Params) -> bool:
        """Whether the response is a stream; by default only if the request asks for one."""
        return bool(params.stream)

    def sampling_params(self, params: Params) -> SamplingParams:
        """Sampling parameters over the checkpoint's defaults. Raises ``InvalidRequest``."""
        raise NotImplementedError

    def num_completions(self, params: Params) -> int:
        """How many completions the request produces."""
        raise NotImplementedError

    async def prepare(self, params: Params, sampling: SamplingParams, slots: Slots) -> Sequence[Prepared]:
        """Fetch and decode pictures and tokenize, in threads; returns one prompt for each completion.

        ``slots``: held until work that cannot be cancelled has ended.
        """
        raise NotImplementedError

    def fitted_sampling(
        self, params: Params, sampling: SamplingParams, prepared: Sequence[Prepared]
    ) -> SamplingParams:
        """Sampling parameters to generate with, now that the prompts are known.

        By default ``sampling``, whose ``max_tokens`` is lowered to what the context has left after the
        longest prompt if ``max_tokens_is_cap``.
        """
        rooms = [self.room(each) for each in prepared] if self.max_tokens_is_cap else []
        room = min((each for each in rooms if each is not None), default=None)
        if room is None or sampling.max_tokens is None or sampling.max_tokens <= room:
            return sampling
        return replace(sampling, max_tokens=room)

    def room(self, prepared: Prepared) -> int | None:
        """Most tokens that the prompt leaves for an answer; None if that is not known."""
        context = self.context.backend.context
        return context - prepared.prompt_tokens if context and prepared.prompt_tokens else None

    def response_writer(
        self, params: Params, prepared: Sequence[Prepared], request_id: str
    ) -> ResponseWriter:
        """The writer of the response; ``prepared``: as ``prepare`` returned it."""
        raise NotImplementedError

    async def reply_without_completion(self, params: Params) -> dict[str, Any] | None:
        """The JSON to reply to a request that generates nothing; None, the default: generate."""
        return None

    def finished(self, params: Params) -> None:
        """Called on the event loop when a request that got its slots is over, however it ended."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = self.context
        context.shutdown.check_accepting()
        request = Request(scope, receive)
        # In a list, from which ``_answer`` takes it: while the request runs, nothing keeps its body.
        reading = read_request(
            request, context.settings.body_limit, bare=self.bare_files, has_files=self.takes_files
        )
        body = [await context.shutdown.run_until_disconnect(reading)]
        sender = _EventSender(send, self.stream_type)
        try:
            await context.shutdown.run_until_disconnect(self._answer(body, request, sender), receive)
        except ClientDisconnected:
            raise
        except Exception as error:
            context.shutdown.stop_if_fatal(error)
            if not sender.started:
                raise
            # The status has been sent, so the error becomes an event, the last of the stream.
            await sender.send(sender.error_event(error))
            await sender.end()
            raise  # for the middleware to log
        finally:
            context.models.request_ended()
            context.heap_trimmer.request_ended()

    async def _answer(self, body: list[ReceivedBody], request: Request, sender: "_EventSender") -> None:
        context = self.context
        params = await self._parse(body.pop())
        context.use_model(params.model, self.model_kind)
        sampling = self.sampling_params(params)
        reply = await self.reply_without_completion(params)
        if reply is not None:
            await JSONReply(reply)(request.scope, request.receive, sender.send_message)
            return
        # Before anything is fetched or decoded, so that a refusal costs next to nothing.
        with context.admission.acquire(self.num_completions(params)) as slots:
            try:
                await self._run(params, sampling, request, sender, slots)
            finally:
                self.finished(params)

    async def _parse(self, body: ReceivedBody) -> Params:
        """Parse ``body``, in a thread if it is long. Large files in it are kept for ``file_of``."""
        if body.size <= MAX_INLINE_BODY:
            return self.parse(body.whole())
        params, files = await self.context.prepare_threads.run(
            parse_request, self.parse, self.file_urls, body
        )
        use_files(files)
        return params

    async def _run(
        self,
        params: Params,
        sampling: SamplingParams,
        request: Request,
        sender: "_EventSender",
        slots: Slots,
    ) -> None:
        context = self.context
        await context.models.load(context.model)
        # With any room for the answer, where ``fitted_sampling`` says later how much there is.
        preparing = replace(sampling, max_tokens=None) if self.max_tokens_is_cap else sampling
        prepared = await self.prepare(params, preparing, slots)
        sampling = self.fitted_sampling(params, sampling, prepared)
        async with context.models.acquire(context.model, len(prepared)) as hold:
            writer = self.response_writer(params, prepared, request.state.request_id)

            def on_end(last: Chunk | Exception) -> None:
                hold.release_one()
                if group.all_started:  # else the next completion takes the slot
                    slots.release_one()
                if isinstance(last, Chunk):
                    context.metrics.record_completion(last)

            group = CompletionGroup(context.backend, prepared, sampling, on_end, self.window)
            await self._respond(params, group, writer, request, sender)

    async def _respond(
        self,
        params: Params,
        completions: CompletionGroup,
        writer: ResponseWriter,
        request: Request,
        sender: "_EventSender",
    ) -> None:
        """Run the completions and send the response."""
        ping = self.context.settings.ping_seconds
        with completions as group:
            if self.streams(params):
                sender.error_event = writer.error_event
                await group.wait_until_accepted(ping)
                await sender.send(writer.first_events())
                async for index, chunk in group.chunks(ping):
                    await sender.send(writer.ping() if chunk is None else writer.events(index, chunk))
                request.state.note = writer.log_note()
                await sender.end()
                return
            async for index, chunk in group.chunks(ping):
                if chunk is not None:
                    writer.add(index, chunk)
        request.state.note = writer.log_note()
        await JSONReply(writer.body())(request.scope, request.receive, sender.send_message)


class _EventSender:
    """Sends the events of a stream; ``started`` once the status has been sent."""

    def __init__(self, send: Send, media_type: str) -> None:
        self.send_message = send
        self.started = False
        self.error_event: Callable[[Exception], bytes] = lambda _: b""  # the writer's, once there is one
        self._headers = [(b"content-type", media_type.encode()), *STREAM_HEADERS]

    async def send(self, data: bytes) -> None:
        if not self.started:
            self.started = True
            start = {"type": "http.response.start", "status": 200, "headers": self._headers}
            await self.send_message(start)
        if data:
            await self.send_message({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self.send_message({"type": "http.response.body", "body": b"", "more_body": False})


async def read_body(request: Request, limit: int) -> bytearray:
    """Read the body of at most ``limit`` bytes.

    Raises ``PackedRequest`` if it is compressed, Starlette's ``ClientDisconnect`` if it ends early, and
    ``RequestTooLarge`` if it is longer: without reading (``BodyNotRead``) if ``Content-Length`` says so, else
    after reading and discarding up to four times ``limit``, since a client that is still sending would see a
    broken connection instead of the error.
    """
    body = bytearray()  # grows in place: joining pieces would take twice the memory, and the GIL for long
    await _receive(request, limit, body.extend, body.clear, _SMALLER_HINT)
    return body


async def read_request(
    request: Request, limit: int, *, bare: bool = False, has_files: bool = True
) -> ReceivedBody:
    """Read the body of at most ``limit`` bytes, and take the large files out of it as it arrives.

    ``bare``: as for ``BodyReader``. ``has_files``: whether the route takes pictures, for the error's hint.
    Raises like ``read_body``.
    """
    reader = BodyReader(bare=bare)
    hint = _SMALLER_FILES_HINT if has_files else _SMALLER_HINT
    await _receive(request, limit, reader.feed, reader.clear, hint)
    return reader.finish()


async def _receive(
    request: Request, limit: int, take: Callable[[bytes], None], discard: Callable[[], None], hint: str
) -> None:
    """Pass the body to ``take`` in pieces; ``discard`` it if it is too long. Raises like ``read_body``.

    ``hint``: what to do about a body that is too long.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise PackedRequest(
            f"the body has Content-Encoding {encoding[:40]!r}; this server decompresses nothing",
            "Send the body uncompressed.",
        )
    if int(request.headers.get("content-length", 0)) > limit:  # h11 has checked that it is digits
        raise BodyNotRead(_too_large(limit), hint)
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size <= limit:
            take(piece)
        else:
            discard()
        if size > 4 * limit:
            break
    if size > limit:
        raise RequestTooLarge(_too_large(limit), hint)


def _too_large(limit: int) -> str:
    return f"the request is larger than {format_bytes(limit)}, the most that this server accepts"
