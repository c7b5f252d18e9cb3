"""A model behind a URL: ``vlfit serve``, or any server that speaks OpenAI's chat completions.

Knows: connections, and how they fail. Does not know: how requests and replies are written
(``openai_wire``) or what runs behind the URL. A vlfit server also tells what it saw of each picture and
how long it took; of any other the usage alone is known, and times are those of our own clock.
"""

import logging
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from vlfit.backends import openai_wire
from vlfit.engine.answer import Answer, Chunk, FinishReason, ImageSeen, Timings, TokenLogprob, Usage
from vlfit.engine.conversation import Conversation
from vlfit.engine.options import Park
from vlfit.engine.sampling import SamplingParams
from vlfit.errors import RemoteError, ServerUnreachable, UsageError

if TYPE_CHECKING:
    import httpx

CONNECT_SECONDS = 5.0
# A vlfit server says something every 15 seconds; others may be silent through a long prefill.
SILENCE_SECONDS = 300.0
TRIES = 8
LONGEST_WAIT = 120.0  # seconds: as long as the openai package waits when a server asks it to

logger = logging.getLogger(__name__)


class RemoteBackend:
    """The server is asked at once for its models, so that a wrong URL or key is known before anything else.

    ``url`` may end in ``/v1`` or not. ``model`` is the first that the server names unless given.
    Raises ``ServerUnreachable``, ``RemoteError``, ``WrongApiKey``, or ``UsageError`` for what is no URL.
    """

    kind = "remote"

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None) -> None:
        import httpx  # a tenth of a second, which nobody should pay who runs a model in process

        self._url = base_url(url)
        self.device = self._url
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS),
        )
        try:
            cards = self._models(optional=model is not None)
        except BaseException:
            self._client.close()
            raise
        card = next((card for card in cards if model in (None, card.get("id"))), cards[0] if cards else {})
        self.model: str = model or str(card.get("id"))
        told = card.get("max_model_len")  # vLLM's name for it, and ours
        self.context: int | None = told if isinstance(told, int) and told > 0 else None
        extras = card.get("vlfit")
        self._is_vlfit = isinstance(extras, dict)
        self._defaults: dict[str, Any] = (extras or {}).get("default_sampling", {}) if self._is_vlfit else {}

    def stream(self, conversation: Conversation, sampling: SamplingParams) -> "RemoteStream":
        """Send the request; returns once the server has taken it. Raises the error it answers with.

        A server with a full queue that says when to come again (429 and ``Retry-After``) is asked again then,
        up to ``TRIES`` times in all.
        """
        body = openai_wire.chat_body(conversation, sampling, self.model, vlfit_server=self._is_vlfit)
        started = time.perf_counter()
        request = self._client.build_request("POST", f"{self._url}/chat/completions", json=body)
        for tries_left in reversed(range(TRIES)):
            with failures_in_words(self._url):
                response = self._client.send(request, stream=True)
            if response.status_code == 200:
                break
            with failures_in_words(self._url):
                text = response.read().decode("utf-8", "replace")
            response.close()
            wait = _wait_asked(response)
            if wait is None or not tries_left:
                raise openai_wire.error_from(response.status_code, text)
            logger.info("the server at %s is full; trying again in %.0f s", self._url, wait)
            time.sleep(wait)
        return RemoteStream(self, response, started)

    def default_sampling(self) -> SamplingParams:
        """The checkpoint's own settings as a vlfit server tells them; of another server, ours."""
        names = {field.name for field in fields(SamplingParams)}  # a newer server may have more
        known = {name: value for name, value in self._defaults.items() if name in names}
        as_tuples = {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
        return replace(SamplingParams(), **{**known, **as_tuples})

    def sleep(self, park: Park = "auto") -> None:
        """Let a vlfit server give its GPU back. Returns when it sleeps: what runs there goes first."""
        self._rest("sleep", {"park": park})

    def wake(self) -> None:
        """Let a vlfit server that sleeps take its memory again. Raises ``CannotWake`` if others have it."""
        self._rest("wake", {})

    def _rest(self, what: str, body: dict[str, str]) -> None:
        import httpx

        with failures_in_words(self._url):
            response = self._client.post(
                f"{self._url}/vlfit/{what}", json=body, timeout=httpx.Timeout(None, connect=CONNECT_SECONDS)
            )
        if response.status_code != 200:
            raise openai_wire.error_from(response.status_code, response.text)

    def close(self) -> None:
        """Close all connections, which ends what still runs on them."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _models(self, *, optional: bool) -> list[dict[str, Any]]:
        """The cards of ``/v1/models``; a server without it is fine if the model's name is known."""
        with failures_in_words(self._url):
            response = self._client.get(f"{self._url}/models")
        if response.status_code == 404 and optional:
            return []
        if response.status_code != 200:
            raise openai_wire.error_from(response.status_code, response.text)
        try:
            cards = [card for card in response.json()["data"] if isinstance(card, dict)]
        except (ValueError, KeyError, TypeError):
            raise RemoteError(
                f"{self._url}/models does not answer as OpenAI's API does", "is it the URL of such a server?"
            ) from None
        if not cards and not optional:
            raise RemoteError(f"the server at {self._url} names no model", "name one with --model")
        return cards


class RemoteStream:
    """One running completion, read by one thread. Closing it closes the connection, which the server
    notices.
    """

    def __init__(self, backend: RemoteBackend, response: "httpx.Response", started: float) -> None:
        self.images: tuple[ImageSeen, ...] = ()
        self._backend = backend
        self._response = response
        self._started = started
        self._first_token: float | None = None
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._finish: FinishReason | None = None
        self._usage: Usage | None = None
        self._server_timings: dict[str, float] = {}
        self._last: Chunk | None = None
        self._chunks = self._read()

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks

    def answer(self) -> Answer:
        """Read on to the end and give the whole completion, with what was read before.

        The usage is 0 throughout if the server does not tell it.
        """
        for _ in self._chunks:
            pass
        if self._last is None or self._finish is None:
            raise UsageError("the stream was closed before its end", "read it to the end to get an answer")
        return Answer(
            "".join(self._text),
            self._finish,
            self._usage or Usage(0, 0, 0),
            self._backend.model,
            self.images,
            self._last.timings,
            tuple(self._logprobs),
        )

    def close(self) -> None:
        self._chunks.close()
        self._response.close()

    def _read(self) -> Generator[Chunk, None, None]:
        """Chunks as they come, and a last one without text: OpenAI sends the usage after the last words."""
        try:
            with failures_in_words(self._backend._url):
                for event in openai_wire.read_events(self._response.iter_lines()):
                    chunk = self._take(event)
                    if chunk is not None:
                        yield chunk
        finally:
            self._response.close()
        if self._finish is None:
            raise RemoteError("the answer ended without a reason", "look at the server's log")
        self._last = Chunk("", (), self._finish, self._usage, self._timings(time.perf_counter()))
        yield self._last

    def _take(self, event: dict[str, Any]) -> Chunk | None:
        """Note what ``event`` tells; the chunk in it, if it has one."""
        extras = event.get("vlfit") or {}
        self.images = openai_wire.read_images(extras) or self.images
        self._usage = openai_wire.read_usage(event) or self._usage
        self._server_timings = extras.get("timings") or self._server_timings
        choice: dict[str, Any] = next(iter(event.get("choices") or ()), {})
        self._finish = openai_wire.read_finish(choice, extras) or self._finish
        text = (choice.get("delta") or {}).get("content") or ""
        logprobs = openai_wire.read_logprobs(choice)
        if not text and not logprobs:
            return None
        self._first_token = self._first_token or time.perf_counter()
        self._text.append(text)
        self._logprobs.extend(logprobs)
        return Chunk(text, logprobs)

    def _timings(self, now: float) -> Timings:
        """The server's own if it told them, else what we saw from here."""
        told, tokens = self._server_timings, self._usage.completion_tokens if self._usage else 0
        if told:
            return Timings(told["queued_s"], told["first_token_s"], told["total_s"], tokens)
        return Timings(0.0, (self._first_token or now) - self._started, now - self._started, tokens)


def _wait_asked(response: "httpx.Response") -> float | None:
    """Seconds to wait before asking a full server again; None for any other reply, or if it is too long."""
    wait = openai_wire.retry_after(response.headers.get("retry-after"))
    if response.status_code != 429 or wait is None or wait > LONGEST_WAIT:
        return None
    return wait


@contextmanager
def failures_in_words(url: str, silence: float = SILENCE_SECONDS) -> Iterator[None]:
    """Whatever goes wrong on the way to the server at ``url`` within the block, in our words."""
    import httpx

    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise ServerUnreachable(
            f"no server answers at {url}: {error}", "start one with `vlfit serve`, or check the URL"
        ) from error
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise UsageError(f"{url} is no URL of a server: {error}", "use http://host:port") from error
    except httpx.TimeoutException as error:
        raise RemoteError(
            f"the server at {url} said nothing for {silence:.0f} s", "look at its log"
        ) from error
    except httpx.HTTPError as error:
        raise RemoteError(
            f"the connection to {url} broke off: {error or type(error).__name__}", "look at the server's log"
        ) from error


def base_url(url: str) -> str:
    """``url`` with a scheme and ``/v1``, without a slash at its end."""
    url = url.strip().rstrip("/")
    if not url:
        raise UsageError("the server's URL is empty", "use http://host:port")
    if "://" not in url:
        url = f"http://{url}"
    return url if url.endswith("/v1") else f"{url}/v1"
