"""A model behind a URL: ``vlfit serve``, or any server with OpenAI's chat completions.

A vlfit server also reports image sizes and its own timings; of others only the usage is known, and times are
measured here. Requests run side by side in one thread with an event loop.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from vlfit.api.conversation import Conversation, TextPart, Tool
from vlfit.api.engine_options import SleepLevel
from vlfit.api.outputs import Chunk, ImageSeen, Listener
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends import openai_replies, openai_wire
from vlfit.backends.base import (
    Backend,
    Capabilities,
    Prepared,
    QueuedStream,
    Ticket,
    check_prepared,
)
from vlfit.backends.openai_replies import EventParser, ReplyReader
from vlfit.backends.server_url import (
    SILENCE_SECONDS,
    api_base_url,
    is_loopback_url,
    redirect_error,
    translate_httpx_errors,
    without_secrets,
)
from vlfit.errors import EngineStopped, QueueFull, RemoteError, VlfitError
from vlfit.prompt.reasoning import NO_THINKING

if TYPE_CHECKING:
    import httpx


AsyncFunction = Callable[[], Coroutine[Any, Any, None]]

CLOSING_SECONDS = 5.0  # for connections to close; the daemon thread delays nothing after that


class RemoteTask:
    """An asyncio task for one request; ``RequestLoop.start`` creates it, any thread may ``cancel`` it.

    ``function`` does the request. ``on_cancelled``: called on the event loop after a cancellation.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, function: AsyncFunction, on_cancelled: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._function: AsyncFunction | None = function
        self._on_cancelled = on_cancelled
        self._task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """Cancel the task; returns at once. Any thread may call it, more than once."""
        with suppress(RuntimeError):  # the loop is closed, so all its tasks have ended
            self._loop.call_soon_threadsafe(self._cancel)

    def begin(self) -> asyncio.Task[None]:
        """Create and return the asyncio task. To be called once, on the event loop."""
        function, self._function = self._function, None  # a ticket may outlive the request's body
        assert function is not None
        self._task = self._loop.create_task(function())
        self._task.add_done_callback(self._done)
        return self._task

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._on_cancelled()


class RequestLoop:
    """A daemon thread with an event loop; the first call of ``start`` starts it.

    ``closed``: ``close`` was called.
    """

    def __init__(self, name: str) -> None:
        self.closed = False
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # of the requests; used on the loop alone
        self._finally: AsyncFunction | None = None

    def start(self, function: AsyncFunction, on_cancelled: Callable[[], None]) -> RemoteTask:
        """Run ``function`` on the loop, without waiting for it. ``function`` must catch its own errors.

        ``on_cancelled``: called on the loop if the task is cancelled. Raises ``EngineStopped`` after
        ``close``.
        """
        with self._lock:
            if self.closed:
                raise EngineStopped("the connection to the server was closed", "Open the backend again.")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._run, args=(self._loop,), name=self._name, daemon=True
                )
                self._thread.start()
            running = RemoteTask(self._loop, function, on_cancelled)
            self._loop.call_soon_threadsafe(self._begin, running)
        return running

    def close(self, cleanup: AsyncFunction) -> None:
        """Cancel all requests, run ``cleanup``, and end the thread; waits at most ``CLOSING_SECONDS``.

        If no task was ever started, ``cleanup`` is not run. Further calls have no effect.
        """
        with self._lock:
            if self.closed or self._loop is None:
                self.closed = True
                return
            self.closed = True
            self._finally = cleanup
            self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSING_SECONDS)

    def _begin(self, request: RemoteTask) -> None:
        task = request.begin()
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.run_forever()
        try:
            loop.run_until_complete(self._end())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    async def _end(self) -> None:
        # Requests alone: each ends the tasks that it started. One of anyio's that is cancelled before its
        # first step leaves a coroutine that was never awaited.
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._finally is not None:
            await self._finally()


CONNECT_SECONDS = 5.0
# Less than uvicorn's 5: else a request would now and then meet a connection that is being closed.
KEEPALIVE_SECONDS = 2.0
MAX_CONCURRENT = 64
MAX_TRIES = 8
LONGEST_WAIT = 120.0  # seconds; the openai package also waits no longer
DRAIN_SECONDS = 1.0  # to read to the end of a reply, so that its connection can be used again

logger = logging.getLogger(__name__)


def closed_error() -> EngineStopped:
    """The error of a request that was open when its backend was closed, however its connection ended."""
    return EngineStopped(
        "the connection was closed before the answer was complete", "Send the request again."
    )


