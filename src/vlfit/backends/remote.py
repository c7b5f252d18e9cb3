"""A model behind a URL: ``vlfit serve``, or any server that speaks OpenAI's chat completions.

Knows: connections, and how they fail. Does not know: how requests are written (``openai_wire``) and replies
read (``openai_replies``), or what runs behind the URL. A vlfit server also tells what it saw of each picture
and how long it took; of any other the usage alone is known, and times are those of our own clock.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from vlfit.api.conversation import Conversation, TextPart, Tool
from vlfit.api.engine_options import Park
from vlfit.api.outputs import Chunk, ImageSeen
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends import openai_replies, openai_wire
from vlfit.backends.base import Closing, Listener, Prepared, QueuedStream, own
from vlfit.backends.openai_replies import Events, ReplyReader
from vlfit.backends.server_url import (
    SILENCE_SECONDS,
    base_url,
    failures_in_words,
    is_here,
    moved,
    without_secrets,
)
from vlfit.errors import EngineStopped, QueueFull, RemoteError, VlfitError

if TYPE_CHECKING:
    import httpx


# Requests that wait for others side by side, all in one thread: an event loop, and who may be in it.
#
# Knows: tasks, threads, how all of it ends. Does not know what a request is (``remote.py``).


Work = Callable[[], Coroutine[Any, Any, None]]

CLOSING_SECONDS = 5.0  # for connections to be closed; the thread is a daemon, so that nobody waits longer


class Running:
    """One request. ``cancel`` may be called from any thread, at any time, more than once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Work, ended: Callable[[], None]) -> None:
        self._loop = loop
        self._work: Work | None = work
        self._ended = ended
        self._task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        with suppress(RuntimeError):  # the loop is closed, and all that was in it has ended
            self._loop.call_soon_threadsafe(self._cancel)

    def begin(self) -> None:
        """Called in the loop."""
        work, self._work = self._work, None  # a ticket may be kept for longer than what was sent
        assert work is not None
        self._task = self._loop.create_task(work())
        self._task.add_done_callback(self._done)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._ended()