@dataclass(frozen=True, slots=True)
class PreparedRemoteRequest:
    """A request's path and the part of its body with messages or prompt; ``start`` adds the rest.

    ``path``: below ``/v1``, such as ``chat/completions``. ``prompt_fields``: JSON members, without braces.
    ``submitted_at``: when preparation began (``time.perf_counter``). ``max_tokens`` 0: unknown.
    ``images``, ``prompt_tokens`` and ``image_tokens``: as in ``Prepared`` without token counts.
    """

    path: str
    prompt_fields: bytes
    submitted_at: float
    max_tokens: int
    images: tuple[ImageSeen, ...] = ()
    prompt_tokens: int = 0
    image_tokens: int | None = 0


class RemoteTicket(Ticket):
    """A request sent to a server.

    ``refusal``: once ``accepted`` is False the error, ``EngineStopped`` if the request was cancelled.
    """

    def __init__(self) -> None:
        self.accepted: Future[bool] = Future()
        self.refusal: Exception | None = None
        self.task: RemoteTask | None = None

    def set_outcome(self, refusal: Exception | None) -> None:
        """Complete ``accepted``: True if ``refusal`` is None, else False. Further calls have no effect."""
        if not self.accepted.done():
            self.refusal = refusal
            self.accepted.set_result(refusal is None)

    def cancel(self) -> None:
        """Cancel the request and close its connection."""
        if self.task is not None:
            self.task.cancel()