class SideBySide:
    """``work`` raises nothing: it tells its failures itself. The thread begins with the first of them."""

    def __init__(self, name: str) -> None:
        self.closed = False
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._last: Callable[[], Coroutine[Any, Any, None]] | None = None

    def start(self, work: Work, ended: Callable[[], None]) -> Running:
        """Begin ``work``; ``ended`` is called if it is cancelled. Raises ``EngineStopped`` once closed."""
        with self._lock:
            if self.closed:
                raise EngineStopped("the connection to the server was closed", "open it again")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._run, args=(self._loop,), name=self._name, daemon=True
                )
                self._thread.start()
            running = Running(self._loop, work, ended)
            self._loop.call_soon_threadsafe(running.begin)
        return running

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel all that runs, then do ``last``, and end the thread. May be called more than once."""
        with self._lock:
            if self.closed or self._loop is None:
                self.closed = True
                return
            self.closed = True
            self._last = last
            self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSING_SECONDS)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.run_forever()
        try:
            loop.run_until_complete(self._end())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._last is not None:
            await self._last()


CONNECT_SECONDS = 5.0
# Idle connections are closed before uvicorn does it after 5: else now and then a request would meet one that
# is being closed.
KEEP_SECONDS = 2.0
AT_ONCE = 64
TRIES = 8
LONGEST_WAIT = 120.0  # seconds: as long as the openai package waits when a server asks it to
DRAIN_SECONDS = 1.0  # for the end of a reply that is whole, so that its connection can be used again

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RemotePrepared:
    """A request that is written but for how words are chosen. What it will cost the server knows alone."""

    path: str
    content: bytes
    asked: float
    most_tokens: int
    images: tuple[ImageSeen, ...] = ()
    prompt_tokens: int = 0
    image_tokens: int | None = 0


@dataclass(slots=True)
class RemoteTicket:
    """A request under way. ``taken`` tells whether the server took it, and ``refused`` why not."""

    taken: "Future[bool]" = field(default_factory=Future)
    refused: Exception | None = None
    running: Running | None = None

    def decide(self, refused: Exception | None) -> None:
        """The server took it, or did not; what comes later changes nothing."""
        if not self.taken.done():
            self.refused = refused
            self.taken.set_result(refused is None)

    def cancel(self) -> None:
        if self.running is not None:
            self.running.cancel()


class RemoteBackend(Closing):
    """The server is asked at once for its models, so that a wrong URL or key is known before anything else.

    ``url`` may end in ``/v1`` or not. ``model`` is the first that the server names unless given. ``context``
    is what the server tells unless given; ``max_tokens`` of an answer whose request names no limit: as the
    server has it unless given. ``at_once`` requests are sent at a time, others wait here. ``serves``: this
    stands behind a server of ours, whose clients are told apart from it (``openai_replies.behind``).
    ``grammars``: as in ``openai_wire.form_fields``.

    Raises ``ServerUnreachable``, ``RemoteError``, ``WrongApiKey``, or ``UsageError`` for what is no URL.
    """

    kind = "remote"

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        model: str | None = None,
        *,
        context: int | None = None,
        max_tokens: int | None = None,
        at_once: int = AT_ONCE,
        serves: bool = False,
        grammars: bool = False,
    ) -> None:
        import httpx  # a tenth of a second, which nobody should pay who runs a model in process

        self._url = base_url(url)
        self.device = without_secrets(self._url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS, pool=None)
        self._client = httpx.Client(
            headers=self._headers, timeout=self._timeout, trust_env=not is_here(self._url)
        )
        self._side_by_side = SideBySide("vlfit-remote")
        self._async_client: httpx.AsyncClient | None = None
        self._room = asyncio.Semaphore(at_once)
        self._max_tokens = max_tokens
        self._serves = serves
        self._grammars = grammars
        try:
            cards = self._models(optional=model is not None)
        except BaseException:
            self._client.close()
            raise
        card = next((card for card in cards if model in (None, card.get("id"))), cards[0] if cards else {})
        self.model: str = model or str(card.get("id"))
        told = card.get("max_model_len")  # vLLM's name for it, and ours
        self.context: int | None = context or (told if isinstance(told, int) and told > 0 else None)
        extras = card.get("vlfit")
        self.server: openai_wire.Server = "vllm" if card.get("owned_by") == "vllm" else "other"
        if isinstance(extras, dict):
            self.server = "vlfit"
        self._defaults = _sampling_told((extras or {}).get("default_sampling") if extras else None)

    def default_sampling(self) -> SamplingParams:
        """The checkpoint's own settings as a vlfit server tells them; of another server, ours: greedy."""
        return self._defaults

    def prepare(
        self, conversation: Conversation, sampling: SamplingParams, tools: tuple[Tool, ...] = ()
    ) -> RemotePrepared:
        """Check the pictures and write the request. Tokens are not counted: the server does, once it runs."""
        asked = time.perf_counter()
        content = openai_wire.chat_fields(conversation, tools, self.server)
        prepared = self._prepared("chat/completions", content, sampling, asked)
        shows = any(not isinstance(part, TextPart) for message in conversation for part in message.parts)
        return replace(prepared, image_tokens=None) if shows else prepared

    def prepare_text(self, prompt: str | tuple[int, ...], sampling: SamplingParams) -> RemotePrepared:
        return self._prepared("completions", openai_wire.text_fields(prompt), sampling, time.perf_counter())

    def start(self, prepared: Prepared, sampling: SamplingParams, listener: Listener) -> RemoteTicket:
        """Send the request. A server with a full queue that says when to come again (429 and ``Retry-After``)
        is asked again then, up to ``TRIES`` times in all, unless we stand behind a server ourselves.
        """
        mine = own(prepared, RemotePrepared)
        ticket = RemoteTicket()

        def ended() -> None:
            closed = self._side_by_side.closed
            stopped = EngineStopped("the connection was closed before the answer was whole", "ask again")
            ticket.decide(stopped)
            listener(stopped if closed else Chunk("", finish_reason="cancelled"))

        async def speak() -> None:
            try:
                await self._speak(mine, sampling, listener, ticket)
            except Exception as error:
                judged = self._judged(error)
                ticket.decide(judged)
                listener(judged)

        ticket.running = self._side_by_side.start(speak, ended)
        return ticket

    def stream(self, conversation: Conversation, sampling: SamplingParams) -> QueuedStream:
        """Send the request; returns once the server has taken it. Raises the error it answers with."""
        stream = QueuedStream(self, self.prepare(conversation, sampling), sampling)
        ticket = stream.ticket
        assert isinstance(ticket, RemoteTicket)
        try:
            taken = ticket.taken.result()
        except BaseException:  # Ctrl-C while nothing is said yet
            ticket.cancel()
            raise
        if not taken and ticket.refused is not None:
            raise ticket.refused
        return stream

    def sleep(self, park: Park = "auto") -> None:
        """Let a vlfit server give its GPU back. Returns when it sleeps: what runs there goes first."""
        self._rest("sleep", {"park": park})

    def wake(self) -> None:
        """Let a vlfit server that sleeps take its memory again. Raises ``CannotWake`` if others have it."""
        self._rest("wake", {})

    def close(self) -> None:
        """Close all connections, which ends what still runs on them."""
        self._side_by_side.close(self._close_client)
        self._client.close()

    def _prepared(self, path: str, content: bytes, sampling: SamplingParams, asked: float) -> RemotePrepared:
        # What makes no sense is found before anybody waits.
        openai_wire.sampling_fields(
            sampling, self.model, self.server, chat=path != "completions", grammars=self._grammars
        )
        wanted = sampling.max_tokens or self._max_tokens or self.context or 0
        return RemotePrepared(path, content, asked, min(wanted, self.context or wanted))

    async def _speak(
        self, prepared: RemotePrepared, sampling: SamplingParams, listener: Listener, ticket: RemoteTicket
    ) -> None:
        """From the request to the last chunk, in the thread of connections."""
        if sampling.max_tokens is None:
            sampling = replace(sampling, max_tokens=self._max_tokens)
        rest = openai_wire.sampling_fields(
            sampling, self.model, self.server, chat=prepared.path != "completions", grammars=self._grammars
        )
        body = b"{" + prepared.content + b"," + rest + b"}"
        reader, events = ReplyReader(prepared.asked, prepared.image_tokens), Events()
        with failures_in_words(self.device):
            async with self._room, self._taken(prepared.path, body) as response:
                ticket.decide(None)
                pieces = response.aiter_bytes()
                async for piece in pieces:
                    for event in events.feed(piece):
                        chunk = _in_form(reader, event)
                        if chunk is not None:
                            listener(chunk)
                    if events.done:
                        break
                events.end()
                listener(reader.last())
                with suppress(Exception):
                    async with asyncio.timeout(DRAIN_SECONDS):
                        async for _ in pieces:
                            pass

    @asynccontextmanager
    async def _taken(self, path: str, body: bytes) -> "AsyncIterator[httpx.Response]":
        """The reply to a request that the server takes."""
        client = self._opened()
        request = client.build_request(
            "POST", f"{self._url}/{path}", content=body, headers={"Content-Type": "application/json"}
        )
        for tries_left in reversed(range(TRIES)):
            response = await client.send(request, stream=True)
            try:
                if response.status_code == 200:
                    yield response
                    return
                text = (await response.aread()).decode("utf-8", "replace")
            finally:
                await response.aclose()
            wait = _wait_asked(response)
            if wait is None or not tries_left or self._serves:
                raise _refusal(response, text)
            logger.info("the server at %s is full; trying again in %.0f s", self.device, wait)
            await asyncio.sleep(wait)

    def _opened(self) -> "httpx.AsyncClient":
        if self._async_client is None:
            import httpx

            limits = httpx.Limits(max_connections=None, keepalive_expiry=KEEP_SECONDS)
            self._async_client = httpx.AsyncClient(
                headers=self._headers, timeout=self._timeout, limits=limits, trust_env=not is_here(self._url)
            )
        return self._async_client

    async def _close_client(self) -> None:
        if self._async_client is not None:
            await self._async_client.aclose()

    def _judged(self, error: Exception) -> Exception:
        return (
            openai_replies.behind(error, self.device)
            if self._serves and isinstance(error, VlfitError)
            else error
        )

    def _rest(self, what: str, body: dict[str, str]) -> None:
        import httpx

        with failures_in_words(self.device):
            response = self._client.post(
                f"{self._url}/vlfit/{what}", json=body, timeout=httpx.Timeout(None, connect=CONNECT_SECONDS)
            )
        if response.status_code != 200:
            raise openai_replies.error_from(response.status_code, response.text)

    def _models(self, *, optional: bool) -> list[dict[str, Any]]:
        """The cards of ``/v1/models``; a server without it is fine if the model's name is known."""
        with failures_in_words(self.device):
            response = self._client.get(f"{self._url}/models")
        if (elsewhere := moved(response)) is not None:
            raise elsewhere
        if response.status_code == 404 and optional:
            return []
        if response.status_code != 200:
            raise openai_replies.error_from(response.status_code, response.text)
        try:
            cards = [card for card in response.json()["data"] if isinstance(card, dict)]
        except (ValueError, KeyError, TypeError):
            raise RemoteError(
                f"{self.device}/models does not answer as OpenAI's API does: "
                + openai_replies.in_a_line(response.text),
                "is it the URL of such a server?",
            ) from None
        if not cards and not optional:
            raise RemoteError(f"the server at {self.device} names no model", "name one with --model")
        return cards


def _sampling_told(told: Any) -> SamplingParams:
    names = {field.name for field in fields(SamplingParams)}  # a newer server may have more
    known = {name: value for name, value in (told or {}).items() if name in names}
    as_tuples = {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
    return replace(SamplingParams(), **{**known, **as_tuples})


def _in_form(reader: ReplyReader, event: dict[str, Any]) -> Chunk | None:
    try:
        return reader.take(event)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RemoteError(
            f"the server's answer has another form than OpenAI's: {error!r}",
            "is it the URL of such a server?",
        ) from error


def _refusal(response: "httpx.Response", text: str) -> VlfitError:
    error = moved(response) or openai_replies.error_from(response.status_code, text)
    wait = openai_replies.retry_after(response.headers.get("retry-after"))
    if isinstance(error, QueueFull) and wait is not None:
        error.retry_after = max(math.ceil(wait), 1)
    return error


def _wait_asked(response: "httpx.Response") -> float | None:
    """Seconds to wait before asking a full server again; None for any other reply, or if it is too long."""
    wait = openai_replies.retry_after(response.headers.get("retry-after"))
    if response.status_code != 429 or wait is None or wait > LONGEST_WAIT:
        return None
    return wait