class RemoteBackend(Backend):
    """A model of the server at ``url``. The constructor fetches ``/v1/models``, to check URL and key.

    - ``url``: may end in ``/v1`` or not.
    - ``model``: None: the first that the server lists. A name that the server does not list is sent all the
      same.
    - ``context``: None: as the server reports it.
    - ``max_tokens``: default of requests without a limit; None: the server's.
    - ``max_concurrent``: most requests sent at a time; others wait in this process.
    - ``behind_server``: requests come from clients of a vlfit server: a full queue is an error at once, and
      errors are those for clients (``openai_replies.error_for_clients``).
    - ``llguidance``: as in ``openai_wire.grammar_fields``.

    The attribute ``server`` says what runs there: vlfit, vLLM or another. Raises ``ServerUnreachable``,
    ``RemoteError``, ``WrongApiKey``, or ``UsageError`` for an invalid URL.
    """

    kind = "remote"
    capabilities = Capabilities(counts_tokens=False)

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        model: str | None = None,
        *,
        context: int | None = None,
        max_tokens: int | None = None,
        max_concurrent: int = MAX_CONCURRENT,
        behind_server: bool = False,
        llguidance: bool = False,
    ) -> None:
        import httpx  # takes 0.1 s, which models in this process need not pay

        self._url = api_base_url(url)
        self.device = without_secrets(self._url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS, pool=None)
        self._client = httpx.Client(
            headers=self._headers, timeout=self._timeout, trust_env=not is_loopback_url(self._url)
        )
        self._request_loop = RequestLoop("vlfit-remote")
        self._async_client: httpx.AsyncClient | None = None
        self._slots = asyncio.Semaphore(max_concurrent)
        self._max_tokens = max_tokens
        self._behind_server = behind_server
        self._llguidance = llguidance
        try:
            cards = self._models(optional=model is not None)
        except BaseException:
            self._client.close()
            raise
        card = next((card for card in cards if model in (None, card.get("id"))), cards[0] if cards else {})
        self.model: str = model or str(card.get("id"))
        length = card.get("max_model_len")  # vLLM's field, and vlfit's
        self.context: int | None = context or (length if isinstance(length, int) and length > 0 else None)
        extras = card.get("vlfit")
        self.server: openai_wire.ServerKind = "vllm" if card.get("owned_by") == "vllm" else "other"
        if isinstance(extras, dict):
            self.server = "vlfit"
        self._defaults = _parse_sampling((extras or {}).get("default_sampling") if extras else None)

    def default_sampling(self) -> SamplingParams:
        """The model's own generation settings as a vlfit server reports them; greedy for other servers."""
        return self._defaults

    def prepare(
        self, conversation: Conversation, sampling: SamplingParams, tools: tuple[Tool, ...] = ()
    ) -> PreparedRemoteRequest:
        """Check pictures and parameters, and encode the request; nothing is sent, no tokens are counted.

        Raises ``PictureError`` or ``InvalidRequest``.
        """
        began = time.perf_counter()
        content = openai_wire.encode_chat_fields(conversation, tools, self.server)
        prepared = self._prepare_request("chat/completions", content, sampling, began)
        has_images = any(not isinstance(part, TextPart) for message in conversation for part in message.parts)
        return replace(prepared, image_tokens=None) if has_images else prepared

    def prepare_text(self, prompt: str | tuple[int, ...], sampling: SamplingParams) -> PreparedRemoteRequest:
        """``prepare`` for plain text or token ids, which ``start`` sends to ``/v1/completions``."""
        return self._prepare_request(
            "completions", openai_wire.encode_prompt_field(prompt), sampling, time.perf_counter()
        )

    def start(self, prepared: Prepared, sampling: SamplingParams, listener: Listener) -> RemoteTicket:
        """Send the request, on another thread, and return.

        If the server's queue is full (status 429 with a ``Retry-After`` of at most ``LONGEST_WAIT`` seconds),
        the request is sent again after that time, ``MAX_TRIES`` times in all; with ``behind_server`` a full
        queue is an error at once.
        """
        remote_prepared = check_prepared(prepared, PreparedRemoteRequest)
        ticket = RemoteTicket()

        def on_cancelled() -> None:
            closed = self._request_loop.closed
            stopped = closed_error()
            ticket.set_outcome(stopped)
            listener(stopped if closed else Chunk("", finish_reason="cancelled"))

        async def run() -> None:
            try:
                await self._run_request(remote_prepared, sampling, listener, ticket)
            except Exception as error:
                error = closed_error() if self._request_loop.closed else self._translate(error)
                ticket.set_outcome(error)
                listener(error)

        ticket.task = self._request_loop.start(run, on_cancelled)
        return ticket

    def without_thinking(self, sampling: SamplingParams) -> SamplingParams:
        """``sampling`` with reasoning turned off, if the server is vlfit's: others may refuse the field."""
        if self.server != "vlfit" or sampling.template_variables is not None:
            return sampling
        return replace(sampling, template_variables=NO_THINKING)

    def stream(self, conversation: Conversation, sampling: SamplingParams) -> QueuedStream:
        """Prepare and start a request, and wait until the server accepts it.

        Raises as ``prepare``, and the server's refusal.
        """
        stream = QueuedStream(self, self.prepare(conversation, sampling), sampling)
        ticket = stream.ticket
        assert isinstance(ticket, RemoteTicket)
        try:
            accepted = ticket.accepted.result()
        except BaseException:  # Ctrl-C before the first chunk
            ticket.cancel()
            raise
        if not accepted and ticket.refusal is not None:
            raise ticket.refusal
        return stream

    def sleep_server(self, level: SleepLevel = "auto") -> None:
        """Put a vlfit server to sleep. Blocks until its open requests have ended and it sleeps.

        ``level``: where the weights are kept, as for ``Backend.sleep``. Raises the server's refusal.
        """
        self._post("sleep", {"park": level})

    def wake_server(self) -> None:
        """Wake a vlfit server; blocks until it is awake. Raises ``CannotWake`` if its memory is not free."""
        self._post("wake", {})

    def close(self) -> None:
        """Cancel all requests and close all connections."""
        self._request_loop.close(self._close_client)
        self._client.close()

    def _prepare_request(
        self, path: str, content: bytes, sampling: SamplingParams, began: float
    ) -> PreparedRemoteRequest:
        # Invalid parameters are refused before the request waits.
        openai_wire.encode_generation_fields(
            sampling, self.model, self.server, chat=path != "completions", llguidance=self._llguidance
        )
        max_tokens = sampling.max_tokens or self._max_tokens or self.context or 0
        return PreparedRemoteRequest(path, content, began, min(max_tokens, self.context or max_tokens))

    async def _run_request(
        self,
        prepared: PreparedRemoteRequest,
        sampling: SamplingParams,
        listener: Listener,
        ticket: RemoteTicket,
    ) -> None:
        """Send the request and deliver its chunks to the last. Runs in the event loop."""
        if sampling.max_tokens is None:
            sampling = replace(sampling, max_tokens=self._max_tokens)
        rest = openai_wire.encode_generation_fields(
            sampling,
            self.model,
            self.server,
            chat=prepared.path != "completions",
            llguidance=self._llguidance,
        )
        body = b"{" + prepared.prompt_fields + b"," + rest + b"}"
        reader, events = ReplyReader(prepared.submitted_at, prepared.image_tokens), EventParser()
        with translate_httpx_errors(self.device):
            async with self._slots, self._accepted_response(prepared.path, body) as response:
                ticket.set_outcome(None)
                pieces = response.aiter_bytes()
                async for piece in pieces:
                    for event in events.feed(piece):
                        chunk = _read_event(reader, event)
                        if chunk is not None:
                            listener(chunk)
                    if events.done:
                        break
                events.check_complete()
                listener(reader.last_chunk())
                with suppress(Exception):
                    async with asyncio.timeout(DRAIN_SECONDS):
                        async for _ in pieces:
                            pass

    @asynccontextmanager
    async def _accepted_response(self, path: str, body: bytes) -> "AsyncIterator[httpx.Response]":
        """The response to a request that the server accepts; raises its refusal."""
        client = self._connections()
        request = client.build_request(
            "POST", f"{self._url}/{path}", content=body, headers={"Content-Type": "application/json"}
        )
        for tries_left in reversed(range(MAX_TRIES)):
            response = await client.send(request, stream=True)
            try:
                if response.status_code == 200:
                    yield response
                    return
                text = (await response.aread()).decode("utf-8", "replace")
            finally:
                await response.aclose()
            wait = _retry_seconds(response)
            if wait is None or not tries_left or self._behind_server:
                raise _refusal(response, text)
            logger.info("the server at %s is full; trying again in %.0f s", self.device, wait)
            await asyncio.sleep(wait)

    def _connections(self) -> "httpx.AsyncClient":
        if self._async_client is None:
            import httpx

            limits = httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_SECONDS)
            self._async_client = httpx.AsyncClient(
                headers=self._headers,
                timeout=self._timeout,
                limits=limits,
                trust_env=not is_loopback_url(self._url),
            )
        return self._async_client

    async def _close_client(self) -> None:
        if self._async_client is not None:
            await self._async_client.aclose()

    def _translate(self, error: Exception) -> Exception:
        return (
            openai_replies.error_for_clients(error, self.device)
            if self._behind_server and isinstance(error, VlfitError)
            else error
        )

    def _post(self, what: str, body: dict[str, str]) -> None:
        import httpx

        with translate_httpx_errors(self.device):
            response = self._client.post(
                f"{self._url}/vlfit/{what}", json=body, timeout=httpx.Timeout(None, connect=CONNECT_SECONDS)
            )
        if response.status_code != 200:
            raise openai_replies.reply_error(response.status_code, response.text)

    def _models(self, *, optional: bool) -> list[dict[str, Any]]:
        """The entries of ``/v1/models``; ``optional``: a server without that route is fine."""
        with translate_httpx_errors(self.device):
            response = self._client.get(f"{self._url}/models")
        if (redirect := redirect_error(response)) is not None:
            raise redirect
        if response.status_code == 404 and optional:
            return []
        if response.status_code != 200:
            raise openai_replies.reply_error(response.status_code, response.text)
        try:
            cards = [card for card in response.json()["data"] if isinstance(card, dict)]
        except (ValueError, KeyError, TypeError):
            raise RemoteError(
                f"{self.device}/models is not OpenAI's API: " + openai_replies.summarize_reply(response.text),
                openai_replies.URL_HINT,
            ) from None
        if not cards and not optional:
            raise RemoteError(f"the server at {self.device} lists no model", "Name one with --model.")
        return cards


def _parse_sampling(values: Any) -> SamplingParams:
    names = {field.name for field in fields(SamplingParams)}  # a newer server may send more
    known = {name: value for name, value in (values or {}).items() if name in names}
    as_tuples = {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
    return replace(SamplingParams(), **{**known, **as_tuples})


def _read_event(reader: ReplyReader, event: dict[str, Any]) -> Chunk | None:
    try:
        return reader.read_event(event)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RemoteError(
            f"the server's reply does not have OpenAI's format: {error!r}",
            openai_replies.URL_HINT,
        ) from error


def _refusal(response: "httpx.Response", text: str) -> VlfitError:
    error = redirect_error(response) or openai_replies.reply_error(response.status_code, text)
    wait = openai_replies.parse_retry_after(response.headers.get("retry-after"))
    if isinstance(error, QueueFull) and wait is not None:
        error.retry_after = max(math.ceil(wait), 1)
    return error


def _retry_seconds(response: "httpx.Response") -> float | None:
    """Seconds until the next try if the server is full; None: do not try again."""
    wait = openai_replies.parse_retry_after(response.headers.get("retry-after"))
    if response.status_code != 429 or wait is None or wait > LONGEST_WAIT:
        return None
    return wait
